"""Fit the shipped constants of the CPU model to documents of `roller bench model --json`.

    python -m roller_svc.bench.model.fit_costs bench/results/model/MACHINE/RESULT.json [MORE.json ...] \
        --output roller_svc/perf/cpu_costs_fitted.py

`RESULT.json:-avgpool,maxpool` leaves out classes, for example those whose kernels have changed since. The fit starts
from the costs in `roller_svc/perf/cpu_costs.py`. The module is replaced atomically, for this script imports it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from roller_svc.bench.cases import performance_cases
from roller_svc.bench.model.fit import fit_machines
from roller_svc.bench.model.measured_plans import FitCase
from roller_svc.bench.model.report import fit_cases, read_measurements, spec_of
from roller_svc.perf.cpu_costs import CpuCosts

Json = dict[str, Any]
CASES = Path(__file__).resolve().parents[3] / "bench" / "data" / "cpu_bench.json"
DIGITS = 2  # significant digits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "results", nargs="+", metavar="RESULT[:-CLASS,...]", help="documents of one or several machines"
    )
    parser.add_argument("--cases", type=Path, default=CASES, help="the measured cases")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="the module to write")
    options = parser.parse_args()
    by_id = {case.id: case for case in performance_cases(options.cases)}
    documents = [read_document(result) for result in options.results]
    machines = [(fit_cases(document, by_id), spec_of(document)) for document in documents]
    costs = fit_machines(machines, CpuCosts())
    sources = [source_line(document, cases) for document, (cases, _) in zip(documents, machines, strict=True)]
    replace_file(options.output, module_source(costs, "\n".join(sources)))


def read_document(result: str) -> Json:
    """Read a document without the classes that follow its name."""
    path, _, excluded = result.partition(":-")
    document = read_measurements(Path(path))
    excluded_classes = set(filter(None, excluded.split(",")))
    if unknown := excluded_classes - {case["cls"] for case in document["cases"]}:
        raise SystemExit(f"{path} has no class {', '.join(sorted(unknown))}")
    return {**document, "cases": [case for case in document["cases"] if case["cls"] not in excluded_classes]}


def source_line(document: Json, cases: Sequence[FitCase]) -> str:
    """Return a line with number of plans, machine and date."""
    machine, plans = document["machine"], sum(len(case.plans) for case in cases)
    return f"{plans} plans of {len(cases)} programs, {machine['cpu']}, {machine['date'][:10]}."


def replace_file(path: Path, text: str) -> None:
    """Replace a file atomically."""
    part = path.with_name(f"{path.name}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def module_source(costs: CpuCosts, sources: str) -> str:
    """Return the source of a module with the costs as FITTED."""
    parts = {part.name: getattr(costs, part.name) for part in fields(costs)}
    families = sorted(type(part).__name__ for part in parts.values() if not isinstance(part, float))
    lines = [
        '"""The costs of `cpu_costs.py` fitted to measurements; written by `roller_svc/bench/model/fit_costs.py`.',
        "",
        sources,
        '"""',
        "",
        "from roller_svc.perf.cpu_costs import (",
        *(f"    {name}," for name in sorted(("CpuCosts", *families))),
        ")",
        "",
        "FITTED = CpuCosts(",
    ]
    for name, part in parts.items():
        if isinstance(part, float):
            lines.append(f"    {name}={_rounded(part)},")
            continue
        inner = (f"        {one.name}={_rounded(getattr(part, one.name))}," for one in fields(part))
        lines += [f"    {name}={type(part).__name__}(", *inner, "    ),"]
    return "\n".join([*lines, ")", ""])


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


if __name__ == "__main__":
    main()
