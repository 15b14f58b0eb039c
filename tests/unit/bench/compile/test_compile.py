"""The comparison of compile times with peers: turns, ratios, and what it says where a peer is missing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from roller_bench.compile import run as bench
from roller_svc.frontend.parse import parse
from roller_svc.ir.dtype import dtype_named
from roller_svc.ir.program import TensorType


def test_there_are_twenty_programs_with_ids_of_their_own() -> None:
    assert len({case.id for case in bench.CASES}) == len(bench.CASES) == 20
    for case in bench.CASES:
        types = {}
        for name, (dtype, shape) in case.inputs.items():
            kind = dtype_named(dtype)
            assert kind is not None
            types[name] = TensorType(kind, shape)
        assert len(parse(case.expression, types, None).outputs) == 1


def test_compilers_take_turns_and_medians_are_compared() -> None:
    order: list[str] = []

    def compiler(name: str, *seconds: float) -> Callable[[object], dict[str, Any]]:
        left = iter(seconds)

        def compiled(_: object) -> dict[str, Any]:
            order.append(name)
            return {"seconds": next(left), "bytes": 10}

        return compiled

    def broken(_: object) -> dict[str, Any]:
        order.append("broken")
        return {"error": "no"}

    mine, slow = compiler("roller", 1.0, 9.0, 2.0), compiler("slow", 5.0, 6.0, 7.0)
    row = bench.compare(bench.CASES[0], {"roller": mine, "slow": slow, "broken": broken}, 3)
    assert order == ["roller", "slow", "broken", "slow", "broken", "roller", "broken", "roller", "slow"]
    assert row["seconds"] == {"roller": 2.0, "slow": 6.0}
    assert row["ratios"] == {"slow": 3.0}
    assert row["errors"] == {"broken": "no"}


def test_the_summary_counts_what_was_compared() -> None:
    rows = [{"ratios": {"a": 3.0}}, {"ratios": {"a": 1.0}}, {"ratios": {}}]
    assert bench.summary(rows, ["a", "b"]) == {
        "a": {"cases": 2, "min_ratio": 1.0, "median_ratio": 2.0},
        "b": {"cases": 0, "min_ratio": None, "median_ratio": None},
    }


def test_a_peer_that_is_missing_is_named_with_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')  # -S: no site-packages
    (tmp_path / "python").chmod(0o755)
    with pytest.raises(SystemExit, match=r"triton is not installed .*roller-svc\[baselines\]"):
        bench.BaselineCompiler("triton", str(tmp_path / "python"), 80)


def test_ours_goes_from_the_expression_to_a_cubin() -> None:
    add = next(case for case in bench.CASES if case.id.startswith("add_"))
    answer = bench.roller_compiler("nvidia-a100-sxm-80gb")(add)
    assert answer["bytes"] > 1000
    assert answer["seconds"] > 0
