"""Build whole models by every lowering, and time them on the device beside their estimates.

The models are built on CPUs, without the device, and saved: the process with the device loads kernels and runs no
compiler but for the delay that timed calls wait behind.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from roller_bench.gpu.clocks import open_nvml
from roller_bench.gpu.device_errors import fatal_device_errors
from roller_bench.gpu.graph_models import PAGE, decode, encoder, lstm, sigmoid, tensor
from roller_bench.gpu.interleaved import calls_for, time_interleaved
from roller_svc import hardware
from roller_svc.calibration.cuda.kernels import delay
from roller_svc.calibration.cuda.launches import Launch, queued_seconds
from roller_svc.errors import RollerError, RollerWarning
from roller_svc.frontend.lang.input_types import tensor_types
from roller_svc.graph import compile as graph_compile
from roller_svc.graph.inputs import random_arrays
from roller_svc.graph.interpret import interpret
from roller_svc.graph.load import GRAPH_FILE, WEIGHTS_FILE, load_graph
from roller_svc.graph.lowerings import LOWERING_KINDS, cuda_graph, launches, persistent
from roller_svc.graph.safetensors import DTYPES
from roller_svc.graph.weights import Weights
from roller_svc.ir.dtype import DType
from roller_svc.ir.program import TensorType
from roller_svc.model import Model, compile_model
from roller_svc.runtime.binding import Array, numpy_dtype
from roller_svc.runtime.cuda.arrays import copy_to_device, copy_to_host, import_cupy
from roller_svc.runtime.cuda.module import load_functions
from roller_svc.runtime.graphs.cuda import CudaModel, Start
from roller_svc.runtime.saved.models import load_model
from roller_svc.settings import read_settings, use
from roller_svc.toolchain import compile_source

Json = dict[str, Any]
NO_RING = f"{persistent.KIND} without ring"
LOWERINGS = (*LOWERING_KINDS, NO_RING)
PAGES = 128  # of a cache, all of them in use: 2,048 keys
BUILD_S = 120.0  # time limit of a model's builds
WANTED_FILE, SEED = "wanted.npz", 20
# How far results may be from the interpreter's, or from those of launches: a part of the output's largest value.
TOLERANCES = {DType.FLOAT32: 1e-3, DType.BFLOAT16: 3e-2}
MODELS: dict[str, Callable[[Any], Json]] = {
    "sigmoid": lambda _: sigmoid(1024, 128),
    "encoder": partial(encoder, rows=128, width=512, hidden=2048),
    "lstm": partial(lstm, hidden=256, steps=20, layers=4),
    "decode-1b": partial(decode, bits=16, pages=PAGES, width=2048, heads=32, shared=8, hidden=8192),
    "decode-8b": partial(decode, bits=16, pages=PAGES, width=4096, heads=32, shared=8, hidden=14336),
    "decode-8b-int4": partial(decode, bits=4, pages=PAGES, width=4096, heads=32, shared=8, hidden=14336),
}
INTERPRETED = ("sigmoid", "encoder", "lstm")  # others have too many weights for the interpreter
REHEARSED = ("encoder",)


@dataclass(frozen=True, slots=True)
class GraphTask:
    """A model of the table, and where it is saved."""

    model: str
    target: str
    folder: str
    bus_id: str | None = None  # of the device, for reading its clocks


@dataclass
class _Constants:
    """Makes constants whose arrays are in a file of their own."""

    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(SEED))
    arrays: dict[str, tuple[TensorType, Array]] = field(default_factory=dict)  # by digest

    def __call__(self, *shape: int, dtype: str = "float32", low: float = -0.5, high: float = 0.5) -> Json:
        type_ = TensorType(DType(dtype), shape)
        is_float = type_.dtype.is_float
        drawn: Array = self.rng.uniform(low, high, shape) if is_float else self.rng.integers(int(low), int(high), shape)
        array = drawn.astype(numpy_dtype(type_.dtype))
        digest = Weights().add_typed(array, type_).digest
        self.arrays[digest] = type_, array
        return tensor(*shape, dtype=dtype) | {"digest": digest}

    def to_safetensors(self) -> bytes:
        """Return the arrays as a file that `load_graph` reads."""
        names = {dtype: name for name, dtype in DTYPES.items()}
        header, end = {}, 0
        for digest, (type_, array) in self.arrays.items():
            offsets = [end, end + array.nbytes]
            header[digest] = {"dtype": names[type_.dtype], "shape": type_.shape, "data_offsets": offsets}
            end = offsets[1]
        text = json.dumps(header).encode()
        return b"".join([len(text).to_bytes(8, "little"), text, *(array.tobytes() for _, array in self.arrays.values())])


def ids(models: Iterable[str]) -> list[str]:
    """Return the ids of the rows of these models."""
    return [_id(model, lowering) for model in models for lowering in LOWERINGS]


def write_model(name: str, folder: Path) -> Json:
    """Write a model of the table to a new folder, which `load_graph` reads, and return its graph."""
    folder.mkdir()
    constants = _Constants()
    document = MODELS[name](constants)
    (folder / GRAPH_FILE).write_text(json.dumps(document), encoding="utf-8")
    (folder / WEIGHTS_FILE).write_bytes(constants.to_safetensors())
    return document


def build_graphs(task: GraphTask) -> list[Json]:
    """Compile a model by each lowering and save it; return a row for each."""
    folder = Path(task.folder) / task.model
    document = write_model(task.model, folder)
    if task.model in INTERPRETED:
        weights = Weights()
        graph = load_graph(folder, weights)
        wanted: Json = interpret(graph, weights, arrays_of(document))
        np.savez(folder / WANTED_FILE, **wanted)
    use(read_settings(cache=folder / "cache"))
    return [_build(task, folder, lowering) for lowering in LOWERINGS]


def _build(task: GraphTask, folder: Path, lowering: str) -> Json:
    row = {"id": _id(task.model, lowering), "model": task.model, "lowering": lowering}
    kind = persistent.KIND if lowering == NO_RING else lowering
    try:
        with _without_ring() if lowering == NO_RING else warnings.catch_warnings():
            model = compile_model(folder, task.target, plan=kind, select="model", top_k=1)
    except RollerError as refused:
        return row | {"status": "refused", "detail": f"{refused.code}: {refused.message}"}
    model.save(folder / lowering)
    return row | {"status": "built"} | _facts(model, kind)


@contextmanager
def _without_ring() -> Iterator[None]:
    """Let no kernel stream its weights through a ring."""
    with mock.patch.object(graph_compile, "find_bundle_page_uses", return_value=()):
        yield


def _facts(model: Model, kind: str) -> Json:
    estimate, used = model.report["lowerings"][kind], [each for kernel in model.kernels for each in kernel.resources]
    return {
        "predicted_s": estimate["seconds"],
        "launches": model.plan["launches"],
        "ring": estimate.get("ring"),
        "registers": max(each.registers_per_thread for each in used),
        "spill_bytes": max(each.spill_bytes for each in used),
    }


def arrays_of(document: Json) -> dict[str, Array]:
    """Return arrays of a model's inputs and states. A cache is full, and its pages have a random order."""
    types = tensor_types({name: (each["dtype"], each["shape"]) for name, each in _tensors(document).items()})
    arrays = random_arrays(((name, type_.dtype.value, type_.shape) for name, type_ in types), SEED)
    if "pages" in arrays:
        count = arrays["pages"].size
        arrays["pages"][...] = 1 + np.random.default_rng(SEED).permutation(count)
        arrays["lengths"][...] = PAGE * count
        arrays["position"][...] = PAGE * count - 1
    return arrays


def _tensors(document: Json) -> Json:
    return {**document["inputs"], **document.get("states", {})}


class _Call:
    """A call of a model, to be launched many times behind a delay. It is not waited for."""

    def __init__(self, cupy: Any, start: Start, wait: tuple[Launch, Any]) -> None:
        self._cupy, self._start, self._wait = cupy, start, wait
        self._times = 1
        self._times = calls_for(self.sample())

    def launch(self, stream: Any) -> None:
        self._start(stream.ptr)

    def sample(self) -> float:
        """Return the seconds of one call."""
        return queued_seconds(self._cupy, self, self._times, *self._wait) / self._times


def time_graphs(task: GraphTask) -> list[Json]:
    """Run and time a saved model by each lowering; return a row for each that was built."""
    cupy = import_cupy()
    folder = Path(task.folder) / task.model
    document = json.loads((folder / GRAPH_FILE).read_text(encoding="utf-8"))
    wanted: Mapping[str, Array] | None = None
    if (folder / WANTED_FILE).exists():
        with np.load(folder / WANTED_FILE) as stored:
            wanted = dict(stored)
    device = None if task.bus_id is None else open_nvml(task.bus_id)
    rows, calls = {}, {}
    with fatal_device_errors():
        wait = _delay(cupy, task.target)
        for lowering in (each for each in LOWERINGS if (folder / each).exists()):
            row, results, start = _run(folder / lowering, document)
            if wanted is None and lowering == launches.LAUNCHES.kind:
                wanted, row["reference"] = results, "itself"
            rows[lowering] = row | {"checked": _compare(results, wanted)}
            calls[lowering] = _Call(cupy, start, wait)
        times, clocks = time_interleaved(calls, device) if calls else ({}, {})
    return [
        {"id": _id(task.model, lowering), **row, **times[lowering], "status": "ok", "clocks": clocks}
        for lowering, row in rows.items()
    ]


def _run(folder: Path, document: Json) -> tuple[Json, dict[str, Array], Start]:
    """Run a saved model once; return a row, its outputs and states, and what starts further calls."""
    bundle = load_model(folder)
    (variant,) = bundle.variants
    kernels = [bundle.kernels[position].compiled for position in variant.kernels]
    loaded = CudaModel(variant.plan, kernels, variant.weights, as_graph=variant.plan.lowering == cuda_graph.KIND)
    given = copy_to_device(arrays_of(document))
    states = {name: given.pop(name) for name in document.get("states", {})}
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always", RollerWarning)
        results = copy_to_host({**loaded.run(given, states), **states})
    row = {"warnings": [str(each.message) for each in raised]} if raised else {}
    return row, results, loaded.prepare(given, states)


def _delay(cupy: Any, target: str) -> tuple[Launch, Any]:
    """Return a launch that takes as long as an array says, and the array."""
    compiled, time = compile_source(delay(hardware.load(target))), cupy.asarray(np.zeros(1, np.uint64))
    (function,) = load_functions(compiled, cupy, 0)
    return Launch(compiled.source, function, {"time": time}), time


def _compare(results: Mapping[str, Array], wanted: Mapping[str, Array] | None) -> str:
    """Return "ok", or the first result that is too far from the one that is wanted."""
    if wanted is None:
        return "not checked: launches are refused"
    for name, want in wanted.items():
        with np.errstate(invalid="ignore"):  # of signalling NaN
            exact, got = want.astype(np.float64), results[name].astype(np.float64)
        difference, largest = float(np.abs(got - exact).max()), float(np.abs(exact).max())
        limit = TOLERANCES[DType(results[name].dtype.name)] * largest
        if not difference <= limit:
            return f"wrong: {name} differs by {difference:.3g}, at most {limit:.3g}"
    return "ok"


def _id(model: str, lowering: str) -> str:
    return f"{model} {lowering}"
