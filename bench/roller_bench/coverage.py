"""Count how often each load, split and epilogue of tensor-core contractions is emulated correctly. Prints JSON.

    python -m roller_bench.coverage --cases bench/data/tensorcore.json --least 10 --jobs 2

A run is a device and constraints that the model would rarely choose for small sizes. Starting with the cheapest cases,
a case is selected if one of its features has occurred less than `--least` times. `roller corpus --emulate` compiles,
emulates and verifies a case in the same way. The exit code is 1 if a case is wrong or a feature occurs too rarely.
"""

from __future__ import annotations

import argparse
import collections
import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from roller_bench import DATA
from roller_svc.compiler.plans import best_plans, rank_best_partition
from roller_svc.compiler.request import resolve_spec
from roller_svc.errors import NoCandidateError, RollerError
from roller_svc.farm.workers import map_unordered
from roller_svc.frontend.parse import parse
from roller_svc.ir.constraints import OpClass
from roller_svc.verify import corpus
from roller_svc.verify.corpus import Row, Run, Task
from roller_svc.verify.kernel_stats import EPILOGUE_FEATURES, count_features, summarize_kernels

TARGETS = ("nvidia-a100-sxm-80gb", "nvidia-t4", "nvidia-rtx4090")
CONSTRAINTS: tuple[tuple[tuple[str, int], ...], ...] = (
    (), (("split_k", 2),), (("stream_k", 5),), (("stages", 4),), (("raster", 2),), (("split_k", 3), ("stages", 3)),
    (("stages", 3), ("stream_k", 3)),
)  # fmt: skip
LOADS = ("async16", "async8", "async4", "vector", "element")
TYPES = ("float16", "bfloat16", "float32", "int8", "float8_e4m3fn", "float8_e5m2")
# "several outputs" is not an epilogue of its own
NEEDED = frozenset({
    *(f"epilogue {word}" for word in EPILOGUE_FEATURES if word != "several outputs"),
    *(f"load {word}" for word in LOADS),
    *(f"operand {word}" for word in TYPES), "split reduction", "stream-K", "raster", "more than two stages",
})  # fmt: skip


def features(kernels: Iterable[corpus.Json]) -> Iterator[str]:
    """Yield the features of the tensor-core kernels of one program, each once per kernel."""
    for kernel in kernels:
        if kernel["family"] != "mma":
            continue
        yield from (f"epilogue {word}" for word in kernel["epilogue"])
        for key, name in (("load", "load"), ("dtype", "operand")):
            yield from {f"{name} {operand[key]}" for operand in kernel["operands"]}
        if kernel["split_k"] > 1:
            yield "split reduction"
        if kernel["stream_k"]:
            yield "stream-K"
        if kernel["raster"] > 1:
            yield "raster"
        if kernel["stages"] > 2:
            yield "more than two stages"


def planned_features(task: Task) -> list[str]:
    """Return the features of a task's kernels; none if its constraints cannot be satisfied."""
    request = corpus.case_request(task.cases[0], task.run)
    hw = resolve_spec(request)
    program = parse(request.expression, dict(request.inputs), request.outputs)
    try:
        groups, ranked, _ = rank_best_partition(program, hw, 1, request.constraints)
    except NoCandidateError:
        return []
    return list(features(summarize_kernels(groups, best_plans(ranked, 1)[0], hw)))


def points(task: Task) -> int:
    """Return the points of all statements, a measure of the time of emulation and reference."""
    request = corpus.case_request(task.cases[0], task.run)
    program = parse(request.expression, dict(request.inputs), request.outputs)
    return sum(statement.points for statement in program.statements)


def select_tasks(cases: list[corpus.Case], min_count: int) -> list[Task]:
    """Select the cheapest cases and runs until every feature occurs often enough, as far as possible."""
    runs = [Run(target, emulate=True, family=OpClass.MMA, tiles=d) for d in CONSTRAINTS for target in TARGETS]
    tasks = sorted(corpus.group_tasks(cases, runs[0]), key=points)
    counts = collections.Counter[str]()
    selected: list[Task] = []
    for offset in range(len(runs)):
        for number, task in enumerate(tasks):
            candidate = Task(task.cases, runs[(number + offset) % len(runs)])
            if all(counts[need] >= min_count for need in NEEDED):
                return selected
            features_of_task = planned_features(candidate)
            if any(counts[word] < min_count for word in NEEDED.intersection(features_of_task)):
                counts.update(features_of_task)
                selected.append(candidate)
    return selected


def verify_tasks(tasks: Sequence[Task], jobs: int, timeout_s: float) -> Iterator[tuple[Task, Row]]:
    """Compile, emulate and verify tasks; yield their rows."""
    for task, answer in map_unordered(corpus.verify_task, tasks, jobs, timeout_s):
        results = corpus.failed_rows(task, answer) if isinstance(answer, RollerError) else answer
        yield from ((task, row) for row in results)


def summary(rows: Sequence[tuple[Task, Row]], min_count: int, seconds: float) -> dict[str, Any]:
    """Return feature counts over the correct cases, the rare features, and the cases that are not correct."""
    right = [kernel for _, row in rows if row.status == "ok" for kernel in row.kernels]
    counts = collections.Counter(features(right))
    return {
        "cases": len(rows),
        "ok": sum(row.status == "ok" for _, row in rows),
        "least": min_count,
        "occurrences": {word: counts[word] for word in sorted(NEEDED)},
        "short": sorted(word for word in NEEDED if counts[word] < min_count),
        "kernels": count_features(kernel for kernel in right if kernel["family"] == "mma"),
        "not_ok": [
            {"id": row.id, "target": task.run.target, "tiles": dict(task.run.tiles), "status": row.status, "detail": row.detail}
            for task, row in rows
            if row.status != "ok"
        ],
        "seconds": seconds,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=Path, default=DATA / "tensorcore.json")
    parser.add_argument("--least", type=int, default=10, help="required occurrences of each feature (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="worker processes (default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=300.0, help="timeout per program, seconds (default: %(default)s)")
    options = parser.parse_args()
    began = time.monotonic()
    cases = corpus.parse_cases(json.loads(options.cases.read_text(encoding="utf-8")), small=True)
    tasks = select_tasks(cases, options.least)
    print(f"{len(tasks)} programs chosen in {time.monotonic() - began:.0f} s", file=sys.stderr)
    rows = list(verify_tasks(tasks, options.jobs, options.timeout))
    result = summary(rows, options.least, time.monotonic() - began)
    print(json.dumps(result, indent=1))
    return 1 if result["short"] or result["not_ok"] else 0


if __name__ == "__main__":
    sys.exit(main())
