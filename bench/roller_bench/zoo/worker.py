"""One engine on one model, as a process: python -m roller_bench.zoo.worker ENGINE FILE THREADS ARRAYS OPTION.

Ours compiles the model, and writes its inputs and outputs to ARRAYS, which the others read. OPTION is how ours selects
kernels, and the file of Inductor's modules.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from roller_svc.graph.inputs import random_arrays
from roller_svc.model import compile_model

MIN_RUNS, MAX_RUNS, TIMED_S, WARM_S = 20, 2000, 1.0, 0.3
INDUCTOR_MODES = {"inductor": None, "inductor-max-autotune": "max-autotune"}
MAX_ATTEMPTS, QUIET_RATIO = 3, 1.3  # timed again while the median is further above the minimum


def measure(call: Callable[[], object]) -> dict[str, Any]:
    """Time a call in blocks; return the least time, and the median of the block with the least spread."""
    clock = time.perf_counter
    begin = clock()
    while clock() - begin < WARM_S:
        call()
    best: dict[str, Any] = {}
    for _ in range(MAX_ATTEMPTS):
        time.sleep(0.1)
        call()
        samples: list[float] = []
        begin = clock()
        while len(samples) < MAX_RUNS and (len(samples) < MIN_RUNS or clock() - begin < TIMED_S):
            start = clock()
            call()
            samples.append((clock() - start) * 1e3)
        row = {"min_ms": min(samples), "median_ms": median(samples), "runs": len(samples)}
        if best:
            row = {"min_ms": min(row["min_ms"], best["min_ms"]), "median_ms": min(row["median_ms"], best["median_ms"]),
                   "runs": row["runs"]}  # fmt: skip
        best = row
        if best["median_ms"] < QUIET_RATIO * best["min_ms"]:
            break
    return best


def run_own(file: str, threads: int, arrays: str, select: str) -> dict[str, Any]:
    start = time.perf_counter()
    compile_model(file, threads=threads, select=select)
    compiled = time.perf_counter()
    model = compile_model(file, threads=threads, select=select)
    warm = time.perf_counter()
    inputs = random_arrays(model.inputs)
    outputs = model.run(inputs)
    named: dict[str, Any] = {f"in_{name}": value for name, value in inputs.items()}
    named |= {f"out_{name}": value for name, value in outputs.items()}
    np.savez(arrays, **named)
    return {
        **measure(lambda: model.run(inputs)),
        "compile_s": compiled - start,
        "warm_compile_s": warm - compiled,
        "peak_bytes": model.plan["arena"]["bytes"],
        "plan": model.report["plan"],
    }


def run_onnxruntime(file: str, threads: int, arrays: Mapping[str, Any]) -> dict[str, Any]:
    import onnxruntime

    onnxruntime.set_default_logger_severity(3)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    names = {each.name for each in session.get_inputs()}
    inputs = {name: value for name, value in _named(arrays, "in_").items() if name in names}
    outputs = dict(zip((each.name for each in session.get_outputs()), session.run(None, inputs), strict=True))
    return {**measure(lambda: session.run(None, inputs)), "max_abs_error": _difference(outputs, arrays)}


def run_openvino(file: str, threads: int, arrays: Mapping[str, Any]) -> dict[str, Any]:
    import openvino

    config = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32",
              "NUM_STREAMS": 1}  # fmt: skip
    core = openvino.Core()
    given = _named(arrays, "in_")
    model = core.read_model(file)
    model.reshape({port: given[port.get_any_name()].shape for port in model.inputs})
    compiled = core.compile_model(model, "CPU", config)
    request = compiled.create_infer_request()
    inputs = {port.get_any_name(): given[port.get_any_name()] for port in compiled.inputs}
    result = request.infer(inputs)
    outputs = {port.get_any_name(): result[port] for port in compiled.outputs}
    return {
        **measure(lambda: request.infer(inputs, share_inputs=True, share_outputs=True)),
        "max_abs_error": _difference(outputs, arrays),
    }


def run_inductor(file: str, threads: int, arrays: Mapping[str, Any], modules: str, mode: str | None = None) -> dict[str, Any]:
    """Time torch.compile with frozen weights in a mode, on the module that build(name) of the Python file returns."""
    import torch
    from torch._dynamo.utils import counters

    spec = importlib.util.spec_from_file_location("modules", modules)
    if spec is None or spec.loader is None:
        raise ImportError(f"{modules}: not a Python file")
    source = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(source)
    torch.set_num_threads(threads)
    torch._inductor.config.freezing = True
    torch._dynamo.config.allow_rnn = True  # or modules with nn.LSTM and nn.GRU stay eager
    module, _, input_names, output_names = source.build(Path(file).stem)
    given = _named(arrays, "in_")
    inputs = tuple(torch.from_numpy(given[name]) for name in input_names)
    with torch.no_grad():
        compiled = torch.compile(module.eval(), mode=mode)
        results = compiled(*inputs)
        results = results if isinstance(results, tuple) else (results,)
        if not counters["stats"]["unique_graphs"]:
            raise RuntimeError("torch.compile compiled no graph")
        outputs = {name: result.numpy() for name, result in zip(output_names, results, strict=True)}
        return {**measure(lambda: compiled(*inputs)), "max_abs_error": _difference(outputs, arrays)}


def _named(arrays: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): arrays[name] for name in arrays if name.startswith(prefix)}


def _difference(outputs: Mapping[str, Any], arrays: Mapping[str, Any]) -> float:
    """Return the largest difference from our outputs."""
    expected = _named(arrays, "out_")
    known = {name: value for name, value in outputs.items() if name in expected}
    return max(float(np.abs(expected[name].astype(np.float64) - value).max()) for name, value in known.items())


def main(engine: str, file: str, threads: str, arrays: str, option: str) -> None:
    if engine == "ours":
        row = run_own(file, int(threads), arrays, option)
    else:
        with np.load(arrays) as loaded:
            named = {name: loaded[name] for name in loaded}
        if engine in INDUCTOR_MODES:
            row = run_inductor(file, int(threads), named, option, INDUCTOR_MODES[engine])
        else:
            engines = {"onnxruntime": run_onnxruntime, "openvino": run_openvino}
            row = engines[engine](file, int(threads), named)
    print("ROW " + json.dumps(row), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
