"""Weights that stream through the ring of a persistent kernel: results, plans, seeded faults, machine code."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest
from persistent import Arrays, Built, Node, build_graph, events, expected, run, spec, with_text

from roller_svc import toolchain
from roller_svc.analysis.happens_before import check_plan
from roller_svc.codegen.cuda.persistent import page_use, static_bytes
from roller_svc.codegen.cuda.ring import MIN_PAGES, PageUse, plan_ring
from roller_svc.codegen.cuda.task_kernel import TaskKernel
from roller_svc.errors import InvariantError, WrongAnswerError
from roller_svc.graph.rammer.ranges import add_streams
from roller_svc.ir.dtype import DType
from roller_svc.ir.event_state import DEADLINE_MS, find_reached_deadline
from roller_svc.ir.kernel import Role
from roller_svc.ir.program import TensorType
from roller_svc.ir.vdevice import Execute, Stream, VDevicePlan, WaitEvent
from roller_svc.toolchain.binaries import sass

A100, H200 = "nvidia-a100-sxm-80gb", "nvidia-h200-sxm"
VEUS = 2
PAGES = 3  # of the ring: fewer than a block streams


def f16(*shape: int) -> TensorType:
    return TensorType(DType.FLOAT16, shape)


PRODUCT = "y[m, n] +=! x[m, k] * w[n, k]; z[m, n] = y[m, n] * 0.25"
PRODUCTS = "u[m, n] +=! x[m, k] * w[n, k]; y[m, n] +=! x[m, k] * v[n, k]; z[m, n] = relu(u[m, n]) + y[m, n] * 0.25"
NODES = [
    Node(PRODUCT, {"x": "X", "w": "W1"}, {"z": "A"}),
    Node(PRODUCTS, {"x": "A", "w": "W2", "v": "V2"}, {"z": "B"}),  # pages have rows of both matrices
    Node("M[m] >=! L[m, n]; E[m, n] = (L[m, n] - M[m]) * 0.5", {"L": "B"}, {"E": "C"}),  # between two that stream
    Node("y[m, n] +=! x[m, k] * w[n, k]", {"x": "C", "w": "W3"}, {"y": "Y"}),
]
TYPES = {"X": f16(2, 256), "W1": f16(192, 256), "W2": f16(96, 192), "V2": f16(96, 192), "W3": f16(40, 96)}


@cache
def built(target: str) -> Built:
    """Return the graph for a device whose shared memory has room for few pages."""
    graph = build_graph(NODES, TYPES, ["Y"], spec(target, VEUS), streams=True)
    streamed = [each.function.streamed() for each in graph.operators if each.function.stream is not None]
    uses = [use for each in streamed if (use := page_use(each)) is not None]
    assert len(uses) == 3
    page = -(-max(use.page_bytes for use in uses) // 128) * 128
    needed = max(each.shared_bytes for each in (*streamed, graph.operators[2].function))
    limit = -(-needed // 128) * 128 + PAGES * (page + 16)
    limit += static_bytes(len(graph.slots), max(len(each.arguments) for each in graph.operators))
    limits = dataclasses.replace(graph.hw.limits, shared_bytes_per_block=limit)
    return dataclasses.replace(graph, hw=dataclasses.replace(graph.hw, limits=limits))


def kernel_of(target: str) -> TaskKernel:
    kernel = built(target).kernel(built(target).streamed_plan())
    assert f"RING_PAGES = {PAGES}" in kernel.source.text
    assert min(kernel.tables["streams"][VEUS + 1 :]) > 2 * PAGES  # both phases of each page
    return kernel


ARRAYS: Arrays = {name: np.random.default_rng(7).uniform(-1, 1, type_.shape).astype(np.float16) for name, type_ in TYPES.items()}


@pytest.mark.emulator
@pytest.mark.parametrize("target", [A100, H200])
def test_weights_that_stream_across_barriers_give_the_bits_of_those_that_do_not(target: str) -> None:
    kernel = kernel_of(target)
    plain = run(built(target).kernel(), ARRAYS)["Y"]
    np.testing.assert_allclose(plain, expected(NODES, TYPES, ARRAYS)["Y"], rtol=2e-2, atol=1e-3)
    sync = None
    for seed in range(5):
        found = run(kernel, ARRAYS, seed, races=seed >= 2, sync=sync)
        sync = found["sync"]
        np.testing.assert_array_equal(found["Y"], plain)
        assert events(kernel, sync) == [(seed + 1) * count for count in (*built(target).plan().events, VEUS)]


@pytest.mark.slow
def test_no_spills_and_weights_arrive_by_asynchronous_copies() -> None:
    for target, copies in ((A100, "LDGSTS.E.BYPASS.128"), (H200, "UBLKCP")):
        compiled = toolchain.compile_source(kernel_of(target).source)
        (used,) = compiled.resources
        assert used.spill_bytes == 0
        code = sass.sass_text(compiled.binary)
        assert code.count(copies) >= 3  # of each product
        assert not re.search(r"LD\w*\.[\w.]*CONSTANT", code)
        rows = len(re.findall(r"\bfetch\(", kernel_of(target).source.text)) + 2  # each call is inlined where it is
        assert target == A100 or code.count("LDGSTS") <= rows


# plans ----------------------------------------------------------------------------------------------------------------


def test_plans_whose_streams_are_not_their_executes_are_refused() -> None:
    first, second = Execute(0, 0, 2), Execute(1, 0, 2)
    streams = Stream(0, 0, 2), Stream(1, 0, 2)
    check_plan(VDevicePlan((2, 2), ((*streams, first, second),)))
    check_plan(VDevicePlan((2, 2), ((first, streams[1], second),)))
    for program, message in (
        ((streams[1], streams[0], first, second), "instruction 2 that it does not stream before, in order"),
        ((first, second, streams[1]), "instruction 1 that it does not stream before"),
        ((Stream(0, 0, 1), first, second), "instruction 1 that it does not stream before"),
        ((*streams, streams[1], first, second), "streams rTasks of rOperator 1 that it does not execute"),
    ):
        with pytest.raises(InvariantError, match=message):
            check_plan(VDevicePlan((2, 2), (program,)))
    with pytest.raises(InvariantError, match="vEU 1 executes rTasks by instruction 0 that it does not stream"):
        check_plan(VDevicePlan((2,), ((Stream(0, 0, 1), Execute(0, 0, 1)), (Execute(0, 1, 1),))))


def test_operands_that_are_written_do_not_stream() -> None:
    graph = built(A100)
    for name in ("W2", "V2"):
        written = tuple(dataclasses.replace(slot, role=Role.OUTPUT) if slot.name == name else slot for slot in graph.slots)
        with pytest.raises(InvariantError, match="rOperator 1 streams an operand that is not constant"):
            dataclasses.replace(graph, slots=written).kernel(graph.streamed_plan())
    without = add_streams(graph.plan(), [2])
    with pytest.raises(InvariantError, match="the rTasks have no operand that streams"):
        graph.kernel(without)


def test_a_ring_has_the_pages_that_shared_memory_leaves() -> None:
    hw = spec(A100)
    use = PageUse((1,), 1000, 4, 300, 1 << 20, 3, 40, 8)
    limit = hw.limits.shared_bytes_per_block
    ring = plan_ring([use, dataclasses.replace(use, warps=8)], 500, 64, hw)
    assert ring is not None
    assert (ring.page_bytes, ring.warps, ring.offset_bytes) == (1024, 8, 512)
    assert ring.end_bytes + 64 <= limit < ring.end_bytes + 64 + 1024 + 16
    assert plan_ring([use, dataclasses.replace(use, warps=6)], 500, 64, hw) is None  # 6 warps share 4 arrivals unevenly
    assert plan_ring([use], limit - 64 - (MIN_PAGES - 1) * 1040 - 128, 64, hw) is None
    assert plan_ring([], 500, 64, hw) is None


# seeded faults --------------------------------------------------------------------------------------------------------

SEEDS = 6


def is_caught(kernel: TaskKernel, plain: np.ndarray, counts: list[int]) -> bool:
    """Whether a schedule or the race detector shows a fault, in runs one after the other."""
    sync = None
    for seed in range(SEEDS):
        try:
            found = run(kernel, ARRAYS, seed, races=seed > 0, sync=sync)
        except WrongAnswerError:
            return True
        sync = found["sync"]
        if not np.array_equal(found["Y"], plain) or events(kernel, sync) != [(seed + 1) * count for count in counts]:
            return True
    return False


def damaged_streams(kernel: TaskKernel) -> Iterator[tuple[str, TaskKernel]]:
    """Yield kernels with one word that is different, of what the warp that fills pages reads."""

    def damaged(table: str, at: tuple[int, ...], value: int) -> TaskKernel:
        other = kernel.tables[table].copy()
        other[at] = value
        return dataclasses.replace(kernel, tables={**kernel.tables, table: other})

    starts, rows = kernel.tables["streams"][: VEUS + 1].tolist(), kernel.tables["rows"]
    for veu in range(VEUS):
        yield f"vEU {veu} begins a Stream later", damaged("streams", (veu,), starts[veu] + 1)
        yield f"vEU {veu} ends a Stream earlier", damaged("streams", (veu + 1,), starts[veu + 1] - 1)
    for at in range(starts[0], starts[-1]):
        code, argument, first, _ = rows[at].tolist()
        yield f"row {at} streams for another function", damaged("rows", (at, 0), code ^ 1 << 16)
        yield f"row {at} has the arguments of another operator", damaged("rows", (at, 1), argument + 1)
        yield f"row {at} streams for another rTask", damaged("rows", (at, 2), first ^ 1)
        yield f"row {at} streams for a rTask less", damaged("rows", (at, 3), 0)
        yield f"row {at} streams for a rTask more", damaged("rows", (at, 3), 2)


TEXTS = {
    "pages are not waited for": (r"(ring_take\(unsigned int number\) \{\n)[^\n]*\n", r"\1"),
    "readers wait for the other phase": (r"(ring_take.*\n.*ring_parity\(number\))", r"\1 ^ 1"),
    "pages are filled before they are free": (r"(ring_claim\(unsigned int number\) \{\n)[^\n]*\n", r"\1"),
    "the warp that fills waits for the other phase": (r"(ring_claim.*\n.*ring_parity\(number\)) \^ 1", r"\1"),
    "the warp that fills waits for its own copies": (r"(ring_claim.*\n.*)ring_free", r"\1ring_filled"),
    "pages are not given back": (r"\n *ring_release<\d+>\(ring_page_\);", ""),
    "pages are given back before they are read": (r"(ring_take\(ring_page_\);)(?s:(.*?))(ring_release<\d+>\(\w+\);)",
                                                  r"\1 \3\2"),
    "a lane gives back the page of others": (r"__syncwarp\(\);\n", "\n"),
    "every lane gives back a page": (r"if \(threadIdx\.x % 32 < RING_WARPS / WARPS\) ", ""),
    "one arrival for each warp of a smaller rTask": (r"(ring_release<)(\d+)>", lambda m: f"{m[1]}{2 * int(m[2])}>"),
    "pages are not committed": (r"\n *ring_commit\(ring_page_\);", ""),
    "one lane commits for all": (r"barrier_init\(ring_filled\(page\), 32\)", "barrier_init(ring_filled(page), 1)"),
    "a lane less commits": (r"barrier_init\(ring_filled\(page\), 32\)", "barrier_init(ring_filled(page), 31)"),
    "a warp less frees a page": (r"barrier_init\(ring_free\(page\), RING_WARPS\)", "barrier_init(ring_free(page), RING_WARPS - 1)"),
    "a warp more frees a page": (r"barrier_init\(ring_free\(page\), RING_WARPS\)", "barrier_init(ring_free(page), RING_WARPS + 1)"),
    "two pages are one": (r"number % RING_PAGES \* RING_PAGE_BYTES", "number % (RING_PAGES - 1) * RING_PAGE_BYTES"),
    "pages overlap": (r"number % RING_PAGES \* RING_PAGE_BYTES", "number % RING_PAGES * (RING_PAGE_BYTES - 128)"),
    "pages lie in the memory of rTasks": (r"return shared_memory \+ \d+;", "return shared_memory + 64;"),
    "mbarriers are shared by pages": (r"RING_PAGE_BYTES\) \+ number % RING_PAGES", "RING_PAGE_BYTES) + number % (RING_PAGES - 1)"),
    "both mbarriers of a page are one": (r"return ring_filled\(number\) \+ RING_PAGES;", "return ring_filled(number);"),
    "phases last a page longer": (r"number / RING_PAGES & 1", "number / (RING_PAGES + 1) & 1"),
    "the phase never changes": (r"number / RING_PAGES & 1", "0"),
    "pages are not counted by readers": (r"(case 0: if [^\n]*\);) first_page \+= [^;]*;", r"\1"),
    "pages are not counted by the warp that fills": (r"(case 0: rtask_0_fill[^\n]*\);) first_page \+= [^;]*;", r"\1"),
    "a page too many is counted": (r"(first_page \+= )([^;]*;)", r"\g<1>1 + \2"),
    "pages begin anew for each rTask": (r"(\n  for \(unsigned int at = start;)", r"\n  first_page++;\1"),
    "the same page twice": (r"(ring_claim\(ring_page_\);(?s:.*?)\(w \+ )", r"\1 0 * "),
    "mbarriers are not initialised": (r"\n  if \(threadIdx\.x == 0\) ring_begin\(\);", ""),
    "every thread initialises the mbarriers": (r"if \(threadIdx\.x == 0\) ring_begin\(\);", "ring_begin();"),
    "no barrier after the mbarriers": (r"(await_fetched\(\);\n  \}\n)  __syncthreads\(\);", r"\1"),
    "the barrier of a block is for all warps": (r"named_barrier\(2, (\d+)\)", lambda m: f"named_barrier(2, {int(m[1]) + 32})"),
    "__syncthreads after an rTask": (r"named_barrier\(2, \d+\);", "__syncthreads();"),
    "no barrier after an rTask": (r"\n *named_barrier\(2, \d+\);", ""),
    "waits are for the warp that fills, too": (r"named_any\(2, (\d+)", lambda m: f"named_any(2, {int(m[1]) + 32}"),
    "the warp that fills goes on to read": (r"(        \}\n      \}\n    \}\n    )return;\n", r"\1\n"),
    "a warp that reads fills, too": (r"threadIdx\.x >= (\d+)", lambda m: f"threadIdx.x >= {int(m[1]) - 32}"),
}  # fmt: skip
BULK = {
    "the mbarriers are not fenced": (r"\n  fence_barrier_init\(\);", ""),
    "half of a row is copied": (r"(copy_bulk\([^\n]*, )(\d+ \* 2)(, ring_filled)", r"\1\2 / 2\3"),
    "copies are counted by another page": (r"ring_filled\(ring_page_\)\);", "ring_filled(ring_page_ + 1));"),
}  # fmt: skip
CP_ASYNC = {
    "pages are committed before they have arrived": (r"\{ arrive_after_copies\(", "{ barrier_arrive("),
    "a copy of 16 bytes is left out": (r"(#pragma unroll\n *for \(int copy = )0", r"\g<1>1"),
}  # fmt: skip
FAULTS = [
    *((H200, fault, change) for fault, change in (TEXTS | BULK).items()),
    *((A100, fault, change) for fault, change in CP_ASYNC.items()),
]


@cache
def known(target: str) -> tuple[TaskKernel, np.ndarray, list[int]]:
    """Return the kernel with its results and the counts of its events, of runs without a fault."""
    kernel, counts = kernel_of(target), [*built(target).plan().events, VEUS]
    plain = run(built(target).kernel(), ARRAYS)["Y"]
    assert not is_caught(kernel, plain, counts)
    return kernel, plain, counts


@pytest.mark.slow
@pytest.mark.emulator
@pytest.mark.parametrize(("target", "fault", "change"), FAULTS, ids=[fault for _, fault, _ in FAULTS])
def test_every_fault_of_the_ring_is_caught(target: str, fault: str, change: tuple[str, str]) -> None:
    kernel, plain, counts = known(target)
    text, count = re.subn(*change, kernel.source.text, count=1)
    assert count == 1, fault
    source = dataclasses.replace(kernel.source, text=text)
    assert is_caught(dataclasses.replace(kernel, source=source), plain, counts)


@pytest.mark.slow
@pytest.mark.emulator
def test_every_damaged_stream_is_caught() -> None:
    kernel, plain, counts = known(H200)
    faults = dict(damaged_streams(kernel))
    assert len(faults) >= 30
    assert [name for name, faulty in faults.items() if not is_caught(faulty, plain, counts)] == []


@pytest.mark.slow
@pytest.mark.emulator
@pytest.mark.parametrize("target", [A100, H200])
def test_no_copy_is_under_way_when_a_deadline_ends_a_block(target: str) -> None:
    kernel = kernel_of(target)
    text = re.sub(r"\bevent_wait\b", "polled_wait", kernel.source.text)  # the kernel's own loop
    rows = kernel.tables["rows"].copy()
    arrival = next(at for at in range(len(rows)) if rows[at, 0] & 0xFF == 1 and rows[at, 0] >> 8 & 1)
    rows[arrival, 0] &= ~np.uint32(1 << 8)
    late = dataclasses.replace(kernel, source=dataclasses.replace(kernel.source, text=text), tables={**kernel.tables, "rows": rows})
    sync = np.zeros(next(b.shape for b in kernel.source.buffers if b.name == "sync"), np.uint32)
    sync[DEADLINE_MS] = 5
    for seed in range(3):
        found = run(late, ARRAYS, seed, races=True, sync=sync.copy())
        assert find_reached_deadline(found["sync"]) is not None
    left = with_text(late, "ring_skip(first_page);\n        return;", "0;\n        return;")
    with pytest.raises(WrongAnswerError, match=r"under way when the block ends|a deadlock"):
        run(left, ARRAYS, 1, races=True, sync=sync.copy())


def test_waits_are_not_streams() -> None:
    assert not VDevicePlan((1,), ((Execute(0, 0, 1),),)).has_events
    assert VDevicePlan((1,), ((Stream(0, 0, 1), Execute(0, 0, 1)),)).has_events
    assert VDevicePlan((1,), ((Stream(0, 0, 1), Execute(0, 0, 1)), (WaitEvent(0),))).streamed == {0}
