"""ModelPlan → the tables of numbers that a model's C program runs: its steps, their addresses, vEUs' programs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from roller_svc.errors import InvariantError
from roller_svc.ir.kernel import KernelSource
from roller_svc.ir.model_plan import Address, CopyStep, KernelStep, LoopStep, ModelPlan, Step, VDeviceStep
from roller_svc.ir.vdevice import Barrier, Execute

Call = tuple[str, int]  # key of a kernel's source, launch
Tasks = tuple[str, int, int]  # and phase
Row = tuple[int, ...]
_Function = TypeVar("_Function", Call, Tasks)

CALL, COPY, LOOP, VDEVICE = range(4)  # kinds of steps
STATUS = -1  # the slot of the status record
WHOLE_STEP = -1  # instead of the tasks of a phase
WAIT = -1  # instead of the row of an instruction


@dataclass(frozen=True, slots=True)
class Functions:
    """The functions of kernels that steps call. Rows have their numbers."""

    calls: tuple[Call, ...]
    tasks: tuple[Tasks, ...]
    max_arguments: int


def list_functions(kernels: Iterable[KernelSource]) -> Functions:
    """Return all functions of kernels, which any plan of these can call."""
    by_key = {kernel.key: kernel for kernel in kernels}
    launches = [(key, number, launch) for key, kernel in by_key.items() for number, launch in enumerate(kernel.launches)]
    return Functions(
        tuple((key, number) for key, number, _ in launches),
        tuple((key, number, phase) for key, number, launch in launches for phase in range(len(launch.phases))),
        max((len(launch.args) for _, _, launch in launches), default=1),
    )


@dataclass(frozen=True, slots=True)
class ModelTables:
    """Rows in the order of the fields of the structs of `codegen/c/model.py`."""

    functions: Functions
    addresses: tuple[Row, ...]
    sizes: tuple[int, ...]
    updates: tuple[Row, ...]
    steps: tuple[Row, ...]
    instructions: tuple[Row, ...]
    waits: tuple[Row, ...]
    programs: tuple[Row, ...]
    prepack_end: int  # steps before it run once
    run_end: int
    max_veus: int


def list_tables(plan: ModelPlan, functions: Functions | None = None) -> ModelTables:
    """Return the tables of a plan. `functions` are those of a program that exists; by default those that it calls."""
    rows = _Rows(plan, functions)
    rows.add(plan.prepack)
    prepack_end = len(rows.steps)
    rows.add(plan.steps)
    if functions is None:
        functions = Functions(tuple(rows.calls), tuple(rows.tasks), rows.max_arguments)
    return ModelTables(
        functions,
        tuple(rows.addresses),
        tuple(rows.sizes),
        tuple(rows.updates),
        tuple(rows.steps),
        tuple(rows.instructions),
        tuple(rows.waits),
        tuple(rows.programs),
        prepack_end,
        len(rows.steps),
        rows.max_veus,
    )


class _Rows:
    def __init__(self, plan: ModelPlan, functions: Functions | None) -> None:
        self.plan = plan
        self.is_complete = functions is not None
        self.calls: dict[Call, int] = {} if functions is None else {call: i for i, call in enumerate(functions.calls)}
        self.tasks: dict[Tasks, int] = {} if functions is None else {tasks: i for i, tasks in enumerate(functions.tasks)}
        self.addresses: list[Row] = []
        self.sizes: list[int] = []
        self.updates: list[Row] = []
        self.steps: list[Row] = []
        self.instructions: list[Row] = []
        self.waits: list[Row] = []
        self.programs: list[Row] = []  # of vEUs: first instruction, instructions
        self.max_arguments = 1
        self.max_veus = 1

    def add(self, steps: Sequence[Step]) -> None:
        """Append the rows of steps: kind, call or bytes or loop count, first address, addresses, ..."""
        for step in steps:
            match step:
                case KernelStep():
                    self._kernel(step)
                case CopyStep():
                    self.steps.append((COPY, step.bytes, self._listed([step.target, step.source]), 0, 0, 0, 0))
                case LoopStep():
                    self._loop(step)
                case VDeviceStep():
                    self._vdevice(step)

    def _kernel(self, step: KernelStep) -> None:
        source = self.plan.kernels[step.kernel].source
        launch = source.launches[step.launch]
        if len(launch.args) != len(step.arguments):
            raise InvariantError(f"{step.node}: {launch.name} takes {len(launch.args)} arguments")
        self.max_arguments = max(self.max_arguments, len(step.arguments))
        at = self._listed([Address(STATUS) if a is None else a for a in step.arguments])
        zeroed = self._listed([address for address, _ in step.zeroed])
        sizes = len(self.sizes)
        self.sizes += [size for _, size in step.zeroed]
        call = self._number(self.calls, (source.key, step.launch))
        self.steps.append((CALL, call, at, len(step.arguments), zeroed, len(step.zeroed), sizes))

    def _loop(self, step: LoopStep) -> None:
        first = len(self.updates)
        for u in step.updates:
            self.updates.append((u.slot, u.start.slot, u.start.offset_bytes, u.stride_bytes, u.alternate_bytes))
        row = len(self.steps)
        self.steps.append(())
        self.add(step.body)
        self.steps[row] = (LOOP, step.steps, first, len(step.updates), len(self.steps), 0, 0)

    def _vdevice(self, step: VDeviceStep) -> None:
        row = len(self.steps)
        self.steps.append(())
        first = len(self.steps)
        self.add(step.steps)
        if step.plan.has_events:
            raise InvariantError(f"{step.node}: a plan for CPUs orders rTasks by barriers, got events")
        first_program, first_time = len(self.programs), 0
        for program in step.plan.programs:
            self.programs.append((len(self.instructions), len(program)))
            for instruction in program:
                if isinstance(instruction, Execute):
                    self._execute(step, first, instruction, first_time)
                    first_time += 1
                elif isinstance(instruction, Barrier):
                    at = len(self.waits)
                    self.waits += instruction.waits
                    self.instructions.append((WAIT, 0, at, len(instruction.waits), 0))
        self.max_veus = max(self.max_veus, step.plan.num_veus)
        self.steps[row] = (VDEVICE, step.plan.num_veus, first_program, first_time, len(self.steps), 0, 0)

    def _execute(self, step: VDeviceStep, first_row: int, instruction: Execute, time: int) -> None:
        operator = step.operators[instruction.operator]
        inner = step.steps[operator.step]
        tasks = WHOLE_STEP
        if operator.phase is not None and isinstance(inner, KernelStep):
            tasks = self._number(self.tasks, (self.plan.kernels[inner.kernel].source.key, inner.launch, operator.phase))
        self.instructions.append((first_row + operator.step, tasks, instruction.first, instruction.count, time))

    def _listed(self, addresses: Iterable[Address]) -> int:
        first = len(self.addresses)
        self.addresses += ((address.slot, address.offset_bytes) for address in addresses)
        return first

    def _number(self, numbers: dict[_Function, int], function: _Function) -> int:
        """Return the number of a function, which gets one at its first use unless a program has all."""
        if self.is_complete and function not in numbers:
            raise InvariantError(f"the program of {self.plan.name} has no function {function}")
        return numbers.setdefault(function, len(numbers))
