"""Cost of the register-blocked micro-kernel (BLIS), and the bandwidth of its operands' source."""

from __future__ import annotations

from typing import Any

from roller_svc.perf.machine import LOAD_PORTS, Cache, Machine
from roller_svc.perf.workload import Workload

FMA_LATENCY_CYCLES = 4.0


def kernel_cycles(mach: Machine, mr: int, vectors: int) -> float:
    """Return cycles for one k, or word of it: max(MR·nv / FMA ports, loads / load ports, FMA latency)."""
    return max(mr * vectors / _fma_ports(mach), _load_cycles(mach, mr, vectors), FMA_LATENCY_CYCLES)


def _fma_ports(mach: Machine) -> float:
    return mach.fma_per_cycle / mach.unit.k_group / mach.unit.shape[-1]


def _load_cycles(mach: Machine, mr: int, vectors: int) -> float:
    """Return load-port cycles for one k: whole vectors of B, broadcasts of A."""
    return mr / LOAD_PORTS + vectors / mach.load_ports


def source_bandwidth(mach: Machine, total_bytes: int) -> float:
    """Return the bandwidth of the smallest cache that holds that much; DRAM's if none does."""
    cache = smallest_cache(mach, total_bytes)
    return mach.dram.bandwidth_bytes_per_s if cache is None else cache.bytes_per_s


def smallest_cache(mach: Machine, total_bytes: int) -> Cache | None:
    """Return the smallest cache that holds that much; None is DRAM."""
    return next((cache for cache in reversed(mach.caches) if total_bytes <= cache.total_bytes // 2), None)


def gather_cycles(p: Workload[Any], axis: int) -> float:
    """Return cycles to gather the operands of an epilogue at one point, whose vectors are along a tile axis.

    Neighbours along the axis that are apart in memory are loaded one by one, as where an operand has another layout.
    """
    # scales of runs of k are packed
    read = [t for t in p.epilogue.tensors if p.space.scale_runs is None or not t.varies_with_reduction]
    apart = sum(axis in tensor.axes and tensor.strides.get(axis) != 1 for tensor in read)
    return p.machine.costs.loops.gather_cycles * apart
