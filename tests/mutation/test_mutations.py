"""The emulator finds bugs that are planted in generated kernels. bench/mutations.py tells by what it finds each."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


def _package() -> ModuleType:
    """The planted bugs, which are no part of the package; `mutants` hereafter."""
    folder = Path(__file__).parents[2] / "bench" / "mutants"
    spec = importlib.util.spec_from_file_location("mutants", folder / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutants"] = module
    spec.loader.exec_module(module)
    return module


_package()
nouns, trial, suite = (importlib.import_module(f"mutants.{name}") for name in ("mutation", "trial", "suite"))

CASES = tuple(dict.fromkeys(mutation.case for mutation in suite.MUTATIONS))
LEAST_SHARE = 0.95


def _sampled(mutation: Any) -> Any:
    """A parameter: a slow one but for a fixed tenth."""
    marks = () if suite.in_sample(mutation) else (pytest.mark.slow,)
    return pytest.param(mutation, id=mutation.id, marks=marks)


@pytest.mark.emulator
@pytest.mark.parametrize("mutation", [_sampled(mutation) for mutation in suite.MUTATIONS])
def test_a_planted_bug_is_found(mutation: Any) -> None:
    """The kernel passes without the bug and not with it, unless the bug is known to survive, and does."""
    assert trial.sound(mutation.case), f"{mutation.case.name} is wrong as it is"
    assert bool(trial.verdict(mutation)) is (mutation.id not in suite.SURVIVORS)


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES])
def test_bugs_fit_the_kernels_as_they_are_generated_now(case: Any) -> None:
    _, source = trial.kernel(case)
    texts = [trial.mutant(mutation).text for mutation in suite.MUTATIONS if mutation.case == case]
    assert source.text not in texts
    assert len(set(texts)) == len(texts), "two of the bugs are the same"


def test_nearly_all_bugs_are_known_to_be_found() -> None:
    names = [mutation.id for mutation in suite.MUTATIONS]
    assert len(set(names)) == len(names)
    assert set(suite.SURVIVORS) <= set(names)
    assert len(suite.SURVIVORS) <= (1 - LEAST_SHARE) * len(names)
    assert {mutation.kind for mutation in suite.MUTATIONS} == set(nouns.Kind)


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (("no such text", ""), "matches 0 times, not 1"),
        ((r"\d", "7"), "matches 2 times, not 1"),
        ((r"\d", "7", 3), "matches 2 times, not 3"),
        (("value", "value"), "changes nothing"),
    ],
)
def test_a_pattern_that_does_not_fit_is_an_error(edit: tuple[Any, ...], reason: str) -> None:
    with pytest.raises(nouns.PatternError, match=reason):
        nouns.Edit(*edit).applied("value = 4 + 5;\n")


def test_edits_are_made_one_after_the_other_where_they_are_asked_for() -> None:
    edits = (nouns.Edit(r"\d", "x", 2, only=1), nouns.Edit(r"^(\w+) = (\d)", r"\2 = \1"))
    mutation = nouns.planted(CASES[0], "any", nouns.Kind.PLACE, *edits)
    assert mutation.applied("value = 4 + 5;\n") == "4 = value + x;\n"
