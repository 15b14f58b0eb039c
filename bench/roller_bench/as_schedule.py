"""Which cases have steps: `python -m roller_bench.as_schedule --target ID FILE...` counts them by family.

Each case is also built again from the options of its tiles: `other text` counts those whose text differs.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path

from roller_bench.cases import BenchCase, performance_cases
from roller_svc.compiler.as_schedule import AsSchedule, explain_as_schedule, first_plan
from roller_svc.compiler.lower_and_emit import emit_plan
from roller_svc.compiler.request import build_request
from roller_svc.errors import InputError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--target", default="cpu-x86-avx2")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="take every N-th case")
    options = parser.parse_args()
    counts: dict[str, Counter[str]] = {}
    missing: Counter[str] = Counter()
    other_text: list[str] = []
    cases = [case for file in options.files for case in performance_cases(file)]
    for case in cases[:: options.every]:
        try:
            found, is_same = count_case(case, options.target)
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


if __name__ == "__main__":
    main()
