"""The outliner: which bodies become functions, which do not, equal results of calls."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from cases_cpu import AVX2

from roller_svc.codegen.kernel import GroupLaunches, emit, tensors_in_memory
from roller_svc.compiler.autotune import batch_plans
from roller_svc.compiler.lower_and_emit import emit_plans
from roller_svc.compiler.partition_cache import partition
from roller_svc.errors import ScheduleError
from roller_svc.families import model_of
from roller_svc.frontend.lang import parse
from roller_svc.ir.dtype import DType
from roller_svc.ir.estimate import Candidate
from roller_svc.ir.expr import Cast, Const, Expr, Load, Op, OpKind, Select
from roller_svc.ir.index import add, lt, mul, num, ref
from roller_svc.ir.kernel import KernelSource
from roller_svc.ir.program import TensorProgram, TensorType
from roller_svc.ir.report import Plan
from roller_svc.ir.schedule import Compute, Loop, LoopKind, Node, Routine, ScheduleTree
from roller_svc.runtime.cpu import CpuModule
from roller_svc.schedule.legality import check
from roller_svc.semantics.compare import agrees
from roller_svc.semantics.inputs import random_inputs
from roller_svc.semantics.interpreter import evaluate
from roller_svc.toolchain import compile_source
from tests.unit.families.cpu.contraction.test_schedule import RELU, Tiles, program_of, tiled

COPY = parse("b[i] = a[i] * 2.0", {"a": TensorType(DType.FLOAT32, (64,))})
F32 = DType.FLOAT32


def plans(program: TensorProgram, *chosen: Tiles) -> tuple[Plan, ...]:
    (group,) = partition(program, AVX2)
    found = [tiled(group, tiles) for tiles in chosen]
    return tuple(Plan((Candidate(tiles, model_of(group, tiles, AVX2).estimate(tiles)),)) for tiles in found)


def together(program: TensorProgram, *chosen: Tiles) -> tuple[KernelSource, ...]:
    return emit_plans(plans(program, *chosen), program, tuple(partition(program, AVX2)), AVX2)


def functions(source: KernelSource, name: str = "multiply") -> int:
    return len(re.findall(rf"^static __attribute__.* void {name}\d+_f32\(", source.text, re.MULTILINE))


def printed(*nodes: Node) -> KernelSource:
    """A tree over a and b as C."""
    buffers = tensors_in_memory(COPY, COPY.types, ())
    part = GroupLaunches((ScheduleTree("copy", nodes),), (*COPY.inputs, ("b", COPY.types["b"])))
    return emit("copy", (part,), buffers, AVX2, "")


def quarter(number: int, value: Expr | None = None) -> Loop:
    """b[16 number + i] = a[16 number + i], or the value, for 16 i."""
    at = (add(mul(num(16), num(number)), ref("i")),)
    return Loop("i", 16, LoopKind.SERIAL, (Compute("b", at, value or Load("a", at, F32)),))


def test_other_blocks_call_the_same_micro_kernels() -> None:
    """Ragged in all directions: whole tiles and three kinds of edges, each once, whatever the blocks and steps are."""
    program = program_of((37, 45, 67))
    alone, *_ = together(program, (6, 16, 18, 48, 26))
    three = together(program, (6, 16, 18, 48, 26), (6, 16, 12, 32, 20), (6, 16, 36, 48, 31))
    assert functions(three[0]) == functions(alone) == 4
    arrays = random_inputs(program, seed=2)
    compiled, want = compile_source(three[0]), evaluate(program, arrays)
    assert all(agrees(program, CpuModule(replace(compiled, source=s)).run(arrays), want).ok for s in three)


def test_other_register_tiles_do_not() -> None:
    program = program_of((36, 48, 64))
    assert functions(together(program, (6, 16, 18, 48, 32), (4, 16, 16, 48, 32))[0]) == 2


def test_stores_share_a_function_where_epilogues_are_the_same() -> None:
    with_relu = program_of((36, 48, 64), then=RELU)
    assert functions(together(with_relu, (6, 16, 18, 48, 32), (6, 16, 36, 48, 32))[0], "store") == 1
    without = program_of((36, 48, 64))
    assert functions(together(without, (6, 16, 18, 48, 32))[0], "store") == 0


def test_outlined_addresses_and_bounds_are_arguments() -> None:
    rows = [Routine("copy", (replace(quarter(n), stop=num(12 + n)),)) for n in range(4)]
    source = printed(*rows)
    assert functions(source, "copy") == 1
    assert [call.strip() for call in source.text.splitlines() if call.strip().startswith("copy0_f32")] == [
        f"copy0_f32(b + {16 * n}, a + {16 * n}, {12 + n});" for n in range(4)
    ]


def test_other_values_are_other_functions() -> None:
    two = Op(OpKind.ADD, (Load("a", (ref("i"),), F32), Const(2.0, F32)), F32)
    assert functions(printed(Routine("copy", (quarter(0),)), Routine("copy", (quarter(0, two),))), "copy") == 2


def test_zeros_of_either_sign_are_other_functions() -> None:
    rows = [Routine("copy", (quarter(0, Const(zero, F32)),)) for zero in (0.0, -0.0)]
    assert functions(printed(*rows), "copy") == 2


@pytest.mark.parametrize("extent", [257, 288, 290, 320, 323])
def test_a_row_of_many_vectors_is_a_loop_with_the_same_values(extent: int) -> None:
    """AVX2: vectors of 8, four an iteration, 32 at most one after the other."""
    program = parse("b[i] = a[i] * 2.0 + i", {"a": TensorType(F32, (extent,))})
    twice = Op(OpKind.MUL, (Load("a", (ref("i"),), F32), Const(2.0, F32)), F32)
    value = Op(OpKind.ADD, (twice, Cast(ref("i"), F32)), F32)
    row = Loop("i", extent, LoopKind.VECTOR, (Compute("b", (ref("i"),), value),))
    buffers = tensors_in_memory(program, program.types, ())
    part = GroupLaunches((ScheduleTree("row", (row,)),), (*program.inputs, ("b", program.types["b"])))
    source = emit("row", (part,), buffers, AVX2, "")
    assert source.text.count("i_iteration++") == 1
    assert source.text.count("*(vf32x8 *)(b") <= 4 + 5
    arrays = random_inputs(program, seed=3)
    want = evaluate(program, arrays)
    assert agrees(program, CpuModule(compile_source(source)).run(arrays), want).ok


def test_guarded_load_is_not_outlined() -> None:
    guarded = Select(lt(ref("i"), num(4)), Load("a", (ref("i"),), F32), Const(0.0, F32), F32)
    checked = Load("a", (ref("i"),), F32, (True,))
    for value in (guarded, checked):
        assert functions(printed(Routine("copy", (quarter(0, value),))), "copy") == 0


def test_a_condition_that_loads_is_outlined() -> None:
    positive = Op(OpKind.GT, (Load("a", (ref("i"),), F32), Const(0.0, F32)), DType.INT8)
    counted = Select(positive, Const(1.0, F32), Const(0.0, F32), F32)
    assert functions(printed(Routine("copy", (quarter(0, counted),))), "copy") == 1


def test_aliased_written_pointer_is_not_restrict() -> None:
    def shifted(by: str) -> tuple[Expr, ...]:
        return (add(mul(num(16), ref(by)), ref("i")),)

    body = Loop("i", 16, LoopKind.SERIAL, (Compute("b", shifted("y"), Load("b", shifted("x"), F32)),))
    tree: Node = Routine("copy", (body,))
    for name in ("x", "y"):
        tree = Loop(name, 4, LoopKind.SERIAL, (tree,))
    assert "void copy0_f32(float *p0, const float *p1)" in printed(tree).text


@pytest.mark.parametrize("body", [Routine("inner", (quarter(0),)), Loop("p", 1, LoopKind.PARALLEL, (quarter(0),))])
def test_a_routine_is_one_threads_and_holds_no_other(body: Node) -> None:
    with pytest.raises(ScheduleError) as refused:
        check((Routine("outer", (body,)),))
    assert refused.value.code == "schedule-routine"


def test_plans_with_the_same_register_tiles_stand_in_one_text() -> None:
    program = program_of((36, 48, 64))
    a, b, c, d = plans(program, (6, 16, 18, 48, 32), (4, 16, 16, 48, 32), (6, 16, 36, 48, 32), (4, 16, 36, 48, 32))
    assert batch_plans((a, b, c, d), 2) == ((a, c), (b, d))
    assert batch_plans((a,), 2) == ((a,),)
    assert sorted(map(id, (p for lot in batch_plans((a, b, c), 8) for p in lot))) == sorted(map(id, (a, b, c)))
