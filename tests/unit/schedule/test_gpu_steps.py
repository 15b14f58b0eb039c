"""Schedules by hand for GPUs: blocks, threads, shared tiles and their barriers, in the emulator with its race detector."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
from emulator_support import module
from gpu_schedules import PROGRAMS, draw
from schedule_support import BLUR, MATMUL, SCALAR, SCATTER, inputs_of, judged, program

import roller_svc
from roller_svc import hardware
from roller_svc.codegen.kernel import GroupLaunches, emit, tensors_in_memory
from roller_svc.compiler.scheduled import build_device_launches, emit_schedule
from roller_svc.errors import ScheduleError, WrongAnswerError
from roller_svc.ir.kernel import KernelSource
from roller_svc.ir.program import TensorProgram
from roller_svc.ir.schedule import Barrier, Branch, Let, Loop, Node, Storage, iter_nodes
from roller_svc.ir.schedule_text import render
from roller_svc.schedule.by_hand import schedule_by_hand
from roller_svc.toolchain import compile_source

A100 = "nvidia-a100-sxm-80gb"
PRODUCT = program("C[m, n] +=! A[m, k] * B[k, n]", A="float32 64 32", B="float32 32 64")
TILED_PRODUCT = """
C: tile m 32 n 32
C: split m.inner 4 as mt mr
C: split n.inner 4 as nt nr
C: reorder m.outer n.outer mt nt mr nr
C: block m.outer
C: block n.outer
C: thread mt
C: thread nt
C: accumulate_at nt
C.acc.update: split k 16 as ko ki
C.acc.update: reorder ko ki m n
A: cache C.acc.update ko shared
A.cache: thread d0
B: cache C.acc.update ko shared
B.cache: thread d0
"""
TWO_BLURS = program(
    "bx[y, x] = (A[y, x] + A[y, x + 1] + A[y, x + 2]) / 3.0 where y in 34, x in 64;"
    "B[y, x] = (bx[y, x] + bx[y + 1, x] + bx[y + 2, x]) / 3.0 where y in 32, x in 64",
    A="float32 34 66",
)
BLURRED = """
B: tile y 8 x 32
B: block y.outer
B: block x.outer
B: thread y.inner
B: thread x.inner
bx: compute_root
bx: compute_at B x.inner
bx: store_in shared
bx: fuse y x
bx: split y.x.fused 256 as round t
bx: thread t
A: cache bx t registers
"""
ROWS = program("mx[r] >=! A[r, c]; e[r, c] = exp(A[r, c] - mx[r]); s[r] +=! e[r, c]; o[r, c] = e[r, c] / s[r]", A="float32 37 50")
ROW_SOFTMAX = """
o: split r 16
o: block r.outer
o: thread r.inner
s: compute_at o r.inner
mx: compute_at o r.inner
s: store_in registers
mx: store_in registers
"""
EXAMPLES = {"matmul": (PRODUCT, TILED_PRODUCT), "blur": (TWO_BLURS, BLURRED), "softmax": (ROWS, ROW_SOFTMAX)}
RAGGED_PRODUCT = program("C[m, n] +=! A[m, k] * B[k, n]", A="float32 50 37", B="float32 37 41")
RAGGED_BLURS = program(
    "bx[y, x] = (A[y, x] + A[y, x + 1] + A[y, x + 2]) / 3.0 where y in 31, x in 50;"
    "B[y, x] = (bx[y, x] + bx[y + 1, x] + bx[y + 2, x]) / 3.0 where y in 29, x in 50",
    A="float32 31 52",
)
TAIL_OF_A_LOOP = """
B: split x 12
B: block y
B: reorder y x.inner x.outer
B: thread x.inner
bx: compute_root
bx: compute_at B x.outer
bx: store_in shared
bx: thread y
"""
SUMS = program("s[r] +=! A[r, c]", A="float32 37 50")
ROW_SUM = """
s: add_threads t 16
s: block r
s: accumulate_at t
s.acc: store_in registers
s.acc.update: split c 16 as co ci
s.acc.update: rfactor ci
s.acc.part: store_in shared
s.acc.part: accumulate_at ci
s.acc.part: thread ci
"""
THREADS_OF_A_ROW = "o: split c 16 as co ci\no: reorder r ci co\no: block r\no: thread ci\n" + "".join(
    f"""{f}: compute_at o ci
{f}: store_in registers
{f}.update: split c 16 as co ci
{f}.update: rfactor ci
{f}.part: store_in shared
{f}.part: accumulate_at ci
{f}.part: thread ci
"""
    for f in ("s", "mx")
)
AN_ELEMENT_EACH = """
C: tile m 8 n 16
C: block m.outer
C: block n.outer
C: thread m.inner
C: thread n.inner
C: accumulate_at n.inner
C.acc.update: split k 16 as ko ki
C.acc.update: reorder ko ki m n
A: cache C.acc.update ko shared
A.cache: thread d1
"""
COOPERATIVE = {
    "an element each": (RAGGED_PRODUCT, AN_ELEMENT_EACH),
    "tiles inside of rows": (RAGGED_PRODUCT, TILED_PRODUCT.replace("reorder ko ki m n", "reorder m ko ki n")),
    "ragged matmul": (RAGGED_PRODUCT, TILED_PRODUCT),
    "ragged blur": (RAGGED_BLURS, BLURRED),
    "ragged loop": (RAGGED_BLURS, TAIL_OF_A_LOOP),
    "row sum": (SUMS, ROW_SUM),
    "softmax by threads": (ROWS, THREADS_OF_A_ROW),
}


def source_of(program: TensorProgram, steps: str, target: str = A100) -> KernelSource:
    return emit_schedule(schedule_by_hand(program, steps), hardware.load(target))


def has_right_values(program: TensorProgram, source: KernelSource, seeds: Sequence[int]) -> None:
    inputs = inputs_of(program)
    for seed in seeds:
        verdict = judged(program, inputs, module(source, seed, races=True).run(inputs))
        assert verdict.ok, f"{verdict.detail}\n{source.text}"


def without_barrier(nodes: tuple[Node, ...], dropped: Barrier) -> tuple[Node, ...]:
    kept: list[Node] = []
    for node in nodes:
        match node:
            case Barrier():
                kept += [] if node is dropped else [node]
            case Loop() | Let() | Storage():
                kept.append(replace(node, body=without_barrier(node.body, dropped)))
            case Branch():
                kept.append(replace(node, then=without_barrier(node.then, dropped)))
            case _:
                kept.append(node)
    return tuple(kept)


def test_threads_share_tiles_between_barriers() -> None:
    """The tiles of one loop need two barriers: before they are written again, and before they are read."""
    (tree,), _ = build_device_launches(schedule_by_hand(PRODUCT, TILED_PRODUCT), hardware.load(A100))
    lines = [line.strip() for line in render(tree.body).splitlines()]
    assert lines.count("barrier") == 2
    assert "shared A.cache.tile: float32[32, 16]" in lines  # what all threads of the block need
    assert "stack C.acc.tile: float32[4, 4]" in lines  # what one thread needs
    assert "__syncthreads();" in source_of(PRODUCT, TILED_PRODUCT).text


@pytest.mark.parametrize("name", sorted(COOPERATIVE))
def test_all_threads_reach_the_barriers_of_a_tail(name: str) -> None:
    """Guards that threads see differently are around what is written, inside of the tiles that they share."""
    scheduled, steps = COOPERATIVE[name]
    (tree,), _ = build_device_launches(schedule_by_hand(scheduled, steps), hardware.load(A100))
    assert any(isinstance(node, Barrier) for node in iter_nodes(tree.body))
    assert not any(
        isinstance(inside, Barrier)
        for node in iter_nodes(tree.body)
        if isinstance(node, Branch) or (isinstance(node, Loop) and node.stop is not None)
        for inside in iter_nodes((node,))
    )


SHARED_SUM = "o: block r\no: thread c\ns: compute_at o c\nmx: compute_at o c\ns: store_in shared\nmx: store_in registers"
BARRIERS = (
    (TWO_BLURS, BLURRED, 1),  # a block writes its tile once
    (ROWS, ROW_SOFTMAX, 0),
    (ROWS, SHARED_SUM, 2),  # after each stage of the sum
)


@pytest.mark.parametrize(("scheduled", "steps", "barriers"), BARRIERS)
def test_barriers_are_where_a_tile_changes_hands(scheduled: TensorProgram, steps: str, barriers: int) -> None:
    trees, _ = build_device_launches(schedule_by_hand(scheduled, steps), hardware.load(A100))
    assert sum(isinstance(node, Barrier) for node in iter_nodes(trees[-1].body)) == barriers


def test_threads_are_numbered_as_in_their_launch() -> None:
    """A tile of 10 rows of 8 pieces is made by 8 rows of 32 threads: not all of them have a piece."""
    steps = BLURRED.partition("bx: fuse")[0] + "bx: split x 4\nbx: thread y\nbx: thread x.outer"
    text = source_of(TWO_BLURS, steps).text
    assert "const int bx_y = ((y_inner * 32) + x_inner) / 8;" in text
    assert "if (bx_y < 10)" in text
    assert "const int bx_x_outer = ((y_inner * 32) + x_inner) % 8;" in text


def test_a_shared_tile_that_no_loop_distributes_is_made_by_one_thread() -> None:
    steps = TILED_PRODUCT.replace("A.cache: thread d0\n", "")
    assert "if (mt == 0 && nt == 0)" in source_of(PRODUCT, steps).text.replace("((", "(").replace("))", ")").replace(
        ") && (", " && "
    )


BX_INSIDE = "bx: compute_root\nbx: compute_at B "
DIVIDED = program("s[r] +=! A[r, c]; o[r, c] = A[r, c] / s[r]", A="float32 8 16")
ROWS_IN_MEMORY = "s: compute_at o r\ns: store_root\n"
SQUARE = program("b[i, j] = a[j, i] + a[i, j]", a="float32 512 512")
SMALL_SQUARE = program("b[i, j] = a[j, i] + a[i, j]", a="float32 256 256")
TWO_SUMS = program("s[i] +=! A[i, k]; t[i] +=! B[i, k]; o[i] = s[i] * t[i]", A="float32 8 90000", B="float32 8 90000")
ACCEPTED = (
    (BLUR, f"B: block y\nB: thread x\n{BX_INSIDE}y"),  # each thread has a tile of its own
    (SMALL_SQUARE, "b: block i\nb: thread j\na: cache b j stack"),  # which is in no shared memory
    (
        TWO_SUMS,
        "s: compute_at o i\nt: compute_at o i\nA: cache s.update i stack\nB: cache t.update i stack\no: block i",
    ),  # one after the other
    (program("b[i] = a[i] + 1.0", a="float32 4096"), "b: split i 512\nb: block i.outer\nb: vectorise i.inner"),
    (DIVIDED, "o: split r 2\no: block c\ns: compute_at o r.inner\ns: store_at o r.outer"),  # blocks inside have tiles of their own
)
REFUSED = (
    (program("b[i, j] = a[i, j]", a="int8 65536 40000"), "b: block i\nb: block j", "schedule-launch", "too many blocks", None),
    (MATMUL, "C: block m", "schedule-launch", "two stages", "C: accumulate_at n"),
    (SCATTER, "", "schedule-launch", "two stages", "without a schedule"),
    (SCALAR, "", "schedule-launch", "two stages", "without a schedule"),
    (BLUR, "", "schedule-launch", "without blocks", "B: block y"),
    (program("o[] = A[] + 1.0", A="float32"), "", "schedule-launch", "without blocks", "has no loop to run on blocks"),
    (BLUR, "B: block y\nB: parallel x", "schedule-launch", "is parallel", "block or thread"),
    (BLUR, "B: thread y\nB: thread x", "schedule-launch", "without blocks", "B: block y"),
    (
        program("b[i] = a[i] + 1.0", a="float32 4096"),
        "b: split i 2048\nb: block i.outer\nb: thread i.inner",
        "schedule-launch",
        "at most 1024",
        "split",
    ),
    (
        BLUR,
        f"B: block y\nB: thread x\n{BX_INSIDE}y\nbx: store_in shared",
        "schedule-launch",
        "expected x, got none",
        "compute bx in x of B",
    ),
    (
        BLUR,
        f"B: split x 2\nB: block y\nB: thread x.inner\n{BX_INSIDE}x.inner\nbx: store_in shared\nbx: thread y",
        "schedule-launch",
        "more threads than its launch: expected at most 2, got 3",
        "split",
    ),
    (BLUR, f"B: block y\nB: thread x\n{BX_INSIDE}x\nbx: thread y", "schedule-launch", "its own tile", "store_in shared"),
    (BLUR, f"B: block y\n{BX_INSIDE}y\nbx: block y", "schedule-launch", "inside of loop y", "mark a loop of B"),
    (
        BLUR,
        f"B: block y\n{BX_INSIDE}x\nbx: thread y\nA: cache bx y shared",
        "schedule-launch",
        "expected none, got bx.y",
        "mark a thread loop of B",
    ),
    (
        program("b[i] = a[i] + 1.0", a="float32 4096"),
        "b: split i 1024\nb: block i.outer\nb: vectorise i.inner",
        "schedule-extent",
        "b is unrolled too often: expected at most 512 copies, got 1024",
        "smaller factor",
    ),
    (MATMUL, "C.update: thread k", "schedule-dependence", "same elements", None),
    (DIVIDED, f"{ROWS_IN_MEMORY}o: block c", "schedule-dependence", "each block of c of o would write all of s", "s: store_at o r"),
    (DIVIDED, f"o: block r\no: thread c\n{ROWS_IN_MEMORY}", "schedule-dependence", "r, which is block", "compute_root"),
    (
        DIVIDED,
        f"o: split c 4\no: thread c.inner\n{ROWS_IN_MEMORY}",
        "schedule-dependence",
        "each thread of c.inner of o would write all of s",
        "s: compute_root",
    ),
    (
        program("t[r] = A[r, 0] * 2.0; o[r, c] = A[r, c] / t[r]", A="float32 8 16"),
        "t: compute_at o r\no: block c\nt: store_root",
        "schedule-dependence",
        "each block of c of o would write all of t",
        "t: compute_root",
    ),
    (
        BLUR,
        f"B: split x 4\nB: block y\nB: thread x.inner\n{BX_INSIDE}x.inner\nbx: store_in shared\nbx: thread y\nA: cache bx y shared",
        "schedule-barrier",
        "divergent control flow: threads disagree on a condition that follows from x.inner where they share bx.tile",
        "bx: compute_at B y",
    ),
    (
        program("b[i, j] = a[i, j] + 1.0", a="float32 512 512"),
        "b: block i\nb: thread j\na: cache b i shared",
        "schedule-launch",
        "expected j, got none",
        "compute a.cache in j",
    ),
    (
        SQUARE,
        "b: block i\nb: thread j\na: cache b j shared",
        "schedule-memory",
        "a.cache.tile: 1048576",
        "smaller factors",
    ),
    (
        SQUARE,
        "b: block i\nb: thread j\na: cache b j registers",
        "schedule-memory",
        "tiles of a thread on the stack and in registers are too large: expected at most 524288 bytes, got 1048576",
        "smaller factors",
    ),
)  # fmt: skip


@pytest.mark.parametrize(("scheduled", "steps", "code", "message", "hint"), REFUSED)
def test_what_a_gpu_cannot_run_is_refused(scheduled: TensorProgram, steps: str, code: str, message: str, hint: str | None) -> None:
    with pytest.raises(ScheduleError) as refused:
        source_of(scheduled, steps)
    assert refused.value.code == code
    assert message in refused.value.message
    assert (hint or "") in (refused.value.hint or "")


@pytest.mark.parametrize(("scheduled", "steps"), ACCEPTED)
def test_tiles_of_threads_need_no_shared_memory(scheduled: TensorProgram, steps: str) -> None:
    assert "__shared__" not in source_of(scheduled, steps).text


@pytest.mark.parametrize(
    ("steps", "message"),
    [("B: block y", "marked block"), (f"{BX_INSIDE}y\nbx: store_in shared", "in shared memory")],
)
def test_a_cpu_has_no_blocks_and_no_shared_memory(steps: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        source_of(BLUR, steps, "cpu-x86-avx2")


def test_threads_of_amd_have_less_memory_of_their_own() -> None:
    steps = "b: block i\nb: thread j\na: cache b j stack"
    assert "a_cache_tile" in source_of(SMALL_SQUARE, steps).text
    with pytest.raises(ScheduleError, match="expected at most 131056 bytes, got 262144"):
        source_of(SMALL_SQUARE, steps, "amd-mi250x")


def test_an_input_is_cached_on_a_cpu() -> None:
    """In its own type: a copy rounds nothing."""
    text = "C[m, n] +=! A[m, k] * B[k, n]"
    inputs = {"A": ("float16", (24, 16)), "B": ("float16", (16, 48))}
    steps = (
        "C: split n 16\nC: reorder n.outer m n.inner\nC: accumulate_at m\nB: cache C.acc.update k stack\nC.acc.update: reorder k n"
    )
    kernel = roller_svc.compile(text, inputs, schedule=steps)
    generator = np.random.default_rng(1)
    a, b = (generator.integers(-4, 4, shape).astype("float16") for _, shape in inputs.values())
    np.testing.assert_array_equal(kernel(A=a, B=b)["C"], a @ b)
    assert "_Float16 B_cache_tile[16]" in kernel.source


def test_what_cannot_be_cached_is_refused() -> None:
    gather = program("o[n, c] = T[ids[n], c] * 2.0", T="float32 4 3", ids="int32 5")
    for scheduled, steps, message in (
        (gather, "T: cache o n stack", "data selects the elements of T"),
        (BLUR, "A: cache B y stack", "does not read A itself"),
        (BLUR, "bx: cache B y stack", "no input is named bx"),
    ):
        with pytest.raises(ScheduleError, match=message):
            schedule_by_hand(scheduled, steps)


SCALED_STEPS = "x: cache b i.inner shared"


@pytest.mark.parametrize("target", [A100, "amd-mi250x"])
def test_a_shared_tile_of_a_scalar_is_an_element(target: str) -> None:
    scaled = program("b[i] = a[i] * x[]", a="float16 96", x="float16")
    steps = f"b: split i 32\nb: block i.outer\nb: thread i.inner\n{SCALED_STEPS}"
    text = source_of(scaled, steps, target).text
    assert "x_cache_tile[1];" in text
    assert "x_cache_tile[0] = x[0];" in text
    assert "x_cache_tile)" not in text


@pytest.mark.slow
@pytest.mark.emulator
def test_a_kernel_by_hand_runs_in_the_emulator() -> None:
    steps = "b: split i 32\nb: block i.outer\nb: thread i.inner"
    kernel = roller_svc.compile("b[i] = a[i] * 2.0", {"a": ("float32", (100,))}, target=A100, runtime="emulator", schedule=steps)
    a = np.arange(100, dtype=np.float32)
    np.testing.assert_array_equal(kernel(a=a)["b"], a * 2)

    inputs: dict[str, Any] = {"a": ("float16", (96,)), "x": ("float16", ())}
    kernel = roller_svc.compile("b[i] = a[i] * x[]", inputs, target=A100, runtime="emulator", schedule=f"{steps}\n{SCALED_STEPS}")
    a = np.arange(96, dtype=np.float16)
    np.testing.assert_array_equal(kernel(a=a, x=np.float16(3))["b"], a * 3)


@pytest.mark.slow
@pytest.mark.emulator
@pytest.mark.parametrize("name", [*sorted(EXAMPLES), *sorted(COOPERATIVE)])
def test_examples_are_right_and_each_barrier_is_needed(name: str) -> None:
    """Without spills for an A100, right for several orders of threads, and the detector finds each missing barrier."""
    scheduled, steps = (EXAMPLES | COOPERATIVE)[name]
    assert name in COOPERATIVE or len(steps.split("\n")) - 2 <= 15
    hw = hardware.load(A100)
    source = source_of(scheduled, steps)
    has_right_values(scheduled, source, range(20 if name in EXAMPLES else 6))
    assert "0 bytes spill stores" in compile_source(source).log
    for target in ("nvidia-h200-sxm", "amd-mi250x"):
        has_right_values(scheduled, source_of(scheduled, steps, target), [0])
    (tree,), _ = build_device_launches(schedule_by_hand(scheduled, steps), hw)
    views = (*scheduled.inputs, *((o.tensor, scheduled.types[o.tensor]) for o in scheduled.outputs))
    for barrier in [node for node in iter_nodes(tree.body) if isinstance(node, Barrier)]:
        broken = replace(tree, body=without_barrier(tree.body, barrier))
        part = GroupLaunches((broken,), views)
        mutant = emit("kernel", (part,), tensors_in_memory(scheduled, scheduled.types, ()), hw, "")
        with pytest.raises(WrongAnswerError):
            has_right_values(scheduled, mutant, [0])


@pytest.mark.slow
@pytest.mark.emulator
@pytest.mark.parametrize("name", PROGRAMS)
def test_row_25_random_schedules_are_right_in_the_emulator(name: str) -> None:
    """A sample of what tests/fuzz/fuzz_schedules.py runs."""
    numbers = Random(2)
    for target in 2 * (A100, "nvidia-h200-sxm", "amd-mi250x"):
        hw = hardware.load(target)
        drawn = draw(name, numbers, hw)
        has_right_values(drawn.program, emit_schedule(drawn.schedule, hw), [0, 1])
        assert drawn.schedule == schedule_by_hand(drawn.program, drawn.text)
