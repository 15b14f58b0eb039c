"""One cooperative kernel for several operators: results, states between runs, text, refusals, seeded faults."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

import numpy as np
import pytest
from emulator_support import module
from persistent import ARENA, Arrays, Built, Node, build_graph, events, expected, find_faults, run, spec, tasks_of, with_text
from reference_kernels import SM_80

from roller_svc import toolchain
from roller_svc.codegen.cuda.function import TaskFunction
from roller_svc.codegen.cuda.persistent import build_persistent
from roller_svc.codegen.cuda.task_kernel import TaskKernel, TaskOperator
from roller_svc.codegen.cuda.waves import build_waves
from roller_svc.errors import InvariantError, LaunchError, WrongAnswerError
from roller_svc.frontend.parse import parse
from roller_svc.graph.rammer.residency import check_resident, count_veus
from roller_svc.graph.rammer.wavefront import find_waves
from roller_svc.ir.dtype import DType
from roller_svc.ir.event_state import DEADLINE_MS, find_reached_deadline
from roller_svc.ir.kernel import Buffer, CompiledKernel, Resources, Role
from roller_svc.ir.model_plan import Address
from roller_svc.ir.program import TensorType
from roller_svc.ir.vdevice import Barrier, Execute, VDevicePlan
from roller_svc.runtime import emulator
from roller_svc.toolchain.binaries import sass

A100, H200 = "nvidia-a100-sxm-80gb", "nvidia-h200-sxm"


def f32(*shape: int) -> TensorType:
    return TensorType(DType.FLOAT32, shape)


def normal(types: dict[str, TensorType]) -> Arrays:
    rng = np.random.default_rng(5)
    return {name: rng.standard_normal(type_.shape).astype(type_.dtype.value) for name, type_ in types.items()}


# generated kernels ----------------------------------------------------------------------------------------------------

SIGMOID_MATMUL_RELU = (
    [
        Node("S[m, k] = 1.0 / (1.0 + exp(0.0 - A[m, k]))", {"A": "A"}, {"S": "S"}),
        Node("C[m, n] +=! S[m, k] * B[k, n]; R[m, n] = max(C[m, n], 0.0)", {"S": "S", "B": "B"}, {"R": "R"}),
    ],
    {"A": f32(64, 48), "B": f32(48, 40)},
    ["R"],
)
TWO_PRODUCTS_AND_SOFTMAX = (
    [
        Node("C[m, n] +=! A[m, k] * B[k, n]", {"A": "X", "B": "W"}, {"C": "H"}),
        Node("C[m, n] +=! A[m, k] * B[k, n]", {"A": "H", "B": "W"}, {"C": "L"}),
        Node(
            "M[m] >=! L[m, n]; E[m, n] = exp(L[m, n] - M[m]); S[m] +=! E[m, n]; P[m, n] = E[m, n] / S[m]",
            {"L": "L"}, {"P": "P"},
        ),
    ],
    {"X": f32(40, 32), "W": f32(32, 32)},
    ["P"],
)  # fmt: skip
GRAPHS = {"sigmoid_matmul_relu": SIGMOID_MATMUL_RELU, "two_products_and_softmax": TWO_PRODUCTS_AND_SOFTMAX}


@pytest.mark.emulator
@pytest.mark.parametrize("target", [A100, H200])
@pytest.mark.parametrize("graph", GRAPHS)
def test_row_14_a_graph_is_one_kernel_and_equals_the_interpreter(graph: str, target: str) -> None:
    nodes, types, outputs = GRAPHS[graph]
    built = build_graph(nodes, types, outputs, spec(target))
    kernel = built.kernel()
    (launch,) = kernel.source.launches
    assert launch.cooperative
    assert launch.grid == (8, 1, 1)
    arrays = normal(types)
    wanted = expected(nodes, types, arrays)
    for seed in range(20):
        found = run(kernel, arrays, seed, races=seed == 19)
        for name in outputs:
            np.testing.assert_allclose(found[name], wanted[name], rtol=1e-4, atol=1e-6)
        assert events(kernel, found["sync"]) == [*built.plan().events, 8]


def test_equal_operators_share_a_function() -> None:
    nodes, types, outputs = TWO_PRODUCTS_AND_SOFTMAX
    wide = {"X": f32(32, 32), "W": f32(32, 32)}  # both products have one shape
    built = build_graph(nodes, wide, outputs, spec(A100))
    assert len(built.operators) > len(set(re.findall(r"void (rtask_\d+)\(", built.kernel().source.text)))
    other = build_graph(nodes, types, outputs, spec(A100)).operators[0].function
    typed = dataclasses.replace(other, parameters=tuple(p.replace("float", "int") for p in other.parameters))
    assert typed != other  # defect 6 of NNFusion: equal bodies of other types are other functions


def test_row_15_text_does_not_grow_with_layers_or_veus() -> None:
    few, many = (layers(count) for count in (2, 32))
    texts = {few.kernel(few.plan(veus)).source.text for veus in (3, 8)} | {many.kernel().source.text}
    assert len(texts) == 1
    assert len(many.kernel().tables["rows"]) > 10 * len(few.kernel().tables["rows"])


def test_launches_with_tensor_maps_cannot_join() -> None:
    half = TensorType(DType.FLOAT16, (256, 256))
    program = parse("C[m, n] +=! A[m, k] * B[k, n]", {"A": half, "B": half}, None)
    with pytest.raises(InvariantError, match="tensor maps, which are parameters of a kernel"):
        tasks_of(program, spec(H200, 132), top_k=1)


def test_no_spills_and_no_loads_past_the_coherent_caches() -> None:
    nodes, types, outputs = SIGMOID_MATMUL_RELU
    for target in (A100, H200):
        kernel = build_graph(nodes, types, outputs, spec(target)).kernel()
        compiled = toolchain.compile_source(kernel.source)
        assert find_faults(compiled) == []
        code = sass.sass_text(compiled.binary)
        assert "LDG.E.STRONG.GPU" in code  # the wait
        assert "CCTL.IVALL" in code  # an acquire drops what L1 has
        assert "MEMBAR" in code  # a release


def test_faults_in_machine_code_are_found() -> None:
    nodes, types, outputs = SIGMOID_MATMUL_RELU
    kernel = build_graph(nodes, types, outputs, spec(A100)).kernel()
    barrier = "      __syncthreads();\n"
    changes = {
        "3 barriers": (f"await_fetched();\n{barrier}", f"await_fetched();\n{2 * barrier}"),
        "CONSTANT": ("const unsigned int code = row[0]", "const unsigned int code = __ldg(rows + 4 * at)"),
    }
    for fault, (old, new) in changes.items():
        compiled = toolchain.compile_source(with_text(kernel, old, new).source)
        assert any(fault in each for each in find_faults(compiled)), (fault, find_faults(compiled))
    used = tuple(dataclasses.replace(each, spill_bytes=8) for each in compiled.resources)
    assert "8 bytes spilled" in find_faults(dataclasses.replace(compiled, resources=used))


# a model by hand ------------------------------------------------------------------------------------------------------

SIZE, TASKS, VEUS = 512, 8, 4
PART = SIZE // TASKS


def function(parameters: tuple[str, ...], body: str, threads: int, tasks: int = TASKS, shared_bytes: int = 0) -> TaskFunction:
    return TaskFunction(parameters, body, ("named_barrier",), tasks, threads, shared_bytes, 16)


REVERSE = function(
    ("const float *x", "float *y"),
    f"""  float *const part = (float *)shared_memory;
  const int i = (int)threadIdx.x;
  part[i] = x[{SIZE - 1} - (task * {PART} + i)];
  named_barrier(1, {PART});
  y[task * {PART} + i] = part[{PART - 1} - i] + 1.0f;
""",
    PART,
    shared_bytes=4 * PART,
)
TOTAL = function(
    ("const float *x", "float *y"),
    f"""  float sum = 0.0f;
  for (int i = (int)threadIdx.x; i < {SIZE}; i += 32) sum += x[i];
  y[threadIdx.x] = sum;
""",
    32,
    1,
)
ROTATE = function(
    ("const float *x", "const float *s", "float *y"),
    f"""  float *const sums = (float *)shared_memory;
  if (threadIdx.x < 32) sums[threadIdx.x] = s[threadIdx.x];
  named_barrier(1, 64);
  float sum = 0.0f;
  for (int lane = 0; lane < 32; lane++) sum += sums[lane];
  const int i = task * {PART} + (int)threadIdx.x;
  y[i] = x[(i + {PART}) % {SIZE}] + sum * 0.125f;
""",
    64,
    shared_bytes=128,
)
WIDE = function(
    ("const float *x", "float *y"),
    f"""  if (threadIdx.x < {PART}) y[task * {PART} + threadIdx.x] = 0.5f * x[(task * {PART} + {SIZE // 2} + threadIdx.x) % {SIZE}];
""",
    128,
)  # fmt: skip


def layers(count: int) -> Built:
    """A chain of layers: reverse, total, rotate, and one with more threads."""
    bytes_ = 4 * SIZE
    operators: list[TaskOperator] = []
    predecessors: list[tuple[int, ...]] = []
    source, end = Address(1), 0
    for layer in range(count):
        total = Address(ARENA, end)  # what is written behind it would be read
        mirrored, moved, halved = (Address(ARENA, end + 128 + i * bytes_) for i in range(3))
        end += 128 + 3 * bytes_
        halved = Address(2) if layer == count - 1 else halved
        first = len(operators)
        operators += [
            TaskOperator(REVERSE, (source, mirrored)),
            TaskOperator(TOTAL, (mirrored, total)),
            TaskOperator(ROTATE, (mirrored, total, moved)),
            TaskOperator(WIDE, (moved, halved)),
        ]
        predecessors += [(first - 1,) if first else (), (first,), (first, first + 1), (first + 2,)]
        source = halved
    slots = (
        Buffer("arena", "arena", Role.WORKSPACE, DType.UINT8, (end,)),
        Buffer("X", "input_x", Role.INPUT, DType.FLOAT32, (SIZE,)),
        Buffer("Y", "output_y", Role.OUTPUT, DType.FLOAT32, (SIZE,)),
    )
    return Built(tuple(operators), tuple(predecessors), slots, dataclasses.replace(spec(A100, VEUS), arch=SM_80))


X = {"X": np.arange(SIZE, dtype=np.float32) % 7}


def by_numpy(count: int) -> np.ndarray:
    x = X["X"]
    for _ in range(count):
        part = x[::-1].reshape(TASKS, PART)[:, ::-1].reshape(-1) + 1
        moved = np.roll(part, -PART) + part.sum() * np.float32(0.125)
        x = np.float32(0.5) * np.roll(moved, -SIZE // 2)
    return x


@pytest.mark.emulator
def test_layers_equal_numpy_in_every_order_of_threads() -> None:
    kernel = layers(3).kernel()
    for seed in range(8):
        np.testing.assert_allclose(run(kernel, X, seed, races=seed >= 6)["Y"], by_numpy(3), rtol=1e-5)


@pytest.mark.emulator
@pytest.mark.parametrize("epoch", [0, 2**32 - 2])
def test_row_15_events_count_on_from_run_to_run_and_around_2_to_the_32(epoch: int) -> None:
    """Defect 12 of NNFusion: barriers that a run has used must be reset. Epochs need no reset."""
    built = layers(1)
    kernel = built.kernel()
    counts = [*built.plan().events, VEUS]
    sync = np.zeros(32 * (len(counts) + 1), np.uint32)
    sync[0] = epoch
    sync[32::32] = [epoch * count % 2**32 for count in counts]
    for times in range(1, 5):
        found = run(kernel, X, times, races=True, sync=sync)
        np.testing.assert_allclose(found["Y"], by_numpy(1), rtol=1e-5)
        sync = found["sync"]
        assert sync[0] == (epoch + times) % 2**32
        assert events(kernel, sync) == [(epoch + times) * count % 2**32 for count in counts]


@pytest.mark.emulator
def test_a_deadlock_names_veu_row_and_event() -> None:
    kernel = layers(1).kernel()
    rows = kernel.tables["rows"].copy()
    (arrival,) = [at for at in range(len(rows)) if rows[at, 0] >> 8 & 1 and rows[at, 3] >> 16 == 1]
    rows[arrival, 0] &= ~np.uint32(1 << 8)
    with pytest.raises(
        WrongAnswerError, match=r"a deadlock: vEU \d waits at row \d+ for event 1, which counts 0 and has to count 1"
    ):
        run(dataclasses.replace(kernel, tables={**kernel.tables, "rows": rows}), X)


def with_polls(kernel: TaskKernel) -> TaskKernel:
    """Return the kernel whose own loop waits, not the emulator's."""
    text = re.sub(r"\bevent_wait\b", "polled_wait", kernel.source.text)
    return dataclasses.replace(kernel, source=dataclasses.replace(kernel.source, text=text))


@pytest.mark.emulator
def test_the_loop_that_polls_waits_for_all_arrivals() -> None:
    kernel = with_polls(layers(2).kernel())
    for seed in range(6):
        found = run(kernel, X, seed, races=seed > 2)
        np.testing.assert_allclose(found["Y"], by_numpy(2), rtol=1e-5)
        assert find_reached_deadline(found["sync"]) is None
    relaxed = with_text(kernel, "seen = load_acquire(", "seen = load_relaxed(")
    with pytest.raises(WrongAnswerError, match="race"):
        run(relaxed, X, 1, races=True)


@pytest.mark.emulator
@pytest.mark.parametrize("limit_ms", [0, 5])
def test_row_15_a_wait_that_reaches_the_deadline_ends_the_run_of_all_veus(limit_ms: int) -> None:
    kernel = with_polls(layers(1).kernel())
    rows = kernel.tables["rows"].copy()
    (arrival,) = [at for at in range(len(rows)) if rows[at, 0] >> 8 & 1 and rows[at, 3] >> 16 == 1]
    rows[arrival, 0] &= ~np.uint32(1 << 8)
    sync = np.zeros(32 * 5, np.uint32)
    sync[DEADLINE_MS] = limit_ms
    found = run(dataclasses.replace(kernel, tables={**kernel.tables, "rows": rows}), X, 1, races=True, sync=sync)
    reached = find_reached_deadline(found["sync"])
    assert reached is not None
    assert (reached.event, reached.seen, reached.target) == (1, 0, 1)
    starts = kernel.tables["starts"]
    assert starts[reached.veu] <= reached.row < starts[reached.veu + 1]
    assert found["sync"][0] == 0  # the epoch has not ended


def test_plans_that_do_not_order_or_execute_the_operators_are_refused() -> None:
    built = layers(1)
    good = built.plan()
    unordered = VDevicePlan(
        good.num_tasks, tuple(tuple(e for e in p if isinstance(e, Execute)) for p in good.programs), good.events
    )
    barriers = VDevicePlan(good.num_tasks, ((*(Execute(i, 0, n) for i, n in enumerate(good.num_tasks)), Barrier(((0, 0),))),))
    for plan, message in (
        (unordered, "rOperator 1 depends on 0, and the plan does not order them"),
        (barriers, "orders rTasks by events, got barriers"),
        (dataclasses.replace(good, num_tasks=(*good.num_tasks, 1)), "is executed never"),
    ):
        with pytest.raises(InvariantError, match=message):
            built.kernel(plan)
    outside = dataclasses.replace(built.operators[0], arguments=(Address(1), Address(ARENA, 1 << 30)))
    with pytest.raises(InvariantError, match="outside of the slots"):
        build_persistent("m", (outside, *built.operators[1:]), built.predecessors, good, built.slots, built.hw)


# seeded faults --------------------------------------------------------------------------------------------------------


SEEDS = 12
LAYERS = 2  # of the kernel whose tables are damaged
LEAST_FAULTS = 300  # in tables and texts


def is_caught(kernel: TaskKernel, counts: list[int], layers: int = 1) -> bool:
    """Whether a schedule or the race detector shows a fault, in runs one after the other."""
    sync = None
    for seed in range(SEEDS):
        try:
            found = run(kernel, X, seed, races=seed > 0, sync=sync)
        except WrongAnswerError:
            return True
        sync = found["sync"]
        if not np.allclose(found["Y"], by_numpy(layers), rtol=1e-5):
            return True
        if sync[0] != seed + 1 or events(kernel, sync) != [(seed + 1) * count for count in counts]:
            return True
    return False


def damaged_tables(kernel: TaskKernel) -> Iterator[tuple[str, TaskKernel]]:
    """Yield kernels with one word that is different: of each row, of the rows of a vEU, of each argument."""

    def damaged(table: str, at: tuple[int, ...], value: int) -> TaskKernel:
        other = kernel.tables[table].copy()
        other[at] = value
        return dataclasses.replace(kernel, tables={**kernel.tables, table: other})

    def changed(at: int, word: int, value: int) -> TaskKernel:
        return damaged("rows", (at, word), value)

    *starts, end, num_events = kernel.tables["starts"].tolist()
    for veu, start in enumerate(starts):
        if veu:
            yield f"vEU {veu} begins a row earlier", damaged("starts", (veu,), start - 1)
        yield f"vEU {veu} begins a row later", damaged("starts", (veu,), start + 1)
    yield "the last vEU ends a row earlier", damaged("starts", (len(starts),), end - 1)
    yield "the end of the run is a shared event", damaged("starts", (len(starts) + 1,), num_events - 1)
    for number, (slot, _, offset, _) in enumerate(kernel.tables["arguments"].tolist()):
        yield f"argument {number} is in another slot", damaged("arguments", (number, 0), (slot + 1) % 3)
        if slot == ARENA:
            yield f"argument {number} is behind its place", damaged("arguments", (number, 2), offset + 64)
            if offset:
                yield f"argument {number} is before its place", damaged("arguments", (number, 2), offset - 64)
    rows = kernel.tables["rows"]
    for at, (code, argument, first, last) in enumerate(rows.tolist()):
        if code & 0xFF == 2:
            yield f"row {at} does not wait", changed(at, 0, 1)
            yield f"row {at} waits for no arrival", changed(at, 2, 0)
            yield f"row {at} waits for one row less", changed(at, 2, first - min(first, TASKS // VEUS))
            yield f"row {at} waits for one arrival more", changed(at, 2, first + 1)
            yield f"row {at} waits for another event", changed(at, 3, last ^ 1 << 16)
            continue
        if last & 0xFFFF > 1:
            yield f"row {at} executes other tasks", changed(at, 2, (first + 1) % TASKS)
            yield f"row {at} executes a task less", changed(at, 3, last - 1)
        yield f"row {at} has the arguments of another operator", changed(at, 1, argument + 1)
        if code >> 8 & 1:
            yield f"row {at} does not arrive", changed(at, 0, code & ~(1 << 8))
            yield f"row {at} arrives at another event", changed(at, 3, last ^ 1 << 16)


TEXTS = {
    "defect 1 of NNFusion: arrivals release nothing": (" event_arrive(sync", " event_arrive_relaxed(sync"),
    "waits acquire nothing": ("!event_wait(", "!event_wait_relaxed("),
    "defect 2 of NNFusion: no barrier after an rTask": ("fetched();\n      __syncthreads();\n", "fetched();\n"),
    "no barrier after a wait": ("if (__syncthreads_or(is_over)) return;", "if (is_over) return;"),
    "every thread arrives": ("if (threadIdx.x == 0 && (code >> 8", "if ((code >> 8"),
    "one arrival for several rTasks": ("event_arrive(sync, event, count)", "event_arrive(sync, event, 1)"),
    "the epoch is that of the last run": ("sync[0] + 1;", "sync[0];"),
    "the epoch is always the first": ("sync[0] + 1;", "1;"),
    "the epoch is not stored": (" sync[0] = next_epoch;", ";"),
    "the end is a shared event": ("starts[gridDim.x + 1];", "starts[gridDim.x + 1] - 1;"),
    "slots without a barrier": ("    await_fetched();\n  }\n  __syncthreads();", "    await_fetched();\n  }"),
    "too many threads": ("if (threadIdx.x < 64) rtask_0", "rtask_0"),
    "too few threads": ("if (threadIdx.x < 64) rtask_0", "if (threadIdx.x < 32) rtask_0"),
    "a warp more": ("if (threadIdx.x < 32) rtask_1", "if (threadIdx.x < 64) rtask_1"),
    "a barrier of the whole block in an rTask": ("named_barrier(1, 64);", "named_barrier(1, 128);"),
    "a barrier of one warp": ("named_barrier(1, 64);", "named_barrier(1, 32);"),
    "no barrier in an rTask": ("named_barrier(1, 64);", ""),
    "__syncthreads in an rTask": ("named_barrier(1, 64);", "__syncthreads();"),
    "arguments of the function before": ("argument + 4)", "argument + 0)"),
    "tasks of a row are the first": ("(int)(first + i)", "(int)first"),
    "every vEU has the rows of the first": ("start = starts[blockIdx.x],", "start = starts[0],"),
    "the last row is left out": ("at < end; at++", "at + 1 < end; at++"),
    "rows overlap": ("rows + 4 * at);", "rows + 4 * (at & ~1u));"),
    "rows are not awaited": ("  commit_copies();\n  await_copies<0>();", ""),
    "rows are not committed": ("  commit_copies();\n", ""),
    "the first rows are not awaited": ("    await_fetched();\n  }\n  __syncthreads();", "  }\n  __syncthreads();"),
    "nothing is awaited after a wait": ("      await_fetched();\n      if (__sync", "      if (__sync"),
    "nothing is awaited after an rTask": ("      await_fetched();\n      __sync", "      __sync"),
    "the row after the next one is not fetched": ("if (at + 2 < end) fetch_row(", "if (at + 3 < end) fetch_row("),
    "the next arguments are not fetched": ("if (at + 1 < end)\n", "if (at + 2 < end)\n"),
    "two rows are in one place": ("fetched + 4 * (at % 4)", "fetched + 4 * (at % 2)"),
    "arguments of two rows are in one place": ("fetched + 12 * (at % 2)", "fetched + 12 * (at % 1)"),
    "the arguments of a row are those before": ("fetched_arguments + 12 * (at % 2)", "fetched_arguments + 12 * (~at % 2)"),
    "an argument less is fetched": ("i < (row[0] >> 9 & 127)", "i + 1 < (row[0] >> 9 & 127)"),
    "an argument more is fetched": ("i < (row[0] >> 9 & 127)", "i <= (row[0] >> 9 & 127)"),
    "at most one task of a row": ("count = row[3] & 0xffff", "count = row[3] & 1"),
    "events share a word": ("event = row[3] >> 16;", "event = row[3] >> 17;"),
    "functions are swapped": ("switch (code >> 16) {", "switch ((code >> 16) ^ 1) {"),
}  # fmt: skip


# Faults of the end of a run, which show where a vEU starts after another one has ended: those without rTasks.
ENDS = {
    "the end orders nothing": ("(event_finish(sync", "(event_finish_relaxed(sync"),
    "every vEU stores the epoch": ("event_finish(sync, last) + 1 == next_epoch * gridDim.x", "event_finish(sync, last) < ~0u"),
    "the first to end stores the epoch": ("sync, last) + 1 == next_epoch", "sync, last) + gridDim.x == next_epoch"),
}


@pytest.mark.emulator
@pytest.mark.parametrize("fault", ENDS)
def test_every_fault_at_the_end_of_a_run_is_caught(fault: str) -> None:
    built = layers(1)
    alone = dataclasses.replace(built, operators=built.operators[:1], predecessors=built.predecessors[:1])
    kernel = alone.kernel(VDevicePlan((TASKS,), ((Execute(0, 0, TASKS),), (), (), ())))

    def epochs(kernel: TaskKernel) -> list[int]:
        return [int(run(kernel, X, seed, races=True)["sync"][0]) for seed in range(4)]

    assert epochs(kernel) == [1] * 4
    with pytest.raises(WrongAnswerError, match="race"):
        epochs(with_text(kernel, *ENDS[fault]))


@pytest.mark.slow
@pytest.mark.emulator
def test_every_damaged_table_is_caught() -> None:
    built = layers(LAYERS)
    kernel = built.kernel()
    counts = [*built.plan().events, VEUS]
    assert not is_caught(kernel, counts, LAYERS)
    faults = dict(damaged_tables(kernel))
    survivors = [name for name, faulty in faults.items() if not is_caught(faulty, counts, LAYERS)]
    assert survivors == []
    assert len(faults) + len(TEXTS) + len(ENDS) >= LEAST_FAULTS


@pytest.mark.emulator
@pytest.mark.parametrize("fault", TEXTS)
def test_every_fault_in_the_text_is_caught(fault: str) -> None:
    built = layers(1)
    assert len(built.plan().events) == 3
    assert is_caught(with_text(built.kernel(), *TEXTS[fault]), [*built.plan().events, VEUS])


# waves and residency --------------------------------------------------------------------------------------------------


def waves_of(built: Built) -> TaskKernel:
    waves = find_waves(built.predecessors)
    return build_waves(built.name, built.operators, built.predecessors, waves, built.slots, built.hw)


@pytest.fixture
def uncontracted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compile without FMA: gcc contracts equal statements in one kernel and not in the other, by the CPU."""
    monkeypatch.setattr(emulator, "_FLAGS", (*emulator._FLAGS, "-ffp-contract=off"))
    emulator._build.cache_clear()
    yield
    emulator._build.cache_clear()


@pytest.mark.emulator
@pytest.mark.usefixtures("uncontracted")
@pytest.mark.parametrize("target", [A100, H200])
@pytest.mark.parametrize("graph", GRAPHS)
def test_a_kernel_launched_once_a_wave_gives_the_bits_of_the_persistent_one(graph: str, target: str) -> None:
    nodes, types, outputs = GRAPHS[graph]
    built = build_graph(nodes, types, outputs, spec(target))
    arrays = normal(types)
    persistent, waves = run(built.kernel(), arrays), waves_of(built)
    assert "event_wait" not in waves.source.text
    for seed in range(3):
        found = module(waves.source, seed, races=seed == 2).run({**waves.tables, **arrays})
        for name in outputs:
            np.testing.assert_array_equal(found[name], persistent[name])


@pytest.mark.emulator
def test_operators_of_a_wave_share_a_launch() -> None:
    """Two layers side by side: as many launches as one layer has, each of blocks of both."""
    one = layers(1)

    def shifted(at: Address) -> Address:
        return Address(at.slot + 2, at.offset_bytes) if at.slot else Address(ARENA, at.offset_bytes + (1 << 14))

    others = tuple(dataclasses.replace(each, arguments=tuple(map(shifted, each.arguments))) for each in one.operators)
    slots = (
        dataclasses.replace(one.slots[ARENA], shape=(1 << 15,)),
        *one.slots[1:],
        *(dataclasses.replace(each, name=f"{each.name}2", symbol=f"{each.symbol}2") for each in one.slots[1:]),
    )
    predecessors = (*one.predecessors, *(tuple(p + 4 for p in before) for before in one.predecessors))
    both = dataclasses.replace(one, operators=(*one.operators, *others), predecessors=predecessors, slots=slots)
    kernel = waves_of(both)
    assert [launch.grid[0] for launch in kernel.source.launches] == [2 * each.function.tasks for each in one.operators]
    found = module(kernel.source, 3, races=True).run({**kernel.tables, **X, "X2": X["X"]})
    np.testing.assert_allclose(found["Y"], by_numpy(1), rtol=1e-5)
    np.testing.assert_array_equal(found["Y2"], found["Y"])


@pytest.mark.parametrize(
    ("waves", "message"),
    [
        ([[0], [1], [2, 3]], "rOperator 3 depends on 2, which is not in an earlier wave"),
        ([[0], [1], [2]], "do not execute each rOperator once"),
        ([[0], [1], [2], [3, 0]], "do not execute each rOperator once"),
    ],
)
def test_waves_that_do_not_order_the_operators_are_refused(waves: list[list[int]], message: str) -> None:
    built = layers(1)
    with pytest.raises(InvariantError, match=message):
        build_waves("m", built.operators, built.predecessors, waves, built.slots, built.hw)


def compiled(registers: int, shared: int, veus: int) -> CompiledKernel:
    kernel = layers(1).kernel(layers(1).plan(veus))
    return CompiledKernel(kernel.source, b"", "", (Resources(registers, shared, 0),))


def test_row_15_a_plan_has_as_many_veus_as_fit_the_device() -> None:
    """An A100 has 65,536 registers and 164 KiB of shared memory a core; a block has 128 threads here."""
    a100 = spec(A100, 108)
    assert count_veus(compiled(128, 1024, 1), a100) == 108 * 4
    assert count_veus(compiled(64, 1024, 1), a100) == 108 * 8
    assert count_veus(compiled(64, 80 << 10, 1), a100) == 108 * 2
    check_resident(compiled(255, 1024, 216), a100)
    with pytest.raises(LaunchError, match="217 vEUs, expected at most 216") as refusal:
        check_resident(compiled(255, 1024, 217), a100)
    assert refusal.value.code == "persistent-too-large"
    with pytest.raises(LaunchError, match="bytes of shared memory in a block") as refusal:
        count_veus(compiled(64, 200 << 10, 1), a100)
    assert refusal.value.code == "persistent-too-large"
