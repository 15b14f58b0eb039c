"""Every kernel family on the NVIDIA device at hand: tried, probed, verified, watched by compute-sanitizer, timed.

    bench/gpu --stages smoke --minutes 3 --out smoke.jsonl
    bench/gpu --dry --out verdicts.jsonl               (beforehand, without a device)
    bench/gpu --stages verify,sanitize --minutes 8 --verdicts verdicts.jsonl --out verify.jsonl
    bench/gpu --report smoke.jsonl verify.jsonl        (without a device)
    bench/gpu --rehearse                               (without a device: the whole program, times from the model)

Exit code 0: nothing is wrong; 1: something is; 3: there is no device, or a package is missing. docs/gpu.md says more.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from roller_svc import hardware
from roller_svc.bench.gpu import machine, report, wheels
from roller_svc.bench.gpu.cases import checks_for
from roller_svc.bench.gpu.record import Record
from roller_svc.bench.gpu.rehearsal import FAULTS, Rehearsal, no_rehearsal, rehearsal_of
from roller_svc.bench.gpu.rehearsal.subset import rehearsal_cases, rehearsal_checks
from roller_svc.bench.gpu.samples import references, sampled_cases
from roller_svc.bench.gpu.session import DRY_STAGES, STAGE_MINUTES, Options, Session, Tasks, error_text, stage_seconds
from roller_svc.bench.gpu.verdicts import read_verdicts
from roller_svc.bench.gpu.workers import BoundedWorker, end_processes
from roller_svc.errors import ArgumentError, RollerError, UnknownHardwareError

Json = dict[str, Any]

BENCH = Path(__file__).resolve().parents[3] / "bench"
DATA, RESULTS = BENCH / "data" / "public.json", BENCH / "results"
NO_DEVICE = 3
# What a run does of everything; a dry one, on the few cores of a machine without a device, enough to walk all of it.
# Of five sets of inputs one is of special values, the second; most are random (values.py).
SETS, CASES_PER_CLASS, TOP_K, MINUTES = 20, 4, 4, 30.0
DRY_SETS, DRY_CASES_PER_CLASS, DRY_TOP_K, DRY_MINUTES = 2, 1, 1, 8.0
REHEARSED_MINUTES, REHEARSED_WITH_FAULT = 4.0, 0.7
TIMEOUT_S = 25.0
REHEARSED_TIMEOUT_S = 15.0
LATE_S = 20.0  # beyond its minutes a run is cut off: something would not end
TARGET = "nvidia-h200-sxm"
# For the plan, roughly: what one of each took on a core, or takes of the device. A check takes twice that with all its
# sets; of a case the device's time is that of its samples, its copies and of starting both libraries' calls.
CHECK_S, BUILD_S, TIMING_S = 2.5, 1.5, 1.2


def run(options: Options, rehearsal: Rehearsal) -> int:
    """All stages; the exit code."""
    about = machine.describe_host() | {"dry": options.dry, "rehearsal": options.rehearse, "minutes": options.minutes}
    if not options.dry:
        lack = None if options.rehearse else machine.missing_requirement()
        if lack is not None:
            print(f"bench/gpu: {lack}")
            return NO_DEVICE
        worker: BoundedWorker[None, Json] = BoundedWorker(rehearsal.on_device(machine.device), options.timeout_s)
        try:
            about["device"] = worker.call(None)
        except RollerError as failure:
            print(f"bench/gpu: {error_text(failure)}")
            return NO_DEVICE
        finally:
            worker.close()
    target = _target(options, about.get("device"))
    if target is None:
        print("bench/gpu: there is no spec for this device in hwspecs/: --target names one that comes close")
        return NO_DEVICE
    return _run(dataclasses.replace(options, target=target), about | {"target": target}, rehearsal)


def _run(options: Options, about: Json, rehearsal: Rehearsal) -> int:
    checks, every = checks_for(hardware.load(options.target)), [*references(), *sampled_cases(DATA, options.each)]
    if options.rehearse:
        checks, every = rehearsal_checks(checks), rehearsal_cases(every)
    found = [check for check in checks if options.only.search(check.id)]
    cases = [case for case in every if options.only.search(case.id)]
    about |= {"plan": plan(options, len(found), len(cases)), "clocks_before": {} if options.dry else machine.clocks()}
    print("\n".join(f"{key}: {value}" for key, value in about.items()), flush=True)
    record = Record(options.out, about)
    late = threading.Timer(60 * options.minutes + LATE_S, _abort, [record])
    late.daemon = True
    late.start()
    bus_id = about["device"]["bus_id"] if "device" in about else None
    work = Tasks(found, cases, read_verdicts(options.verdicts))
    Session(options, record, work, rehearsal.on_device, bus_id).run()
    late.cancel()
    record.finish()
    total = report.report_of([options.out])
    report_path = options.out.with_suffix(".json")
    report.write(total, report_path)
    print(f"\n{report.table(total)}\n\n{record.path}, {report_path}", flush=True)
    return 1 if total["summary"]["wrong"] else 0


def plan(options: Options, checks: int, cases: int) -> Json:
    """How much there is to do, and about how long it takes with these jobs; a device times one case at a time."""
    check_s = CHECK_S if options.sets <= DRY_SETS else 2 * CHECK_S
    return {
        "checks": checks, "cases": cases, "seconds": stage_seconds(options.stages, options.minutes),
        "verify_s": checks * check_s / options.jobs,
        "measure_s": max(cases * BUILD_S / max(1, options.jobs - 1), 0.0 if options.dry else cases * TIMING_S),
    }  # fmt: skip


def _abort(record: Record) -> None:
    """The end of a run that would not end: the file has what was found, and no last line that says it is whole."""
    print(f"bench/gpu: the time is up and something does not end: cut off; see {record.path}", flush=True)
    end_processes()
    os._exit(1)


def _target(options: Options, device: Json | None) -> str | None:
    if options.target or device is None:
        return options.target or TARGET
    spec = machine.target_of(device)
    return None if spec is None else spec.id


def parse_options(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench/gpu", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    given = os.environ.get("OUT")
    default = Path(given) / "gpu.jsonl" if given else RESULTS / f"gpu-{time.strftime('%Y-%m-%d')}.jsonl"
    parser.add_argument("--out", type=Path, help=f"file of JSON lines (default: {default}; none of a rehearsal)")
    parser.add_argument("--target", default="", help="spec to build for (default: that of the device)")
    parser.add_argument("--wheels", type=Path, help="folder of wheels of packages that this Python lacks (wheels.py)")
    parser.add_argument("--minutes", type=float, help=f"for all stages (default: {MINUTES:g}; dry: {DRY_MINUTES:g})")
    parser.add_argument("--dry", action="store_true", help="no device: compile everything, emulate what can be")
    parser.add_argument("--rehearse", action="store_true", help="a device that is not there: times from the model")
    parser.add_argument("--fault", choices=FAULTS, help="what befalls the device of a rehearsal")
    parser.add_argument("--report", type=Path, nargs="+", metavar="FILE", help="print what these files hold")
    parser.add_argument("--verdicts", type=Path, help="file of a dry run: the emulator's verdicts")
    parser.add_argument("--only", type=re.compile, default=re.compile(""), help="ids that this pattern is found in")
    parser.add_argument("--stages", type=lambda text: tuple(text.split(",")),
                        help=f"some of {','.join(STAGE_MINUTES)} (default: all)")  # fmt: skip
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes (default: the cores)")
    parser.add_argument("--sets", type=int, help=f"of inputs for a check (default: {SETS}; dry: {DRY_SETS})")
    parser.add_argument("--each", type=int, help=f"cases of every class and type (default: {CASES_PER_CLASS}; dry: {DRY_CASES_PER_CLASS})")
    parser.add_argument("--top-k", type=int, help=f"candidates timed of a case (default: {TOP_K}; dry: {DRY_TOP_K})")
    parser.add_argument("--timeout", type=float, help=f"seconds for one check or case (default: {TIMEOUT_S:g})")
    found = parser.parse_args(words)
    found.out = found.out or (None if found.rehearse else default)
    found.stages = found.stages or (DRY_STAGES if found.dry else tuple(STAGE_MINUTES))
    unknown = set(found.stages) - set(DRY_STAGES if found.dry else STAGE_MINUTES)
    if unknown:
        parser.error(f"--stages takes some of {', '.join(DRY_STAGES if found.dry else STAGE_MINUTES)}, "
                     f"not {', '.join(sorted(unknown))}")  # fmt: skip
    if found.fault and not found.rehearse:
        parser.error("--fault is for --rehearse")
    return found


def make_options(found: argparse.Namespace, out: Path) -> Options:
    """With what is usual of what was not said; stages in their order."""
    small = found.dry or found.rehearse
    minutes = DRY_MINUTES if found.dry else MINUTES
    if found.rehearse:
        minutes = REHEARSED_WITH_FAULT if found.fault else REHEARSED_MINUTES
    stages = tuple(stage for stage in STAGE_MINUTES if stage in found.stages)
    return Options(
        out=out, target=found.target, minutes=_or_default(found.minutes, minutes), dry=found.dry, only=found.only,
        stages=stages, jobs=found.jobs, sets=_or_default(found.sets, DRY_SETS if small else SETS),
        each=_or_default(found.each, DRY_CASES_PER_CLASS if small else CASES_PER_CLASS),
        top_k=_or_default(found.top_k, DRY_TOP_K if found.dry else TOP_K),
        timeout_s=_or_default(found.timeout, REHEARSED_TIMEOUT_S if found.rehearse else TIMEOUT_S),
        rehearse=found.rehearse, verdicts=found.verdicts,
    )  # fmt: skip


def _or_default(one: Any, otherwise: Any) -> Any:
    return otherwise if one is None else one


def main(words: Sequence[str] | None = None) -> int:
    found = parse_options(words)
    try:
        if found.report:
            total = report.report_of(found.report)
            print(report.table(total))
            return 1 if total["summary"]["wrong"] else 0
        if found.rehearse:
            with rehearsal_of(found.fault) as rehearsal:
                out = found.out or rehearsal.folder / "rehearsal.jsonl"
                return run(make_options(found, out), rehearsal)
        return run(make_options(found, found.out), no_rehearsal())
    except (UnknownHardwareError, ArgumentError) as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2


def exit_process(code: int) -> NoReturn:
    """End this process. An ordinary end would wait for workers that cannot be ended."""
    if end_processes():
        sys.exit(code)
    wheels.remove_unpacked()
    sys.stdout.flush()
    os._exit(code)
