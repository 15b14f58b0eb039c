"""Which cases have steps: `python -m roller_bench.as_schedule --target ID FILE...` counts them by family.

Each case is also built again from the options of its tiles: `other text` counts those whose text differs. With `--time`
the kernels of steps and of construction's plan run in turn on this CPU instead, and their results are compared.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import roller_svc
from roller_bench.by_hand import Times, time_alternately
from roller_bench.cases import BenchCase, performance_cases
from roller_svc.compiler.as_schedule import AsSchedule, explain_as_schedule, first_plan
from roller_svc.compiler.lower_and_emit import emit_plan
from roller_svc.compiler.request import build_request
from roller_svc.errors import BuildError, InputError

ROUNDS = 7
MAX_CASE_S = 0.02  # of a case that is timed, by the model
NEAR_RATIO = 1.1  # between times of steps and of construction


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--target", help="default: cpu-x86-avx2, with --time local")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="take every N-th case")
    parser.add_argument("--time", action="store_true", help="time each case that has steps against construction's plan")
    parser.add_argument("--budget", type=float, default=540.0, metavar="S", help="seconds after which --time begins no case")
    options = parser.parse_args()
    cases = [case for file in options.files for case in performance_cases(file)][:: options.every]
    if options.time:
        time_cases(cases, options.target or "local", options.budget)
    else:
        count_cases(cases, options.target or "cpu-x86-avx2")


def count_cases(cases: Sequence[BenchCase], target: str) -> None:
    """Print how many cases have steps, by family, and what no step says of the others."""
    counts: dict[str, Counter[str]] = {}
    missing: Counter[str] = Counter()
    other_text: list[str] = []
    for case in cases:
        try:
            found, is_same = count_case(case, target)
        except InputError as refused:
            counts.setdefault(f"refused: {refused.code}", Counter())["cases"] += 1
            continue
        families = " + ".join(dict.fromkeys(str(kernel["family"]) for kernel in found.kernels))
        counts.setdefault(families, Counter()).update(cases=1, steps=int(found.steps is not None))
        missing.update([found.missing] if found.steps is None else [])
        if not is_same:
            other_text.append(case.id)
    print(json.dumps({"families": counts, "missing": missing.most_common(), "other text": other_text}, indent=1))


def count_case(case: BenchCase, target: str) -> tuple[AsSchedule, bool]:
    """Return what a case's first plan is as a schedule, and whether the options of its tiles build the same text."""
    inputs = {name: (value["dtype"], value["shape"]) for name, value in case.inputs.items()}
    request = build_request(case.expression, inputs, target=target, outputs=case.outputs, select="model")
    chosen = first_plan(request)
    found = explain_as_schedule(request, chosen)
    if found.options is None:
        return found, False
    again = first_plan(build_request(case.expression, inputs, target=target, outputs=case.outputs, **found.options))
    texts = [emit_plan(each.plan, each.program, each.groups, each.hardware).text for each in (chosen, again)]
    return found, texts[0] == texts[1]


def time_cases(cases: Sequence[BenchCase], target: str, budget_s: float) -> None:
    """Print the times of each case that has steps, and how many are near construction's."""
    end_s, timed, skipped = time.monotonic() + budget_s, [], Counter[str]()
    for number, case in enumerate(cases):
        if time.monotonic() > end_s:
            skipped["no time is left"] = len(cases) - number
            break
        try:
            times = time_case(case, target)
        except (InputError, BuildError) as error:
            skipped[error.code] += 1
            continue
        if isinstance(times, str):
            skipped[times] += 1
            continue
        timed.append(times)
        line = {"case": case.id, "constructed_s": times.constructed_s, "steps_s": times.scheduled_s, "ratio": times.ratio}
        print(json.dumps(line | {"differs": times.differs}), flush=True)
    ratios = sorted(each.ratio for each in timed)
    summary = {
        "timed": len(timed),
        "results differ": sum(bool(each.differs) for each in timed),
        "at most 1.1 times": sum(ratio <= NEAR_RATIO for ratio in ratios),
        "below 1/1.1 times": sum(ratio < 1 / NEAR_RATIO for ratio in ratios),
        "median": ratios[len(ratios) // 2] if ratios else None,
        "largest": ratios[-1] if ratios else None,
        "skipped": skipped,
    }
    print(json.dumps(summary))


def time_case(case: BenchCase, target: str) -> Times | str:
    """Return the times of a case by its steps and by construction's first plan, or why it is not timed."""
    inputs = {name: (value["dtype"], value["shape"]) for name, value in case.inputs.items()}
    request = build_request(case.expression, inputs, target=target, outputs=case.outputs, select="model")
    chosen = first_plan(request)
    if chosen.plan.estimate.seconds > MAX_CASE_S:
        return "long"
    found = explain_as_schedule(request, chosen)
    if found.steps is None:
        return "no steps"
    constructed = roller_svc.compile(case.expression, inputs, target=target, outputs=case.outputs, select="model")
    scheduled = roller_svc.Schedule(case.expression, inputs, target, found.steps, outputs=case.outputs).compile()
    return time_alternately(constructed, scheduled, found.program, ROUNDS)


if __name__ == "__main__":
    main()
