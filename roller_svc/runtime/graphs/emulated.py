"""Run a model for a GPU in the emulator: each launch in a process of its own, in memory placed by the plan."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from roller_svc.analysis.step_order import check_operands, find_predecessors
from roller_svc.errors import IndexRangeError, LaunchError, RollerWarning
from roller_svc.ir.kernel import Buffer, CompiledKernel, KernelSource, Role
from roller_svc.ir.model_plan import Address, CopyStep, KernelStep, ModelPlan, unroll_steps
from roller_svc.runtime.binding import Array, Binding, NumpyArrays
from roller_svc.runtime.emulator import CxxCompiler, EmulatorCall, EmulatorModule
from roller_svc.runtime.graphs.buffers import bind_call, call_buffers
from roller_svc.runtime.graphs.cooperative import find_cooperative

MAX_TOGETHER = 8  # blocks of a cooperative launch, as in memory.h
_UNDEFINED = 0xFF  # every byte of memory that nothing has written: NaN as a number
_BEFORE = "_before"  # ends the symbol of a written buffer's contents before a launch


class EmulatedModel:
    """A model in the emulator. Its steps run in an order that the hazards between them allow."""

    def __init__(
        self,
        plan: ModelPlan,
        compiled: Sequence[CompiledKernel],
        weights: Array,
        compile_cxx: CxxCompiler,
        *,
        seed: int | None = None,
        races: bool = False,
    ) -> None:
        """Take a plan with the kernels that it runs.

        Args:
            plan: the plan.
            compiled: its kernels; only their sources are used.
            weights: all weights.
            compile_cxx: the C++ compiler.
            seed: seed of the schedules of steps and of threads. None: steps in order, and a new order of threads for
                each launch.
            races: whether the race detector looks at each launch.
        """
        self.plan = plan
        self._compiled = compiled
        self._weights = weights.reshape(-1).view(np.uint8)
        self._compile_cxx = compile_cxx
        self._seed, self._races = seed, races
        self._buffers = call_buffers(plan)
        self._steps = self._runnable_steps()
        check_operands(plan, (*unroll_steps(plan.prepack), *self._steps))
        self._modules: dict[tuple[int, int], EmulatorModule] = {}
        self._packed: Array | None = None

    def _runnable_steps(self) -> tuple[KernelStep | CopyStep, ...]:
        """Return the steps of a call: the plan's, or its fallback where too many blocks would have to run together.

        Raises LaunchError (persistent-too-large) if the plan has no fallback then.
        """
        plan = self.plan
        steps = tuple(unroll_steps(plan.steps))
        launches = [plan.kernels[step.kernel].source.launches[step.launch] for step, _ in find_cooperative(plan, steps)]
        blocks = max((math.prod(launch.grid) for launch in launches), default=0)
        if blocks <= MAX_TOGETHER:
            return steps
        message = f"a kernel of {plan.name} has {blocks} blocks that run together, and the emulator runs at most {MAX_TOGETHER}"
        fallback = tuple(unroll_steps(plan.fallback))
        if not fallback:
            raise LaunchError(f'{message}: plan="waves" has the same functions', code="persistent-too-large")
        warnings.warn(f'{message}: {plan.name} runs as launches; plan="waves" has the same functions', RollerWarning, stacklevel=4)
        return fallback

    def run(self, arrays: Mapping[str, object], out: Mapping[str, object] | None = None) -> dict[str, Array]:
        """Return the outputs by name. Raises as EmulatorModule.run does; an index out of range names its node."""
        binding = bind_call(self._buffers, arrays, out, NumpyArrays())
        if self._packed is None:
            packed = _undefined(self.plan.packed_bytes)
            self._run_steps(tuple(unroll_steps(self.plan.prepack)), (self._weights, packed, _undefined(0)))
            self._packed = packed
        tensors = [binding.memory[buffer.symbol].reshape(-1).view(np.uint8) for buffer in self._buffers]
        self._run_steps(self._ordered(), (self._weights, self._packed, _undefined(self.plan.arena_bytes), *tensors))
        binding.copy_back()
        return binding.results()

    def _ordered(self) -> Iterable[KernelStep | CopyStep]:
        """Return the steps, by a seed in a random order in which each comes after those that it depends on."""
        if self._seed is None:
            return self._steps
        waiting = [set(before) for before in find_predecessors(self.plan, self._steps)]
        chosen = random.Random(self._seed)
        remaining, order = set(range(len(self._steps))), []
        while remaining:
            step = chosen.choice(sorted(each for each in remaining if not waiting[each] & remaining))
            remaining.remove(step)
            order.append(self._steps[step])
        return order

    def _run_steps(self, steps: Iterable[KernelStep | CopyStep], slots: Sequence[Array]) -> None:
        """Run steps on the memory of the model's slots."""

        def memory(address: Address, size_bytes: int) -> Array:
            return slots[address.slot][address.offset_bytes : address.offset_bytes + size_bytes]

        for step in steps:
            if isinstance(step, CopyStep):
                memory(step.target, step.bytes)[:] = memory(step.source, step.bytes)
                continue
            module = self._module(step.kernel, step.launch)
            operands = self._compiled[step.kernel].source.launches[step.launch].operands
            places = {symbol: at for symbol, at in zip(operands, step.arguments, strict=True) if at is not None}
            bound = {b.symbol: memory(places[b.symbol.removesuffix(_BEFORE)], b.bytes) for b in module.source.buffers}
            try:
                EmulatorCall(module, Binding(NumpyArrays(), bound, {}, {}))()
            except IndexRangeError as error:
                raise IndexRangeError(f"node {step.node!r}: {error.message}", hint=error.hint) from error

    def _module(self, kernel: int, launch: int) -> EmulatorModule:
        if (kernel, launch) not in self._modules:
            compiled = self._compiled[kernel]
            alone = replace(compiled, source=isolate_launch(compiled.source, launch))
            self._modules[kernel, launch] = EmulatorModule(alone, self._compile_cxx, seed=self._seed, races=self._races)
        return self._modules[kernel, launch]


def isolate_launch(source: KernelSource, number: int) -> KernelSource:
    """Return a kernel with one launch. What it writes is an input too, since other launches may have written it."""
    launch = source.launches[number]
    buffers: list[Buffer] = []
    for buffer in (each for each in source.buffers if each.symbol in launch.operands):
        if buffer.role is Role.INPUT:
            buffers.append(buffer)
        else:
            before = replace(buffer, symbol=f"{buffer.symbol}{_BEFORE}", role=Role.INPUT, donated=True)
            buffers += [before, replace(buffer, role=Role.OUTPUT)]
    inputs = {each.name for each in buffers if each.role is Role.INPUT and not each.donated}
    constants = tuple(name for name in source.constants if name in inputs)
    return replace(source, launches=(launch,), buffers=tuple(buffers), constants=constants)


def _undefined(size_bytes: int) -> Array:
    return np.full(size_bytes, _UNDEFINED, np.uint8)
