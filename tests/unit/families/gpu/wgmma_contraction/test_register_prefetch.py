"""Words of packed operands that a producer prefetches: which, how often, and what the model says."""

from __future__ import annotations

import pytest
from cases_matrix import contraction, unit
from schedule_support import program

from roller_svc import hardware
from roller_svc.analysis.operand import all_operands
from roller_svc.compiler.plans import best_plans, rank_best_partition
from roller_svc.families.common.gpu.warpgroups import tile as warpgroup_tile
from roller_svc.families.common.gpu.warpgroups.register_prefetch import RegisterPrefetch
from roller_svc.families.common.gpu.warpgroups.tile import (
    WgmmaOperand,
    WgmmaTile,
    launch_registers,
    plan_wgmma_loads,
)
from roller_svc.ir.program import TensorProgram
from roller_svc.ir.rprogram import PipelineOptions

HOPPER = hardware.load("nvidia-h200-sxm")
FIELD = "({word} >> ({place} * 4)).call(`bitwise_and`, [15]).cast(`int32`)"
ROWS = "W[n, k] = ({value}).cast(`float16`){scale} where n in 512, k in 1024; C[m, n] +=! A[m, k] * W[n, k]"
COLUMNS = "W[k, n] = ({word} - {zero}).cast(`float16`) * S[k // 128, n] where n in 512, k in 1024; C[m, n] +=! A[m, k] * W[k, n]"
ZERO = FIELD.format(word="Z[k // 128, n // 8]", place="(n % 8)")
COLUMN_INPUTS = {"A": "float16 64 1024", "Z": "int32 8 64", "S": "float16 8 512"}
INT4 = (
    ROWS.format(value=FIELD.format(word="Q[n, k // 8]", place="(k % 8)") + " - 8", scale=" * S[n, k // 128]"),
    {"A": "float16 64 1024", "Q": "int32 512 128", "S": "float16 512 8"},
)
CASES = {  # text, inputs; loads of a thread for a k-tile of 64 x 128
    "int4": (*INT4, 16),  # a word and a scale for each of 8 rows
    "looked up": (
        ROWS.format(value=f"T[{FIELD.format(word='Q[n, k // 8]', place='(k % 8)')}]", scale=" * S[n, k // 128]"),
        {"A": "float16 64 1024", "Q": "int32 512 128", "S": "float16 512 8", "T": "float16 16"}, 16,
    ),  # the table is that of all k-tiles
    "bytes of int4": (
        ROWS.format(value=FIELD.format(word="Q[n, k // 2].cast(`int32`)", place="(k % 2)") + " - 8", scale=""),
        {"A": "float16 64 1024", "Q": "uint8 512 512"}, 8,
    ),
    "int8": (
        ROWS.format(value="Q[n, k]", scale=" * S[n]"),
        {"A": "float16 64 1024", "Q": "int8 512 1024", "S": "float16 512"}, 8,
    ),  # scales are those of all k-tiles
    "float8": (
        ROWS.format(value="Q[n, k]", scale=""), {"A": "float16 64 1024", "Q": "float8_e4m3fn 512 1024"}, 8,
    ),
    "AWQ": (
        COLUMNS.format(word=FIELD.format(word="Q[k, n // 8]", place="(n % 2 * 4 + n % 8 // 2)"), zero=ZERO),
        COLUMN_INPUTS | {"Q": "int32 1024 64"}, 10,
    ),  # a word for each row; zero points and scales of all
    "GPTQ": (
        COLUMNS.format(word=FIELD.format(word="Q[k // 8, n]", place="(k % 8)"), zero=ZERO),
        COLUMN_INPUTS | {"Q": "int32 128 512"}, 4,
    ),  # eight words, a zero point and scales of all rows
}  # fmt: skip


def block(text: str, inputs: dict[str, str], columns: int = 128, consumers: int = 1) -> WgmmaTile:
    group = contraction(text, HOPPER, **inputs)
    loads = plan_wgmma_loads(group.space, unit(HOPPER, "wgmma_f16"), all_operands(group), HOPPER.arch)
    return loads.tile((64 * consumers, columns, 64), (64, columns), PipelineOptions(4))


def prefetch(operand: WgmmaOperand) -> RegisterPrefetch:
    assert operand.prefetch is not None
    return operand.prefetch


@pytest.mark.parametrize("name", CASES)
def test_rows_of_a_thread_share_loads(name: str) -> None:
    text, inputs, instructions = CASES[name]
    assert prefetch(block(text, inputs).b).load_instructions == instructions


def test_prefetched_k_tiles_fit_in_registers() -> None:
    k_tiles = [block(*INT4, consumers=consumers).prefetched_k_tiles for consumers in (1, 2, 3)]
    assert k_tiles == [5, 3, 2]
    assert prefetch(block(*INT4, columns=32).b).prefetched_k_tiles == 8
    assert block(*INT4).as_pingpong.prefetched_k_tiles == 3
    for consumers in (2, 3):  # setmaxnreg only takes registers from a producer
        tile = block(*INT4, consumers=consumers)
        assert tile.producer_registers <= launch_registers(tile.threads)


@pytest.mark.parametrize(
    ("text", "inputs"),
    [
        (
            "W[n, k] = T[Q[n, k].cast(`int32`)] * S[n]; C[m, n] +=! A[m, k] * W[n, k]",
            {"A": "float16 64 256", "Q": "uint8 512 256", "T": "float16 256", "S": "float16 512"},
        ),  # by data
        (
            ROWS.format(value=f"T[{FIELD.format(word='Q[n, k // 8]', place='(k % 8)')}]", scale=""),
            {"A": "float16 64 1024", "Q": "int32 512 128", "T": "float32 16"},
        ),  # a table in memory
        (
            "W[n, k] = Q[n, k].cast(`float16`) * S[n]; C[m, n] +=! A[m, k] * W[n, k]",
            {"A": "float16 64 252", "Q": "int8 512 252", "S": "float16 512"},
        ),  # rows end within a vector
        ("C[m, n] +=! A[m, k] * B[n, k]", {"A": "float16 64 256", "B": "float16 512 256"}),
    ],
)
def test_other_operands_are_not_prefetched(text: str, inputs: dict[str, str]) -> None:
    assert block(text, inputs).b.prefetch is None


def seconds(compute: TensorProgram) -> float:
    return best_plans(rank_best_partition(compute, HOPPER, 1).candidates, 1)[0].estimate.seconds


def test_model_counts_one_latency_for_the_k_tiles_in_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    text, inputs = INT4
    inputs = inputs | {"A": "float16 64 4096", "Q": "int32 4096 512", "S": "float16 4096 32"}
    compute = program(text.replace("n in 512, k in 1024", "n in 4096, k in 4096"), **inputs)
    many = seconds(compute)
    monkeypatch.setattr(warpgroup_tile, "LONE_PREFETCH_REGISTERS", 16)
    monkeypatch.setattr(warpgroup_tile, "PREFETCH_REGISTERS", 16)
    one = seconds(compute)
    monkeypatch.setattr(warpgroup_tile, "LONE_PREFETCH_REGISTERS", 0)
    monkeypatch.setattr(warpgroup_tile, "PREFETCH_REGISTERS", 0)
    none = seconds(compute)
    assert many < 0.97 * one < 0.97 * none
    assert many < 0.8 * none
