"""nvMatmulHeuristics' tiles beside the model's own, for half-precision products on Ampere and Hopper → JSON.

    pip install 'roller-svc[bench]'
    python -m roller_svc.bench.compare_nvmatmulheuristics --out FILE.json

No device is needed: both know their devices from descriptions. Two of its back ends are asked: `cutlass`, which knows
mma.sync as our kernels of warps do, and `cutlass3`, which on Hopper knows wgmma and clusters, as those of warpgroups
do. Agreement is reported, nothing is fitted to it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from itertools import product as pairs
from pathlib import Path
from typing import Any

from roller_svc import hardware
from roller_svc.analysis.operand import operands
from roller_svc.bench.cases import BenchCase, performance_cases
from roller_svc.bench.model.regret import median_abs_log_ratio, spearman
from roller_svc.compiler.partition_cache import partition
from roller_svc.compiler.rank import rank_units
from roller_svc.construct.rules import Base
from roller_svc.families import prepare
from roller_svc.families.common.gpu.matrix.tile import COLUMNS, ROWS
from roller_svc.families.gpu.mma_contraction.rules import MmaContraction
from roller_svc.families.gpu.wgmma_contraction.rules import WgmmaContraction
from roller_svc.families.matching import units_for
from roller_svc.ir.constraints import NO_CONSTRAINTS
from roller_svc.ir.dtype import DType
from roller_svc.ir.estimate import Candidate
from roller_svc.ir.group import AxisRole, GroupKind, KernelGroup
from roller_svc.ir.hardware import ComputeUnit, HardwareSpec, UnitKind
from roller_svc.ir.rprogram import RProgram
from roller_svc.perf.footprint import Tile
from roller_svc.perf.model import Model

Json = dict[str, Any]

WHEEL, MODULE = "nvidia-matmul-heuristics", "nvMatmulHeuristics"
GPUS = {  # our id: its name
    "nvidia-a100-sxm-80gb": "A100_SXM_80GB",
    "nvidia-h100-sxm": "H100_SXM",
    "nvidia-h200-sxm": "H200_SXM",
}
BACKENDS = ("cutlass", "cutlass3")
PRECISIONS = {DType.FLOAT16: "HSH", DType.BFLOAT16: "TST"}  # operands, sums in float32, results
FIRST = 10  # choices of either that are compared
SQUARES = (512, 1024, 2048, 3072, 4096, 6144, 8192, 12288, 16384)
SKINNY_ROWS, SKINNY_SIDES = (16, 32, 64, 128, 256), (2048, 4096, 8192, 16384)
DEEP_SIDES, DEEP_K = (128, 256, 512, 1024), (16384, 65536)
PARTS = (1, 2, 4, 8)  # that its tile is cut into for our warps, and its step for ours
LEAST_STEP = 16  # along k, of one instruction
CONSUMERS = (1, 2, 3)  # warpgroups that share a block's tile along one side
GROUP_STEP = 64  # along k: rows of 128 bytes, the widest that is swizzled
CASES = Path(__file__).resolve().parents[2] / "bench" / "data" / "public.json"


@dataclass(frozen=True, slots=True)
class Product:
    """C[b, m, n] = sum over k of A * B; `a_along_k`, `b_along_k`: whether rows of A and B in memory lie along k."""

    id: str
    case: BenchCase
    batch: int
    m: int
    n: int
    k: int
    dtype: DType
    a_along_k: bool
    b_along_k: bool

    @property
    def layout(self) -> str:
        """Its name of how the operands lie; results in rows along n."""
        return f"{'N' if self.a_along_k else 'T'}{'T' if self.b_along_k else 'N'}_ROW_MAJOR"

    @property
    def content(self) -> tuple[object, ...]:
        return self.batch, self.m, self.n, self.k, self.dtype, self.layout


@dataclass(frozen=True, slots=True)
class Choice:
    """A kernel that it suggests, and the seconds that it expects. Tiles are (m, n, k)."""

    tile: tuple[int, int, int]
    warp: tuple[int, int, int]
    stages: int
    split_k: int
    cluster: tuple[int, int]
    seconds: float

    def described(self) -> Json:
        return {
            "tile": list(self.tile), "warp": list(self.warp), "stages": self.stages, "split_k": self.split_k,
            "cluster": list(self.cluster), "seconds": self.seconds,
        }  # fmt: skip


class Heuristics:
    """The wheel, for one device and back end."""

    def __init__(self, gpu: str, backend: str) -> None:
        wheel = import_module(MODULE)
        self._layouts = wheel.NvMatmulHeuristicsMatmulLayout
        self._library = wheel.NvMatmulHeuristicsInterfaceEx(
            backend=wheel.NvMatmulHeuristicsTarget[backend.upper()],
            flags=wheel.NvMatmulHeuristicsFlags.PERF_MODEL_BASED_AUTO_TUNING,
            gpu=wheel.NvMatmulHeuristicsNvidiaGpu[gpu],
        )

    def choices(self, product: Product) -> list[Choice]:
        """Its first ones, best first; there may be fewer than `FIRST`."""
        layout = self._layouts[product.layout]
        problem = self._library.makeNvMatmulHeuristicsProblem(product.m, product.n, product.k, layout, product.batch)
        return [_choice(row) for row in self._library.get(problem, FIRST, PRECISIONS[product.dtype])]


def _choice(row: Json) -> Choice:
    kernel = row["kernel"]
    return Choice(
        (kernel.cta_tile_m, kernel.cta_tile_n, kernel.cta_tile_k),
        (kernel.warp_tile_m, kernel.warp_tile_n, kernel.warp_tile_k),
        kernel.stages, kernel.split_k, (kernel.cluster_m, kernel.cluster_n), row["runtime"],
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Pricing:
    """What the model makes of another's tile in our kernel on one unit."""

    rules: MmaContraction | WgmmaContraction
    model: Model[Any]

    @classmethod
    def of(cls, group: KernelGroup, hw: HardwareSpec, unit: ComputeUnit) -> Pricing:
        family, workload = prepare(group, hw, unit)
        rules = family.rules(workload)
        assert isinstance(rules, MmaContraction | WgmmaContraction)
        return cls(rules, family.model(workload))

    def least(self, choice: Choice, part: tuple[int, int], k: int) -> float | None:
        """Seconds with its tile and split, in steps of k and in the best of the ways that our rules know; `part`: of
        the tile, (m, n) of a warp or warpgroup. None where the rules refuse that."""
        p = self.rules.workload
        m, n, _ = choice.tile
        block, thread = self._tile(m, n, k), self._tile(*part, 1)
        base = Base(thread, *self.rules.lane_choices())
        if m % part[0] or n % part[1] or (look := self.rules.look(block, base)).too_large or look.misaligned:
            return None
        touched = p.touched
        plain = RProgram(
            p.space, p.machine.unit, touched.rtile(block), touched.rtile(thread), base.lanes, choice.split_k
        )
        ways = [
            replace(
                plain, stages=way.stages, raster=way.raster, stream_k_blocks=way.stream_k, persistent_blocks=way.blocks,
                cluster=way.cluster,
            )
            for way in self.rules.pipelines(block, base, choice.split_k)
        ]  # fmt: skip
        return min(self.model.timed(way).seconds for way in ways)

    def _tile(self, m: int, n: int, k: int) -> Tile:
        p = self.rules.workload
        extents = {p.m: m, p.n: n, p.k: k}
        return tuple(extents.get(i, 1) for i in range(len(p.extents)))


class Ours:
    """The model of one product on the matrix units of one device, and the candidates that it puts first."""

    def __init__(self, product: Product, hw: HardwareSpec) -> None:
        (group,) = partition(product.case.program(), hw)
        found, _ = rank_units(group, hw, FIRST)
        self.candidates: tuple[Candidate, ...] = found
        self.on_matrix_unit = found[0].program.unit.is_matrix
        self._warps = Pricing.of(group, hw, _matrix_unit(hw, product.dtype))
        taken = units_for(group, hw, NO_CONSTRAINTS).taken
        self._warpgroups = [Pricing.of(group, hw, unit) for unit in taken if unit.kind is UnitKind.WGMMA]

    def seconds(self, choice: Choice) -> float | None:
        """What the model expects of our kernel with the tile and the split that the other chose, on warps or on
        warpgroups. On warps with its own, or, where registers do not suffice for those and its steps, others that do
        the best. None where our kernels cannot have the tile at all."""
        found = [self.own_seconds(choice), *self._on_warpgroups(choice)]
        if found[0] is None:
            found += self._on_other_warps(choice)
        return min((seconds for seconds in found if seconds is not None), default=None)

    def own_seconds(self, choice: Choice) -> float | None:
        """On warps, with its warps and step alone."""
        return self._warps.least(choice, choice.warp[:2], choice.tile[2])

    def _on_other_warps(self, choice: Choice) -> Iterator[float | None]:
        m, n, k = choice.tile
        warps = [(m // i, n // j) for i, j in pairs(PARTS, PARTS) if m % (i * ROWS) == n % (j * COLUMNS) == 0]
        steps = [k // part for part in PARTS if k % part == 0 and k // part >= LEAST_STEP]
        return (self._warps.least(choice, warp, step) for warp, step in pairs(warps, steps))

    def _on_warpgroups(self, choice: Choice) -> Iterator[float | None]:
        """Which share its tile, in steps of 128 bytes."""
        m, n, _ = choice.tile
        shares = [(m // i, n // j) for i, j in pairs(CONSUMERS, CONSUMERS) if m % i == n % j == 0]
        return (kernel.least(choice, share, GROUP_STEP) for kernel in self._warpgroups for share in shares)


def _matrix_unit(hw: HardwareSpec, dtype: DType) -> ComputeUnit:
    return next(u for u in hw.units if u.kind is UnitKind.MMA and u.in_dtype is dtype)


def tile_of(program: RProgram) -> tuple[int, int]:
    """The block's tile of the output."""
    (m,), (n,) = program.space.role(AxisRole.M), program.space.role(AxisRole.N)
    return program.block[m.name], program.block[n.name]


def products(cases: Path) -> list[Product]:
    """Each product of half-precision matrices among the cases, once, and those of the grid."""
    hw = hardware.load(next(iter(GPUS)))
    found: dict[tuple[object, ...], Product] = {}
    for case in (*performance_cases(cases), *grid()):
        one = as_product(case, hw)
        if one is not None:
            found.setdefault(one.content, one)
    return list(found.values())


def grid() -> Iterator[BenchCase]:
    """Squares, thin products, and products with a long k."""
    sizes = [(s, s, s) for s in SQUARES]
    sizes += [(m, n, k) for m in SKINNY_ROWS for n, k in pairs(SKINNY_SIDES, SKINNY_SIDES)]
    sizes += [(s, s, k) for s, k in pairs(DEEP_SIDES, DEEP_K)]
    for m, n, k in sizes:
        inputs = {
            "A": {"dtype": "float16", "shape": [m, k]},
            "B": {"dtype": "float16", "shape": [n, k]},
        }
        yield BenchCase(f"grid-{m}x{n}x{k}", "grid", "C[m, n] +=! A[m, k] * B[n, k]", inputs, None)


def as_product(case: BenchCase, hw: HardwareSpec) -> Product | None:
    """The case, where it is one product of two matrices in memory, of one of the types, and nothing else."""
    groups = partition(case.program(), hw)
    if len(groups) != 1 or groups[0].kind is not GroupKind.CONTRACTION or len(groups[0].statements) != 1:
        return None
    a, b = operands(groups[0])
    plain = all(o.source is not None and o.guard is None for o in (a, b))
    # a gathered operand, or the windows of an image, is no matrix
    dims = [dim for access in groups[0].space.accesses for dim in access.dims]
    if not plain or a.dtype is not b.dtype or a.dtype not in PRECISIONS:
        return None
    if any(dim.opaque or len(dim.coeffs) > 1 for dim in dims):
        return None
    batch, m, n, k = (_extent(groups[0], r) for r in (AxisRole.BATCH, AxisRole.M, AxisRole.N, AxisRole.K))
    return Product(case.id, case, batch, m, n, k, a.dtype, a.along_k, b.along_k)


def _extent(group: KernelGroup, role: AxisRole) -> int:
    extent = 1
    for axis in group.space.role(role):
        extent *= axis.extent
    return extent


def row(product: Product, ours: Ours, choices: Sequence[Choice]) -> Json:
    """One product on one device: its first choice and ours, and what the model says of its choices in our kernel."""
    best = ours.candidates[0]
    priced = [(choice, ours.seconds(choice)) for choice in choices]
    both = [(choice.seconds, seconds) for choice, seconds in priced if seconds is not None]
    theirs, mine = choices[0].tile[:2], [tile_of(c.program) for c in ours.candidates]
    cost = priced[0][1]
    return {
        "id": product.id, "cls": product.case.cls,
        "size": [product.batch, product.m, product.n, product.k], "dtype": product.dtype.value,
        "layout": product.layout,
        "theirs": choices[0].described(),
        "ours": described(best) | {"seconds": best.estimate.seconds, "bound": best.estimate.bound},
        "registers_suffice": ours.own_seconds(choices[0]) is not None,
        "tile_first": theirs == mine[0], "tile_in_ten": theirs in mine,
        "ours_in_their_ten": mine[0] in [choice.tile[:2] for choice in choices],
        "their_tile_over_ours": None if cost is None else cost / best.estimate.seconds,
        "spearman_of_choices": spearman(both),
    }  # fmt: skip


def described(candidate: Candidate) -> Json:
    program = candidate.program
    (k,) = program.space.role(AxisRole.K)
    warp = [program.thread[axis.name] for role in (AxisRole.M, AxisRole.N) for axis in program.space.role(role)]
    return {
        "tile": [*tile_of(program), program.block[k.name]], "warp": warp, "stages": program.stages,
        "split_k": program.split_k, "stream_k": program.stream_k_blocks, "unit": program.unit.name,
    }  # fmt: skip


def summary(rows: Sequence[Json]) -> Json:
    """Shares of products, and medians over them; times are compared over all products."""
    times = [(one["ours"]["seconds"], one["theirs"]["seconds"]) for one in rows]
    costs = sorted(one["their_tile_over_ours"] for one in rows if one["their_tile_over_ours"] is not None)
    ranked = [one["spearman_of_choices"] for one in rows if one["spearman_of_choices"] is not None]
    return {
        "products": len(rows),
        "registers_suffice": _share(rows, "registers_suffice"),
        "tile_first": _share(rows, "tile_first"), "tile_in_ten": _share(rows, "tile_in_ten"),
        "ours_in_their_ten": _share(rows, "ours_in_their_ten"),
        "cannot_have_their_tile": (len(rows) - len(costs)) / len(rows),
        "their_tile_over_ours": {
            "median": statistics.median(costs), "p90": costs[min(len(costs) - 1, int(0.9 * len(costs)))],
            "within_5_percent": sum(cost <= 1.05 for cost in costs) / len(costs),
            "under_98_percent": sum(cost < 0.98 for cost in costs) / len(costs),
        } if costs else None,
        "spearman_of_choices_median": statistics.median(ranked) if ranked else None,
        "spearman_of_seconds": spearman(times),
        "median_abs_log_ratio": median_abs_log_ratio(times),
        "ours_over_theirs_median": statistics.median(mine / theirs for mine, theirs in times),
    }  # fmt: skip


def _share(rows: Sequence[Json], field: str) -> float:
    return float(sum(one[field] for one in rows) / len(rows))


def compared(products: Sequence[Product], target: str, *, with_rows: bool = True) -> Json:
    """One device: for each back end the summary, by class too, and a row for each product."""
    hw = hardware.load(target)
    asked = {backend: Heuristics(GPUS[target], backend) for backend in BACKENDS}
    rows: dict[str, list[Json]] = {backend: [] for backend in BACKENDS}
    left_out = []
    for product in products:
        ours = Ours(product, hw)
        if not ours.on_matrix_unit:
            left_out.append(product.id)
            continue
        for backend, heuristics in asked.items():
            rows[backend].append(row(product, ours, heuristics.choices(product)))
    return {
        backend: _backend(found, left_out) | ({"cases": found} if with_rows else {}) for backend, found in rows.items()
    }


def _backend(rows: list[Json], left_out: list[str]) -> Json:
    classes = sorted({one["cls"] for one in rows})
    return {
        "overall": summary(rows),
        "classes": {cls: summary([one for one in rows if one["cls"] == cls]) for cls in classes},
        "not_on_a_matrix_unit": left_out,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=Path, default=CASES)
    parser.add_argument("--target", action="append", choices=tuple(GPUS), help="default: all; may be repeated")
    parser.add_argument("--brief", action="store_true", help="leave out the rows of single products")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the JSON there; default: stdout")
    options = parser.parse_args()
    try:
        found = version(WHEEL)
    except PackageNotFoundError:
        raise SystemExit(f"{WHEEL} is not there: pip install 'roller-svc[bench]'") from None
    todo = products(options.cases)
    devices = {}
    for target in options.target or GPUS:
        devices[target] = compared(todo, target, with_rows=not options.brief)
        for backend in BACKENDS:
            print(target, backend, json.dumps(devices[target][backend]["overall"]), file=sys.stderr)
    document = {"date": time.strftime("%Y-%m-%d"), WHEEL: found, "first": FIRST, "devices": devices}
    text = json.dumps(document, indent=1) + "\n"
    if options.out:
        options.out.write_text(text, encoding="utf-8")
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
