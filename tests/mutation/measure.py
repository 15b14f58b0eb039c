"""Measure how many mutants of generated CUDA kernels the emulator finds; write one JSON document.

    python -m tests.mutation.measure --jobs 2 --out FILE.json

Each kernel runs on three random inputs in three orders of threads, and once more watched for races where that shows
nothing. Exits 1 where a kernel without a bug is found wrong, where a bug no longer fits its kernel, or where one
survives that is not known to.
"""

from __future__ import annotations

import argparse
import collections
import json
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from roller_svc.errors import RollerError
from tests.mutation.mutants.mutation import Case, Mutation, PatternError
from tests.mutation.mutants.run_mutant import sound, verdict
from tests.mutation.mutants.suite import EQUIVALENT, MUTATIONS, SURVIVORS

Json = dict[str, Any]
DETAIL_CHARACTERS = 300


def of_case(case: Case) -> list[Json]:
    """The rows of a case: of its kernel as it is where that is found wrong, else of every mutation."""
    mutations = [mutation for mutation in MUTATIONS if mutation.case == case]
    if not sound(case):
        return [_row(mutation, "error", detail="the kernel without a bug is found wrong") for mutation in mutations]
    return [_tried(mutation) for mutation in mutations]


def _tried(mutation: Mutation) -> Json:
    try:
        findings = verdict(mutation)
    except (PatternError, RollerError) as problem:
        return _row(mutation, "error", detail=str(problem))
    if not findings:
        return _row(mutation, "survived", detail=SURVIVORS.get(mutation.id, "not known why"))
    first = findings[0]
    return _row(
        mutation,
        "killed",
        killed_by=first.cause.value,
        seeds=[f.seed for f in findings],
        races_watched=first.races,
        detail=first.detail,
    )


def _row(mutation: Mutation, status: str, **more: object) -> Json:
    row = {"case": mutation.case.name, "family": mutation.case.family, "name": mutation.name,
           "kind": mutation.kind.value, "status": status, **more}  # fmt: skip
    return row | {"detail": str(more["detail"])[:DETAIL_CHARACTERS]}


def report(rows: list[Json], seconds: float) -> Json:
    """The rows, counted by what became of them, by family and by kind."""
    killed = [row for row in rows if row["status"] == "killed"]
    return {
        "mutations": len(rows),
        "killed": len(killed),
        "share": round(len(killed) / len(rows), 4),
        "errors": sum(row["status"] == "error" for row in rows),
        "killed_by": dict(collections.Counter(row["killed_by"] for row in killed)),
        "only_with_races_watched": sum(row["races_watched"] for row in killed),
        "not_with_every_seed": sum(len(row["seeds"]) < 3 for row in killed),
        "families": _shares(rows, "family"),
        "kinds": _shares(rows, "kind"),
        "seconds": round(seconds, 1),
        "equivalent": EQUIVALENT,
        "rows": rows,
    }


def _shares(rows: list[Json], field: str) -> Json:
    """Killed of how many, for each value of a field."""
    total = collections.Counter(row[field] for row in rows)
    killed = collections.Counter(row[field] for row in rows if row["status"] == "killed")
    return {value: f"{killed[value]} of {total[value]}" for value in sorted(total)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--out", type=Path, help="write the document there, and not to stdout")
    options = parser.parse_args()
    began = time.perf_counter()
    cases = list(dict.fromkeys(mutation.case for mutation in MUTATIONS))
    with ProcessPoolExecutor(options.jobs) as pool:
        rows = [row for found in pool.map(of_case, cases) for row in found]
    document = json.dumps(report(rows, time.perf_counter() - began), indent=1)
    if options.out:
        options.out.write_text(document + "\n", encoding="utf-8")
    else:
        sys.stdout.write(document + "\n")
    unknown = any(row["status"] == "survived" and f"{row['case']}: {row['name']}" not in SURVIVORS for row in rows)
    return 1 if unknown or any(row["status"] == "error" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
