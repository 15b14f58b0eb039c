"""Compare the choices of `tune="online"` with all choices of the same variables, on this machine.

`python -m roller_bench.tuning FILE.onnx... --threads 1 2` prints a JSON document for each model and number of threads.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from roller_svc.compiler.kernel_cache import KernelCache
from roller_svc.errors import RollerError, require
from roller_svc.graph.compile import ModelOptions, build_model
from roller_svc.graph.inputs import Sample, draw_sample
from roller_svc.graph.load import load_graph
from roller_svc.graph.weights import Weights
from roller_svc.graph.wiring.kernels import KernelChoices, TuneOptions, build_here
from roller_svc.graph.wiring.online import APART, LOWEST, OnlineSource, OnlineTuning
from roller_svc.hardware.catalog import restrict_cores
from roller_svc.model import compile_model, device_spec
from roller_svc.runtime.graphs.cpu import CpuCalls
from roller_svc.settings import settings

MAX_COMBINATIONS = 64  # of kernels: of more, a random part that has those in use and those that were picked
SCREENING_CALLS, ROUNDS = 5, 60
PAIR_ROUNDS = 1000  # of the pick and the best of all alone, in turns: the best of several least times is partly luck
FINALISTS = 6

Choice = tuple[tuple[int, ...], str, str]  # of kernels, of the plan, of buffers
Row = dict[str, Any]


def compare_choices(file: Path, threads: int, top_k: int) -> Row:
    """Return the seconds of a call by the choice in use, by that of trials in calls, and by the best of all."""
    start_s = time.perf_counter()
    model = compile_model(file, threads=threads, top_k=top_k, tune="online", tune_options={"share": 1.0})
    compiled_s = time.perf_counter() - start_s
    tuning = model.tuning
    assert isinstance(tuning, OnlineTuning)
    sample = draw_sample(model._variants[0].plan, 1)
    before = str(model.report["plan"])
    start_s, calls = time.perf_counter(), 0
    while tuning.state == "exploring":
        model.run(sample.inputs)
        calls += 1
    tuned_s = time.perf_counter() - start_s
    choices, source = _find_choices(file, threads, top_k)
    variables = list(choices.choices)
    picked = tuple(
        [each.digest for each in choices.choices[name][1]].index(tuning.chosen[name]) if name in tuning.chosen else 0
        for name in variables
    )
    plan = tuning.chosen.get("plan", "used")
    pick = picked, before if plan == "used" else plan, tuning.chosen.get("buffers", LOWEST)
    used = (0,) * len(variables), before, LOWEST
    seconds, number = time_choices(choices, source, sample, used, pick)
    best = min(seconds, key=lambda choice: seconds[choice])
    pair_s = time_interleaved({choice: _bind(choices, source, choice[0])[choice] for choice in (pick, best)}, sample, PAIR_ROUNDS)
    return {
        "file": file.name, "threads": threads, "load": os.getloadavg()[0], "compiled_s": compiled_s, "tuned_s": tuned_s,
        "calls": calls, "trials": tuning.trials, "gain": tuning.gain, "notes": tuning.notes,
        "choices": [len(each) for _, each in choices.choices.values()],
        "compared": number, "used_s": seconds[used], "picked_s": seconds[pick], "best_s": seconds[best],
        "pair_picked_s": pair_s[pick], "pair_best_s": pair_s[best],
        "used": before, "picked": [*map(str, pick)], "best": [*map(str, best)],
    }  # fmt: skip


def _find_choices(file: Path, threads: int, top_k: int) -> tuple[KernelChoices, OnlineSource]:
    weights, cache = Weights(), KernelCache(settings().cache_folder)
    spec = restrict_cores(device_spec("local", None), threads)
    options = ModelOptions(spec, top_k=top_k, tune=TuneOptions("online"))
    graph = load_graph(file, weights, byte_group=spec.byte_group)
    source = require(build_model(graph, weights, options, cache).online, "choices")
    return source.find_choices(build_here, ()), source


def time_choices(
    choices: KernelChoices, source: OnlineSource, sample: Sample, used: Choice, pick: Choice
) -> tuple[dict[Choice, float], int]:
    """Return the least seconds of the choice in use, of the pick and of the fastest others, and how many were compared."""
    counts = [range(len(kernels)) for _, kernels in choices.choices.values()]
    if math.prod(map(len, counts)) <= MAX_COMBINATIONS:
        combinations = set(itertools.product(*counts))
    else:
        drawn = random.Random(0)
        combinations = {tuple(drawn.choice(each) for each in counts) for _ in range(MAX_COMBINATIONS)}
        combinations |= {tuple(n if i == k else 0 for k in range(len(counts))) for i, each in enumerate(counts) for n in each}
    screened: dict[Choice, float] = {}
    timed: dict[Choice, CpuCalls] = {}
    for kernels in sorted(combinations | {used[0], pick[0]}):
        for choice, bound in _bind(choices, source, kernels).items():
            screened[choice] = min(time_call(bound, sample) for _ in range(SCREENING_CALLS))
            if choice in (used, pick):
                timed[choice] = bound
    for choice in sorted(screened, key=lambda each: screened[each])[:FINALISTS]:
        timed[choice] = _bind(choices, source, choice[0])[choice]
    return time_interleaved(timed, sample, ROUNDS), len(screened)


def time_interleaved(models: Mapping[Choice, CpuCalls], sample: Sample, rounds: int) -> dict[Choice, float]:
    """Return the least seconds of a call of each model."""
    seconds = dict.fromkeys(models, math.inf)
    for _ in range(rounds):
        for choice, model in models.items():
            seconds[choice] = min(seconds[choice], time_call(model, sample))
    return seconds


def _bind(choices: KernelChoices, source: OnlineSource, kernels: Sequence[int]) -> Mapping[Choice, CpuCalls]:
    """Return all plans of kernels whose results are right."""
    assigned = choices.assign(dict(zip(choices.choices, kernels, strict=True)))
    bound: dict[Choice, CpuCalls] = {}
    for buffers in (LOWEST, APART):
        for kind, plan in source.make_plans(source.graph, assigned, share_memory=buffers == LOWEST).items():
            model = choices.bind_right(plan)[0]
            if model is not None:
                bound[tuple(kernels), kind, buffers] = model
    return bound


def time_call(model: CpuCalls, sample: Sample) -> float:
    """Return the seconds of a call."""
    states = sample.restore()
    start_s = time.perf_counter()
    model.run(sample.inputs, states)
    return time.perf_counter() - start_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--threads", nargs="+", type=int, default=[1])
    parser.add_argument("--top-k", type=int, default=4)
    options = parser.parse_args()
    for file, threads in itertools.product(options.files, options.threads):
        try:
            row = compare_choices(file, threads, options.top_k)
        except RollerError as error:
            row = {"file": file.name, "threads": threads, "error": error.message}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
