"""Rows, metrics by class and machine description of the CPU benchmark."""

from __future__ import annotations

import datetime
import math
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from roller_bench import CHECKOUT
from roller_bench.cases import BenchCase
from roller_svc import toolchain
from roller_svc.calibration.cpu.limits import Limits
from roller_svc.errors import RollerError
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.program import TensorProgram
from roller_svc.runtime.measure import host_name
from roller_svc.version import __version__

Json = dict[str, Any]
ROLLER = "ours"


@dataclass(frozen=True, slots=True)
class Samples:
    """Interleaved samples of one case."""

    seconds: dict[str, list[float]]  # per call, of roller ("ours") and of each baseline
    repeated: int  # samples that were repeated because of interference
    peaks: tuple[float, ...] = ()  # FMA peak at each of roller's samples, if measured

    def min_s(self, name: str) -> float:
        return min(self.seconds[name])

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name])

    def fma_fraction(self, flops: int) -> float | None:
        """Return the median fraction of the FMA peak over roller's samples."""
        shares = [flops / s / peak for s, peak in zip(self.seconds[ROLLER], self.peaks, strict=False)]
        return statistics.median(shares) if shares else None


@dataclass(frozen=True, slots=True)
class Bound:
    """The work of a program and its roofline bound by the machine's measured limits."""

    flops: int
    bytes: int
    flops_s: float
    bytes_s: float

    @property
    def name(self) -> str:
        return "fma" if self.flops_s >= self.bytes_s else "copy bandwidth"

    @property
    def seconds(self) -> float:
        return max(self.flops_s, self.bytes_s)


def roofline_bound(program: TensorProgram, limits: Limits) -> Bound:
    """Return the bound with every input read once (or its accessed part) and every output written once."""
    types = program.types
    reads: dict[str, int] = {}
    for statement in program.statements:
        for load in statement.reads:
            reads[load.tensor] = reads.get(load.tensor, 0) + statement.points * types[load.tensor].dtype.bytes
    read = sum(min(kind.bytes, reads.get(name, 0)) for name, kind in program.inputs)
    written = sum(types[out.tensor].bytes for out in program.outputs)
    moved = read + written
    return Bound(program.flops, moved, program.flops / limits.flops_per_s, moved / limits.copy_bytes_per_s(moved))


def case_row(case: BenchCase, samples: Samples, bound: Bound) -> Json:
    """Return the row of a case; `ratio` is the fastest baseline's minimum time over ours."""
    baselines = [name for name in samples.seconds if name != ROLLER]
    roller_s, median = samples.min_s(ROLLER), samples.median(ROLLER)
    min_s = {name: samples.min_s(name) for name in baselines}
    medians = {name: samples.median(name) for name in baselines}
    share = samples.fma_fraction(bound.flops)
    return {
        "id": case.id,
        "cls": case.cls,
        "ours_s": roller_s,
        "ours_median_s": median,
        "peers": min_s,
        "peers_median": medians,
        "best_peer": min(min_s, key=lambda name: min_s[name]) if min_s else None,
        "ratio": min(min_s.values()) / roller_s if min_s else None,
        "median_ratio": min(medians.values()) / median if medians else None,
        "gflops": bound.flops / roller_s / 1e9,
        "gb_per_s": bound.bytes / roller_s / 1e9,
        "share_of_peak": share if bound.name == "fma" and share else bound.seconds / roller_s,
        "bound": bound.name,
        "samples": min(len(s) for s in samples.seconds.values()),
        "repeated": samples.repeated,
        "error": None,
    }


def failed_row(case: BenchCase, failure: RollerError) -> Json:
    """Return the row of a case without a correct kernel."""
    return {
        "id": case.id,
        "cls": case.cls,
        "ours_s": None,
        "peers": {},
        "ratio": None,
        "error": f"{failure.code}: {failure.message}",
    }


def metrics(rows: Sequence[Json]) -> Json:
    """Return geometric mean, minimum and median of the ratios, and build times."""
    ratios = [row["ratio"] for row in rows if row["ratio"]]
    medians = [row["median_ratio"] for row in rows if row.get("median_ratio")]
    builds = sorted(row["build_s"] for row in rows if "build_s" in row)
    models = sorted(row["model_build_s"] for row in rows if "model_build_s" in row)
    return {
        "cases": len(rows),
        "compared": len(ratios),
        "errors": sum(row["error"] is not None for row in rows),
        "geomean_ratio": _geomean(ratios),
        "geomean_median_ratio": _geomean(medians),
        "min_ratio": min(ratios, default=None),
        "median_ratio": statistics.median(ratios) if ratios else None,
        "build_median_s": statistics.median(builds) if builds else None,
        "build_p95_s": p95(builds),
        "model_build_median_s": statistics.median(models) if models else None,
        "model_build_p95_s": p95(models),
    }


def summary(rows: Sequence[Json]) -> Json:
    """Return the metrics of all rows and of each class."""
    classes = dict.fromkeys(row["cls"] for row in rows)
    return metrics(rows) | {"classes": {cls: metrics([r for r in rows if r["cls"] == cls]) for cls in sorted(classes)}}


def limits_json(limits: Limits) -> Json:
    return {
        "flops_per_s": limits.flops_per_s,
        "bandwidths": [
            {"stream": b.stream.value, "level": b.level, "size_bytes": b.size_bytes, "bytes_per_s": b.bytes_per_s}
            for b in limits.bandwidths
        ],
    }


def machine(hw: HardwareSpec) -> Json:
    """Describe the machine, the compiler, the commit and the date."""
    return {
        "cpu": host_name(),
        "target": hw.id,
        "arch": str(hw.arch),
        "isa": list(hw.isa),
        "vector_bytes": hw.vector_bytes,
        "cores": hw.num_cores,
        "roller": __version__,
        "commit": _commit(),
        "compiler": toolchain.versions().get("cc"),
        "date": datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="seconds"),
    }


def p95(ordered: Sequence[float]) -> float | None:
    return ordered[math.ceil(0.95 * len(ordered)) - 1] if ordered else None


def _geomean(ratios: Sequence[float]) -> float | None:
    return math.exp(statistics.fmean(math.log(r) for r in ratios)) if ratios else None


def _commit() -> str | None:
    """Return the commit of the checkout, or None outside one."""
    if not (CHECKOUT / ".git").exists():
        return None
    command = ["git", "-C", str(CHECKOUT), "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None
