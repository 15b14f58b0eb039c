"""Time models on this CPU, ours and other engines', one after the other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from roller_svc.errors import ArgumentError

OWN_ENGINE = "ours"
INDUCTOR, MAX_AUTOTUNE = "inductor", "inductor-max-autotune"
BASELINES = ("onnxruntime", "openvino", INDUCTOR, MAX_AUTOTUNE)
PAUSE_S = 0.5  # between processes, so that the threads of one have ended
TIMEOUT_S = 1800.0


def bench_models(
    files: Sequence[str],
    threads: int,
    baselines: Sequence[str],
    select: str,
    rounds: int = 1,
    modules: str | None = None,
    *,
    is_quantized: bool = False,
) -> Iterator[dict[str, Any]]:
    """Yield a row for each model: times of all engines, the best baseline over ours, and the largest difference.

    Each round runs every engine in a process of its own; least times of all rounds count. `modules` is a Python file
    for Inductor. Its `build(name)` returns the torch module of the model `name.onnx`, its inputs, their names and
    those of the outputs. `is_quantized`: every engine runs the model that onnxruntime's tool quantizes. Raises
    ArgumentError for a baseline that does not exist, for Inductor without modules, and where that tool fails.
    """
    if unknown := [name for name in baselines if name not in BASELINES]:
        raise ArgumentError(f"--peers {unknown[0]}: expected some of {', '.join(BASELINES)}", code="invalid-option")
    of_modules = [name for name in baselines if name in (INDUCTOR, MAX_AUTOTUNE)]
    if of_modules and modules is None:
        raise ArgumentError(
            f"--peers {of_modules[0]}: compiles torch modules, and ONNX files have none",
            code="invalid-option",
            hint="name a Python file with build(name) by --modules",
        )
    for file in files:
        own: list[dict[str, Any]] = []
        timed: dict[str, list[dict[str, Any]]] = {name: [] for name in baselines}
        with tempfile.TemporaryDirectory(prefix="roller-zoo-") as folder:
            arrays = str(Path(folder) / "arrays.npz")
            timed_file = _quantize(file, folder) if is_quantized else file
            for _ in range(rounds):
                own.append(_run([OWN_ENGINE, timed_file, str(threads), arrays, select], threads))
                if "error" in own[-1]:
                    break
                for name, rows in timed.items():
                    extra = modules if name in of_modules and modules is not None else ""
                    rows.append(_run([name, timed_file, str(threads), arrays, extra], threads))
        yield _row(file, threads, _best(own), {name: _best(rows) for name, rows in timed.items() if rows})


def _quantize(file: str, folder: str) -> str:
    """Return the file of a quantized model in a folder. Raises ArgumentError if the tool fails."""
    target = str(Path(folder) / Path(file).name)
    command = [sys.executable, "-m", "roller_bench.zoo.quantize", file, target]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise ArgumentError(f"--quantize: {file} was not quantized: {last[:300]}", code="invalid-option")
    return target


def _best(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the first row with the least times of all rounds; the row with an error if there is one."""
    failed = next((row for row in rows if "error" in row), None)
    return failed or rows[0] | {name: min(row[name] for row in rows) for name in ("min_ms", "median_ms")}


def _run(arguments: Sequence[str], threads: int) -> dict[str, Any]:
    """Return the row that a worker prints, or its error."""
    time.sleep(PAUSE_S)
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, "-m", "roller_bench.zoo.worker", *arguments]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"over {TIMEOUT_S:.0f} s"}
    for line in done.stdout.splitlines():
        if line.startswith("ROW "):
            row: dict[str, Any] = json.loads(line[4:])
            return row
    last = (done.stderr.strip().splitlines() or ["no output"])[-1]
    return {"error": last[:300]}


def _row(file: str, threads: int, own: dict[str, Any], baselines: dict[str, dict[str, Any]]) -> dict[str, Any]:
    minima = [each["min_ms"] for each in baselines.values() if "error" not in each]
    errors = [each["max_abs_error"] for each in baselines.values() if "error" not in each]
    return {
        "file": Path(file).name,
        "threads": threads,
        "ours_ms": _times(own),
        "peers": {name: _times(each) for name, each in baselines.items()},
        "ratio": min(minima) / own["min_ms"] if minima and "error" not in own else None,
        "compile_s": own.get("compile_s"),
        "warm_compile_s": own.get("warm_compile_s"),
        "max_abs_error": max(errors, default=None),
        "peak_bytes": own.get("peak_bytes"),
        "plan": own.get("plan"),
    }


def _times(row: dict[str, Any]) -> dict[str, Any]:
    return {"error": row["error"]} if "error" in row else {"min": row["min_ms"], "median": row["median_ms"]}
