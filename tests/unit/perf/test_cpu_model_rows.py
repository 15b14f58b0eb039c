"""Reductions in the model of CPUs: chains of joins, rows that begin together, rows that are walked once."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from tile_spaces import COSTS, with_costs

from roller_svc import hardware
from roller_svc.ir.dtype import DType
from roller_svc.ir.estimate import Estimate
from roller_svc.perf.model import Model
from tests.unit.families.cpu.test_cost_terms import F32, estimated_program, model_of, stage


def by_lanes(model: Model, lanes: int, rows: int = 1) -> Estimate:
    """All rows in a block, `rows` of them at hand, each walked by so many lanes."""
    return model.estimate(replace(estimated_program(model, {}, {"i": rows}), reduce_threads=lanes))


def test_rows_of_columns_that_begin_together_wait_together() -> None:
    """The narrower the pieces of columns the more stretches of memory begin, whether these fill pages or not; what each
    waits is small, for eight rows wait at once."""
    model = model_of("y[j] +=! x[k, j]", {"x": (F32, (4096, 4096))})
    blocks = (4096, 2048, 1024, 512, 256)
    times = [stage(model.estimate(estimated_program(model, {"j": j}, {"j": 64})), "dram") for j in blocks]
    assert times == sorted(times)
    assert 1.05 * times[0] < times[-1] < 2.0 * times[0]


def test_loads_hide_where_joins_wait_for_each_other() -> None:
    """One accumulator to a row: only the chain of additions counts. Four of them wait less than loads take."""
    model = model_of("y[i] +=! x[i, k]", {"x": (F32, (16, 1024))})
    slow = with_costs(model, replace(COSTS, loops=replace(COSTS.loops, accumulate_latency_cycles=4.0)))
    assert stage(by_lanes(slow, 16), "loads") == 0.0
    assert stage(by_lanes(slow, 64), "loads") > 0.0
    assert by_lanes(slow, 16).seconds > by_lanes(slow, 64).seconds


def test_a_mean_walks_its_rows_once() -> None:
    """The quotient of a sum is one value of a row: several rows at hand begin no walk anew."""
    model = model_of("s[i] +=! x[i, k]; y[i] = s[i] / 7.0", {"x": (F32, (65536, 1024))}, ("y",))
    one, four = (stage(by_lanes(model, 16, rows), "dram") for rows in (1, 4))
    assert four == pytest.approx(one, rel=2e-3)  # one loop over rows for all four


def test_a_core_that_runs_ahead_of_prefetchers_reads_slower() -> None:
    """The more accumulators, the fewer operations a loop has for each line; maxima have more of them than sums, and
    what ends a short row counts too."""
    sums, maxima = (model_of(f"y[i] {join} x[i, k]", {"x": (F32, (65536, 1024))}) for join in ("+=!", ">=!"))
    times = [stage(by_lanes(sums, lanes), "dram") for lanes in (16, 32, 64)]
    assert times[2] > 1.005 * times[1] > times[0]
    assert stage(by_lanes(maxima, 16), "dram") < times[0]
    short = model_of("y[i] +=! x[i, k]", {"x": (F32, (1 << 20, 64))})  # as many bytes
    assert stage(by_lanes(short, 64), "dram") < 0.99 * times[2]


@pytest.mark.parametrize("row", [512, 3072, 3584, 16384])
def test_a_faster_cache_never_costs_results_past_it(row: int) -> None:
    """Reads of a norm come sooner then, and hide less of its results; what is read meanwhile hides beside them only as
    far as rows overlap."""
    text = (
        "q[M] +=! x[M, K].cast(`float32`) * x[M, K].cast(`float32`); "
        "y[M, K] = (x[M, K].cast(`float32`) * (q[M] / 3072.0 + 1e-05).call(`rsqrt`)).cast(`float16`) * w[K]"
    )
    hw = hardware.load("cpu-x86-avx2")
    seconds = []
    for faster in (1.0, 1.25, 1.5, 2.0, 4.0):
        levels = tuple(
            replace(level, bandwidth_bytes_per_s=level.bandwidth_bytes_per_s * (faster if level.name == "l3" else 1.0))
            for level in hw.levels
        )
        shapes = {"x": (DType.FLOAT16, (4096, row)), "w": (DType.FLOAT16, (row,))}
        model = model_of(text, shapes, ("y",), replace(hw, levels=levels))
        program = replace(estimated_program(model, {"M": 2048}, {}), reduce_threads=32).with_pipeline(nontemporal=True)
        seconds.append(model.estimate(program).seconds)
    assert all(after <= before for before, after in pairwise(seconds))
