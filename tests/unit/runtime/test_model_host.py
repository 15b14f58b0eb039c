"""The C program of a saved GPU model: the driver's calls, compared with those of our runtime."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_driver import FakeDriver
from gpu_models import MODELS, PARTIAL, call, constant, graph, node, tensor

from roller_svc import hardware
from roller_svc.analysis.step_order import find_early_starts, find_predecessors
from roller_svc.errors import ArgumentError
from roller_svc.graph import compile as graph_compile
from roller_svc.ir.hardware import TargetKind
from roller_svc.ir.model_plan import CopyStep, KernelStep, ModelPlan, unroll_steps
from roller_svc.ir.symbol_names import symbol_fault
from roller_svc.model import Model, compile_model
from roller_svc.runtime.cuda.driver import Driver
from roller_svc.runtime.saved.launchers import check_model_launchers
from roller_svc.runtime.saved.model_host import _hash_words, _Tables
from roller_svc.settings import read_settings, use

FAKE_CUDA = Path(__file__).parents[2] / "support" / "fake_cuda"
H200 = "nvidia-h200-sxm"
STREAM, BLOCK = 7, 1 << 40  # of addresses
INVALID_IMAGE, FILE_NOT_FOUND, DEADLINE, TOO_LARGE = 200, 301, 702, 720  # CUDA_ERROR_*
SOURCES = {**MODELS, "partial": PARTIAL}
_STATE = tensor(64, 128, dtype="float16")
_BODY = graph(
    {"s": _STATE, "x": _STATE, "w": tensor(128, 128, dtype="float16")},
    {},
    [
        node("h", "C[i, j]: float32 +=! A[i, k] * B[k, j]", A="s", B="w"),
        call("soft", "softmax", "h"),
        node("n", "C[i, j]: float16 = A[i, j] + B[i, j]", A="soft", B="x"),
    ],
    "n",
    name="body",
) | {"outputs": {"next": "n", "each": "n"}}
_LOOP = {"steps": 4, "carried": 1, "scanned": [False], "stacked": [True], "body": _BODY}
SCAN = graph(
    {"first": _STATE, "xs": tensor(4, 64, 128, dtype="float16")},
    {"w": constant(128, 128, dtype="float16")},
    [{"name": "scan", "loop": _LOOP, "inputs": ["first", "xs", "w"], "outputs": ["last", "all"]}],
    "last",
    "all",
)


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    use(read_settings(cache=tmp_path_factory.mktemp("cache")))
    yield
    use(read_settings())


@pytest.fixture(autouse=True)
def few_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    load = hardware.load
    monkeypatch.setattr(hardware, "load", lambda target: dataclasses.replace(load(target), num_cores=8))
    monkeypatch.setattr(graph_compile, "find_joinable", lambda *_, **__: None)  # the product of `partial` has tensor maps


def compiled(name: str, plan: str) -> Model:
    return compile_model(copy.deepcopy(SOURCES[name]), H200, select="model", top_k=1, plan=plan, name="tower")


class Expected:
    """The calls that our runtime makes for a model whose memory is where the fake driver allocates it."""

    def __init__(self, model: Model) -> None:
        self.plan: ModelPlan = model._variants[0].plan
        tables = _Tables(self.plan)
        self.once, self.steps, self.fallback = (
            tuple(unroll_steps(steps)) for steps in (self.plan.prepack, self.plan.steps, self.plan.fallback)
        )
        for steps in (self.once, self.steps, self.fallback):
            tables.add(steps)
        self.rows = list(tables.rows.values())
        self.numbers = {place: number + 1 for place, number in tables.launches.items()}
        self.tensors = [(i + 1) * 0x1000_0000 for i in range(len(self.plan.tensors))]

    def slots(self, weights: int) -> list[int]:
        return [weights * BLOCK, 2 * BLOCK, 3 * BLOCK, *self.tensors]

    def launches(self, steps: Iterable[KernelStep | CopyStep]) -> Iterator[Any]:
        for step in steps:
            if isinstance(step, KernelStep):
                yield self.plan.kernels[step.kernel].source.launches[step.launch]

    def calls(self, steps: Sequence[KernelStep | CopyStep], slots: Sequence[int], stream: int, encoded: int = 0) -> list[list[Any]]:
        """Return the calls of each step. `encoded`: the tensor maps that were encoded before."""
        fake = FakeDriver(self.launches(steps))
        fake.encoded = encoded
        driver = Driver(fake, fix_small_maps=True)
        listed: list[list[Any]] = []
        for step in steps:
            done = len(fake.calls)
            if isinstance(step, CopyStep):
                ends = [slots[each.slot] + each.offset_bytes for each in (step.target, step.source)]
                fake.cuMemcpyDtoDAsync(*ends, step.bytes, stream)
            else:
                for at, size in step.zeroed:
                    fake.cuMemsetD8Async(slots[at.slot] + at.offset_bytes, 0, size, stream)
                launch = self.plan.kernels[step.kernel].source.launches[step.launch]
                named = zip(launch.operands, step.arguments, strict=True)
                given = driver.parameters(launch, {symbol: slots[at.slot] + at.offset_bytes for symbol, at in named if at})
                driver.launch(self.numbers[step.kernel, step.launch], launch, given, stream)
            own = fake.calls[done:]
            listed.append([[0 if each is None else each for each in call] for call in own])  # no pointer
        return listed

    def nodes(self, steps: Sequence[KernelStep | CopyStep], slots: Sequence[int], encoded: int = 0) -> list[Any]:
        """Return the nodes of a graph of steps, between the tensor maps that are encoded for them."""
        last: list[int] = []
        rows: list[Any] = []
        count = 0
        calls, predecessors = self.calls(steps, slots, 0, encoded), find_predecessors(self.plan, steps)
        early = find_early_starts(self.plan, steps, predecessors)
        for own, before, is_early in zip(calls, predecessors, early, strict=True):
            after, fills = [last[each] for each in before], []
            for each in own:
                if each[0] in ("tiled", "im2col"):
                    rows.append(each)
                    continue
                count += 1
                if is_early:
                    rows += [["node", [], each], *(["edge", number, count, 1, 0, 1] for number in after)]
                    continue
                rows.append(["node", fills or after if each[0] == "launch" else after, each])
                if each[0] == "fill":
                    fills.append(count)
            last.append(count)
        return rows


def run(model: Model, folder: Path, resident: int = 8, stopped: int = 0, calls: int = 1) -> tuple[Path, int, list[Any]]:
    """Return the saved model, the status of its last call, and what the fake driver prints."""
    expected = Expected(model)
    saved = model.save(folder / "saved", launcher="cpp")
    is_fallback = resident < 8 and bool(expected.fallback)
    called = expected.fallback if is_fallback else expected.steps
    launches = [*expected.launches(expected.once), *list(expected.launches(called)) * calls]
    sizes = ", ".join("{" + ", ".join(map(str, [8] * len(each.args) + [128] * len(each.tensor_maps))) + "}" for each in launches)
    inputs = len(expected.plan.inputs)
    outputs = len(expected.tensors) - inputs
    values = [f"{address}ull" for address in expected.tensors]
    (folder / "main.cpp").write_text(f"""
#include "saved/model_host.c"
int main() {{
  parameter_bytes = {{{sizes}}};
  resident_blocks = {resident};
  stopped = {stopped};
  struct tower model;
  const CUdeviceptr inputs[{inputs}] = {{{", ".join(values[:inputs])}}}, outputs[{outputs}] = {{{", ".join(values[inputs:])}}};
  CUresult status = tower_open(&model, "saved");
  for (int i = 0; i < {calls} && !status; i++) {{
    std::printf("[\\"call\\"]\\n");
    status = tower_call(&model, inputs, outputs, (CUstream){STREAM});
  }}
  std::printf("[\\"close\\"]\\n");
  tower_close(&model);
  std::printf("[\\"status\\", %d]\\n", status);
  return 0;
}}""")
    command = ("g++", "-std=c++17", "-Wall", "-Wextra", "-Wpedantic", "-Werror", f"-I{FAKE_CUDA}", "-Isaved", "main.cpp")
    subprocess.run((*command, "-o", "main"), cwd=folder, check=True)
    return saved, *rerun(folder)


def rerun(folder: Path) -> tuple[int, list[Any]]:
    """Return the status of the last call, or of opening the model, and what the fake driver prints before it."""
    printed = subprocess.run((folder / "main",), cwd=folder, check=True, capture_output=True, text=True).stdout
    *rows, (_, status) = [json.loads(line) for line in printed.splitlines()]
    return status, rows


def flat(calls: Iterable[list[Any]]) -> list[Any]:
    return [call for each in calls for call in each]


def split(rows: list[Any]) -> tuple[list[Any], list[list[Any]], list[Any]]:
    """Return what a program does when it opens a model, in each call, and when it closes it."""
    marks = [i for i, row in enumerate(rows) if row[0] in ("call", "close")]
    calls = [rows[first + 1 : end] for first, end in pairwise(marks)]
    return rows[: marks[0]], calls, rows[marks[-1] + 1 :]


@pytest.mark.needs("g++")
@pytest.mark.parametrize(
    ("name", "plan"), [("lookups", "launches"), ("views", "launches"), ("partial", "launches"), ("partial", "persistent")]
)
def test_the_program_calls_the_driver_as_our_runtime(name: str, plan: str, tmp_path: Path) -> None:
    model = compiled(name, plan)
    expected = Expected(model)
    saved, status, rows = run(model, tmp_path)
    assert status == 0
    opened, (call,), closed = split(rows)
    own = expected.plan
    weights = model._variants[0].loaded.weights[: own.weights_bytes]
    sizes = [own.weights_bytes, own.packed_bytes, own.arena_bytes]
    kept = [own.read_weights_bytes] if own.read_weights_bytes < own.weights_bytes else []
    assert [row[1] - 1 for row in opened if row[0] == "allocate"] == sizes + kept
    (upload,) = (row for row in opened if row[0] == "upload")
    total = int(np.dot(np.arange(1, weights.nbytes + 1, dtype=np.uint64), weights.astype(np.uint64)))
    assert upload == ["upload", BLOCK, weights.nbytes, total]
    assert [row for row in opened if row[0] == "keep"] == [["keep", 4 * BLOCK, BLOCK, size] for size in kept]
    assert len({row[1] for row in opened if row[0] == "load"}) == len({kernel for kernel, _ in expected.rows})
    assert all((tmp_path / row[1]).is_file() for row in opened if row[0] == "load")
    entries = [own.kernels[kernel].source.launches[launch] for kernel, launch in expected.rows]
    assert [row[1] for row in opened if row[0] == "function"] == [each.name for each in entries]
    resources = [model._kernel_bundles[kernel].compiled.resources[launch] for kernel, launch in expected.rows]
    asking = [
        ["attribute", number + 1, 8, each.shared_bytes]
        for number, (each, used) in enumerate(zip(entries, resources, strict=True))
        if each.shared_bytes and used.shared_bytes > 48 << 10
    ]
    assert [row for row in opened if row[0] == "attribute"] == asking
    once = flat(expected.calls(expected.once, expected.slots(1), 0))
    kinds = ("fill", "copy", "launch", "cooperative", "tiled", "im2col")
    assert [row for row in opened if row[0] in kinds] == once
    slots = expected.slots(4 if kept else 1)
    cooperative = [step for step in expected.steps if isinstance(step, KernelStep) and step.events]
    events = [slots[at.slot] + at.offset_bytes for step in cooperative for at, _ in step.zeroed]
    encoded = sum(row[0] in ("tiled", "im2col") for row in once)
    read = [row for each in events for row in (["wait"], ["read", each])]
    assert call == flat(expected.calls(expected.steps, slots, STREAM, encoded)) + read
    assert bool(events) == (plan == "persistent")
    assert {row[1] for row in closed} | {row[1] for row in opened if row[0] == "free"} == {
        number * BLOCK for number in range(1, 4 + len(kept))
    }
    assert (saved / "plan.bin").stat().st_size % 8 == 0


@pytest.mark.needs("g++")
@pytest.mark.parametrize(("plan", "resident"), [("graph", 8), ("persistent", 7)])
def test_row_15_a_device_that_holds_fewer_blocks_runs_the_graph_of_the_fallback(plan: str, resident: int, tmp_path: Path) -> None:
    model = compiled("partial", plan)
    expected = Expected(model)
    _, status, rows = run(model, tmp_path, resident, calls=2)
    assert status == 0
    opened, (first, second), closed = split(rows)
    steps = expected.steps if plan == "graph" else expected.fallback
    weights = 4 if any(row[0] == "keep" for row in opened) else 1
    assert first == [*expected.nodes(steps, expected.slots(weights)), ["graph", STREAM]]
    assert any(row[0] == "edge" for row in first)  # of a kernel behind kernels
    assert second == [["graph", STREAM]]  # with the same addresses
    assert closed[0] == ["destroy"]


@pytest.mark.needs("g++")
def test_row_15_a_wait_that_reaches_its_deadline_is_a_status(tmp_path: Path) -> None:
    _, status, _ = run(compiled("lookups", "persistent"), tmp_path, stopped=1)
    assert status == DEADLINE


@pytest.mark.needs("g++")
def test_row_15_a_device_that_holds_fewer_blocks_does_not_open_a_model_without_a_fallback(tmp_path: Path) -> None:
    model = compiled("lookups", "persistent")
    (variant,) = model._variants
    variant.plan = dataclasses.replace(variant.plan, fallback=())  # as models were saved before they had one
    assert run(model, tmp_path, resident=7)[1] == TOO_LARGE


@pytest.mark.needs("g++")
def test_a_folder_without_its_files_is_not_opened(tmp_path: Path) -> None:
    saved, status, _ = run(compiled("lookups", "launches"), tmp_path)
    assert status == 0
    for name in ("plan.bin", "weights.bin"):
        content = (saved / name).read_bytes()
        for damaged in (content[:-8], content + bytes(8)):
            (saved / name).write_bytes(damaged)
            assert rerun(tmp_path)[0] == INVALID_IMAGE
        (saved / name).unlink()
        assert rerun(tmp_path)[0] == FILE_NOT_FOUND
        (saved / name).write_bytes(content)
    assert rerun(tmp_path)[0] == 0


@pytest.mark.needs("g++")
def test_a_plan_with_a_changed_word_is_not_opened(tmp_path: Path) -> None:
    saved, _, _ = run(compiled("lookups", "launches"), tmp_path)
    plan = np.frombuffer((saved / "plan.bin").read_bytes(), "<i8")
    rng = np.random.default_rng(3)
    changes = [{number: 1 << int(rng.integers(63))} for number in range(len(plan))]
    changes += [{first: -1 << 63, first + 1: -1 << 63} for first in range(len(plan) - 1)]  # the highest bits of two
    for place, change in enumerate(changes):
        damaged = plan.copy()
        for number, bits in change.items():
            damaged[number] ^= bits
        assert _hash_words(damaged) != _hash_words(plan)
        if place % 32 == 0:  # the program computes the same
            (saved / "plan.bin").write_bytes(damaged.tobytes())
            assert rerun(tmp_path) == (INVALID_IMAGE, [["close"]])


@pytest.mark.parametrize(("source", "plan"), [(MODELS["states"], "launches"), (SCAN, "persistent")], ids=["launches", "persistent"])
def test_the_text_does_not_grow_with_the_steps_of_a_call(source: dict[str, Any], plan: str, tmp_path: Path) -> None:
    def text(steps: int) -> str:
        longer = copy.deepcopy(source)
        longer["nodes"][0]["loop"]["steps"] = steps
        longer["inputs"]["xs"]["shape"][0] = steps
        model = compile_model(longer, H200, select="model", top_k=1, plan=plan, name="tower")
        assert len(model._variants[0].plan.steps) > 1 or plan == "launches"
        saved = model.save(tmp_path / str(steps), launcher="cpp")
        return (saved / "model_host.c").read_text()

    few, many = text(4), text(12)
    assert len(few.splitlines()) == len(many.splitlines())


def test_types_of_the_program_have_names_that_no_model_has(tmp_path: Path) -> None:
    text = (compiled("lookups", "launches").save(tmp_path / "saved", launcher="cpp") / "model_host.c").read_text()
    tags = set(re.findall(r"(?:\bstruct|\benum|\bunion|\btypedef [\w ]+) (\w+)", text)) - {"tower"}
    assert len(tags) > 8
    assert all(symbol_fault(tag) for tag in tags)  # no client's name


@pytest.mark.needs("g++")
def test_a_model_of_copies_alone_has_a_program(tmp_path: Path) -> None:
    source = graph({"x": tensor(4, 8)}, {}, [call("both", "concat", "x", "x", axis=0)], "both")
    model = compile_model(copy.deepcopy(source), H200, select="model", plan="launches", name="tower")
    assert not model._kernel_bundles
    _, status, rows = run(model, tmp_path)
    assert status == 0
    assert [row[0] for row in split(rows)[1][0]] == ["copy", "copy"]
    with pytest.raises(ArgumentError, match="models for AMD devices have none"):
        compile_model(source, "amd-mi300x", select="model").save(tmp_path / "amd", launcher="cpp")


def test_launchers_that_a_model_for_a_gpu_cannot_have(tmp_path: Path) -> None:
    model = compiled("views", "launches")
    for name, message in (("ctypes", "have the launcher cpp alone"), ("rust", "unknown launcher")):
        with pytest.raises(ArgumentError, match=message) as raised:
            model.save(tmp_path / "a", launcher=name)
        assert raised.value.code == "unknown-launcher"
    with pytest.raises(ArgumentError, match="models for AMD devices have none"):
        check_model_launchers(["cpp"], "amd-mi300x", TargetKind.AMD)
    check_model_launchers([], "amd-mi300x", TargetKind.AMD)
    assert not (tmp_path / "a").exists()
