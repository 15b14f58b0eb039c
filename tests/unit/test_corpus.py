"""Corpus cases judged on several random inputs each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from roller_svc import corpus
from roller_svc.corpus import Row
from roller_svc.lang.compare import Agreement
from roller_svc.lang.inputs import random_inputs
from roller_svc.trial import judged

CORPUS = {
    "cases": [{"id": "one", "cls": "map", "expr": "y[i] = x[i]", "inputs": {"x": {"dtype": "float32", "shape": [8]}}}]
}


def row(seeds: int, target: str = "local", *, emulate: bool = False) -> Row:
    (task,) = corpus.tasks_of(corpus.cases_of(CORPUS, small=True), target, emulate=emulate, seeds=seeds)
    (found,) = corpus.judge(task)
    return found


def test_a_case_runs_on_inputs_of_every_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []

    def watched(program: Any, seed: int, hints: Any) -> Any:
        seeds.append(seed)
        return random_inputs(program, seed=seed, hints=hints)

    monkeypatch.setattr(corpus, "random_inputs", watched)
    assert row(3).status == "ok"
    assert seeds == [0, 1, 2]


def test_the_first_inputs_that_show_an_error_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    verdicts: list[Agreement] = []

    def wrong_at_second(*args: Any, **options: Any) -> Agreement:
        verdict = judged(*args, **options)
        verdicts.append(replace(verdict, ok=len(verdicts) != 1, detail="off by one"))
        return verdicts[-1]

    monkeypatch.setattr(corpus, "judged", wrong_at_second)
    found = row(3)
    assert (found.status, found.detail) == ("wrong", "inputs of seed 1: off by one")
    assert len(verdicts) == 2


@pytest.mark.emulator
def test_a_case_is_emulated_on_every_seed() -> None:
    found = row(2, "nvidia-a100-sxm-80gb", emulate=True)
    assert (found.status, found.detail, found.max_abs_error) == ("ok", "", 0.0)
