"""TVM as a peer: the program compiled for this CPU, with the schedules there are without tuning."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import tvm
from numpy.typing import NDArray
from tvm.target.codegen import llvm_version_major

from roller_svc.bench.peers.found import REFUSALS, Peer, check, fastest, in_brief
from roller_svc.bench.peers.library import no_peer
from roller_svc.bench.peers.tvm_expr import type_name
from roller_svc.bench.peers.tvm_program import function_of
from roller_svc.bench.peers.tvm_schedule import Schedule, host_target, schedules
from roller_svc.ir.program import TensorProgram
from roller_svc.lang.interpreter import Value

Arrays = Mapping[str, NDArray[Any]]


def versions() -> dict[str, str]:
    return {"tvm": str(tvm.__version__), "tvm_llvm": str(llvm_version_major())}


@dataclass(frozen=True, slots=True)
class TvmFinder:
    """Finds a program's peer."""

    threads: int

    def __call__(self, program: TensorProgram, arrays: Arrays, want: Mapping[str, Value]) -> Peer:
        """The fastest schedule that agrees with the reference; BuildError no-peer where there is none."""
        function, target = function_of(program), host_target(self.threads)
        built = _Built(program, target, arrays)
        found: list[Peer] = []
        reasons: dict[str, None] = {}
        for schedule in schedules(function, target):
            try:
                found.append(built.peer(schedule, want))
            except REFUSALS as refusal:
                reasons[in_brief(refusal)] = None
        if not found:
            raise no_peer("; ".join(reasons))
        return fastest(found)


class _Built:
    """TVM's own arrays for a program, inputs filled, and schedules compiled to run on them."""

    def __init__(self, program: TensorProgram, target: Any, arrays: Arrays) -> None:
        self._program = program
        self._target = target
        self._inputs = [tvm.runtime.tensor(arrays[name]) for name, _ in program.inputs]
        types = [program.types[out.tensor] for out in program.outputs]
        self._outputs = [tvm.runtime.empty(kind.shape, type_name(kind.dtype)) for kind in types]

    def peer(self, make: Callable[[], Schedule], want: Mapping[str, Value]) -> Peer:
        """Raises one of REFUSALS where the schedule does not apply, does not compile or is wrong."""
        schedule = make()
        executable = tvm.compile(schedule.module, self._target)
        run = partial(executable["main"], *self._inputs, *self._outputs)
        run()
        names = [out.name for out in self._program.outputs]
        results = {name: tensor.numpy() for name, tensor in zip(names, self._outputs, strict=True)}
        check([schedule.name], self._program, results, want)
        return Peer(run, (schedule.name,), executable)
