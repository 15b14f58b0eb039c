"""Programs of one kernel group on a CPU: every tile's kernel, compiled and run, against the interpreter."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from roller_svc import hardware
from roller_svc.compiler.lower_and_emit import emit_plan
from roller_svc.compiler.partition_cache import partition
from roller_svc.compiler.rank import rank
from roller_svc.frontend.lang import parse
from roller_svc.ir.dtype import DType
from roller_svc.ir.estimate import Candidate
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.kernel import KernelSource
from roller_svc.ir.program import TensorProgram, TensorType
from roller_svc.ir.report import Plan
from roller_svc.runtime.cpu import CpuModule
from roller_svc.runtime.cpu_features import missing_features
from roller_svc.semantics.compare import agrees
from roller_svc.semantics.inputs import random_inputs
from roller_svc.semantics.interpreter import evaluate
from roller_svc.toolchain import compile_source

AVX2 = hardware.load("cpu-x86-avx2")
Types = dict[str, tuple[str, tuple[int, ...]]]


def skip_where_features_lack(hw: HardwareSpec) -> None:
    """Skip the rest of a test that runs kernels of a target on this machine."""
    if missing := missing_features(hw.arch):
        pytest.skip(f"the CPU at hand lacks {', '.join(missing)}")


def hinting(hw: HardwareSpec, gain: float = 1.4) -> HardwareSpec:
    """The spec of a CPU whose walks through memory gain so much by prefetch instructions."""
    return dataclasses.replace(hw, levels=tuple(dataclasses.replace(lv, hinted_gain=gain) for lv in hw.levels))


@dataclasses.dataclass(frozen=True)
class CpuCase:
    """A program that is one kernel group, and its candidates best first."""

    program: TensorProgram
    group: KernelGroup
    hw: HardwareSpec
    ranked: tuple[Candidate, ...]

    def source(self, candidate: Candidate) -> KernelSource:
        return emit_plan(Plan((candidate,)), self.program, (self.group,), self.hw)

    def results(self, candidate: Candidate, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return CpuModule(compile_source(self.source(candidate))).run(arrays)

    def check_some(self, count: int) -> None:
        """The best candidate, and some of the others."""
        arrays = random_inputs(self.program, 1)
        expected = evaluate(self.program, arrays)
        step = max(1, -(-len(self.ranked) // count))
        chosen = dict.fromkeys((self.ranked[0], *self.ranked[1::step]))
        sources = [self.source(c) for c in chosen]
        with ThreadPoolExecutor(2) as pool:
            kernels = list(pool.map(compile_source, sources))
        skip_where_features_lack(self.hw)
        for kernel in kernels:
            found = CpuModule(kernel).run(arrays)
            agreement = agrees(self.program, found, expected)
            assert agreement.ok, f"{agreement}\n{kernel.source.text}"


def cpu_case(expression: str, types: Types, hw: HardwareSpec = AVX2) -> CpuCase:
    program = parse(expression, {name: TensorType(DType(d), shape) for name, (d, shape) in types.items()})
    (group,) = partition(program, hw)
    ranked, _ = rank(group, hw, hw.unit_for(group.space.compute_dtype), 64)
    return CpuCase(program, group, hw, ranked)
