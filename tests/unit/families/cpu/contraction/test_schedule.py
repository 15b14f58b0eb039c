"""Contractions on a CPU: packing of all layouts, tails of tiles and k blocks, accumulation in place and epilogues."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from cases_cpu import AVX2, cpu_case

import roller_svc
from roller_svc import hardware
from roller_svc.codegen.kernel import GroupLaunches, emit, tensors_in_memory
from roller_svc.compiler.lower_and_emit import emit_plan, lower
from roller_svc.compiler.partition_cache import partition
from roller_svc.compiler.rank import rank
from roller_svc.families import model_of
from roller_svc.families.common.view import GemmView
from roller_svc.families.cpu.contraction.packing import K_ROW
from roller_svc.families.cpu.contraction.schedule import OperandPrefetch, OutputPrefetch
from roller_svc.families.cpu.contraction.workload import OperandLayout, cpu_operands
from roller_svc.frontend.lang import parse
from roller_svc.fusion.partition import stored_types
from roller_svc.ir.dtype import DType
from roller_svc.ir.estimate import Candidate
from roller_svc.ir.expr import Const, Expr, Load, Op, OpKind
from roller_svc.ir.group import AxisRole, KernelGroup
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.index import num, ref
from roller_svc.ir.program import TensorProgram, TensorType
from roller_svc.ir.report import Plan
from roller_svc.ir.rprogram import RProgram, RTile
from roller_svc.ir.schedule import (
    Branch,
    Compute,
    Let,
    Loop,
    LoopKind,
    Prefetch,
    ScheduleTree,
    Scope,
    Storage,
    Transpose,
    iter_nodes,
)
from roller_svc.ir.schedule_text import render
from roller_svc.runtime.cpu import CpuModule
from roller_svc.semantics.compare import agrees
from roller_svc.semantics.inputs import random_inputs
from roller_svc.semantics.interpreter import evaluate
from roller_svc.toolchain import compile_source

AVX512 = hardware.load("cpu-x86-avx512")
SHAPES = {"[m, k]": "mk", "[k, m]": "km", "[k, n]": "kn", "[n, k]": "nk"}
Tiles = tuple[int, int, int, int, int]  # mr, nr, mc, nc, kc


def program_of(
    extents: tuple[int, int, int], a: str = "[m, k]", b: str = "[k, n]", dtype: str = "float32", then: str = ""
) -> TensorProgram:
    """C = A B and what follows."""
    size = dict(zip("mnk", extents, strict=True))
    shapes = {"A": tuple(size[x] for x in SHAPES[a]), "B": tuple(size[x] for x in SHAPES[b])}
    if "bias" in then:
        shapes["bias"] = (extents[1],)
    types = {name: TensorType(DType(dtype), shape) for name, shape in shapes.items()}
    return parse(f"C[m, n] +=! A{a} * B{b}{then}", types)


def tiled(group: KernelGroup, tiles: Tiles) -> RProgram:
    """The group in those tiles, none larger than whole register tiles cover."""
    mr, nr, mc, nc, kc = tiles
    sizes = {AxisRole.M: (mr, mc), AxisRole.N: (nr, nc), AxisRole.K: (1, kc), AxisRole.BATCH: (1, 1)}
    thread, block = [], []
    for axis in group.space.axes:
        small, large = sizes[axis.role]
        whole = large if axis.role is AxisRole.K else min(large, -(-axis.extent // small) * small)
        thread.append((axis.name, small))
        block.append((axis.name, whole))
    unit = AVX2.unit_for(group.space.compute_dtype)
    return RProgram(group.space, unit, RTile(tuple(block)), RTile(tuple(thread)))


def check(program: TensorProgram, tiles: Tiles) -> None:
    (group,) = partition(program, AVX2)
    chosen = tiled(group, tiles)
    plan = Plan((Candidate(chosen, model_of(group, chosen, AVX2).estimate(chosen)),))
    arrays = random_inputs(program, seed=1)
    found = CpuModule(compile_source(emit_plan(plan, program, (group,), AVX2))).run(arrays)
    agreement = agrees(program, found, evaluate(program, arrays))
    assert agreement.ok, str(agreement)


RELU = "; Y[m, n] = (C[m, n] + bias[n]).call(`max`, [0.0])"


@pytest.mark.parametrize("b", ["[k, n]", "[n, k]"])
@pytest.mark.parametrize("a", ["[m, k]", "[k, m]"])
@pytest.mark.parametrize("then", ["", RELU])
def test_operand_layouts_match_the_interpreter(a: str, b: str, then: str) -> None:
    """Every edge is ragged: the last rows, the last columns, the last step and its last vector."""
    check(program_of((37, 45, 67), a, b, then=then), (6, 16, 18, 48, 26))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("a", "b"), [("[m, k]", "[n, k]"), ("[k, m]", "[n, k]"), ("[m, k]", "[k, n]")])
def test_halves_are_widened_while_they_are_packed(dtype: str, a: str, b: str) -> None:
    program = program_of((37, 45, 67), a, b, dtype)
    check(program, (6, 16, 18, 48, 26))
    (group,) = partition(program, AVX2)
    layouts = [operand.layout for operand in cpu_operands(group)]
    assert layouts == [OperandLayout.K_MAJOR if x.endswith("k]") else OperandLayout.PANEL_MAJOR for x in (a, b)]


@pytest.mark.parametrize(
    ("extents", "tiles"),
    [
        ((64, 96, 40), (4, 24, 16, 48, 40)),  # whole tiles, one step
        ((5, 7, 9), (6, 16, 6, 16, 9)),  # less than one register tile
        ((40, 16, 50), (6, 16, 42, 16, 17)),  # A is unpacked
        ((41, 30, 33), (5, 16, 20, 32, 8)),  # the same, with a full panel and a tail panel of B
        ((37, 45, 1024), (6, 16, 18, 48, 300)),  # A packed, for its rows are a page apart
        ((13, 8, 200), (13, 8, 13, 8, 64)),  # one vector
        ((9, 100, 31), (1, 32, 3, 64, 31)),  # one row at a time
        ((37, 45, 67), (4, 24, 40, 48, 67)),  # B packed by A's first panel, both ragged
        ((9, 60, 20), (4, 24, 8, 72, 20)),  # the same, the last task's first panel being one row
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_tiles_of_all_kinds(extents: tuple[int, int, int], tiles: Tiles, dtype: str) -> None:
    check(program_of(extents, dtype=dtype), tiles)


def test_tasks_of_several_blocks_of_rows() -> None:
    """L2 holds fewer rows of A than a task has, and not half of them."""
    program = program_of((3000, 64, 1030), "[k, m]", "[k, n]")
    (group,) = partition(program, AVX2)
    nodes = lower(group, tiled(group, (5, 16, 1505, 64, 515)), AVX2)[0].body
    loops = {node.var: node for node in iter_nodes(nodes) if isinstance(node, Loop)}
    assert loops["m.task"].extent == 2
    assert loops["m.block"].extent > 1
    packed = next(node for node in iter_nodes(nodes) if isinstance(node, Storage) and node.tensor == ".a_packed")
    assert packed.shape[0] * loops["m.block"].extent * 5 >= 1505
    assert AVX2.block_level.capacity_bytes >= 4 * 515 * 5 * packed.shape[0]


@pytest.mark.parametrize(
    ("depth", "columns", "is_packed"),
    [
        (1040, 96, False),  # L2 holds the six panels of B
        (1040, 1024, True),  # it does not
        (1024, 96, True),  # rows of A are a page apart: six of them in each set of the first cache
        (1024, 32, False),  # a copy would be used twice
    ],
)
def test_unpacked_rows_of_a_match_the_interpreter(depth: int, columns: int, is_packed: bool) -> None:
    (group,) = partition(program_of((60, columns, depth)), AVX2)
    nodes = iter_nodes(lower(group, tiled(group, (6, 16, 60, columns, 208)), AVX2)[0].body)
    assert (".a_packed" in {node.tensor for node in nodes if isinstance(node, Storage)}) is is_packed


@pytest.mark.parametrize(
    ("extents", "tiles", "b", "packs_on_first_use"),
    [
        ((48, 96, 60), (4, 24, 48, 96, 60), "[k, n]", True),
        ((48, 96, 60), (4, 24, 48, 96, 60), "[n, k]", False),  # it must be transposed
        ((48, 96, 60), (4, 24, 48, 96, 30), "[k, n]", False),  # sums would come and go between steps
        ((52, 96, 60), (4, 24, 52, 96, 60), "[k, n]", False),  # one panel of A too many
        ((48, 96, 60), (6, 16, 48, 96, 60), "[k, n]", False),  # pieces of a line
        ((12, 20480, 1024), (4, 24, 12, 96, 1024), "[k, n]", False),  # more than the last cache keeps near
        ((48, 96, 1200), (4, 24, 48, 96, 1200), "[k, n]", False),  # L2 does not hold the rows of A
    ],
)
def test_first_panel_of_a_packs_a_near_b(extents: tuple[int, int, int], tiles: Tiles, b: str, packs_on_first_use: bool) -> None:
    """One panel then has a buffer, and its rows are prefetched."""
    (group,) = partition(program_of(extents, b=b), AVX2)
    nodes = [*iter_nodes(lower(group, tiled(group, tiles), AVX2)[0].body)]
    (packed,) = (node for node in nodes if isinstance(node, Storage) and node.tensor == ".b_packed")
    ahead = {node.distance for node in nodes if isinstance(node, Prefetch) and node.tensor == "B"}
    assert packed.shape[0] == (1 if packs_on_first_use else tiles[3] // tiles[1])
    assert ({8 * extents[1]} <= ahead) is packs_on_first_use


def test_packing_on_first_use_works_with_an_epilogue() -> None:
    check(program_of((37, 45, 67), then=RELU), (4, 24, 40, 48, 67))


def test_short_rows_are_prefetched() -> None:
    """Rows of A that are a task's 48 numbers long; rows of B fill a page and more."""
    (group,) = partition(program_of((96, 1040, 1024), "[k, m]", "[k, n]"), AVX2)
    nodes = [*iter_nodes(lower(group, tiled(group, (6, 16, 48, 1040, 512)), AVX2)[0].body)]
    hints = [node for node in nodes if isinstance(node, Prefetch) and not node.for_write]
    assert {(hint.tensor, hint.distance) for hint in hints if hint.tensor in dict(group.inputs)} == {("A", 11 * 96)}
    (packed,) = (node for node in nodes if isinstance(node, Storage) and node.tensor == ".a_packed")
    assert packed.shape[1] * packed.shape[2] * 4 % 4096 >= 64


@pytest.mark.parametrize(("height", "is_first"), [(4, True), (12, False)])
def test_output_lines_are_prefetched_during_the_micro_kernel(height: int, is_first: bool) -> None:
    (group,) = partition(program_of((48, 64, 64), then=RELU), AVX2)
    nodes = [*iter_nodes(lower(group, tiled(group, (height, 16, 48, 64, 64)), AVX2)[0].body)]
    k_loops = [node for node in nodes if isinstance(node, Loop) and node.var == K_ROW]
    prefetches = [node for k_loop in k_loops for node in iter_nodes(k_loop.body)]
    found = [[x.tensor for x in part if isinstance(x, Prefetch) and x.for_write] for part in (nodes, prefetches)]
    assert found == [["Y"], [] if is_first else ["Y"]]


@pytest.mark.parametrize(("height", "steps"), [(14, 64), (9, 256), (14, 14), (14, 5), (30, 7)])
def test_output_prefetch_covers_every_row(height: int, steps: int) -> None:
    (group,) = partition(program_of((height, 16, steps), then=RELU), AVX2)
    prefetches = OutputPrefetch(GemmView.of(group, tiled(group, (height, 16, height, 16, steps)).space), height, 16).in_step(steps)
    prefetched: set[int] = set()
    for k in range(steps):
        nodes = prefetches
        if isinstance(nodes[0], Branch):
            nodes = nodes[0].then if value(nodes[0].cond, k) else ()
        prefetched |= {value(node.value, k) for node in nodes if isinstance(node, Let)}
    assert prefetched == set(range(height))


@pytest.mark.parametrize(("rows", "height"), [(64, 9), (8192, 9), (8192, 4), (8192, 20)])
def test_unpacked_rows_of_a_are_prefetched_one_tile_ahead(rows: int, height: int) -> None:
    """Each line of each row once, and none of rows that are near anyway."""
    (group,) = partition(program_of((rows, 16, 48)), AVX2)
    operand = cpu_operands(group)[0]
    view = GemmView.of(group, tiled(group, (height, 16, -(-rows // height) * height, 16, 48)).space)
    prefetches = OperandPrefetch(view, operand, height, AVX2).nodes()
    prefetched: Counter[tuple[int, int]] = Counter()
    for k in range(48) if prefetches else ():
        nodes = prefetches
        if isinstance(nodes[0], Branch):
            nodes = nodes[0].then if value(nodes[0].cond, k) else ()
        for let in (node for node in nodes if isinstance(node, Let)):
            (hint,) = let.body
            assert isinstance(hint, Prefetch)
            assert (hint.tensor, hint.distance, hint.to_l2) == ("A", height * 48, True)
            prefetched[value(let.value, k), value(hint.index[1], k)] += 1
    lines = {(row, first) for row in range(height) for first in (0, 16, 32)}
    assert set(prefetched) == (lines if rows * 48 * 4 > AVX2.block_level.capacity_bytes else set())


def test_prefetches_to_l2_use_their_instruction() -> None:
    (group,) = partition(program_of((8192, 16, 48)), AVX2)
    (tree,) = lower(group, tiled(group, (4, 16, 8192, 16, 48)), AVX2)
    assert "prefetch A to L2" in render(tree.body)


def value(expr: Expr, k: int) -> int:
    """Evaluate an expression of the step along k in the first of all blocks."""
    if isinstance(expr, Const):
        return int(expr.value)
    if not isinstance(expr, Op):
        return k if expr == ref(K_ROW) else 0
    found: dict[OpKind, Callable[[int, int], int]] = {
        OpKind.ADD: operator.add, OpKind.MUL: operator.mul, OpKind.FLOORDIV: operator.floordiv,
        OpKind.MOD: operator.mod, OpKind.MIN: min, OpKind.EQ: operator.eq, OpKind.SUB: operator.sub,
    }  # fmt: skip
    a, b = (value(arg, k) for arg in expr.args)
    return found[expr.kind](a, b)


@pytest.mark.parametrize(
    ("spec", "tile", "is_pinned"),
    [(AVX2, (6, 16), True), (AVX2, (4, 32), False), (AVX512, (3, 64), True), (AVX512, (8, 64), False)],
)
def test_rows_of_b_are_loaded_once_if_registers_suffice(spec: HardwareSpec, tile: tuple[int, int], is_pinned: bool) -> None:
    (group,) = partition(program_of((48, 128, 64)), spec)
    chosen = replace(tiled(group, (*tile, 48, 128, 32)), unit=spec.unit_for(DType.FLOAT32))
    rooms = [node for node in iter_nodes(lower(group, chosen, spec)[0].body) if isinstance(node, Storage)]
    whole = (node for room in rooms if room.shape == tile for node in iter_nodes(room.body))
    assert {node.no_rematerialize for node in whole if isinstance(node, Storage)} == {is_pinned}


def test_scaled_batched_contraction() -> None:
    types = {"q": TensorType(DType.FLOAT32, (3, 21, 19)), "k": TensorType(DType.FLOAT32, (3, 23, 19))}
    check(parse("s[h, i, j] +=! q[h, i, d] * k[h, j, d]; t[h, i, j] = s[h, i, j] * 0.125", types), (4, 16, 8, 32, 16))


def test_integers_are_packed() -> None:
    types = {"A": TensorType(DType.INT32, (19, 21)), "B": TensorType(DType.INT32, (21, 18))}
    check(parse("C[m, n] +=! A[m, k] * B[k, n]", types), (4, 16, 8, 32, 16))


def test_transposed_and_copied_operands() -> None:
    (group,) = partition(program_of((64, 64, 1024), "[m, k]", "[n, k]"), AVX2)
    assert [operand.layout for operand in cpu_operands(group)] == [OperandLayout.K_MAJOR, OperandLayout.K_MAJOR]
    nodes = [*iter_nodes(lower(group, tiled(group, (6, 16, 48, 64, 32)), AVX2)[0].body)]
    assert {node.rows for node in nodes if isinstance(node, Transpose)} == {6, 8, 4}
    (group,) = partition(program_of((64, 64, 64), "[k, m]", "[k, n]"), AVX2)
    assert [operand.layout for operand in cpu_operands(group)] == [OperandLayout.PANEL_MAJOR, OperandLayout.PANEL_MAJOR]
    nodes = [*iter_nodes(lower(group, tiled(group, (6, 16, 48, 64, 32)), AVX2)[0].body)]
    assert not any(isinstance(node, Transpose) for node in nodes)


def test_rows_are_transposed_block_by_block() -> None:
    """Many rows with a stride of 16 KiB do not fit L1."""
    (group,) = partition(program_of((64, 64, 1024), "[m, k]", "[n, k]"), AVX2)
    loops = (n for n in iter_nodes(lower(group, tiled(group, (6, 16, 48, 64, 32)), AVX2)[0].body) if isinstance(n, Loop))
    transposes = [sum(isinstance(node, Transpose) for node in loop.body) for loop in loops]
    assert max(transposes) == 1


def test_unused_buffers_are_not_allocated() -> None:
    """A thin product copies no A, a wide one does whose rows are a page apart; a sum that is the output has no tile of
    its own, one behind an epilogue has."""

    def buffers(program: TensorProgram, tiles: Tiles) -> set[str]:
        (group,) = partition(program, AVX2)
        nodes = iter_nodes(lower(group, tiled(group, tiles), AVX2)[0].body)
        return {node.tensor for node in nodes if isinstance(node, Storage)} & {".a_packed", ".c_tile", ".c_edge"}

    assert buffers(program_of((48, 16, 64)), (6, 16, 48, 16, 32)) == set()
    assert buffers(program_of((48, 64, 1024)), (6, 16, 48, 64, 32)) == {".a_packed"}
    assert buffers(program_of((48, 60, 1024)), (6, 16, 48, 64, 32)) == {".a_packed", ".c_edge"}
    assert buffers(program_of((48, 64, 1024), then=RELU), (6, 16, 48, 64, 32)) == {".a_packed", ".c_tile"}


@pytest.mark.parametrize(
    ("constants", "outer", "prefetched"),
    [("", "m.panel", set()), ("A", "m.panel", {".a_packed"}), ("B", "n.panel", {".b_packed"})],
)
def test_prepacked_operands_are_streamed_once(constants: str, outer: str, prefetched: set[str]) -> None:
    """Panels that come from L3 are in the outer loop, and each arrives during the one before."""
    program = replace(program_of((45, 60, 1024), "[m, k]", "[n, k]"), constants=frozenset(constants))
    (group,) = partition(program, AVX2)
    tiles = (6, 16, 48, 64, 256)
    nodes = list(iter_nodes(lower(group, tiled(group, tiles), AVX2)[0].body))
    last = next(i for i, node in enumerate(nodes) if isinstance(node, Loop) and node.kind is LoopKind.UNROLL)
    panels = [node.var for node in nodes[:last] if isinstance(node, Loop) and node.var in ("m.panel", "n.panel")]
    assert panels[-2] == outer
    packed = {node.tensor for node in nodes if isinstance(node, Prefetch)} & {".a_packed", ".b_packed"}
    assert packed == prefetched
    check(program, tiles)


def test_rules_find_tiles_for_unpacked_operands() -> None:
    """A skinny GEMM streams a large A: the rows of its best task exceed every cache."""
    (group,) = partition(program_of((8192, 16, 4096)), AVX2)
    (best, *_), _ = rank(group, AVX2, AVX2.unit_for(DType.FLOAT32), 1)
    rows, depth = best.program.block["m"], best.program.block["k"]
    assert rows * depth * 4 > AVX2.block_level.capacity_bytes


@pytest.mark.parametrize(
    ("dtype", "lanes", "rows", "width"),
    [
        ("float32", 8, 2, 2),
        ("float32", 8, 5, 5),
        ("float32", 8, 6, 9),
        ("float32", 8, 8, 8),
        ("float32", 8, 8, 24),
        ("int32", 8, 7, 7),
        ("float64", 4, 3, 3),
        ("float64", 4, 2, 5),
        ("float64", 4, 4, 4),
    ],
)
def test_blocks_are_transposed_in_registers(dtype: str, lanes: int, rows: int, width: int) -> None:
    """Blocks of any number of rows, in panels of equal or larger width; memory around them stays."""
    kind = DType(dtype)
    program = parse(f"y[i, j] = x[0, 0] where i in {lanes + 2}, j in {width}", {"x": TensorType(kind, (rows, 21))})
    room, i, j = ".room", ref("i"), ref("j")
    shape = (lanes + 2, width)

    def everywhere(node: Compute) -> Loop:
        return Loop("i", shape[0], LoopKind.SERIAL, (Loop("j", width, LoopKind.SERIAL, (node,)),))

    body = (
        everywhere(Compute(room, (i, j), Const(7 if kind is DType.INT32 else 7.0, kind))),
        Transpose(room, (num(1), num(0)), width, Load("x", (num(0), num(3)), kind), 21, rows),
        everywhere(Compute("y", (i, j), Load(room, (i, j), kind))),
    )
    tree = ScheduleTree("turn", (Storage(room, kind, shape, Scope.STACK, body),))
    views = (("x", TensorType(kind, (rows, 21))), ("y", TensorType(kind, shape)))
    buffers = tensors_in_memory(program, stored_types(program), [])
    source = emit("kernel", (GroupLaunches((tree,), views),), buffers, AVX2, "")
    x = np.arange(rows * 21, dtype=dtype).reshape(rows, 21)
    expected = np.full(shape, 7, dtype)
    expected[1:-1, :rows] = x[:, 3 : 3 + lanes].T
    np.testing.assert_array_equal(CpuModule(compile_source(source)).run({"x": x})["y"], expected)


def test_skinny_gemm_candidates_match_the_interpreter() -> None:
    case = cpu_case("C[m, n] +=! A[m, k] * B[k, n]", {"A": ("float32", (70, 130)), "B": ("float32", (130, 17))})
    case.check_some(6)


@pytest.mark.parametrize(("a", "b"), [("[k, m]", "[k, n]"), ("[m, k]", "[n, k]"), ("[m, k]", "[k, n]")])
@pytest.mark.parametrize(("m", "n"), [(14, 16), (40, 33)])
def test_long_sums_use_blocked_summation(a: str, b: str, m: int, n: int) -> None:
    """200,000 positive terms in one chain of float32 would err by 3e-5 of the result."""
    program = program_of((m, n, 200_000), a, b)
    arrays = {name: np.abs(value) for name, value in random_inputs(program, 0).items()}
    types = {name: ("float32", value.shape) for name, value in arrays.items()}
    kernel = roller_svc.compile(f"C[m, n] +=! A{a} * B{b}", types, target="local", top_k=1, select="model")
    wide = [
        np.float64(arrays[x] if where.startswith(first) else arrays[x].T) for x, where, first in (("A", a, "[m"), ("B", b, "[k"))
    ]
    assert np.abs(kernel(**arrays)["C"] / (wide[0] @ wide[1]) - 1).max() < 4e-6


@pytest.mark.slow
def test_scattered_elements_are_gathered_by_one_offset_table() -> None:
    """A strided 1 x 1 convolution over several images: panels of pixels that are no neighbours."""
    text = "y[N, F, HO, WO] +=! x[N, C, HO * 2, WO * 2] * w[F, C] where HO in 7, WO in 7"
    case = cpu_case(text, {"x": ("float32", (3, 19, 14, 14)), "w": ("float32", (21, 19))}, AVX2)
    assert any(" place_of[" in case.source(candidate).text for candidate in case.ranked)
    case.check_some(6)
