"""Contractions on matrix units: how often each load, split, stream and epilogue ran and was right → counts as JSON.

    python -m roller_svc.bench.coverage --cases bench/data/tensorcore.json --least 10 --jobs 2

From the cheapest cases on, in every run (a device, and demands of what the model would rarely choose for such sizes),
those are taken in which something occurs that has not yet occurred `--least` times. They are compiled, emulated and
judged as `roller corpus --emulate` does it. Exit code 1 where a case was not right or something stays short.
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

from roller_svc.compiler.plans import best_plans, rank_best_partition
from roller_svc.compiler.request import resolve_spec
from roller_svc.errors import NoCandidateError, RollerError
from roller_svc.farm.workers import map_unordered
from roller_svc.frontend.parse import parse
from roller_svc.ir.constraints import OpClass
from roller_svc.verify import corpus
from roller_svc.verify.corpus import Row, Run, Task
from roller_svc.verify.kernel_stats import EPILOGUE_FEATURES, count_features, summarize_kernels

DATA = Path(__file__).resolve().parents[2] / "bench" / "data" / "tensorcore.json"
TARGETS = ("nvidia-a100-sxm-80gb", "nvidia-t4", "nvidia-rtx4090")
DEMANDS: tuple[tuple[tuple[str, int], ...], ...] = (
    (), (("split_k", 2),), (("stream_k", 5),), (("stages", 4),), (("raster", 2),), (("split_k", 3), ("stages", 3)),
    (("stages", 3), ("stream_k", 3)),
)  # fmt: skip
LOADS = ("async16", "async8", "async4", "vector", "element")
TYPES = ("float16", "bfloat16", "float32", "int8", "float8_e4m3fn", "float8_e5m2")
# "several outputs" is no epilogue of its own
NEEDED = frozenset({
    *(f"epilogue {word}" for word in EPILOGUE_FEATURES if word != "several outputs"),
    *(f"load {word}" for word in LOADS),
    *(f"operand {word}" for word in TYPES), "split reduction", "stream-K", "raster", "more than two stages",
})  # fmt: skip


def features(found: Iterable[corpus.Json]) -> Iterator[str]:
    """What occurs in the kernels of one program, each thing once a kernel; of matrix units only."""
    for kernel in found:
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


def planned(task: Task) -> list[str]:
    """What would occur in the task's kernels; nothing where it cannot have what is demanded."""
    request = corpus.case_request(task.cases[0], task.run)
    hw = resolve_spec(request)
    program = parse(request.expression, dict(request.inputs), request.outputs)
    try:
        groups, ranked, _ = rank_best_partition(program, hw, 1, request.constraints)
    except NoCandidateError:
        return []
    return list(features(summarize_kernels(groups, best_plans(ranked, 1)[0], hw)))


def points(task: Task) -> int:
    """Of all statements: what emulation and reference take time for."""
    request = corpus.case_request(task.cases[0], task.run)
    program = parse(request.expression, dict(request.inputs), request.outputs)
    return sum(statement.points for statement in program.statements)


def chosen(cases: list[corpus.Case], least: int) -> list[Task]:
    """The cheapest cases and runs in which all that is needed occurs often enough, as far as that can be had."""
    runs = [Run(target, emulate=True, family=OpClass.MMA, tiles=d) for d in DEMANDS for target in TARGETS]
    tasks = sorted(corpus.group_tasks(cases, runs[0]), key=points)
    counts = collections.Counter[str]()
    taken: list[Task] = []
    for turn in range(len(runs)):
        for number, task in enumerate(tasks):
            candidate = Task(task.cases, runs[(number + turn) % len(runs)])
            if all(counts[need] >= least for need in NEEDED):
                return taken
            found = planned(candidate)
            if any(counts[word] < least for word in NEEDED.intersection(found)):
                counts.update(found)
                taken.append(candidate)
    return taken


def judged(tasks: Sequence[Task], jobs: int, timeout_s: float) -> Iterator[tuple[Task, Row]]:
    for task, answer in map_unordered(corpus.verify_task, tasks, jobs, timeout_s):
        rows = corpus.failed_rows(task, answer) if isinstance(answer, RollerError) else answer
        yield from ((task, row) for row in rows)


def table(found: Sequence[tuple[Task, Row]], least: int, seconds: float) -> dict[str, Any]:
    """Counts over the cases that are right, what of the needed stays short, and the cases that are not right."""
    right = [kernel for _, row in found if row.status == "ok" for kernel in row.kernels]
    counts = collections.Counter(features(right))
    return {
        "cases": len(found),
        "ok": sum(row.status == "ok" for _, row in found),
        "least": least,
        "occurrences": {word: counts[word] for word in sorted(NEEDED)},
        "short": sorted(word for word in NEEDED if counts[word] < least),
        "kernels": count_features(kernel for kernel in right if kernel["family"] == "mma"),
        "not_ok": [
            {"id": row.id, "target": task.run.target, "tiles": dict(task.run.tiles), "status": row.status,
             "detail": row.detail}
            for task, row in found if row.status != "ok"
        ],
        "seconds": seconds,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=Path, default=DATA)
    parser.add_argument("--least", type=int, default=10, help="how often everything must occur (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="worker processes (default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one program (default: %(default)s)")
    options = parser.parse_args()
    began = time.monotonic()
    cases = corpus.parse_cases(json.loads(options.cases.read_text(encoding="utf-8")), small=True)
    tasks = chosen(cases, options.least)
    print(f"{len(tasks)} programs chosen in {time.monotonic() - began:.0f} s", file=sys.stderr)
    found = list(judged(tasks, options.jobs, options.timeout))
    result = table(found, options.least, time.monotonic() - began)
    print(json.dumps(result, indent=1))
    return 1 if result["short"] or result["not_ok"] else 0


if __name__ == "__main__":
    sys.exit(main())
