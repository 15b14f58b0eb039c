"""Digests of kernel texts, launches and candidates, and the command that renews them.

    python tests/support/kernel_digests.py --reason "why the differences are expected"   (make digests REASON="...")
    python tests/support/kernel_digests.py --show public/antares-000 --target cpu-x86-avx2

The first form prints what differs from `tests/data/kernel_digests.json`, by case, and writes the file with the reason.
Without a reason it writes nothing and exits with 1 if anything differs. The second form prints what the digests of one
case are made from: two checkouts can then be compared by `diff`.

Nothing here depends on the machine: the targets are shipped specs, and no compiler is called. Comments at the top of a
text are left out, since they have the model's estimate.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import MISSING, fields, is_dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from roller_svc import hardware
from roller_svc.compiler.lower_and_emit import emit_plan
from roller_svc.compiler.partition_cache import PartitionCache
from roller_svc.compiler.plans import merge_ranked_plans, rank_partitions
from roller_svc.errors import RollerError
from roller_svc.frontend.parse import parse
from roller_svc.ir.report import GroupedPlan
from roller_svc.verify.corpus import Case, Run, case_request, parse_cases

ROOT = Path(__file__).parents[2]
FILE = ROOT / "tests" / "data" / "kernel_digests.json"
# Corpus → how many cases there are for each that has digests.
CORPORA = {"cpu_bench": 1, "gpu_functions": 1, "tensorcore": 4, "public": 8}
TARGETS = (
    "cpu-x86-avx2", "cpu-x86-avx512", "nvidia-v100-sxm2", "nvidia-a100-sxm-80gb", "nvidia-h200-sxm", "amd-mi250x",
)  # fmt: skip
PARTS = ("text", "launches", "candidates")
TOP_K = 10  # candidates in the digest of their order
DIGITS = 6  # of a digest, hexadecimal
_HEADER = re.compile(r"\A/\*.*?\*/\n", re.DOTALL)

Digests = dict[str, list[str]]  # "corpus/case" → for each target the digests of PARTS, or the code of a refusal


def read_cases() -> dict[str, Case]:
    """Return {"corpus/case": case} of all cases that have digests."""
    corpora = {
        name: parse_cases(json.loads((ROOT / "bench" / "data" / f"{name}.json").read_text()), small=False, every=every)
        for name, every in CORPORA.items()
    }
    return {f"{corpus}/{case.id}": case for corpus, cases in corpora.items() for case in cases}


def read_digests() -> Digests:
    """Return the committed digests."""
    digests: Digests = json.loads(FILE.read_text())["digests"]
    return digests


def describe_case(case: Case, target: str, cache: PartitionCache | None = None) -> dict[str, str]:
    """Return text, launches and candidates of a case on a target as text. Raises RollerError for a refused case."""
    request = case_request(case, Run(target))
    program = parse(request.expression, dict(request.inputs), request.outputs)
    program = replace(program, name="named")  # the default name would change with the text
    hw = hardware.load(target)
    plans = merge_ranked_plans(rank_partitions(cache or PartitionCache(program), hw, TOP_K, request.constraints), TOP_K)
    source = emit_plan(plans[0].plan, program, plans[0].groups, hw)
    others = (source.launches, source.buffers, source.checks, source.options)
    return {
        "text": _HEADER.sub("", source.text),
        "launches": json.dumps(describe(others), indent=1),
        "candidates": "\n".join(json.dumps(_describe_plan(plan)) for plan in plans),
    }


def _describe_plan(grouped: GroupedPlan) -> list[Any]:
    """Return the kernels of a plan: statements, tile space, unit and tiles, without estimates."""
    kernels = []
    for group, choice in zip(grouped.groups, grouped.plan.choices, strict=True):
        program = choice.program
        axes = [[axis.name, axis.extent, axis.role.value] for axis in program.space.axes]
        tiles = {name: value for name, value in describe(program).items() if name not in ("space", "unit")}
        tiles |= tiles.pop("pipeline", {})
        tiles |= {name: tiles.pop(name) for name in ("family", "pingpong", "cluster_k") if name in tiles}
        kernels.append([[s.name for s in group.statements], axes, program.unit.name, tiles])
    return kernels


def describe(value: Any) -> Any:
    """Return a value as JSON. Fields that have their default are left out: a new field changes no digest."""
    if is_dataclass(value):
        parts = ((f, getattr(value, f.name)) for f in fields(value))
        return {f.name: describe(part) for f, part in parts if f.default is MISSING or part != f.default}
    if isinstance(value, Enum):
        return describe(value.value)
    if isinstance(value, tuple | list):
        return [describe(part) for part in value]
    return value if isinstance(value, int | float | str | None) else str(value)


def digest_case(case: Case) -> list[str]:
    """Return the digests of a case on all targets."""
    request = case_request(case, Run(TARGETS[0]))
    try:
        cache = PartitionCache(parse(request.expression, dict(request.inputs), request.outputs))
    except RollerError as refusal:
        return [refusal.code] * len(TARGETS)
    return [_digest(case, target, cache) for target in TARGETS]


def _digest(case: Case, target: str, cache: PartitionCache) -> str:
    try:
        described = describe_case(case, target, cache)
    except RollerError as refusal:
        return refusal.code
    return " ".join(hashlib.sha256(described[part].encode()).hexdigest()[:DIGITS] for part in PARTS)


def compare(before: Mapping[str, Sequence[str]], now: Mapping[str, Sequence[str]]) -> dict[str, dict[str, list[str]]]:
    """Return {case: {what differs: targets}}, with the cases in order; cases on one side only are `new` or `gone`."""
    differences: dict[str, dict[str, list[str]]] = {}
    for name in dict.fromkeys((*before, *now)):
        if name not in before or name not in now:
            differences[name] = {"new" if name in now else "gone": list(TARGETS)}
            continue
        for target, old, new in zip(TARGETS, before[name], now[name], strict=True):
            if old != new:
                differences.setdefault(name, {}).setdefault(_differing_parts(old, new), []).append(target)
    return differences


def _differing_parts(old: str, new: str) -> str:
    old_parts, new_parts = old.split(), new.split()
    if len(old_parts) != len(PARTS) or len(new_parts) != len(PARTS):
        return f"{_outcome(old_parts)}, now {_outcome(new_parts)}"
    return ", ".join(part for part, a, b in zip(PARTS, old_parts, new_parts, strict=True) if a != b)


def _outcome(parts: Sequence[str]) -> str:
    return "a kernel" if len(parts) == len(PARTS) else f"refused ({' '.join(parts)})"


def print_differences(differences: Mapping[str, Mapping[str, Sequence[str]]]) -> str:
    """Return the differences as text: how often each occurs on each target, then the cases."""
    counts = Counter((target, what) for by_what in differences.values() for what in by_what for target in by_what[what])
    totals = [f"{count:5} {target}: {what}" for (target, what), count in sorted(counts.items())]
    lines = [
        f"{name}: {what} ({'all targets' if len(targets) == len(TARGETS) else ', '.join(targets)})"
        for name, by_what in differences.items()
        for what, targets in by_what.items()
    ]
    return "\n".join([*lines, "", *totals])


def digest_cases(cases: Mapping[str, Case]) -> Digests:
    """Return the digests of the cases, computed on all cores."""
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return dict(zip(cases, pool.map(digest_case, cases.values(), chunksize=4), strict=True))


def write_digests(digests: Mapping[str, Sequence[str]], reason: str) -> None:
    """Write the file with one line for each case."""
    rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(digests[name])}" for name in digests)
    head = f' "reason": {json.dumps(reason)},\n "targets": {json.dumps(TARGETS)},\n "parts": {json.dumps(PARTS)},'
    temporary = FILE.with_suffix(".new")
    temporary.write_text(f'{{\n{head}\n "digests": {{\n{rows}\n }}\n}}\n')
    temporary.replace(FILE)


def main(arguments: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reason", default="", help="why the differences are expected; it is written to the file")
    parser.add_argument("--show", metavar="CORPUS/CASE", help="print what the digests of a case are made from")
    parser.add_argument("--target", choices=TARGETS, default=TARGETS[0], help="of --show (default: %(default)s)")
    options = parser.parse_args(None if arguments is None else list(arguments))
    cases = read_cases()
    if options.show is not None:
        if options.show not in cases:
            parser.error(f"--show: expected one of the {len(cases)} cases of {FILE.name}, got {options.show}")
        for part, text in describe_case(cases[options.show], options.target).items():
            print(f"== {part}\n{text}")
        return 0
    digests = digest_cases(cases)
    differences = compare(read_digests() if FILE.exists() else {}, digests)
    if not differences:
        print(f"{len(digests)} cases on {len(TARGETS)} targets: nothing differs")
        return 0
    print(print_differences(differences))
    if not options.reason.strip():
        print(
            f"{len(differences)} of {len(digests)} cases differ. If that is expected, give --reason TEXT",
            file=sys.stderr,
        )
        return 1
    write_digests(digests, options.reason.strip())
    print(f"wrote {FILE.relative_to(ROOT)}; reason: {options.reason.strip()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
