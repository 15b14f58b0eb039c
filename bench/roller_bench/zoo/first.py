"""The first answer of models in the background, and what replaces it: python -m roller_bench.zoo.first THREADS FILE...

Each model is compiled by a process of its own with an empty cache. It prints a JSON document: seconds until the first
answer and until other kernels are bound, those of calls meanwhile, and interleaved calls of the first model, the last one,
and one whose kernels were measured before the first answer, which is the old way.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from roller_svc.graph.inputs import random_arrays
from roller_svc.graph.wiring.online import OnlineTuning
from roller_svc.model import Model, compile_model
from roller_svc.settings import read_settings, use

LIMIT_S = 600.0  # until other kernels are bound
PAUSE_S = 0.01  # between calls meanwhile
ROUNDS, CALLS = 10, 10  # of each model, interleaved
WORKER = "--one"


def time_first_answer(file: str, threads: int, folder: Path) -> dict[str, Any]:
    """Return what this process measures of a model."""
    use(read_settings(cache=folder / "background"))
    cpu_s, start = _cpu_seconds(), time.perf_counter()
    model = compile_model(file, threads=threads, tune="background")
    inputs = random_arrays(model.inputs)
    expected = {name: array.copy() for name, array in model.run(inputs).items()}
    answered_s, used_s = time.perf_counter() - start, [b - a for a, b in zip(cpu_s, _cpu_seconds(), strict=True)]
    assert isinstance(model.tuning, OnlineTuning)
    calls = []
    while model.tuning.state == "exploring" and time.perf_counter() - start < LIMIT_S:
        begin = time.perf_counter()
        results = model.run(inputs)
        calls.append(time.perf_counter() - begin)
        for name, array in expected.items():
            np.testing.assert_allclose(results[name], array, rtol=1e-2, atol=1e-2 * float(np.max(np.abs(array), initial=0)))
        time.sleep(PAUSE_S)
    swapped_s = time.perf_counter() - start
    model.tuning.stop()
    begin = time.perf_counter()
    first = compile_model(file, threads=threads, select="model")
    first.run(inputs)
    warm_s = time.perf_counter() - begin
    use(read_settings(cache=folder / "measured"))
    begin = time.perf_counter()
    measured = compile_model(file, threads=threads, tune="off")
    measured.run(inputs)
    old_way_s = time.perf_counter() - begin
    times = time_interleaved({"first": first, "last": model, "old_way": measured}, inputs)
    return {
        "file": Path(file).name,
        "threads": threads,
        "first_answer_s": answered_s,
        "python_cpu_s": used_s[0],
        "compilers_cpu_s": used_s[1],
        "stages": model.report["seconds"],
        "warm_s": warm_s,
        "ended_s": swapped_s,
        "state": model.tuning.state,
        "notes": model.tuning.notes,
        "gain": model.tuning.gain,
        "calls_meanwhile": {"number": len(calls), "median_s": float(np.median(calls)), "most_s": max(calls, default=0.0)},
        "old_way_s": old_way_s,
        "call_s": times,
        "loss": {name: times["first"] / times[name] - 1 for name in ("last", "old_way")},
        "load": os.getloadavg()[0],
    }


def time_interleaved(models: Mapping[str, Model], inputs: Mapping[str, Any]) -> dict[str, float]:
    """Return the least seconds of a call of each model."""
    least = dict.fromkeys(models, float("inf"))
    for _ in range(ROUNDS):
        for name, model in models.items():
            for _ in range(CALLS):
                begin = time.perf_counter()
                model.run(inputs)
                least[name] = min(least[name], time.perf_counter() - begin)
    return least


def _cpu_seconds() -> tuple[float, float]:
    """Return the CPU time of this process, and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return used[0].ru_utime + used[0].ru_stime, used[1].ru_utime + used[1].ru_stime


def main(arguments: Sequence[str]) -> None:
    """Measure each model in a process."""
    if arguments[0] == WORKER:
        with tempfile.TemporaryDirectory(prefix="roller-first-") as folder:
            print(json.dumps(time_first_answer(arguments[2], int(arguments[1]), Path(folder))))
        return
    threads, *files = arguments
    rows = []
    for file in files:
        command = [sys.executable, "-m", "roller_bench.zoo.first", WORKER, threads, file]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
    print(json.dumps({"models": rows}, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
