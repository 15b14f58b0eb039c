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
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from gpu_bench import machine
from gpu_bench.cases import Check, checks
from gpu_bench.peers import peer_timed
from gpu_bench.record import Record, table
from gpu_bench.samples import TimedCase, references, sampled_cases
from gpu_bench.sanitized import sample, sanitize
from gpu_bench.timing import BuildTask, Built, TimingTask, build, calibrated, copy_bandwidth, timed
from gpu_bench.verify import Verification, verify
from roller_svc.errors import RollerError
from roller_svc.farm.lanes import Lane, spread

Json = dict[str, Any]
T = TypeVar("T")
R = TypeVar("R")

DATA = Path(__file__).resolve().parents[1] / "data" / "public.json"
RESULTS = Path(__file__).resolve().parents[1] / "results"
NO_DEVICE = 3
STAGES = ("verify", "sanitize", "measure")
# Shares of the time at which a stage must have ended; what it did not get to is listed as skipped.
VERIFIED_BY, SANITIZED_BY, MEASURED_BY = 0.5, 0.65, 0.95
MOST_JOBS_ON_DEVICE = 8  # a context each, which takes about half a gigabyte and a second
CALIBRATION_S = 8.0  # of measuring, after its kernels are compiled
# For the plan: what one of each took on two cores, or is allowed to take of the device.
CHECK_S, BUILD_S, TIMING_S = 2.0, 4.0, 2.0


@dataclass(frozen=True, slots=True)
class Options:
    """`only`: what ids must match. `each`: cases of every class and type. `timeout_s`: for one check or case."""

    out: Path
    target: str
    minutes: float
    dry: bool
    only: re.Pattern[str]
    stages: tuple[str, ...]
    jobs: int
    seeds: int
    each: int
    top_k: int
    timeout_s: float


class Session:
    """One run: its options, its record, its clock."""

    def __init__(self, options: Options, record: Record) -> None:
        self.options = options
        self.record = record
        self._began = time.monotonic()

    def late(self, share: float) -> bool:
        return self.left_s(share) <= 0

    def left_s(self, share: float) -> float:
        return self._began + share * self.options.minutes * 60 - time.monotonic()

    def until(
        self, share: float, work: Callable[[T], R], tasks: Sequence[T], jobs: int
    ) -> Iterator[tuple[T, R | RollerError]]:
        """Tasks with their results, as they come, until that share of the time is spent."""
        done = 0
        if not self.late(share):
            for task, answer in spread(work, tasks, jobs, self.options.timeout_s):
                yield task, answer
                done += 1
                if self.late(share):
                    break
        if done < len(tasks):
            self.record.add("skipped", {"stage": work.__name__, "tasks": len(tasks) - done})

    def verify(self, found: Sequence[Check]) -> None:
        """Large ones first: they take longest, and the others fill the cores beside them."""
        options = self.options
        ordered = sorted(found, key=lambda check: not check.family.endswith("-large"))
        tasks = [Verification(check, options.target, options.seeds, not options.dry) for check in ordered]
        share = MEASURED_BY if options.stages == ("verify",) else VERIFIED_BY
        for task, answer in self.until(share, verify, tasks, min(options.jobs, MOST_JOBS_ON_DEVICE)):
            check = task.check
            lost = {"id": check.id, "family": check.family, "status": "error"}
            row = lost | {"detail": f"{answer.code}: {answer.message}"} if isinstance(answer, RollerError) else answer
            self.record.add("verification", row)
            print(f"{row['status']:>9}  {row['id']}  {row['detail'][:160]}", flush=True)

    def sanitize(self, found: list[Check]) -> None:
        if self.options.dry or self.late(SANITIZED_BY):
            self.record.add("skipped", {"stage": "sanitize", "tasks": len(found)})
            return
        for row in sanitize(found, self.options.target, max(10.0, self.left_s(SANITIZED_BY))):
            self.record.add("sanitizer", row)
            print(f"{row['status']:>9}  {row['tool']}", flush=True)

    def measure(self, cases: Sequence[TimedCase]) -> None:
        """Kernels are built on all cores but one while those that are ready are timed, one at a time."""
        options = self.options
        ours: Lane[TimingTask, Json] = Lane(timed, options.timeout_s)
        theirs: Lane[TimedCase, Json | None] = Lane(peer_timed, options.timeout_s)
        tasks = [BuildTask(case, options.target, options.top_k) for case in cases]
        try:
            for task, answer in self.until(MEASURED_BY, build, tasks, max(1, options.jobs - 1)):
                row: Json = {"id": task.case.id, "cls": task.case.cls, "dtype": task.case.dtype,
                             "flops": task.case.flops}  # fmt: skip
                if isinstance(answer, RollerError):
                    row |= {"error": f"{answer.code}: {answer.message}"}
                elif options.dry:
                    row |= {"built": len(answer), "predicted_s": answer[0].predicted_s}
                else:
                    row |= _timed(ours, theirs, task.case, answer)
                self.record.add("measurements", row)
                print(_line(row), flush=True)
        finally:
            ours.close(at_once=True)
            theirs.close(at_once=True)


def _timed(
    ours: Lane[TimingTask, Json], theirs: Lane[TimedCase, Json | None], case: TimedCase, built: tuple[Built, ...]
) -> Json:
    """Our times and the library's, each from a process of its own: what breaks one leaves the other."""
    row: Json = {}
    try:
        row |= ours.call(TimingTask(case, built))
    except RollerError as failure:
        row["error"] = f"{failure.code}: {failure.message}"
    try:
        row["peer"] = theirs.call(case)
    except RollerError as failure:
        row["peer"] = {"error": f"{failure.code}: {failure.message}"}
    return row


def _line(row: Json) -> str:
    if "error" in row:
        return f"{'error':>9}  {row['id']}  {row['error'][:160]}"
    if "best_s" not in row:
        return f"{'built':>9}  {row['id']}  {row['built']} candidates"
    peer = row.get("peer") or {}
    beside = f", {peer['name']} {peer['seconds'] * 1e6:.1f} us" if "seconds" in peer else ""
    wrong = "" if not row["judged"].startswith("wrong") else f"  {row['judged'][:100]}"
    return f"{row['best_s'] * 1e6:>9.1f}  us {row['id']}, predicted {row['predicted_s'] * 1e6:.1f}{beside}{wrong}"


def plan(options: Options, found: Sequence[Check], cases: Sequence[TimedCase]) -> Json:
    """How much there is to do, and about how long it takes with these jobs; a device times one case at a time."""
    jobs = min(options.jobs, MOST_JOBS_ON_DEVICE)
    verifying, building = len(found) * CHECK_S / jobs, len(cases) * BUILD_S / max(1, options.jobs - 1)
    return {"checks": len(found), "cases": len(cases), "verify_s": verifying,
            "measure_s": max(building, len(cases) * TIMING_S)}  # fmt: skip


def run(options: Options) -> int:
    """All stages; the exit code."""
    about = machine.here() | {"dry": options.dry, "minutes": options.minutes}
    if not options.dry:
        lack = machine.missing()
        if lack is not None:
            print(f"bench/gpu: {lack}")
            return NO_DEVICE
        opened: Lane[object, Json] = Lane(machine.device, options.timeout_s)
        try:
            about["device"] = opened.call(None)
        except RollerError as failure:
            print(f"bench/gpu: {failure.message}")
            return NO_DEVICE
        finally:
            opened.close()
    target = _target(options, about.get("device"))
    if target is None:
        print("bench/gpu: there is no spec for this device in hwspecs/: --target names one that comes close")
        return NO_DEVICE
    return _run(dataclasses.replace(options, target=target), about | {"target": target})


def _run(options: Options, about: Json) -> int:
    found = [check for check in checks() if options.only.search(check.id)]
    cases = [case for case in (*references(), *sampled_cases(DATA, options.each)) if options.only.search(case.id)]
    about["plan"] = plan(options, found, cases)
    print("\n".join(f"{key}: {value}" for key, value in about.items()), flush=True)
    record = Record(options.out, about)
    session = Session(options, record)
    if "verify" in options.stages:
        session.verify(found)
    if "sanitize" in options.stages:
        session.sanitize(sample(found))
    if "measure" in options.stages:
        if not options.dry:
            record.document["bandwidth"] = _alone(copy_bandwidth, None, options.timeout_s)
            record.document["calibration"] = _alone(calibrated, CALIBRATION_S, options.timeout_s)
        session.measure(cases)
    if not options.dry:
        record.document["about"]["clocks_after"] = machine.clocks()
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


def _alone(work: Callable[[T], Json], task: T, timeout_s: float) -> Json:
    """In a process of its own: what breaks it leaves the rest."""
    lane: Lane[T, Json] = Lane(work, timeout_s)
    try:
        return lane.call(task)
    except RollerError as failure:
        return {"error": f"{failure.code}: {failure.message}"}
    finally:
        lane.close(at_once=True)


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
    parser.add_argument("--minutes", type=float, default=9.0, help="for everything (default: %(default)s)")
    parser.add_argument("--dry", action="store_true", help="no device: compile everything, emulate what can be")
    parser.add_argument("--only", type=re.compile, default=re.compile(""), help="ids that this pattern is found in")
    parser.add_argument("--stages", type=lambda text: tuple(text.split(",")), default=STAGES,
                        help="some of verify,sanitize,measure (default: all)")  # fmt: skip
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes (default: the cores)")
    parser.add_argument("--seeds", type=int, default=3, help="sets of inputs for a check (default: %(default)s)")
    parser.add_argument("--each", type=int, default=3, help="cases of every class and type (default: %(default)s)")
    parser.add_argument("--top-k", type=int, default=4, help="candidates timed of a case (default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=90.0, help="seconds for one check or case")
    options = parser.parse_args(words)
    unknown = set(options.stages) - set(STAGES)
    if unknown:
        parser.error(f"--stages takes some of {', '.join(STAGES)}, not {', '.join(sorted(unknown))}")
    return Options(
        options.out, options.target, options.minutes, options.dry, options.only, options.stages, options.jobs,
        options.seeds, options.each, options.top_k, options.timeout,
    )  # fmt: skip


def main() -> int:
    return run(parsed())
