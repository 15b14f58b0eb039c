"""Samples of the CPU benchmark → rows, figures of classes, and the machine they were taken on."""

from __future__ import annotations

import datetime
import math
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roller_svc import toolchain
from roller_svc.bench.cases import BenchCase
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
    """Seconds a call of every accepted sample, in turns; how many were taken again; and the FMA peak beside each of
    ours, where it was measured."""

    seconds: dict[str, list[float]]
    repeated: int
    peaks: tuple[float, ...] = ()

    def min_s(self, name: str) -> float:
        return min(self.seconds[name])

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name])

    def fma_fraction(self, flops: int) -> float | None:
        """The median of what each sample of ours reached of the peak beside it."""
        shares = [flops / s / peak for s, peak in zip(self.seconds[ROLLER], self.peaks, strict=False)]
        return statistics.median(shares) if shares else None


@dataclass(frozen=True, slots=True)
class Bound:
    """What a program must do, and the least time that the machine's measured limits allow for it."""

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
    """Every input read once (or as much of it as the statements can read), every output written once."""
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
    """The figures of one case; `ratio` is the fastest peer's least time over ours."""
    peers = [name for name in samples.seconds if name != ROLLER]
    ours, median = samples.min_s(ROLLER), samples.median(ROLLER)
    min_s = {name: samples.min_s(name) for name in peers}
    medians = {name: samples.median(name) for name in peers}
    share = samples.fma_fraction(bound.flops)
    return {
        "id": case.id,
        "cls": case.cls,
        "ours_s": ours,
        "ours_median_s": median,
        "peers": min_s,
        "peers_median": medians,
        "best_peer": min(min_s, key=lambda name: min_s[name]) if min_s else None,
        "ratio": min(min_s.values()) / ours if min_s else None,
        "median_ratio": min(medians.values()) / median if medians else None,
        "gflops": bound.flops / ours / 1e9,
        "gb_per_s": bound.bytes / ours / 1e9,
        "share_of_peak": share if bound.name == "fma" and share else bound.seconds / ours,
        "bound": bound.name,
        "samples": min(len(s) for s in samples.seconds.values()),
        "repeated": samples.repeated,
        "error": None,
    }


def failed_row(case: BenchCase, failure: RollerError) -> Json:
    """The row of a case that came to no right kernel."""
    return {"id": case.id, "cls": case.cls, "ours_s": None, "peers": {}, "ratio": None,
            "error": f"{failure.code}: {failure.message}"}  # fmt: skip


def metrics(rows: Sequence[Json]) -> Json:
    """Geometric mean, least and median of the ratios there are; seconds to a kernel."""
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
    """The figures of all rows and of every class."""
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
    """What was measured on, with what, when."""
    return {
        "cpu": host_name(), "target": hw.id, "arch": str(hw.arch), "isa": list(hw.isa),
        "vector_bytes": hw.vector_bytes, "cores": hw.num_cores, "roller": __version__, "commit": _commit(),
        "compiler": toolchain.versions().get("cc"),
        "date": datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="seconds"),
    }  # fmt: skip


def p95(ordered: Sequence[float]) -> float | None:
    return ordered[math.ceil(0.95 * len(ordered)) - 1] if ordered else None


def _geomean(ratios: Sequence[float]) -> float | None:
    return math.exp(statistics.fmean(math.log(r) for r in ratios)) if ratios else None


def _commit() -> str | None:
    """The checkout's commit; None outside one."""
    folder = Path(__file__).resolve().parents[3]
    if not (folder / ".git").exists():
        return None
    command = ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None
