"""Quick tests of schedules find faults seeded in legality, bounds, barriers and steps."""

from __future__ import annotations

import pytest

from tests.mutation.mutants import rule_mutants, rules
from tests.mutation.mutants.mutation import Edit, PatternError

MUTATIONS = rule_mutants.RULE_MUTATIONS
MODULES = tuple(dict.fromkeys(mutation.module for mutation in MUTATIONS))
TESTS = tuple(dict.fromkeys(mutation.test for mutation in MUTATIONS))


@pytest.mark.slow
@pytest.mark.parametrize("module", MODULES)
def test_a_fault_in_a_rule_is_found(module: str) -> None:
    survivors = []
    for mutation in MUTATIONS:
        if mutation.module == module:
            with rules.applied(mutation):
                survivors += [] if rules.fails(mutation.test) else [mutation.id]
    assert not survivors


@pytest.mark.slow
def test_the_rules_as_they_are_pass() -> None:
    assert [test for test in TESTS if rules.fails(test)] == []


def test_faults_fit_the_rules_as_written() -> None:
    for mutation in MUTATIONS:
        mutation.edit.applied(rules.text_of(mutation.module))
    assert len({mutation.id for mutation in MUTATIONS}) == len(MUTATIONS)


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (Edit("no such text", ""), "matches 0 times"),
        (Edit('"""Verifier of schedule trees', '"""Verifier'), "changes no function"),
        (Edit("import math\n", ""), "adds or removes lines"),
    ],
)
def test_an_edit_that_changes_no_function_is_an_error(edit: Edit, reason: str) -> None:
    with pytest.raises(PatternError, match=reason):
        rules.changed_functions(rules.RuleMutation("schedule.legality", "any", edit, TESTS[0]))
