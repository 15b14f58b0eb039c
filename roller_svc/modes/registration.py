"""Functions of Python that a service, or the command line, has: those that ROLLER_PYTHON_OPS registers."""

from __future__ import annotations

import re
from functools import lru_cache
from importlib import import_module

from roller_svc.errors import ArgumentError
from roller_svc.settings import settings

_NAME = re.compile(r"([A-Za-z_][\w.]*):([A-Za-z_]\w*)", re.ASCII)


def register_python_ops() -> None:
    """Call the function that the setting names, once in a process. Raises ArgumentError if there is none."""
    if settings().python_ops:
        _register(settings().python_ops)


@lru_cache(1)
def _register(name: str) -> None:
    match = _NAME.fullmatch(name)
    if match is None:
        raise ArgumentError(f"ROLLER_PYTHON_OPS must be MODULE:FUNCTION, got {name!r:.200}", code="invalid-setting")
    try:
        function = getattr(import_module(match[1]), match[2])
    except (ImportError, AttributeError) as error:
        raise ArgumentError(f"ROLLER_PYTHON_OPS: {name} cannot be imported: {error}", code="invalid-setting") from error
    function()
