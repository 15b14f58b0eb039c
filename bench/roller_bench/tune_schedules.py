"""The search of schedules against construction: `python -m roller_bench.tune_schedules --shapes 30 --trials 100`.

Shapes are drawn from a seed. The best schedule and construction's kernel are timed in turn, least of all rounds. 100
trials of 30 shapes take about half an hour of one core: `--budget 50` ends each search, `taskset -c 0` gives it a core.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np

import roller_svc
from roller_bench.by_hand import time_alternately

ROUNDS = 5
Inputs = dict[str, tuple[str, tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class Result:
    """One shape."""

    kind: str
    inputs: Inputs
    trials: int
    search_s: float
    ratio: float  # construction's time over that of the best schedule
    trials_to_construction: int | None  # until a schedule was as fast
    seconds_to_construction: float | None  # of the search until then
    rank_correlation: float | None  # of prices and times (Spearman)
    best: str
    unbuilt: Mapping[str, int]  # proposals that were not built, by the reason


def draw_shape(chance: random.Random) -> tuple[str, str, Inputs]:
    """Return a kind of program, its text and its inputs."""

    def extent(low: int, high: int) -> int:
        return chance.randint(low, high)

    match chance.choice(("matmul", "batched matmul", "blur", "map", "window", "depthwise")):
        case "matmul":
            m, n, k = extent(16, 384), extent(16, 384), extent(16, 384)
            return "matmul", "C[m, n] +=! A[m, k] * B[k, n]", {"A": ("float32", (m, k)), "B": ("float32", (k, n))}
        case "batched matmul":
            b, m, n, k = extent(2, 8), extent(16, 96), extent(16, 96), extent(16, 96)
            inputs: Inputs = {"A": ("float32", (b, m, k)), "B": ("float32", (b, k, n))}
            return "batched matmul", "C[b, m, n] +=! A[b, m, k] * B[b, k, n]", inputs
        case "blur":
            y, x = extent(64, 1024), extent(64, 1024)
            text = f"""bx[y, x] = (A[y, x] + A[y, x + 1] + A[y, x + 2]) / 3.0 where y in {y + 2}, x in {x};
                B[y, x] = (bx[y, x] + bx[y + 1, x] + bx[y + 2, x]) / 3.0 where y in {y}, x in {x}"""
            return "blur", text, {"A": ("float32", (y + 2, x + 2))}
        case "map":
            r, c = extent(64, 1024), extent(64, 1024)
            inputs = {"a": ("float32", (r, c)), "b": ("float32", (c,)), "s": ("float32", (r,))}
            return "map", "y[r, c] = relu(a[r, c] * s[r] + b[c])", inputs
        case "window":
            c, y, x = extent(4, 32), extent(14, 64), extent(14, 64)
            text = f"p[c, y, x] >=! a[c, y * 2 + i, x * 2 + j] where y in {y}, x in {x}, i in 2, j in 2"
            return "window", text, {"a": ("float32", (c, 2 * y, 2 * x))}
        case _:
            y, x, c = extent(7, 56), extent(7, 56), extent(16, 128)
            text = f"o[y, x, c] +=! a[y + i, x + j, c] * w[i, j, c] where y in {y}, x in {x}, i in 3, j in 3"
            return "depthwise", text, {"a": ("float32", (y + 2, x + 2, c)), "w": ("float32", (3, 3, c))}


def tune_shape(kind: str, text: str, inputs: Inputs, trials: int, budget_s: float, seed: int) -> Result:
    start_s = time.monotonic()
    ends_s: list[float] = []
    found = roller_svc.tune(
        text, inputs, trials=trials, seed=seed, budget_s=budget_s, on_trial=lambda _: ends_s.append(time.monotonic() - start_s)
    )
    search_s = time.monotonic() - start_s
    times = time_alternately(roller_svc.compile(text, inputs, top_k=4), found.best.compile(), found.best.program, ROUNDS)
    if times.differs:
        raise AssertionError(f"wrong result: {times.differs}\n{found.best.text()}")
    timed = [(trial.priced_s, trial.seconds) for trial in found.trials if trial.seconds is not None]
    reached = next((at for at, (_, seconds) in enumerate(timed, 1) if seconds <= times.constructed_s), None)
    if reached is None and times.ratio <= 1:
        reached = 1 + min(range(len(timed)), key=lambda at: timed[at][1])
    return Result(
        kind,
        inputs,
        len(found.trials),
        search_s,
        1 / times.ratio,
        reached,
        None if reached is None else ends_s[reached - 1],
        correlate(timed),
        found.best.text(),
        found.unbuilt,
    )


def correlate(pairs: list[tuple[float, float]]) -> float | None:
    """Return Spearman's rank correlation; None of less than three pairs."""
    if len(pairs) < 3:
        return None
    prices, times = (np.argsort(np.argsort(values)).astype(np.float64) for values in zip(*pairs, strict=True))
    return float(np.corrcoef(prices, times)[0, 1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", type=int, default=30)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--budget", type=float, default=600.0, help="seconds of each search")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    chance, results = random.Random(options.seed), []
    for number in range(options.shapes):
        result = tune_shape(*draw_shape(chance), options.trials, options.budget, number)
        results.append(result)
        print(json.dumps(asdict(result)), flush=True)
    for kind in sorted({result.kind for result in results}):
        print(json.dumps({"kind": kind} | summarise([result for result in results if result.kind == kind])))
    print(json.dumps({"kind": "all"} | summarise(results)))


def summarise(results: Sequence[Result]) -> dict[str, object]:
    ratios = [result.ratio for result in results]
    reached = [result for result in results if result.trials_to_construction is not None]
    correlations = [result.rank_correlation for result in results if result.rank_correlation is not None]
    unbuilt = sum((Counter(result.unbuilt) for result in results), Counter[str]())
    return {
        "shapes": len(results),
        "trials": sum(result.trials for result in results),
        "seconds": round(sum(result.search_s for result in results)),
        "wins": sum(ratio > 1 for ratio in ratios),
        "best ratio": max(ratios),
        "geometric mean": math.exp(sum(map(math.log, ratios)) / len(results)),
        "reached": len(reached),
        "median trials until then": statistics.median(r.trials_to_construction or 0 for r in reached) if reached else None,
        "median seconds until then": statistics.median(r.seconds_to_construction or 0.0 for r in reached) if reached else None,
        "rank correlation": statistics.fmean(correlations) if correlations else None,
        "unbuilt": dict(unbuilt.most_common()),
    }


if __name__ == "__main__":
    main()
