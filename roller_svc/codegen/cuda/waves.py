"""Operators level by level → one kernel, launched once a wave: RAMMER's level 1, without waits.

The hardware schedules the blocks. A wave's table says which blocks are the rTasks of which rOperator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from roller_svc.codegen.cuda.function import TaskFunction, dialect_of
from roller_svc.codegen.cuda.task_kernel import (
    ARGUMENT_WORDS,
    Table,
    TaskKernel,
    TaskOperator,
    argument_table,
    block_threads,
    check_operators,
    distinct_functions,
    function_cases,
    function_texts,
    runtime_checks,
    shared_bytes,
    slot_declaration,
    slot_parameters,
    table_buffers,
)
from roller_svc.errors import InvariantError
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.kernel import Buffer, KernelSource, LaunchSpec
from roller_svc.ir.quoting import require_identifier

PART_WORDS = 4


def build_waves(
    name: str,
    operators: Sequence[TaskOperator],
    predecessors: Sequence[Sequence[int]],
    waves: Sequence[Sequence[int]],
    slots: Sequence[Buffer],
    hw: HardwareSpec,
) -> TaskKernel:
    """Return a kernel that is launched once a wave. Raises InvariantError for waves that do not order the operators.

    Args:
        name: the kernel's name.
        operators: the rOperators.
        predecessors: the rOperators that each one has to come after, because of data or of memory that is used again.
        waves: the rOperators of each launch, which do not depend on each other.
        slots: the memory behind each slot.
        hw: the device.
    """
    require_identifier(name)
    check_operators(operators, slots)
    _check(operators, predecessors, waves)
    functions = distinct_functions(operators)
    arguments, first_argument = argument_table(operators)
    parts = [_parts([(operators[each], first_argument[each]) for each in wave], functions) for wave in waves]
    tables = {**{f"wave{i}": part for i, part in enumerate(parts)}, "arguments": arguments}
    inputs = table_buffers(tables)
    launches = tuple(
        LaunchSpec(
            name,
            (f"wave{i}", "arguments", *(slot.symbol for slot in slots)),
            (int(part[-1, 0]), 1, 1),
            (block_threads(functions), 1, 1),
            shared_bytes(functions),
        )
        for i, part in enumerate(parts)
    )
    text = _text(name, list(functions), slots, hw)
    language = dialect_of(hw.arch).language
    return TaskKernel(KernelSource(name, language, hw.arch, text, (*inputs, *slots), launches, runtime_checks(functions)), tables)


def _check(operators: Sequence[TaskOperator], predecessors: Sequence[Sequence[int]], waves: Sequence[Sequence[int]]) -> None:
    wave_of = {operator: number for number, wave in enumerate(waves) for operator in wave}
    if sorted(operator for wave in waves for operator in wave) != list(range(len(operators))) or not all(waves):
        raise InvariantError("the waves do not execute each rOperator once")
    for operator, before in enumerate(predecessors):
        for each in before:
            if wave_of[each] >= wave_of[operator]:
                raise InvariantError(f"rOperator {operator} depends on {each}, which is not in an earlier wave")


def _parts(wave: Sequence[tuple[TaskOperator, int]], functions: Mapping[TaskFunction, int]) -> Table:
    """Return {end, function, first argument, start} of the blocks of each rOperator."""
    parts: list[tuple[int, int, int, int]] = []
    end = 0
    for operator, first_argument in wave:
        start, end = end, end + operator.function.tasks
        parts.append((end, functions[operator.function], first_argument, start))
    return np.array(parts, np.uint32).reshape(-1, PART_WORDS)


def _text(name: str, functions: Sequence[TaskFunction], slots: Sequence[Buffer], hw: HardwareSpec) -> str:
    return f"""{function_texts(functions, (), hw.arch)}
extern "C" __global__ void __launch_bounds__({block_threads(functions)}, 1)
{name}(const unsigned int *part, const unsigned int *arguments, {slot_parameters(slots)}) {{
{slot_declaration(functions, slots)}
  __syncthreads();
  while (blockIdx.x >= part[0]) part += {PART_WORDS};
  const unsigned int *const argument = arguments + {ARGUMENT_WORDS} * part[2];
  const int task = (int)(blockIdx.x - part[3]);
  switch (part[1]) {{
{function_cases(functions)}
  }}
}}
"""
