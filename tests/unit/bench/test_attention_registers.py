"""bench/attention_registers: the grid of tiles, rows and summaries."""

from __future__ import annotations

from roller_bench import attention_registers as registers
from roller_svc.ir.hardware import UnitKind


def test_the_constants_of_the_report_exist() -> None:
    assert all(hasattr(registers.attention_tile, name) for name in registers.WARP_CONSTANTS)
    assert all(hasattr(registers.wgmma_attention, name) for name in registers.WARPGROUP_CONSTANTS)


def test_the_grid_reaches_the_limit_from_both_sides() -> None:
    found = list(registers.cases([128]))
    assert len({case.id for case in found}) == len(found)
    for kind in (UnitKind.MMA, UnitKind.WGMMA):
        off = [case.counted - case.limit for case in found if case.kind is kind]
        assert min(off) < -registers.INSTRUCTION_GRANULE
        assert max(off) > registers.INSTRUCTION_GRANULE


def test_a_small_tile_takes_fewer_registers_than_are_counted_and_spills_none() -> None:
    case = next(c for c in registers.cases([64]) if c.kind is UnitKind.WGMMA and "1 consumers" in c.id)
    row = registers.row(case)
    assert row["spill_bytes"] == 0
    assert 0 < row["registers"] <= row["limit"]
    assert row["counted"] < row["limit"]


def test_a_count_is_short_by_what_a_tile_that_is_taken_and_spills_has_left() -> None:
    def row(counted: int, spill_bytes: int = 0) -> dict[str, int]:
        return {"counted": counted, "limit": 100, "registers": 97, "spill_bytes": spill_bytes}

    found = registers.summary([row(98, 8), row(95), row(101), row(102, 4)])
    assert (found["taken_and_spilled"], found["refused_in_vain"], found["short"]) == (1, 1, 3)
    assert found["over"] == {"least": -2, "median": 1, "most": 4}
    assert registers.summary([row(102, 4)])["short"] == -1
    assert registers.summary([row(95)])["short"] is None
