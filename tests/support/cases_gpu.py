"""Programs on a GPU of one core, which small ones fill: every tile's text, emulated, against the interpreter."""

from __future__ import annotations

import dataclasses

from roller_svc import hardware
from roller_svc.compiler.backends import load_emulated
from roller_svc.compiler.lower_and_emit import emit_plan
from roller_svc.compiler.partition_cache import partition
from roller_svc.compiler.rank import construct
from roller_svc.families import model_of
from roller_svc.frontend.lang import parse
from roller_svc.ir.dtype import DType
from roller_svc.ir.estimate import Candidate
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.kernel import CompiledKernel, KernelSource
from roller_svc.ir.program import TensorProgram, TensorType
from roller_svc.ir.report import Plan
from roller_svc.ir.rprogram import RProgram
from roller_svc.semantics.compare import agrees
from roller_svc.semantics.inputs import random_inputs
from roller_svc.semantics.interpreter import evaluate

A100 = hardware.load("nvidia-a100-sxm-80gb")
ONE_CORE = dataclasses.replace(A100, num_cores=1)
Types = dict[str, tuple[str, tuple[int, ...]]]


@dataclasses.dataclass(frozen=True)
class Case:
    """A program that is one kernel group, its tiles best first."""

    program: TensorProgram
    group: KernelGroup
    ranked: tuple[RProgram, ...]

    def text(self, tiles: RProgram) -> str:
        return self._source(tiles).text

    def check(self, tiles: RProgram, seed: int = 1) -> None:
        """Emulate the kernel of those tiles."""
        arrays = random_inputs(self.program, seed)
        source = self._source(tiles)
        found = load_emulated(CompiledKernel(source, b"", "", ()), seed).run(arrays)
        agreement = agrees(self.program, found, evaluate(self.program, arrays))
        assert agreement.ok, f"{agreement}\n{source.text}"

    def check_some(self, count: int = 3) -> None:
        """The best tiles, and some of the others."""
        ranked = self.ranked
        for tiles in dict.fromkeys((ranked[0], *ranked[1 :: max(1, -(-len(ranked) // count))])):
            self.check(tiles)

    def _source(self, tiles: RProgram) -> KernelSource:
        plan = Plan((Candidate(tiles, model_of(self.group, tiles, ONE_CORE).estimate(tiles)),))
        return emit_plan(plan, self.program, (self.group,), ONE_CORE)


def case(expression: str, types: Types) -> Case:
    program = parse(expression, {name: TensorType(DType(d), shape) for name, (d, shape) in types.items()})
    (group,) = partition(program, ONE_CORE)
    programs = construct(group, ONE_CORE, ONE_CORE.unit_for(group.space.compute_dtype)).programs
    return Case(program, group, tuple(sorted(programs, key=lambda p: model_of(group, p, ONE_CORE).estimate(p).seconds)))
