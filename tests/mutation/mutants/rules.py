"""Faults in the rules of schedules: edits of functions of roller_svc, and the quick tests that must fail with them.

A mutant replaces the code of functions that are already imported, so that every importer runs it.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest

from roller_svc.errors import RollerError
from tests.mutation.mutants.mutation import Edit, PatternError

FAILURES = (AssertionError, pytest.fail.Exception, RollerError, LookupError, ArithmeticError)


@dataclass(frozen=True, slots=True)
class RuleMutation:
    """One fault. `module`: below `roller_svc`. `test`: the module and function of the test that fails.

    Such a test has no fixtures: it is called.
    """

    module: str
    name: str
    edit: Edit
    test: str

    @property
    def id(self) -> str:
        return f"{self.module}: {self.name}"


def text_of(module: str) -> str:
    """Return the source of a module of roller_svc."""
    return inspect.getsource(importlib.import_module(f"roller_svc.{module}"))


def changed_functions(mutation: RuleMutation) -> list[tuple[FunctionType, CodeType]]:
    """Return the functions that the edit changes, and their new code. Raises PatternError where it does not fit."""
    module = importlib.import_module(f"roller_svc.{mutation.module}")
    text = text_of(mutation.module)
    edited = mutation.edit.applied(text)
    if edited.count("\n") != text.count("\n"):
        raise PatternError(f"{mutation.id}: the edit adds or removes lines, which changes all functions after it")
    old, new = (_codes(compile(each, str(module.__file__), "exec", dont_inherit=True)) for each in (text, edited))
    found = [(_function(module, name), code) for name, code in new.items() if code != old[name]]
    if not found:
        raise PatternError(f"{mutation.id}: the edit changes no function")
    return found


def _codes(code: CodeType) -> dict[str, CodeType]:
    """Return the code of the functions of a module and of its classes, by qualified name."""
    found: dict[str, CodeType] = {}
    for each in code.co_consts:
        if isinstance(each, CodeType):
            is_function = each.co_flags & inspect.CO_NEWLOCALS
            found |= {each.co_qualname: each} if is_function else _codes(each)
    return found


def _function(module: ModuleType, name: str) -> FunctionType:
    """Return the function of that name, without its decorators."""
    found: Any = module
    for part in name.split("."):
        found = inspect.getattr_static(found, part)
    found = inspect.unwrap(getattr(found, "__func__", getattr(found, "fget", found)))
    assert isinstance(found, FunctionType)
    return found


@contextmanager
def applied(mutation: RuleMutation) -> Iterator[None]:
    """Run the block with the fault."""
    changed = [(function, function.__code__, code) for function, code in changed_functions(mutation)]
    for function, _, code in changed:
        function.__code__ = code
    try:
        yield
    finally:
        for function, code, _ in changed:
            function.__code__ = code


def calls_of(test: str) -> list[tuple[Callable[..., None], dict[str, Any]]]:
    """Return the calls of a test: one for each of its parameters."""
    module, _, name = test.partition(":")
    found: Any = importlib.import_module(f"tests.unit.schedule.{module}")
    for part in name.split("."):
        found = getattr(found() if inspect.isclass(found) else found, part)
    calls: list[dict[str, Any]] = [{}]
    for mark in getattr(found, "pytestmark", ()):
        if mark.name == "parametrize":
            names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
            rows = [value if len(names) > 1 else (value,) for value in mark.args[1]]
            calls = [call | dict(zip(names, row, strict=True)) for call in calls for row in rows]
    return [(found, call) for call in calls]


def fails(test: str) -> bool:
    """Return whether a test fails for one of its parameters."""
    for function, arguments in calls_of(test):
        try:
            function(**arguments)
        except FAILURES:
            return True
    return False
