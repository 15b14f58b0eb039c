"""Measure the gain of trials in calls: models by kernels that were measured alone, and by those that calls have chosen.

A model takes a process of its own: python -m roller_bench.zoo.gain FILE THREADS SECONDS
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from roller_svc.errors import RollerError
from roller_svc.graph.inputs import random_arrays
from roller_svc.graph.wiring.online import OnlineTuning
from roller_svc.model import Model, compile_model

TIMED_S, MIN_ROUNDS = 3.0, 20  # of both models, one call of each in turns
TOLERANCE = 1e-2  # of answers while the model explores, relative to the greatest


def measure_gain(file: str, threads: int, limit_s: float) -> dict[str, Any]:
    """Return the seconds of calls before and after trials, and what the trials took; they are cut off after the limit."""
    alone = compile_model(file, threads=threads, tune="off", select="measure", plan="auto")
    inputs = random_arrays(alone.inputs)
    expected = {name: np.array(array) for name, array in alone.run(inputs).items()}
    start_s = time.perf_counter()
    model = compile_model(file, threads=threads, tune="online", tune_options={"share": 1.0})
    tuning, calls, wrong = model.tuning, 0, 0
    assert isinstance(tuning, OnlineTuning)
    answered_s = 0.0
    while (tuning.state == "exploring" and time.perf_counter() - start_s < limit_s) or not calls:
        results = model.run(inputs)
        answered_s = answered_s or time.perf_counter() - start_s
        wrong += not all(_is_near(results[name], array) for name, array in expected.items())
        calls += 1
    is_cut = tuning.state == "exploring"
    if is_cut:
        tuning.commit()
    ended_s = time.perf_counter() - start_s
    wrong += not all(_is_near(model.run(inputs)[name], array) for name, array in expected.items())
    alone_s, tuned_s = _time_interleaved(alone, model, inputs)
    return {
        "file": Path(file).name, "threads": threads, "load": os.getloadavg()[0],
        "alone_s": alone_s, "tuned_s": tuned_s, "speedup": alone_s / tuned_s, "is_rebound": model.digest != alone.digest,
        "plan": [alone.report["plan"], model.report["plan"]], "state": tuning.state, "notes": tuning.notes,
        "is_cut": is_cut, "trials": tuning.trials, "gain": tuning.gain, "first_answer_s": answered_s, "ended_s": ended_s,
        "calls": calls, "wrong": wrong,
    }  # fmt: skip


def _is_near(result: Any, expected: Any) -> bool:
    limit = TOLERANCE * float(np.max(np.abs(expected), initial=0.0))
    return bool(np.allclose(result, expected, rtol=TOLERANCE, atol=limit, equal_nan=True))


def _time_interleaved(first: Model, second: Model, inputs: dict[str, Any]) -> tuple[float, float]:
    """Return the least seconds of a call of each model."""
    least = [math.inf, math.inf]
    end_s, rounds = time.perf_counter() + TIMED_S, 0
    while rounds < MIN_ROUNDS or time.perf_counter() < end_s:
        for number, model in enumerate((first, second)):
            start_s = time.perf_counter()
            model.run(inputs)
            least[number] = min(least[number], time.perf_counter() - start_s)
        rounds += 1
    return least[0], least[1]


def bench_gains(files: Sequence[str], threads: int, limit_s: float) -> Iterator[dict[str, Any]]:
    """Yield a row for each model; all of them together take no longer than the limit.

    Each model gets an equal share of what is left. A model that has no time left has an error in its row.
    """
    end_s = time.monotonic() + limit_s
    for number, file in enumerate(files):
        left_s = end_s - time.monotonic()
        yield _run(file, threads, left_s / (len(files) - number), left_s)


def _run(file: str, threads: int, share_s: float, left_s: float) -> dict[str, Any]:
    command = [sys.executable, "-m", "roller_bench.zoo.gain", file, str(threads), str(share_s)]
    row = {"file": Path(file).name, "threads": threads}
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=max(0.0, left_s))
    except subprocess.TimeoutExpired:
        return row | {"error": "no time is left: run again, kernels are in the cache"}
    except subprocess.CalledProcessError as failure:
        return row | {"error": f"its process has ended with {failure.returncode}"}
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return measured


def summarize_gains(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the geometric mean of how many times as fast the models are, the least, and how many were measured."""
    speedups = [row["speedup"] for row in rows if "speedup" in row]
    if not speedups:
        return {"measured": 0, "of": len(rows)}
    mean = math.exp(sum(map(math.log, speedups)) / len(speedups))
    return {"measured": len(speedups), "of": len(rows), "geometric_mean": mean, "least": min(speedups), "most": max(speedups)}


def measure_or_refuse(file: str, threads: int, limit_s: float) -> dict[str, Any]:
    """Return the row of a model, which has an error if the model cannot be compiled."""
    try:
        return measure_gain(file, threads, limit_s)
    except RollerError as error:
        return {"file": Path(file).name, "threads": threads, "error": error.message.partition("\n")[0]}


if __name__ == "__main__":
    print(json.dumps(measure_or_refuse(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))))
