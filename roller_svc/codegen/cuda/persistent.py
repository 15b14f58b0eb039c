"""A plan of a virtual device → one cooperative kernel: a persistent block a vEU, rows as data (RAMMER, OSDI 2020, §4.1).

The text has a case for each distinct function, so it depends on neither the number of vEUs nor the depth of a model.
A vEU's rows are its instructions. An argument is a slot and an offset, as in ir/model_plan.py. A kernel may be launched
several times, each time with the tables of other rOperators. Where a plan streams operands, one more warp of each block
executes the Streams, whose rows are behind all others, and fills the pages of a ring (ring.py).

While a vEU waits or executes, the arguments of its next row and the row after that are copied to shared memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from roller_svc.analysis.happens_before import HappensBefore, check_plan
from roller_svc.codegen.cuda.event_instructions import EVENT_WRAPPERS
from roller_svc.codegen.cuda.function import FIRST_PAGE, WARP, TaskFunction, dialect_of, shared_memory
from roller_svc.codegen.cuda.instructions import AMPERE
from roller_svc.codegen.cuda.instructions import instruction as wrapper_of
from roller_svc.codegen.cuda.ring import PageUse, Ring, check_ring, plan_ring, ring_text, ring_wrappers
from roller_svc.codegen.cuda.task_kernel import (
    ARGUMENT_WORDS,
    MAX_ARGUMENTS,
    MAX_COUNT,
    Table,
    TaskKernel,
    TaskOperator,
    argument_table,
    block_threads,
    check_operators,
    distinct_functions,
    fill_cases,
    function_cases,
    function_texts,
    runtime_checks,
    shared_alignment,
    shared_bytes,
    slot_declaration,
    slot_parameters,
    table_buffers,
)
from roller_svc.errors import InvariantError, require
from roller_svc.ir.dtype import DType
from roller_svc.ir.event_state import EVENT_WORDS
from roller_svc.ir.hardware import Arch, HardwareSpec
from roller_svc.ir.index import ceil_div
from roller_svc.ir.kernel import Buffer, KernelSource, LaunchSpec, Role
from roller_svc.ir.quoting import require_identifier
from roller_svc.ir.vdevice import Execute, Stream, VDevicePlan, WaitEvent

ROWS, STARTS = "rows", "starts"  # tables: the first arguments of a launch
EXECUTE, WAIT, STREAM = 1, 2, 3  # opcodes
ARRIVES = 1  # flag of a row: its rTasks arrive at its event
ARGUMENTS_BIT = 9  # of a row's first word: from there on the number of its arguments
ROW_WORDS = 4
WORD_BYTES = 4
FETCHED_ROWS = 4  # in shared memory: one that is executed, the next one, and the one after that; a power of two
FETCHED_ARGUMENTS = 2  # of how many rows
POINTER_BYTES = 8
BLOCK_BARRIER = 2  # the named barrier of the threads that execute rTasks, where others fill a ring
SYNC = "sync"  # the name of the memory of events


@dataclass(frozen=True, slots=True)
class PersistentRun:
    """The rOperators of one launch of a persistent kernel, and the plan that executes them."""

    operators: tuple[TaskOperator, ...]  # in the order of the plan's
    # the rOperators that each one has to come after, because of data or of memory that is used again
    predecessors: tuple[tuple[int, ...], ...]
    plan: VDevicePlan  # what each vEU executes; its rTasks are ordered by events


def build_persistent(
    name: str,
    operators: Sequence[TaskOperator],
    predecessors: Sequence[Sequence[int]],
    plan: VDevicePlan,
    slots: Sequence[Buffer],
    hw: HardwareSpec,
) -> TaskKernel:
    """Return the kernel that executes a plan. Raises InvariantError for a plan that does not compute its operators.

    Args:
        name: the kernel's name.
        operators: the rOperators, in the order of the plan's.
        predecessors: the rOperators that each one has to come after, because of data or of memory that is used again.
        plan: what each vEU executes. Its rTasks are ordered by events.
        slots: the memory behind each slot.
        hw: the device.
    """
    return build_launches(name, (PersistentRun(tuple(operators), tuple(map(tuple, predecessors)), plan),), slots, hw)


def build_launches(name: str, runs: Sequence[PersistentRun], slots: Sequence[Buffer], hw: HardwareSpec) -> TaskKernel:
    """Return the kernel with a launch for each run. Raises InvariantError as `build_persistent` does."""
    require_identifier(name)
    runs = [_with_streams(run) for run in runs]
    operators = tuple(operator for run in runs for operator in run.operators)
    check_operators(operators, slots)
    functions = distinct_functions(operators)
    most = max(len(each.parameters) for each in functions)
    if most > MAX_ARGUMENTS:
        raise InvariantError(f"an rOperator has {most} arguments, at most {MAX_ARGUMENTS}")
    ring = _plan_ring(functions, slots, hw)
    threads = block_threads(functions) if ring is None else _reader_threads(functions) + WARP
    if threads > hw.limits.max_threads_per_block:
        raise InvariantError(f"a block has {threads} threads, at most {hw.limits.max_threads_per_block}")
    tables: dict[str, Table] = {}
    buffers: list[Buffer] = []
    states: list[Buffer] = []
    launches: list[LaunchSpec] = []
    for number, run in enumerate(runs):
        _check(run.operators, run.predecessors, run.plan, slots)
        tabled = _tables(run.operators, functions, run.plan, has_ring=ring is not None)
        own = {_numbered(table, number): rows for table, rows in tabled.items()}
        tables |= own
        inputs = table_buffers(own)
        state, before, after = (_numbered(each, number) for each in (SYNC, "sync", "sync_state"))
        words = EVENT_WORDS * (len(run.plan.events) + 2)
        donated = Buffer(state, before, Role.INPUT, DType.UINT32, (words,), donated=True)
        sync = Buffer(state, after, Role.OUTPUT, DType.UINT32, (words,))
        buffers += (*inputs, donated, sync)
        states.append(sync)
        launches.append(
            LaunchSpec(
                name,
                tuple(buffer.symbol for buffer in (*inputs, sync, *slots)),
                (run.plan.num_veus, 1, 1),
                (threads, 1, 1),
                shared_bytes(functions) if ring is None else ring.end_bytes,
                cooperative=True,
            )
        )
    text = _text(name, list(functions), slots, hw.arch, ring, threads)
    language, checks = dialect_of(hw.arch).language, runtime_checks(functions)
    source = KernelSource(name, language, hw.arch, text, (*buffers, *slots), tuple(launches), checks)
    return TaskKernel(source, tables, tuple(states))


class TabledRow(NamedTuple):
    """A row of the tables, as a vEU reads it."""

    opcode: int
    function: int
    arguments: int  # the first one of the rOperator, which no other has
    first: int  # rTask; of a wait the arrivals
    tasks: int
    event: int | None  # None: rTasks at whose end nothing arrives


def read_rows(rows: Table, starts: Table) -> list[list[TabledRow]]:
    """Return what each vEU executes and waits for, from the tables of a launch."""
    places = [int(each) for each in starts[:-1]]  # the last one is the number of events
    return [[_read_row(row) for row in rows[first:end].tolist()] for first, end in pairwise(places)]


def _read_row(row: Sequence[int]) -> TabledRow:
    code, arguments, first, last = row
    opcode, arrives = code & 0xFF, code >> 8 & ARRIVES
    event = last >> 16 if opcode == WAIT or arrives else None
    return TabledRow(opcode, code >> 16, arguments, first, last & 0xFFFF, event)


def _numbered(name: str, number: int) -> str:
    """Return the name of what each launch has. The first has it as it is."""
    return f"{name}{number}" if number else name


def _with_streams(run: PersistentRun) -> PersistentRun:
    """Return the run whose rOperators that its plan streams have the functions for it."""
    streamed = run.plan.streamed
    return replace(
        run,
        operators=tuple(
            replace(each, function=each.function.streamed()) if number in streamed else each
            for number, each in enumerate(run.operators)
        ),
    )


def _plan_ring(functions: Mapping[TaskFunction, int], slots: Sequence[Buffer], hw: HardwareSpec) -> Ring | None:
    """Return the ring of a kernel; None if nothing streams. Raises InvariantError if there is no room for one."""
    uses = [use for each in functions if each.is_streamed and (use := page_use(each)) is not None]
    if not uses:
        return None
    static = static_bytes(len(slots), max(len(each.parameters) for each in functions))
    return check_ring(plan_ring(uses, shared_bytes(functions), static, hw), uses)


def static_bytes(slots: int, most_arguments: int) -> int:
    """Return the bytes of shared memory that a kernel has beside its rTasks and its ring: slots, rows and arguments.

    Args:
        slots: their number.
        most_arguments: of an rOperator.
    """
    words = FETCHED_ROWS * ROW_WORDS + FETCHED_ARGUMENTS * most_arguments * ARGUMENT_WORDS
    return POINTER_BYTES * slots + WORD_BYTES * words


def prefetches_rows(arch: Arch) -> bool:
    """Return whether rows and arguments arrive while a vEU waits. Without `cp.async` it waits for them."""
    return arch >= AMPERE


def page_use(function: TaskFunction) -> PageUse | None:
    """Return how the rTasks of a function use pages; None if they cannot stream."""
    stream = function.stream
    if stream is None:
        return None
    sizes = stream.shared_bytes, stream.bytes, stream.pages_in_flight, stream.registers
    return PageUse(stream.parameters, stream.page_bytes, function.warps, *sizes, function.tasks)


def _reader_threads(functions: Iterable[TaskFunction]) -> int:
    """Return the threads of a block that execute rTasks: whole warps."""
    return ceil_div(block_threads(functions), WARP) * WARP


def _check(
    operators: Sequence[TaskOperator], predecessors: Sequence[Sequence[int]], plan: VDevicePlan, slots: Sequence[Buffer]
) -> None:
    clocks = check_plan(plan)
    if tuple(each.function.tasks for each in operators) != plan.num_tasks:
        raise InvariantError("the plan's rTasks are not those of its rOperators")
    for number in plan.streamed:
        stream, arguments = operators[number].function.stream, operators[number].arguments
        if stream is None or any(slots[arguments[each].slot].role is not Role.INPUT for each in stream.parameters):
            raise InvariantError(f"rOperator {number} streams an operand that is not constant")
    if any(not isinstance(each, Execute | WaitEvent | Stream) for program in plan.programs for each in program):
        raise InvariantError("a plan for GPUs orders rTasks by events, got barriers")
    order = HappensBefore(plan, clocks)
    for operator, before in enumerate(predecessors):
        for each in before:
            if not order.before(each, operator):
                raise InvariantError(f"rOperator {operator} depends on {each}, and the plan does not order them")
    if len(plan.events) >= MAX_COUNT:
        raise InvariantError(f"a kernel has less than {MAX_COUNT} events, got {len(plan.events)}")


def _tables(
    operators: Sequence[TaskOperator], functions: Mapping[TaskFunction, int], plan: VDevicePlan, *, has_ring: bool
) -> dict[str, Table]:
    """Return rows, the first row of each vEU with the end of the last and the number of events, and arguments.

    With a ring also the first of each vEU's Streams with the end of the last, and then the pages of each vEU.

    A row is {u8 opcode, u1 arrives, u7 number of arguments, u16 function, u32 arguments, u32 first, u16 count, u16 event}.
    A wait has the event's arrivals as `first`.
    """
    pages: list[int] = []
    arguments, first_argument = argument_table(operators)
    rows: list[tuple[int, int, int, int]] = []
    starts = [0]
    for program in plan.programs:
        for instruction in program:
            if isinstance(instruction, WaitEvent):
                rows.append((WAIT, 0, plan.events[instruction.event], instruction.event << 16))
            elif isinstance(instruction, Execute):
                function = functions[operators[instruction.operator].function]
                arrives = instruction.arrives is not None
                number = len(operators[instruction.operator].arguments)
                code = EXECUTE | arrives * ARRIVES << 8 | number << ARGUMENTS_BIT | function << 16
                event = (instruction.arrives or 0) << 16
                end = instruction.first + instruction.count
                for first in range(instruction.first, end, MAX_COUNT):
                    count = min(MAX_COUNT, end - first)
                    rows.append((code, first_argument[instruction.operator], first, count | event))
        starts.append(len(rows))
    starts.append(len(plan.events))
    streams = [len(rows)]
    for program in plan.programs:
        own = [each for each in program if isinstance(each, Stream)]
        for each in own:
            code = STREAM | functions[operators[each.operator].function] << 16
            rows.append((code, first_argument[each.operator], each.first, each.count))
        streams.append(len(rows))
        pages.append(sum(operators[each.operator].function.count_pages(each.first, each.count) for each in own))
    row_table = np.array(rows, np.uint32).reshape(-1, ROW_WORDS)
    tables = {ROWS: row_table, STARTS: np.array(starts, np.uint32), "arguments": arguments}
    return tables | ({"streams": np.array([*streams, *pages], np.uint32)} if has_ring else {})


def _fill_loop(functions: Sequence[TaskFunction], readers: int) -> str:
    """Return the loop of the warp that fills the ring."""
    return f"""
  unsigned int {FIRST_PAGE} = 0;
  if (threadIdx.x >= {readers}) {{
    const unsigned int last_stream = streams[blockIdx.x + 1];
    for (unsigned int at = streams[blockIdx.x]; at < last_stream; at++) {{
      const unsigned int *const row = rows + {ROW_WORDS} * at;
      const unsigned int code = row[0], first = row[2], count = row[3];
      const unsigned int *const argument = arguments + {ARGUMENT_WORDS} * row[1];
      for (unsigned int i = 0; i < count; i++) {{
        const int task = (int)(first + i);
        switch (code >> 16) {{
{fill_cases(functions)}
        }}
      }}
    }}
    return;
  }}"""


def _fetch_text(arch: Arch, threads: int, most_arguments: int) -> str:
    """Return the functions that copy the rows of a vEU and their arguments to shared memory."""
    inline = "__device__ __forceinline__ void"
    copy, arrived = "copy_async_16(to, from, true);", "commit_copies();\n  await_copies<0>();"
    if not prefetches_rows(arch):
        copy, arrived = f"for (int word = 0; word < {ROW_WORDS}; word++) to[word] = from[word];", ""
    return f"""{inline} fetch(unsigned int *to, const unsigned int *from) {{
  {copy}
}}
{inline} fetch_row(unsigned int *fetched, const unsigned int *rows, unsigned int at) {{
  if (threadIdx.x == 0) fetch(fetched + {ROW_WORDS} * (at % {FETCHED_ROWS}), rows + {ROW_WORDS} * at);
}}
{inline} fetch_arguments(unsigned int *fetched, const unsigned int *row, const unsigned int *arguments, unsigned int at) {{
  unsigned int *const to = fetched + {ARGUMENT_WORDS * most_arguments} * (at % {FETCHED_ARGUMENTS});
  for (unsigned int i = threadIdx.x; i < (row[0] >> {ARGUMENTS_BIT} & {MAX_ARGUMENTS}); i += {threads})
    fetch(to + {ARGUMENT_WORDS} * i, arguments + {ARGUMENT_WORDS} * (row[1] + i));
}}
{inline} await_fetched() {{
  {arrived}
}}
"""


def _fetch_wrappers(arch: Arch) -> tuple[str, ...]:
    """Return the wrappers that the functions above call."""
    names = ("copy_async_16", "commit_copies", "await_copies") if prefetches_rows(arch) else ()
    needs = (need for name in names for need in require(wrapper_of(name), f"instruction {name}").needs)
    return tuple(dict.fromkeys((*needs, *names)))


def _text(
    name: str, functions: Sequence[TaskFunction], slots: Sequence[Buffer], arch: Arch, ring: Ring | None, threads: int
) -> str:
    tables = "const unsigned int *rows, const unsigned int *starts, const unsigned int *arguments, "
    wrappers = (*EVENT_WRAPPERS, *_fetch_wrappers(arch))
    most = max(len(each.parameters) for each in functions)
    readers, functions_of_ring, begin, fill = threads, "", "", ""
    meet, any_of, leave = "__syncthreads()", "__syncthreads_or(is_over)", "return;"
    if ring is not None:
        readers = threads - WARP
        tables += "const unsigned int *streams, "
        wrappers += ring_wrappers(arch)
        functions_of_ring = ring_text(ring, shared_memory(shared_alignment(functions)), arch)
        begin, fill = "\n  if (threadIdx.x == 0) ring_begin();", _fill_loop(functions, readers)
        meet, any_of = f"named_barrier({BLOCK_BARRIER}, {readers})", f"named_any({BLOCK_BARRIER}, {readers}, is_over)"
        # no copy may be under way when the block ends
        leave = f"""{{
        const unsigned int pages = streams[gridDim.x + 1 + blockIdx.x];
        for (; threadIdx.x == 0 && {FIRST_PAGE} < pages; {FIRST_PAGE}++) ring_skip({FIRST_PAGE});
        return;
      }}"""
    tables += "unsigned int *sync"
    fetch = _fetch_text(arch, readers, most)
    return f"""{function_texts(functions, wrappers, arch, functions_of_ring + fetch)}
extern "C" __global__ void __launch_bounds__({threads}, 1)
{name}({tables}, {slot_parameters(slots)}) {{
{slot_declaration(functions, slots)}
  __shared__ __align__(16) unsigned int fetched_rows[{FETCHED_ROWS * ROW_WORDS}];
  __shared__ __align__(16) unsigned int fetched_arguments[{FETCHED_ARGUMENTS * most * ARGUMENT_WORDS}];
  const unsigned int next_epoch = sync[0] + 1;
  const unsigned int start = starts[blockIdx.x], end = starts[blockIdx.x + 1];{begin}
  if (start < end && threadIdx.x < {readers}) {{
    fetch_row(fetched_rows, rows, start);
    fetch_arguments(fetched_arguments, rows + {ROW_WORDS} * start, arguments, start);
    if (start + 1 < end) fetch_row(fetched_rows, rows, start + 1);
    await_fetched();
  }}
  __syncthreads();{fill}
  for (unsigned int at = start; at < end; at++) {{
    const unsigned int *const row = fetched_rows + {ROW_WORDS} * (at % {FETCHED_ROWS});
    const unsigned int code = row[0], first = row[2], count = row[3] & 0xffff, event = row[3] >> 16;
    if (at + 1 < end)
      fetch_arguments(fetched_arguments, fetched_rows + {ROW_WORDS} * ((at + 1) % {FETCHED_ROWS}), arguments, at + 1);
    if (at + 2 < end) fetch_row(fetched_rows, rows, at + 2);
    if ((code & 0xff) == {WAIT}) {{
      int is_over = 0;
      if (threadIdx.x == 0) is_over = !event_wait(sync, event, next_epoch * first, at);
      await_fetched();
      if ({any_of}) {leave}
      continue;
    }}
    const unsigned int *const argument = fetched_arguments + {ARGUMENT_WORDS * most} * (at % {FETCHED_ARGUMENTS});
    for (unsigned int i = 0; i < count; i++) {{
      const int task = (int)(first + i);
      switch (code >> 16) {{
{function_cases(functions, has_ring=ring is not None)}
      }}
      await_fetched();
      {meet};
    }}
    if (threadIdx.x == 0 && (code >> 8 & {ARRIVES})) event_arrive(sync, event, count);
  }}
  if (threadIdx.x) return;
  const unsigned int last = starts[gridDim.x + 1];
  if (event_finish(sync, last) + 1 == next_epoch * gridDim.x) sync[0] = next_epoch;
}}
"""
