"""A plan of a virtual device → one cooperative kernel: a persistent block a vEU, rows as data (RAMMER, OSDI 2020, §4.1).

The text has a case for each distinct function, so it depends on neither the number of vEUs nor the depth of a model.
A vEU's rows are its instructions. An argument is a slot and an offset, as in ir/model_plan.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from roller_svc.analysis.happens_before import HappensBefore, check_plan
from roller_svc.codegen.cuda.event_instructions import EVENT_WORDS
from roller_svc.codegen.cuda.function import TaskFunction, dialect_of, preamble, shared_memory
from roller_svc.errors import InvariantError
from roller_svc.ir.dtype import DType
from roller_svc.ir.hardware import Arch, HardwareSpec
from roller_svc.ir.kernel import Buffer, KernelSource, LaunchSpec, Role, RuntimeCheck
from roller_svc.ir.model_plan import Address
from roller_svc.ir.quoting import require_identifier
from roller_svc.ir.vdevice import Execute, VDevicePlan, WaitEvent

EXECUTE, WAIT = 1, 2  # opcodes
ARRIVES = 1  # flag of a row: its rTasks arrive at its event
ROW_WORDS, ARGUMENT_WORDS = 4, 4
MAX_COUNT = (1 << 16) - 1  # of rTasks of a row, functions and events
MAX_SLOTS = 480  # pointers in the 4096 bytes of a kernel's parameters

_ADDRESS = """__device__ __forceinline__ unsigned char *address(unsigned char *const *slots, const unsigned int *argument) {
  return slots[argument[0]] + ((unsigned long long)argument[3] << 32 | argument[2]);
}
"""


@dataclass(frozen=True, slots=True)
class TaskOperator:
    """An rOperator: one launch of a kernel as rTasks."""

    function: TaskFunction
    arguments: tuple[Address, ...]  # in the order of the function's parameters


@dataclass(frozen=True, slots=True)
class PersistentKernel:
    """One cooperative kernel and its tables.

    The memory `sync` is zero before the first run, and kept between runs. After a run that was aborted it is zeroed.
    """

    source: KernelSource
    tables: Mapping[str, NDArray[np.uint32]]  # by the name of their buffer


def build_persistent(
    name: str,
    operators: Sequence[TaskOperator],
    predecessors: Sequence[Sequence[int]],
    plan: VDevicePlan,
    slots: Sequence[Buffer],
    hw: HardwareSpec,
) -> PersistentKernel:
    """Return the kernel that executes a plan. Raises InvariantError for a plan that does not compute its operators.

    Args:
        name: the kernel's name.
        operators: the rOperators, in the order of the plan's.
        predecessors: the rOperators that each one has to come after, because of data or of memory that is used again.
        plan: what each vEU executes. Its rTasks are ordered by events.
        slots: the memory behind each slot.
        hw: the device.
    """
    require_identifier(name)
    _check(operators, predecessors, plan, slots)
    functions = list(dict.fromkeys(each.function for each in operators))
    rows, starts, arguments = _tables(operators, {function: i for i, function in enumerate(functions)}, plan)
    tables = {"rows": rows, "starts": starts, "arguments": arguments}
    used = tuple(Buffer(key, key, Role.INPUT, DType.UINT32, table.shape) for key, table in tables.items())
    words = EVENT_WORDS * (len(plan.events) + 2)
    donated = Buffer("sync", "sync", Role.INPUT, DType.UINT32, (words,), donated=True)
    sync = Buffer("sync", "sync_state", Role.OUTPUT, DType.UINT32, (words,))
    threads = max(function.threads for function in functions)
    launch = LaunchSpec(
        name,
        tuple(buffer.symbol for buffer in (*used, sync, *slots)),
        (plan.num_veus, 1, 1),
        (threads, 1, 1),
        max(function.shared_bytes for function in functions),
        cooperative=True,
    )
    text = _text(name, functions, len(plan.events), slots, threads, hw.arch)
    buffers = (*used, donated, sync, *slots)
    source = KernelSource(name, dialect_of(hw.arch).language, hw.arch, text, buffers, (launch,), _checks(functions))
    return PersistentKernel(source, tables)


def _check(
    operators: Sequence[TaskOperator],
    predecessors: Sequence[Sequence[int]],
    plan: VDevicePlan,
    slots: Sequence[Buffer],
) -> None:
    check_plan(plan)
    if tuple(each.function.tasks for each in operators) != plan.num_tasks:
        raise InvariantError("the plan's rTasks are not those of its rOperators")
    if any(not isinstance(each, Execute | WaitEvent) for program in plan.programs for each in program):
        raise InvariantError("a plan for GPUs orders rTasks by events, got barriers")
    order = HappensBefore(plan)
    for operator, before in enumerate(predecessors):
        for each in before:
            if not order.before(each, operator):
                raise InvariantError(f"rOperator {operator} depends on {each}, and the plan does not order them")
    if len(slots) > MAX_SLOTS:
        raise InvariantError(f"a kernel has at most {MAX_SLOTS} slots, got {len(slots)}")
    if len(plan.events) >= MAX_COUNT:
        raise InvariantError(f"a kernel has less than {MAX_COUNT} events, got {len(plan.events)}")
    for number, operator_ in enumerate(operators):
        if len(operator_.arguments) != len(operator_.function.parameters):
            expected, actual = len(operator_.function.parameters), len(operator_.arguments)
            raise InvariantError(f"rOperator {number} has {actual} arguments, expected {expected}")
        for argument in operator_.arguments:
            if argument.slot >= len(slots) or argument.offset_bytes >= slots[argument.slot].bytes:
                raise InvariantError(f"rOperator {number} has an argument outside of the slots: {argument}")


def _tables(
    operators: Sequence[TaskOperator], functions: Mapping[TaskFunction, int], plan: VDevicePlan
) -> tuple[NDArray[np.uint32], NDArray[np.uint32], NDArray[np.uint32]]:
    """Return rows, the first row of each vEU, and arguments.

    A row is {u8 opcode, u8 flags, u16 function, u32 arguments, u32 first, u16 count, u16 event}. A wait has the event's
    arrivals as `first`. An argument is {u32 slot, u32 0, u64 offset}.
    """
    arguments: list[tuple[int, int, int, int]] = []
    first_argument: list[int] = []
    for operator in operators:
        first_argument.append(len(arguments))
        arguments += [(each.slot, 0, each.offset_bytes & 0xFFFFFFFF, each.offset_bytes >> 32) for each in operator.arguments]
    rows: list[tuple[int, int, int, int]] = []
    starts = [0]
    for program in plan.programs:
        for instruction in program:
            if isinstance(instruction, WaitEvent):
                rows.append((WAIT, 0, plan.events[instruction.event], instruction.event << 16))
            elif isinstance(instruction, Execute):
                function = functions[operators[instruction.operator].function]
                arrives = instruction.arrives is not None
                code = EXECUTE | arrives * ARRIVES << 8 | function << 16
                event = (instruction.arrives or 0) << 16
                end = instruction.first + instruction.count
                for first in range(instruction.first, end, MAX_COUNT):
                    count = min(MAX_COUNT, end - first)
                    rows.append((code, first_argument[instruction.operator], first, count | event))
        starts.append(len(rows))
    listed = [np.array(table, np.uint32).reshape(-1, 4) for table in (rows, arguments)]
    return listed[0], np.array(starts, np.uint32), listed[1]


def _text(name: str, functions: Sequence[TaskFunction], num_events: int, slots: Sequence[Buffer], threads: int, arch: Arch) -> str:
    alignment = max(function.alignment for function in functions)
    definitions = "\n".join(each.definition(f"rtask_{i}", alignment) for i, each in enumerate(functions))
    parameters = ["const unsigned int *rows", "const unsigned int *starts", "const unsigned int *arguments"]
    parameters += ["unsigned int *sync", *(f"{_const(slot)}unsigned char *{slot.symbol}" for slot in slots)]
    assigned = "\n".join(f"    slots[{i}] = (unsigned char *){slot.symbol};" for i, slot in enumerate(slots))
    cases = "\n".join(_case(i, function, threads) for i, function in enumerate(functions))
    shared = f"  {shared_memory(alignment)}\n" if any(function.shared_bytes for function in functions) else ""
    wrappers = preamble_of(functions, arch)
    return f"""{wrappers}{_ADDRESS}
{definitions}
extern "C" __global__ void __launch_bounds__({threads}, 1)
{name}({", ".join(parameters)}) {{
{shared}  __shared__ unsigned char *slots[{len(slots)}];
  if (threadIdx.x == 0) {{
{assigned}
  }}
  const unsigned int next_epoch = sync[0] + 1;
  const unsigned int end = starts[blockIdx.x + 1];
  __syncthreads();
  for (unsigned int at = starts[blockIdx.x]; at < end; at++) {{
    const unsigned int *const row = rows + {ROW_WORDS} * at;
    const unsigned int code = row[0], first = row[2], count = row[3] & 0xffff, event = row[3] >> 16;
    if ((code & 0xff) == {WAIT}) {{
      int is_over = 0;
      if (threadIdx.x == 0) is_over = !event_wait(sync, event, next_epoch * first, at);
      if (__syncthreads_or(is_over)) return;
      continue;
    }}
    const unsigned int *const argument = arguments + {ARGUMENT_WORDS} * row[1];
    for (unsigned int i = 0; i < count; i++) {{
      const int task = (int)(first + i);
      switch (code >> 16) {{
{cases}
      }}
      __syncthreads();
    }}
    if (threadIdx.x == 0 && (code >> 8 & {ARRIVES})) event_arrive(sync, event, count);
  }}
  if (threadIdx.x == 0 && event_finish(sync, {num_events}) + 1 == next_epoch * gridDim.x) sync[0] = next_epoch;
}}
"""


def preamble_of(functions: Sequence[TaskFunction], arch: Arch) -> str:
    """Return the helpers of the functions, and of the kernel around them."""
    own = ("load_acquire", "load_relaxed", "exchange_relaxed", "sleep_ns", "timer_ns",
           "event_wait", "event_arrive", "event_finish")  # fmt: skip
    return preamble([*own, *(name for function in functions for name in function.helpers)], arch)


def _checks(functions: Sequence[TaskFunction]) -> tuple[RuntimeCheck, ...]:
    """Return the run-time checks by the numbers that the functions have for them."""
    checks: list[RuntimeCheck] = []
    for function in sorted((each for each in functions if each.checks), key=lambda each: each.first_check):
        if function.first_check != len(checks):
            raise InvariantError(f"run-time checks begin at number {function.first_check}, expected {len(checks)}")
        checks += function.checks
    return tuple(checks)


def _const(slot: Buffer) -> str:
    return "const " if slot.role is Role.INPUT else ""


def _case(number: int, function: TaskFunction, threads: int) -> str:
    """Return the call of a function by its threads, the first of the block."""
    pointers = [
        f"({parameter[: parameter.index('*') + 1]})address(slots, argument + {ARGUMENT_WORDS * i})"
        for i, parameter in enumerate(function.parameters)
    ]
    condition = "" if function.threads == threads else f"if (threadIdx.x < {function.threads}) "
    return f"        case {number}: {condition}rtask_{number}({', '.join(('task', *pointers))}); break;"
