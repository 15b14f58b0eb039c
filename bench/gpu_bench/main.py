"""Every kernel family on the NVIDIA device at hand: verified, then watched by compute-sanitizer, then timed → JSON.

    bench/gpu --minutes 9 --out gpu.json
    bench/gpu --dry --minutes 9 --target nvidia-h200-sxm

Exit code 0: nothing is wrong; 1: something is; 3: there is no device, or no CuPy. docs/gpu.md says how to read it.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu_bench import machine
from gpu_bench.cases import checks_for
from gpu_bench.check import Check
from gpu_bench.clocks import opened
from gpu_bench.record import Record, table
from gpu_bench.samples import TimedCase, references, sampled_cases
from gpu_bench.sanitized import sample
from gpu_bench.session import MOST_JOBS_ON_DEVICE, SHARES, Options, Session
from roller_svc import hardware
from roller_svc.errors import RollerError, UnknownHardwareError
from roller_svc.farm.lanes import Lane

Json = dict[str, Any]

DATA = Path(__file__).resolve().parents[1] / "data" / "public.json"
RESULTS = Path(__file__).resolve().parents[1] / "results"
NO_DEVICE = 3
STAGES = tuple(SHARES)
# What a run does of everything; a dry one, on the few cores of a machine without a device, enough to walk all of it.
# Of five sets of inputs one is of special values, the second; most are random (values.py).
SETS, EACH, TOP_K, MINUTES = 20, 4, 4, 9.0
DRY_SETS, DRY_EACH, DRY_TOP_K, DRY_MINUTES = 2, 1, 1, 8.0
# For the plan, roughly: what one of each took on a core, or is allowed to take of the device; a check takes twice that
# with all its sets.
CHECK_S, BUILD_S, TIMING_S = 2.5, 1.5, 1.5


def plan(options: Options, found: Sequence[Check], cases: Sequence[TimedCase]) -> Json:
    """How much there is to do, and about how long it takes with these jobs; a device times one case at a time."""
    jobs, building = min(options.jobs, MOST_JOBS_ON_DEVICE), max(1, options.jobs - 1)
    check_s = CHECK_S if options.sets <= DRY_SETS else 2 * CHECK_S
    return {"checks": len(found), "cases": len(cases), "verify_s": len(found) * check_s / jobs,
            "measure_s": max(len(cases) * BUILD_S / building,
                             0.0 if options.dry else len(cases) * TIMING_S)}  # fmt: skip


def run(options: Options) -> int:
    """All stages; the exit code."""
    about = machine.here() | {"dry": options.dry, "minutes": options.minutes}
    if not options.dry:
        lack = machine.missing()
        if lack is not None:
            print(f"bench/gpu: {lack}")
            return NO_DEVICE
        lane: Lane[object, Json] = Lane(machine.device, options.timeout_s)
        try:
            about["device"] = lane.call(None)
        except RollerError as failure:
            print(f"bench/gpu: {failure.message}")
            return NO_DEVICE
        finally:
            lane.close()
    target = _target(options, about.get("device"))
    if target is None:
        print("bench/gpu: there is no spec for this device in hwspecs/: --target names one that comes close")
        return NO_DEVICE
    return _run(dataclasses.replace(options, target=target), about | {"target": target})


def _run(options: Options, about: Json) -> int:
    found = [check for check in checks_for(hardware.load(options.target)) if options.only.search(check.id)]
    cases = [case for case in (*references(), *sampled_cases(DATA, options.each)) if options.only.search(case.id)]
    about["plan"] = plan(options, found, cases)
    print("\n".join(f"{key}: {value}" for key, value in about.items()), flush=True)
    record = Record(options.out, about)
    session = Session(options, record, opened(about["device"]["bus_id"]) if "device" in about else None)
    if "verify" in options.stages:
        session.verify(found)
    if "sanitize" in options.stages:
        session.sanitize(sample(found))
    if "measure" in options.stages:
        session.measure(cases)
    if "compare" in options.stages:
        session.compare()
    if not options.dry:
        about["clocks_after"] = machine.clocks()
    summary = record.finish()
    print(f"\n{table(summary)}\n\n{record.path}")
    return 1 if wrong(record.document) else 0


def wrong(document: Json) -> bool:
    """Whether anything that ran was not right."""
    rows = [*document["verification"], *document["sanitizer"]]
    bad = ("wrong", "error", "refused", "timeout")
    return any(row["status"] in bad for row in rows) or any(
        "error" in row or str(row.get("judged", "")).startswith("wrong") for row in document["measurements"]
    )


def _target(options: Options, device: Json | None) -> str | None:
    if options.target or device is None:
        return options.target or "nvidia-h200-sxm"
    spec = machine.target_of(device)
    return None if spec is None else spec.id


def parsed(words: Sequence[str] | None = None) -> Options:
    parser = argparse.ArgumentParser(prog="bench/gpu", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    given = os.environ.get("OUT")
    default = Path(given) / "gpu.json" if given else RESULTS / f"gpu-{time.strftime('%Y-%m-%d')}.json"
    parser.add_argument("--out", type=Path, default=default, help="the JSON file (default: %(default)s)")
    parser.add_argument("--target", default="", help="spec to build for (default: that of the device)")
    parser.add_argument("--wheels", type=Path, help="folder of wheels of packages that this Python lacks (wheels.py)")
    parser.add_argument("--minutes", type=float, help=f"for everything (default: {MINUTES:g}; dry: {DRY_MINUTES:g})")
    parser.add_argument("--dry", action="store_true", help="no device: compile everything, emulate what can be")
    parser.add_argument("--only", type=re.compile, default=re.compile(""), help="ids that this pattern is found in")
    parser.add_argument("--stages", type=lambda text: tuple(text.split(",")), default=STAGES,
                        help=f"some of {','.join(STAGES)} (default: all); compare needs measure")  # fmt: skip
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes (default: the cores)")
    parser.add_argument("--sets", type=int, help=f"of inputs for a check (default: {SETS}; dry: {DRY_SETS})")
    parser.add_argument("--each", type=int, help=f"cases of every class and type (default: {EACH}; dry: {DRY_EACH})")
    parser.add_argument("--top-k", type=int, help=f"candidates timed of a case (default: {TOP_K}; dry: {DRY_TOP_K})")
    parser.add_argument("--timeout", type=float, default=90.0, help="seconds for one check or case")
    options = parser.parse_args(words)
    unknown = set(options.stages) - set(STAGES)
    if unknown:
        parser.error(f"--stages takes some of {', '.join(STAGES)}, not {', '.join(sorted(unknown))}")
    usual = (DRY_SETS, DRY_EACH, DRY_TOP_K, DRY_MINUTES) if options.dry else (SETS, EACH, TOP_K, MINUTES)
    said = (options.sets, options.each, options.top_k, options.minutes)
    sets, each, top_k, minutes = (default if one is None else one for one, default in zip(said, usual, strict=True))
    return Options(
        options.out, options.target, minutes, options.dry, options.only, options.stages, options.jobs,
        sets, each, top_k, options.timeout,
    )  # fmt: skip


def main() -> int:
    try:
        return run(parsed())
    except UnknownHardwareError as unknown:
        print(f"error: {unknown}", file=sys.stderr)
        return 2
