"""Kernel texts, launches and the order of candidates are those that are committed, for cases of the benchmarks.

A change that is meant to change them renews the digests: make digests REASON="...".
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import kernel_digests
import pytest
from kernel_digests import PARTS, TARGETS, compare, describe, describe_case, digest_case, print_differences

from roller_svc.compiler import lower_and_emit
from roller_svc.compiler.plans import RankedPartitions, merge_ranked_plans
from roller_svc.ir.kernel import KernelSource, LaunchSpec, Role
from roller_svc.ir.report import GroupedPlan
from roller_svc.ir.rprogram import RTile

CHUNKS = 24  # the quick suite runs three of them
CASES = kernel_digests.read_cases()
NAMES = tuple(CASES)
CASE = "cpu_bench/roller-393"


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_kernels_are_those_committed(chunk: int) -> None:
    names = NAMES[chunk::CHUNKS]
    committed = kernel_digests.read_digests()
    now = {name: digest_case(CASES[name]) for name in names}
    differences = compare({name: committed[name] for name in names if name in committed}, now)
    assert not differences, (
        f'\n{print_differences(differences)}\nExpected differences are committed by: make digests REASON="why they are expected"'
    )


def test_the_committed_cases_and_targets_are_those_of_the_corpora() -> None:
    document = json.loads(kernel_digests.FILE.read_text())
    assert list(document["digests"]) == list(NAMES)
    assert (document["targets"], document["parts"]) == (list(TARGETS), list(PARTS))
    assert document["reason"]


def test_every_part_that_differs_is_named_with_its_targets() -> None:
    before = {"a": ["1 2 3", "1 2 3", "no-candidate"], "b": ["1 2 3"] * 3, "old": ["1 2 3"] * 3}
    now = {"a": ["9 2 3", "9 2 9", "1 2 3"], "b": ["1 2 3"] * 3, "new": ["1 2 3"] * 3}
    targets = TARGETS[:3]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_digests, "TARGETS", targets)
        differences = compare(before, now)
        printed = print_differences(differences)
    assert differences == {
        "a": {
            "text": [targets[0]],
            "text, candidates": [targets[1]],
            "refused (no-candidate), now a kernel": [targets[2]],
        },
        "old": {"gone": list(targets)},
        "new": {"new": list(targets)},
    }
    assert f"a: text, candidates ({targets[1]})" in printed
    assert "old: gone (all targets)" in printed
    assert f"    1 {targets[0]}: text" in printed


def test_candidates_in_another_order_differ_in_that_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    before = describe_case(CASES[CASE], TARGETS[0])

    def merge(partitions: RankedPartitions, count: int) -> tuple[GroupedPlan, ...]:
        first, second, third, *others = merge_ranked_plans(partitions, count)
        return (first, third, second, *others)

    monkeypatch.setattr(kernel_digests, "merge_ranked_plans", merge)
    changed = describe_case(CASES[CASE], TARGETS[0])
    assert [part for part in PARTS if changed[part] != before[part]] == ["candidates"]


def test_a_comment_of_the_estimate_is_no_difference_and_a_statement_is(monkeypatch: pytest.MonkeyPatch) -> None:
    before = describe_case(CASES[CASE], TARGETS[0])
    monkeypatch.setattr(lower_and_emit, "_header", lambda *_: "estimate: 1 us\nnone */")
    assert describe_case(CASES[CASE], TARGETS[0]) == before

    def emit(*arguments: object) -> tuple[KernelSource, ...]:
        (source,) = emit_plans(*arguments)
        return (replace(source, text=source.text + "\n;"),)

    emit_plans = lower_and_emit.emit_plans
    monkeypatch.setattr(lower_and_emit, "emit_plans", emit)
    changed = describe_case(CASES[CASE], TARGETS[0])
    assert [part for part in PARTS if changed[part] != before[part]] == ["text"]


def test_fields_with_their_default_are_left_out() -> None:
    assert describe(LaunchSpec("kernel0", ("a",), block=(64, 1, 1))) == {
        "name": "kernel0",
        "args": ["a"],
        "block": [64, 1, 1],
    }
    assert describe((RTile((("m", 4),)), Role.INPUT)) == [{"extents": [["m", 4]]}, "input"]


def test_digests_are_renewed_only_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "kernel_digests.json"
    monkeypatch.setattr(kernel_digests, "ROOT", tmp_path)
    monkeypatch.setattr(kernel_digests, "FILE", file)
    monkeypatch.setattr(kernel_digests, "read_cases", lambda: {CASE: CASES[CASE]})
    assert kernel_digests.main([]) == 1
    assert not file.exists()
    assert "1 of 1 cases differ" in capsys.readouterr().err
    assert kernel_digests.main(["--reason", "the first"]) == 0
    assert f"{CASE}: new (all targets)" in capsys.readouterr().out
    assert json.loads(file.read_text())["reason"] == "the first"
    assert kernel_digests.main([]) == 0
    assert "nothing differs" in capsys.readouterr().out
