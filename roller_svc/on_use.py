"""Load modules when they are first used, so that a command or a mistake loads only what it needs."""

from __future__ import annotations

from importlib import import_module
from typing import Any


class OnUse:
    """A module, or an object of a module as `module:name`. Type checkers see an import beside it."""

    __slots__ = ("_loaded", "_name")

    def __init__(self, name: str) -> None:
        self._name = name
        self._loaded: Any = None

    def _load(self) -> Any:
        if self._loaded is None:
            module, _, attribute = self._name.partition(":")
            loaded = import_module(module)
            self._loaded = getattr(loaded, attribute) if attribute else loaded
        return self._loaded

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._load(), attribute)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._load()(*arguments, **named)
