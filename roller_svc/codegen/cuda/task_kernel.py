"""Functions of rTasks in one kernel: arguments as data, a case for each function."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from roller_svc.codegen.cuda.function import FIRST_PAGE, TASK, TaskFunction, preamble, shared_memory
from roller_svc.codegen.cuda.ring import PAGE_ALIGNMENT_BYTES
from roller_svc.errors import InvariantError
from roller_svc.ir.dtype import DType
from roller_svc.ir.hardware import Arch
from roller_svc.ir.kernel import Buffer, KernelSource, Role, RuntimeCheck
from roller_svc.ir.model_plan import Address

Table = NDArray[np.uint32]
ARGUMENT_WORDS = 4  # {u32 slot, u32 0, u64 offset}
MAX_ARGUMENTS = (1 << 7) - 1  # of an rOperator of a persistent kernel
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
class TaskKernel:
    """A kernel of many operators and its tables.

    A state of a cooperative kernel is zero before the first run, and kept between runs. After a run that was aborted it
    is zeroed.
    """

    source: KernelSource
    tables: Mapping[str, Table]  # by the name of their buffer
    states: tuple[Buffer, ...] = ()  # of each cooperative launch: the memory of its events


def distinct_functions(operators: Sequence[TaskOperator]) -> dict[TaskFunction, int]:
    """Return the numbers of the functions. Equal are those with one body and one list of parameters."""
    return {function: i for i, function in enumerate(dict.fromkeys(each.function for each in operators))}


def check_operators(operators: Sequence[TaskOperator], slots: Sequence[Buffer]) -> None:
    """Check that the arguments are those of the functions, and in the slots. Raises InvariantError."""
    if len(slots) > MAX_SLOTS:
        raise InvariantError(f"a kernel has at most {MAX_SLOTS} slots, got {len(slots)}")
    for number, operator in enumerate(operators):
        expected, actual = len(operator.function.parameters), len(operator.arguments)
        if expected != actual:
            raise InvariantError(f"rOperator {number} has {actual} arguments, expected {expected}")
        for argument in operator.arguments:
            if argument.slot >= len(slots) or argument.offset_bytes >= slots[argument.slot].bytes:
                raise InvariantError(f"rOperator {number} has an argument outside of the slots: {argument}")


def argument_table(operators: Sequence[TaskOperator]) -> tuple[Table, list[int]]:
    """Return the arguments of all operators, and the first of each operator."""
    arguments: list[tuple[int, int, int, int]] = []
    first: list[int] = []
    for operator in operators:
        first.append(len(arguments))
        arguments += [(each.slot, 0, each.offset_bytes & 0xFFFFFFFF, each.offset_bytes >> 32) for each in operator.arguments]
    return np.array(arguments, np.uint32).reshape(-1, ARGUMENT_WORDS), first


def table_buffers(tables: Mapping[str, Table]) -> tuple[Buffer, ...]:
    """Return the inputs of a kernel that are its tables."""
    return tuple(Buffer(name, name, Role.INPUT, DType.UINT32, table.shape) for name, table in tables.items())


def function_texts(functions: Sequence[TaskFunction], wrappers: Iterable[str], arch: Arch, ring: str = "") -> str:
    """Return the functions, and the helpers of these and of the kernel around them. `ring`: functions of its ring."""
    alignment = shared_alignment(functions)
    helpers = preamble((*wrappers, *(name for function in functions for name in function.helpers)), arch)
    definitions = "\n".join(each.definition(f"rtask_{i}", alignment) for i, each in enumerate(functions))
    return f"{helpers}{_ADDRESS}\n{ring}{definitions}"


def slot_parameters(slots: Sequence[Buffer]) -> str:
    """Return the parameters of a kernel that are its slots."""
    return ", ".join(f"{_const(slot)}unsigned char *{slot.symbol}" for slot in slots)


def slot_declaration(functions: Sequence[TaskFunction], slots: Sequence[Buffer]) -> str:
    """Return the statements that declare the shared memory and write the slots to it. A barrier follows."""
    shared = f"  {shared_memory(shared_alignment(functions))}\n" if any(each.shared_bytes for each in functions) else ""
    assigned = "\n".join(f"    slots[{i}] = (unsigned char *){slot.symbol};" for i, slot in enumerate(slots))
    return f"""{shared}  __shared__ unsigned char *slots[{len(slots)}];
  if (threadIdx.x == 0) {{
{assigned}
  }}"""


def function_cases(functions: Sequence[TaskFunction], *, has_ring: bool = False) -> str:
    """Return the cases of a switch that call each function by its threads, the first of the block."""
    threads = block_threads(functions)
    return "\n".join(_case(i, function, threads, has_ring=has_ring) for i, function in enumerate(functions))


def fill_cases(functions: Sequence[TaskFunction]) -> str:
    """Return the cases of a switch that fill the pages of each function that streams."""
    calls = ((i, each) for i, each in enumerate(functions) if each.is_streamed)
    return "\n".join(f"        case {i}: {_call(f'rtask_{i}_fill', each)} {_advance(each)} break;" for i, each in calls)


def block_threads(functions: Iterable[TaskFunction]) -> int:
    return max(function.threads for function in functions)


def shared_bytes(functions: Iterable[TaskFunction]) -> int:
    return max(function.shared_bytes for function in functions)


def runtime_checks(functions: Iterable[TaskFunction]) -> tuple[RuntimeCheck, ...]:
    """Return the run-time checks by the numbers that the functions have for them."""
    checks: list[RuntimeCheck] = []
    for function in sorted((each for each in functions if each.checks), key=lambda each: each.first_check):
        if function.first_check != len(checks):
            raise InvariantError(f"run-time checks begin at number {function.first_check}, expected {len(checks)}")
        checks += function.checks
    return tuple(checks)


def shared_alignment(functions: Iterable[TaskFunction]) -> int:
    """Return the alignment of the shared memory that all functions have."""
    return max(max(each.alignment, PAGE_ALIGNMENT_BYTES * each.is_streamed) for each in functions)


def _const(slot: Buffer) -> str:
    return "const " if slot.role is Role.INPUT else ""


def _case(number: int, function: TaskFunction, threads: int, *, has_ring: bool) -> str:
    """Return the call of a function by its threads, the first of the block. All threads count its pages."""
    condition = "" if function.threads == threads and not has_ring else f"if (threadIdx.x < {function.threads}) "
    counted = f" {_advance(function)}" if function.is_streamed else ""
    return f"        case {number}: {condition}{_call(f'rtask_{number}', function)}{counted} break;"


def _call(name: str, function: TaskFunction) -> str:
    pointers = (
        f"({parameter[: parameter.index('*') + 1]})address(slots, argument + {ARGUMENT_WORDS * i})"
        for i, parameter in enumerate(function.parameters)
    )
    first = (TASK, *((FIRST_PAGE,) if function.is_streamed else ()))
    return f"{name}({', '.join((*first, *pointers))});"


def _advance(function: TaskFunction) -> str:
    return f"{FIRST_PAGE} += {function.pages_text()};"
