"""Cost of the register-blocked micro-kernel, and where its operands come from."""

from __future__ import annotations

from roller_svc.perf.machine import LOAD_PORTS, Cache, Machine

FMA_LATENCY_CYCLES = 4.0


def kernel_cycles(mach: Machine, mr: int, vectors: int) -> float:
    """Cycles for one k, or word of it: max(MR·nv / FMA ports, loads / load ports, FMA latency); within 3 % for 11
    kernels of single k."""
    return max(mr * vectors / _fma_ports(mach), _load_cycles(mach, mr, vectors), FMA_LATENCY_CYCLES)


def _fma_ports(mach: Machine) -> float:
    return mach.fma_per_cycle / mach.unit.k_group / mach.unit.shape[-1]


def _load_cycles(mach: Machine, mr: int, vectors: int) -> float:
    """Of the load ports for one k: rows of B are whole vectors, which some cores read one of a cycle; elements of A,
    which all lanes share, are none."""
    return mr / LOAD_PORTS + vectors / mach.load_ports


def source_bandwidth(mach: Machine, total_bytes: int) -> float:
    """Bandwidth of the smallest cache that holds that much; DRAM's where none does."""
    cache = smallest_cache(mach, total_bytes)
    return mach.dram.bandwidth_bytes_per_s if cache is None else cache.bytes_per_s


def smallest_cache(mach: Machine, total_bytes: int) -> Cache | None:
    """The smallest cache that holds that much; None is DRAM."""
    return next((cache for cache in reversed(mach.caches) if total_bytes <= cache.total_bytes // 2), None)
