"""The emulator finds faults seeded in generated kernels. tests/mutation/measure.py reports how it finds each."""

from __future__ import annotations

from typing import Any

import pytest

from tests.mutation.mutants import mutation as definitions
from tests.mutation.mutants import run_mutant, suite

CASES = tuple(dict.fromkeys(mutation.case for mutation in suite.MUTATIONS))
LEAST_SHARE = 0.95


def _sampled(mutation: Any) -> Any:
    """Return a test parameter, marked slow outside the sample."""
    marks = () if mutation.id in suite.SAMPLE else (pytest.mark.slow,)
    return pytest.param(mutation, id=mutation.id, marks=marks)


@pytest.mark.slow
@pytest.mark.emulator
@pytest.mark.parametrize("mutation", [_sampled(mutation) for mutation in suite.MUTATIONS])
def test_a_mutant_is_killed(mutation: Any) -> None:
    """Check that the kernel passes without the fault, and fails with it unless the mutant is a known survivor."""
    assert run_mutant.sound(mutation.case), f"{mutation.case.name} is wrong as it is"
    assert bool(run_mutant.verdict(mutation)) is (mutation.id not in suite.SURVIVORS)


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES])
def test_mutations_fit_the_kernels_as_generated(case: Any) -> None:
    _, source = run_mutant.kernel(case)
    texts = [run_mutant.mutated(mutation).text for mutation in suite.MUTATIONS if mutation.case == case]
    assert source.text not in texts
    assert len(set(texts)) == len(texts), "two mutants are equal"


def test_nearly_all_mutants_are_killed() -> None:
    names = [mutation.id for mutation in suite.MUTATIONS]
    assert len(set(names)) == len(names)
    assert set(suite.SURVIVORS) <= set(names)
    assert len(suite.SURVIVORS) <= (1 - LEAST_SHARE) * len(names)
    assert {mutation.kind for mutation in suite.MUTATIONS} == set(definitions.Kind)


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
    with pytest.raises(definitions.PatternError, match=reason):
        definitions.Edit(*edit).applied("value = 4 + 5;\n")


def test_edits_are_made_one_after_the_other_where_they_are_asked_for() -> None:
    edits = (definitions.Edit(r"\d", "x", 2, only=1), definitions.Edit(r"^(\w+) = (\d)", r"\2 = \1"))
    mutation = definitions.mutant(CASES[0], "any", definitions.Kind.PLACE, *edits)
    assert mutation.applied("value = 4 + 5;\n") == "4 = value + x;\n"
