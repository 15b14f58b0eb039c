"""Compare the tiles of nvMatmulHeuristics with the model's, for half-precision products on Ampere and Hopper.

    pip install 'roller-svc[bench]'
    python -m roller_bench.compare_nvmatmulheuristics --out FILE.json

No device is needed: both use descriptions of devices. Two back ends are queried: `cutlass` (mma.sync) and `cutlass3`
(wgmma and clusters on Hopper). Nothing is fitted to the agreement.
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

from roller_bench import DATA
from roller_bench.cases import BenchCase, performance_cases
from roller_bench.model.regret import median_abs_log_ratio, spearman
from roller_svc import hardware
from roller_svc.analysis.operand import operands
from roller_svc.compiler.partition_cache import partition
from roller_svc.compiler.rank import rank_units
from roller_svc.construct.rules import ThreadTile
from roller_svc.families import prepare
from roller_svc.families.common.gpu.matrix.tile import COLUMNS, ROWS
from roller_svc.families.gpu.mma_contraction.rules import MmaContractionRules
from roller_svc.families.gpu.wgmma_contraction.rules import WgmmaContractionRules
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
GPUS = {  # device id: name in nvMatmulHeuristics
    "nvidia-a100-sxm-80gb": "A100_SXM_80GB",
    "nvidia-h100-sxm": "H100_SXM",
    "nvidia-h200-sxm": "H200_SXM",
}
BACKENDS = ("cutlass", "cutlass3")
PRECISIONS = {DType.FLOAT16: "HSH", DType.BFLOAT16: "TST"}  # operands, float32 accumulators, results
FIRST = 10  # compared choices of each
SQUARES = (512, 1024, 2048, 3072, 4096, 6144, 8192, 12288, 16384)
SKINNY_ROWS, SKINNY_SIDES = (16, 32, 64, 128, 256), (2048, 4096, 8192, 16384)
DEEP_SIDES, DEEP_K = (128, 256, 512, 1024), (16384, 65536)
PARTS = (1, 2, 4, 8)  # divisors of its tile for our warps, and of its k-tile
MIN_STEP = 16  # k of one instruction
CONSUMERS = (1, 2, 3)  # warpgroups along one side of a block tile
GROUP_STEP = 64  # k-tile of warpgroups: rows of 128 bytes, the widest swizzle


@dataclass(frozen=True, slots=True)
class Product:
    """A product C[b, m, n] = sum over k of A * B."""

    id: str
    case: BenchCase
    batch: int
    m: int
    n: int
    k: int
    dtype: DType
    a_is_k_major: bool
    b_is_k_major: bool

    @property
    def layout(self) -> str:
        """Return the wheel's name of the operand layout; results are row-major."""
        return f"{'N' if self.a_is_k_major else 'T'}{'T' if self.b_is_k_major else 'N'}_ROW_MAJOR"

    @property
    def content(self) -> tuple[object, ...]:
        return self.batch, self.m, self.n, self.k, self.dtype, self.layout


@dataclass(frozen=True, slots=True)
class Choice:
    """A suggested kernel and its predicted seconds. Tiles are (m, n, k)."""

    tile: tuple[int, int, int]
    warp: tuple[int, int, int]
    stages: int
    split_k: int
    cluster: tuple[int, int]
    seconds: float

    def as_json(self) -> Json:
        return {
            "tile": list(self.tile),
            "warp": list(self.warp),
            "stages": self.stages,
            "split_k": self.split_k,
            "cluster": list(self.cluster),
            "seconds": self.seconds,
        }


class Heuristics:
    """nvMatmulHeuristics for one device and back end."""

    def __init__(self, gpu: str, backend: str) -> None:
        wheel = import_module(MODULE)
        self._layouts = wheel.NvMatmulHeuristicsMatmulLayout
        self._library = wheel.NvMatmulHeuristicsInterfaceEx(
            backend=wheel.NvMatmulHeuristicsTarget[backend.upper()],
            flags=wheel.NvMatmulHeuristicsFlags.PERF_MODEL_BASED_AUTO_TUNING,
            gpu=wheel.NvMatmulHeuristicsNvidiaGpu[gpu],
        )

    def choices(self, product: Product) -> list[Choice]:
        """Return at most `FIRST` suggestions, best first."""
        layout = self._layouts[product.layout]
        problem = self._library.makeNvMatmulHeuristicsProblem(product.m, product.n, product.k, layout, product.batch)
        return [_choice(row) for row in self._library.get(problem, FIRST, PRECISIONS[product.dtype])]


def _choice(row: Json) -> Choice:
    kernel = row["kernel"]
    return Choice(
        (kernel.cta_tile_m, kernel.cta_tile_n, kernel.cta_tile_k),
        (kernel.warp_tile_m, kernel.warp_tile_n, kernel.warp_tile_k),
        kernel.stages,
        kernel.split_k,
        (kernel.cluster_m, kernel.cluster_n),
        row["runtime"],
    )


@dataclass(frozen=True, slots=True)
class Pricing:
    """Estimates our kernel with a suggested tile on one compute unit."""

    rules: MmaContractionRules | WgmmaContractionRules
    model: Model[Any]

    @classmethod
    def of(cls, group: KernelGroup, hw: HardwareSpec, unit: ComputeUnit) -> Pricing:
        family, workload = prepare(group, hw, unit)
        rules = family.rules(workload)
        assert isinstance(rules, MmaContractionRules | WgmmaContractionRules)
        return cls(rules, family.model(workload))

    def fastest_s(self, choice: Choice, part: tuple[int, int], k: int) -> float | None:
        """Return the seconds with its tile and split, the k-tile `k` and the best pipeline options of our rules.

        `part` is the (m, n) tile of a warp or warpgroup. Returns None if the rules reject it.
        """
        p = self.rules.workload
        m, n, _ = choice.tile
        block, thread = self._tile(m, n, k), self._tile(*part, 1)
        base = ThreadTile(thread, *self.rules.reduce_thread_choices())
        if m % part[0] or n % part[1] or (metrics := self.rules.evaluate(block, base)).too_large or metrics.misaligned:
            return None
        footprint = p.footprint
        plain = RProgram(
            p.space,
            p.machine.unit,
            footprint.rtile(block),
            footprint.rtile(thread),
            base.reduce_threads,
            choice.split_k,
        )
        programs = [replace(plain, pipeline=options) for options in self.rules.pipeline_choices(block, base, choice.split_k)]
        return min(self.model.timed(program).seconds for program in programs)

    def _tile(self, m: int, n: int, k: int) -> Tile:
        p = self.rules.workload
        extents = {p.m: m, p.n: n, p.k: k}
        return tuple(extents.get(i, 1) for i in range(len(p.extents)))


class RollerModel:
    """The model's candidates for one product on the tensor cores of one device."""

    def __init__(self, product: Product, hw: HardwareSpec) -> None:
        (group,) = partition(product.case.program(), hw)
        found, _ = rank_units(group, hw, FIRST)
        self.candidates: tuple[Candidate, ...] = found
        self.on_matrix_unit = found[0].program.unit.is_matrix
        self._warps = Pricing.of(group, hw, _matrix_unit(hw, product.dtype))
        units = units_for(group, hw, NO_CONSTRAINTS).units
        self._warpgroups = [Pricing.of(group, hw, unit) for unit in units if unit.kind is UnitKind.WGMMA]

    def seconds(self, choice: Choice) -> float | None:
        """Return the predicted seconds of our kernel with a suggested tile and split, on warps or warpgroups.

        If its warp tile and k-tile exceed our registers, the best others are used. Returns None if our kernels cannot
        have the block tile.
        """
        found = [self.own_seconds(choice), *self._on_warpgroups(choice)]
        if found[0] is None:
            found += self._on_other_warps(choice)
        return min((seconds for seconds in found if seconds is not None), default=None)

    def own_seconds(self, choice: Choice) -> float | None:
        """Return the seconds on warps with its own warp tile and k-tile."""
        return self._warps.fastest_s(choice, choice.warp[:2], choice.tile[2])

    def _on_other_warps(self, choice: Choice) -> Iterator[float | None]:
        m, n, k = choice.tile
        warps = [(m // i, n // j) for i, j in pairs(PARTS, PARTS) if m % (i * ROWS) == n % (j * COLUMNS) == 0]
        steps = [k // part for part in PARTS if k % part == 0 and k // part >= MIN_STEP]
        return (self._warps.fastest_s(choice, warp, step) for warp, step in pairs(warps, steps))

    def _on_warpgroups(self, choice: Choice) -> Iterator[float | None]:
        """Return the seconds on warpgroups with k-tiles of 128 bytes."""
        m, n, _ = choice.tile
        shares = [(m // i, n // j) for i, j in pairs(CONSUMERS, CONSUMERS) if m % i == n % j == 0]
        return (kernel.fastest_s(choice, share, GROUP_STEP) for kernel in self._warpgroups for share in shares)


def _matrix_unit(hw: HardwareSpec, dtype: DType) -> ComputeUnit:
    return next(u for u in hw.units if u.kind is UnitKind.MMA and u.in_dtype is dtype)


def tile_of(program: RProgram) -> tuple[int, int]:
    """Return the block tile of the output."""
    (m,), (n,) = program.space.role(AxisRole.M), program.space.role(AxisRole.N)
    return program.block[m.name], program.block[n.name]


def products(cases: Path) -> list[Product]:
    """Return the distinct half-precision products of the cases and of the grid."""
    hw = hardware.load(next(iter(GPUS)))
    found: dict[tuple[object, ...], Product] = {}
    for case in (*performance_cases(cases), *grid()):
        one = as_product(case, hw)
        if one is not None:
            found.setdefault(one.content, one)
    return list(found.values())


def grid() -> Iterator[BenchCase]:
    """Yield square products, skinny products and products with a long k."""
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
    """Return a case as a product, or None if it is not a single product of two matrices of a supported type."""
    groups = partition(case.program(), hw)
    if len(groups) != 1 or groups[0].kind is not GroupKind.CONTRACTION or len(groups[0].statements) != 1:
        return None
    a, b = operands(groups[0])
    plain = all(o.source is not None and o.guard is None for o in (a, b))
    # gathered operands and sliding windows are not matrices
    dims = [dim for access in groups[0].space.accesses for dim in access.dims]
    if not plain or a.dtype is not b.dtype or a.dtype not in PRECISIONS:
        return None
    if any(not dim.is_affine or len(dim.coeffs) > 1 for dim in dims):
        return None
    batch, m, n, k = (_extent(groups[0], r) for r in (AxisRole.BATCH, AxisRole.M, AxisRole.N, AxisRole.K))
    return Product(case.id, case, batch, m, n, k, a.dtype, a.k_major, b.k_major)


def _extent(group: KernelGroup, role: AxisRole) -> int:
    extent = 1
    for axis in group.space.role(role):
        extent *= axis.extent
    return extent


def row(product: Product, roller: RollerModel, choices: Sequence[Choice]) -> Json:
    """Return the row of one product: both first choices, and estimates of the suggestions in our kernel."""
    best = roller.candidates[0]
    priced = [(choice, roller.seconds(choice)) for choice in choices]
    both = [(choice.seconds, seconds) for choice, seconds in priced if seconds is not None]
    their_tile, our_tiles = choices[0].tile[:2], [tile_of(c.program) for c in roller.candidates]
    cost = priced[0][1]
    return {
        "id": product.id,
        "cls": product.case.cls,
        "size": [product.batch, product.m, product.n, product.k],
        "dtype": product.dtype.value,
        "layout": product.layout,
        "theirs": choices[0].as_json(),
        "ours": candidate_json(best) | {"seconds": best.estimate.seconds, "bound": best.estimate.bound},
        "registers_suffice": roller.own_seconds(choices[0]) is not None,
        "tile_first": their_tile == our_tiles[0],
        "tile_in_ten": their_tile in our_tiles,
        "ours_in_their_ten": our_tiles[0] in [choice.tile[:2] for choice in choices],
        "their_tile_over_ours": None if cost is None else cost / best.estimate.seconds,
        "spearman_of_choices": spearman(both),
    }


def candidate_json(candidate: Candidate) -> Json:
    program = candidate.program
    (k,) = program.space.role(AxisRole.K)
    warp = [program.thread[axis.name] for role in (AxisRole.M, AxisRole.N) for axis in program.space.role(role)]
    return {
        "tile": [*tile_of(program), program.block[k.name]],
        "warp": warp,
        "stages": program.pipeline.stages,
        "split_k": program.split_k,
        "stream_k": program.pipeline.stream_k_blocks,
        "unit": program.unit.name,
    }


def summary(rows: Sequence[Json]) -> Json:
    """Return fractions and medians over the products."""
    times = [(one["ours"]["seconds"], one["theirs"]["seconds"]) for one in rows]
    costs = sorted(one["their_tile_over_ours"] for one in rows if one["their_tile_over_ours"] is not None)
    ranked = [one["spearman_of_choices"] for one in rows if one["spearman_of_choices"] is not None]
    return {
        "products": len(rows),
        "registers_suffice": _share(rows, "registers_suffice"),
        "tile_first": _share(rows, "tile_first"),
        "tile_in_ten": _share(rows, "tile_in_ten"),
        "ours_in_their_ten": _share(rows, "ours_in_their_ten"),
        "cannot_have_their_tile": (len(rows) - len(costs)) / len(rows),
        "their_tile_over_ours": {
            "median": statistics.median(costs),
            "p90": costs[min(len(costs) - 1, int(0.9 * len(costs)))],
            "within_5_percent": sum(cost <= 1.05 for cost in costs) / len(costs),
            "under_98_percent": sum(cost < 0.98 for cost in costs) / len(costs),
        }
        if costs
        else None,
        "spearman_of_choices_median": statistics.median(ranked) if ranked else None,
        "spearman_of_seconds": spearman(times),
        "median_abs_log_ratio": median_abs_log_ratio(times),
        "ours_over_theirs_median": statistics.median(roller_s / their_s for roller_s, their_s in times),
    }


def _share(rows: Sequence[Json], field: str) -> float:
    return float(sum(one[field] for one in rows) / len(rows))


def compared(products: Sequence[Product], target: str, *, with_rows: bool = True) -> Json:
    """One device: for each back end the summary, by class too, and a row for each product."""
    hw = hardware.load(target)
    queried = {backend: Heuristics(GPUS[target], backend) for backend in BACKENDS}
    rows: dict[str, list[Json]] = {backend: [] for backend in BACKENDS}
    left_out = []
    for product in products:
        roller = RollerModel(product, hw)
        if not roller.on_matrix_unit:
            left_out.append(product.id)
            continue
        for backend, heuristics in queried.items():
            rows[backend].append(row(product, roller, heuristics.choices(product)))
    return {backend: _backend(found, left_out) | ({"cases": found} if with_rows else {}) for backend, found in rows.items()}


def _backend(rows: list[Json], left_out: list[str]) -> Json:
    classes = sorted({one["cls"] for one in rows})
    return {
        "overall": summary(rows),
        "classes": {cls: summary([one for one in rows if one["cls"] == cls]) for cls in classes},
        "not_on_a_matrix_unit": left_out,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=Path, default=DATA / "public.json")
    parser.add_argument("--target", action="append", choices=tuple(GPUS), help="default: all; may be repeated")
    parser.add_argument("--brief", action="store_true", help="leave out the rows of single products")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the JSON there; default: stdout")
    options = parser.parse_args()
    try:
        found = version(WHEEL)
    except PackageNotFoundError:
        raise SystemExit(f"{WHEEL} is not installed: pip install 'roller-svc[bench]'") from None
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
