"""Schedule trees of `mma.sync` contractions: legality, mutations that the verifier rejects, layouts, block order,
names.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from cases_matrix import ADA, AMPERE, TURING, chosen, contraction, tiles, unit
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import every, examples
from schedule_support import program

from roller_svc.codegen import dialect
from roller_svc.codegen.buffer_ref import BufferRef
from roller_svc.codegen.cuda.function import emit_function
from roller_svc.codegen.names import Names
from roller_svc.codegen.scalar import Scalar
from roller_svc.compiler.backends import load_emulated
from roller_svc.compiler.lower_and_emit import emit_plan, lower
from roller_svc.compiler.partition_cache import partition
from roller_svc.errors import ScheduleError
from roller_svc.families.common.gpu.matrix.mainloop import ACC, LANE, A, B
from roller_svc.families.common.gpu.matrix.stream_k import partial_tiles
from roller_svc.families.common.gpu.matrix.tile import SHARED_A
from roller_svc.ir.dtype import DType
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.index import lt, num, ref
from roller_svc.ir.kernel import Buffer, CompiledKernel, Role
from roller_svc.ir.report import Plan
from roller_svc.ir.schedule import (
    Barrier,
    Branch,
    Compute,
    CpAsync,
    CpAsyncWaitGroup,
    Let,
    LoadMatrix,
    Loop,
    LoopKind,
    Mma,
    Node,
    RoundFragment,
    ScheduleTree,
    Storage,
    iter_nodes,
)
from roller_svc.schedule.legality import check
from roller_svc.semantics.compare import agrees
from roller_svc.semantics.inputs import random_inputs
from roller_svc.semantics.interpreter import evaluate

Nodes = tuple[Node, ...]

MATMUL = "C[m, n] +=! A[m, k] * B[k, n]"
KINDS = {
    "copied": (AMPERE, "mma_f16", MATMUL, "float16", {}),
    "copied, ragged": (AMPERE, "mma_f16", f"{MATMUL}; Y[m, n] = relu(C[m, n] + v[n])", "float16", {"stages": 4}),
    "through registers": (TURING, "mma_f16", MATMUL, "float16", {}),
    "one of them computed": (AMPERE, "mma_f16", "C[m, n] +=! A[m, k] * relu(B[k, n])", "float16", {"stages": 3}),
    "rounded": (AMPERE, "mma_tf32", MATMUL, "float32", {"stages": 3}),
    "bytes": (ADA, "mma_e4m3", "C[m, n] +=! A[m, k].cast(`float32`) * B[k, n].cast(`float32`)", "float8_e4m3fn", {}),
    "streamed": (AMPERE, "mma_f16", MATMUL, "float16", {"stages": 3, "stream_k_blocks": 5}),
    "rows reduced": (AMPERE, "mma_f16", f"{MATMUL}; Y[m] >=! C[m, n]", "float16", {}),
}


def trees(kind: str) -> tuple[ScheduleTree, ...]:
    hw, name, text, dtype, more = KINDS[kind]
    m, n, k = (33, 40, 72) if "ragged" in kind else (64, 64, 128)
    inputs = {"A": f"{dtype} {m} {k}", "B": f"{dtype} {k} {n}"} | ({"v": f"{dtype} {n}"} if "v[" in text else {})
    group = contraction(text, hw, **inputs)
    depth = 64 // group.inputs[0][1].dtype.bytes
    by_hand = tiles(group, unit(hw, name), (32, 64, depth), (16, 32), **more)
    if by_hand.pipeline.stream_k_blocks:
        group = replace(group, stored=(*group.stored, partial_tiles(group.name, by_hand)))
    return lower(group, by_hand, hw)


def changed(nodes: Nodes, change: Callable[[Node], Nodes | None]) -> Nodes:
    """The tree with each node in whose place `change` puts others; None keeps it."""
    result: Nodes = ()
    for node in nodes:
        others = change(node)
        if others is not None:
            result += others
            continue
        match node:
            case Loop() | Let() | Storage():
                result += (replace(node, body=changed(node.body, change)),)
            case Branch():
                then, otherwise = changed(node.then, change), changed(node.otherwise, change)
                result += (replace(node, then=then, otherwise=otherwise),)
            case _:
                result += (node,)
    return result


def without(*kinds: type) -> Callable[[Node], Nodes | None]:
    return lambda node: () if isinstance(node, kinds) else None


def for_some_lanes(*kinds: type) -> Callable[[Node], Nodes | None]:
    """Under a condition that not all threads of a warp meet."""
    return lambda node: (Branch(lt(ref(LANE), num(16)), (node,)),) if isinstance(node, kinds) else None


def fragment_unloaded(tensor: str) -> Callable[[Node], Nodes | None]:
    return lambda node: () if isinstance(node, LoadMatrix) and node.tensor == tensor else None


def sums_uncleared(node: Node) -> Nodes | None:
    return () if isinstance(node, Compute) and node.tensor == ACC else None


def epilogue_inside_the_pipeline(nodes: Nodes) -> Nodes:
    """Allocate the epilogue's buffer, which aliases the pipeline's memory, while that memory is in use."""
    late = next(n for n in iter_nodes(nodes) if isinstance(n, Storage) and n.aliases)
    nodes = changed(nodes, lambda node: () if node is late else None)

    def opened(node: Node) -> Nodes | None:
        if isinstance(node, Storage) and node.tensor == SHARED_A:
            return (replace(node, body=(*node.body, late)),)
        return None

    return changed(nodes, opened)


def copies_within_shared_memory(node: Node) -> Nodes | None:
    if not isinstance(node, CpAsync):
        return None
    return (replace(node, source=replace(node.source, tensor=SHARED_A, index=node.index)),)


@pytest.mark.parametrize("kind", KINDS)
def test_trees_are_legal(kind: str) -> None:
    for tree in trees(kind):
        check(tree.body)
    names = {type(node) for node in iter_nodes(trees(kind)[0].body)}
    assert {LoadMatrix, Mma} <= names
    assert (CpAsync in names) == (kind != "through registers")
    assert (RoundFragment in names) == (kind == "rounded")


@pytest.mark.parametrize(
    ("kind", "change", "code"),
    [
        *[(k, without(CpAsyncWaitGroup), "schedule-order") for k in ("copied", "copied, ragged", "rounded", "streamed")],
        ("one of them computed", without(CpAsyncWaitGroup), "schedule-order"),
        ("copied", without(Barrier), "schedule-order"),
        ("one of them computed", without(Barrier), "schedule-order"),
        ("copied", fragment_unloaded(A), "schedule-order"),
        ("through registers", fragment_unloaded(B), "schedule-order"),
        ("rounded", fragment_unloaded(B), "schedule-order"),
        ("copied", sums_uncleared, "schedule-order"),
        ("streamed", sums_uncleared, "schedule-order"),
        ("copied", for_some_lanes(Mma), "schedule-barrier"),
        ("through registers", for_some_lanes(LoadMatrix), "schedule-barrier"),
        ("copied", for_some_lanes(Barrier), "schedule-barrier"),
        ("copied", copies_within_shared_memory, "schedule-scope"),
    ],
)
def test_broken_tree_is_rejected(kind: str, change: Callable[[Node], Nodes | None], code: str) -> None:
    with pytest.raises(ScheduleError) as refused:
        check(changed(trees(kind)[0].body, change))
    assert refused.value.code == code


@pytest.mark.parametrize("kind", ["copied", "through registers"])
def test_aliased_buffer_in_use_is_rejected(kind: str) -> None:
    with pytest.raises(ScheduleError, match="which is still in scope") as refused:
        check(epilogue_inside_the_pipeline(trees(kind)[0].body))
    assert refused.value.code == "schedule-scope"


# layouts -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [DType.INT8, DType.FLOAT16, DType.FLOAT32])
@pytest.mark.parametrize("chunks", range(1, 33))
def test_eight_rows_use_eight_bank_groups(dtype: DType, chunks: int) -> None:
    """Rows of every whole number of 16-byte chunks: what one matrix of ldmatrix reads comes in one cycle."""
    chunk = 16 // dtype.bytes
    room = BufferRef("room", dtype, (2, 16, chunks * chunk), swizzled=True)
    scalar = Scalar(dialect.CUDA, Names(), "int", guard_reads=True, ranges={"r": (0, 15)})
    text = scalar.address(room, (ref("s"), ref("r"), ref("c")))
    address = eval(f"lambda s, r, c: {text.replace('/', '//')}")
    for first in (0, 8):
        for column in range(chunks):
            places = [address(1, row, column * chunk) * dtype.bytes for row in range(first, first + 8)]
            assert all(place % 16 == 0 for place in places)
            assert len({place // 16 % 8 for place in places}) == 8
    every = {address(slot, row, c) for slot in range(2) for row in range(16) for c in range(chunks * chunk)}
    assert every == set(range(2 * 16 * chunks * chunk))


# order of blocks -----------------------------------------------------------------------------------------------------
def block_places(text: str, blocks: int) -> list[tuple[int, int, int]]:
    """Return (batch, m.block, n.block) of every block."""
    lines = re.findall(r"const \w+ (\w+) = (.+);", text.partition("{")[2])
    found = []
    for block in range(blocks):
        values = {"batch": 0, "m_block": 0, "n_block": 0}
        for name, value in lines:
            value = value.replace("(int)blockIdx.x", str(block)).replace("/", "//")
            value = re.sub(r"(.+?) < (.+?) \? \1 : \2", r"min(\1, \2)", value)
            values[name] = eval(value, {"min": min}, values)
        found.append((values["batch"], values["m_block"], values["n_block"]))
    return found


def rastered(batches: int, rows: int, columns: int, raster: int) -> list[tuple[int, int, int]]:
    nodes: Nodes = (Compute("C", (ref("batch"), ref("m.block"), ref("n.block")), num(1)),)
    for var, extent in (("n.block", columns), ("m.block", rows), ("batch", batches)):
        nodes = (Loop(var, extent, LoopKind.BLOCK, nodes),)
    shape = (batches, rows, columns)
    places = {"C": BufferRef("C", DType.INT32, shape)}
    buffers = (Buffer("C", "C", Role.OUTPUT, DType.INT32, shape),)
    function = emit_function(ScheduleTree("kernel", nodes, raster=raster), places, buffers, AMPERE.arch)
    assert function.grid == batches * rows * columns
    return block_places(function.text, function.grid)


@given(st.integers(1, 3), st.integers(1, 9), st.integers(1, 7), st.integers(1, 10))
@settings(max_examples=examples(60))
def test_every_tile_has_one_block_in_any_raster(batches: int, rows: int, columns: int, raster: int) -> None:
    places = rastered(batches, rows, columns, raster)
    assert set(places) == {(b, m, n) for b in range(batches) for m in range(rows) for n in range(columns)}
    assert len(set(places)) == len(places)


def test_blocks_of_a_raster_share_rows_and_columns() -> None:
    """The first blocks make a rectangle of `raster` rows; the last rows, fewer than that, come last."""
    order = [(m, n) for _, m, n in rastered(1, 5, 4, 2)]
    assert order[:6] == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]
    assert order[8:12] == [(2, 0), (3, 0), (2, 1), (3, 1)]
    assert order[16:] == [(4, 0), (4, 1), (4, 2), (4, 3)]


# names ---------------------------------------------------------------------------------------------------------------
def emulated_result(text: str, hw: HardwareSpec, rprogram: dict[str, int], **inputs: str) -> None:
    """Compile for the matrix unit, emulate, judge."""
    found = program(text, **inputs)
    (group,) = partition(found, hw)
    by_hand = tiles(group, unit(hw, "mma_f16"), (16, 16, 16), (16, 8), **rprogram)
    source = emit_plan(Plan((chosen(by_hand),)), found, (group,), hw)
    arrays = random_inputs(found, 1)
    verdict = agrees(found, load_emulated(CompiledKernel(source, b"", "", ()), 1).run(arrays), evaluate(found, arrays))
    assert verdict.ok, f"{verdict}\n{source.text}"


@pytest.mark.emulator
@pytest.mark.parametrize("condition", ["k < 40", "m < 20", "k < 40, m >= 8"])
def test_gathered_rows_under_a_guard_are_zero_elsewhere(condition: str) -> None:
    text = f"C[m, n] +=! T[ids[m], k].when([{condition}], 0.0) * B[k, n]"
    inputs = {"T": "float16 9 48", "ids": "int32 24", "B": "float16 48 40"}
    emulated_result(text, AMPERE, {"stages": 3}, **inputs)


@pytest.mark.emulator
def test_gathered_rows_of_a_split_are_not_read_beyond_the_last_index() -> None:
    text = "C[m, n] +=! A[m, k] * T[ids[k // 2], k % 2, n] where k in 90"
    inputs = {"A": "float16 24 90", "T": "float16 9 2 40", "ids": "int32 45"}
    emulated_result(text, AMPERE, {"stages": 2, "split_k": 4}, **inputs)


@pytest.mark.emulator
@pytest.mark.parametrize("at", ["o", "p", "n", "f", "o, p"])
@pytest.mark.parametrize("columns", [12, 8])
def test_vectors_of_outputs_have_their_own_biases(at: str, columns: int) -> None:
    """Outputs are contiguous over o and p, but a vector of eight may begin in one row of o and end in the next."""
    extents = {"o": 2, "p": columns, "n": 3, "f": 8}
    text = f"t[n, f, o, p] +=! x[n, o, p, k] * w[k, f]; y[n, f, o, p]: float16 = t[n, f, o, p] + b[{at}]"
    bias = " ".join(str(extents[name]) for name in at.split(", "))
    inputs = {"x": f"float16 3 2 {columns} 32", "w": "float16 32 8", "b": f"float16 {bias}"}
    emulated_result(text, AMPERE, {"stages": 2}, **inputs)


@pytest.mark.emulator
@pytest.mark.parametrize(
    ("more", "a", "b", "bias", "sums", "out", "axes"),
    every(
        3,
        [
            (m, *names)
            for m in ({"stages": 3, "raster": 2}, {"stages": 2, "stream_k_blocks": 3})
            for names in (
                ("acc", "thread", "raster", "sums", "item", ("lane_id", "row", "element")),
                ("a", "b", "copy_async_16", "part", "mma_m16n8k16_f16", ("stream", "tile", "visit")),
                ("shared_memory", "a_shared", "total", "partial", "first", ("slot", "n_block", "place")),
                ("commit_copies", "load_matrix_4", "b_shared", "fetched", "shared_address", ("raster_row", "m_warp", "pair")),
            )
        ],
    ),
)
def test_program_names_do_not_clash_with_kernel_names(
    a: str, b: str, bias: str, sums: str, out: str, axes: tuple[str, str, str], more: dict[str, int]
) -> None:
    m, n, k = axes
    text = f"{sums}[{m}, {n}] +=! {a}[{m}, {k}] * {b}[{k}, {n}]; {out}[{m}, {n}] = {sums}[{m}, {n}] + {bias}[{n}]"
    emulated_result(text, AMPERE, more, **{a: "float16 24 48", b: "float16 48 40", bias: "float16 40"})
