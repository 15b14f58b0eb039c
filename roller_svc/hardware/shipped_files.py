"""The spec files of hwspecs/."""

from __future__ import annotations

from functools import lru_cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from roller_svc.errors import InvariantError

SUFFIX = ".yaml"


@lru_cache(maxsize=1)
def shipped_files() -> dict[str, Traversable]:
    """Return spec files by id: from inside an installed package, or next to the package in a checkout."""
    installed = files("roller_svc") / "hwspecs"
    directory: Traversable = installed if installed.is_dir() else Path(__file__).parents[2] / "hwspecs"
    if not directory.is_dir():
        raise InvariantError(f"no spec files: neither {installed} nor {directory} exists")
    return {file.name.removesuffix(SUFFIX): file for file in directory.iterdir() if file.name.endswith(SUFFIX)}
