"""What names an action: whatever decides a kernel changes its digest."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator

import pytest

from roller_svc import toolchain
from roller_svc.compiler import action
from roller_svc.compiler.action import action_digest
from roller_svc.compiler.request import build_request

REQUEST = build_request("y[i] = x[i] * 2.0", {"x": ("float32", (64,))}, target="cpu-x86-avx2", top_k=1, select="model")


@pytest.fixture(autouse=True)
def _asked_anew() -> Iterator[None]:
    caches = (action.toolchain_versions, action.library_versions, toolchain.gcc.binutils_versions)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def test_one_request_has_one_digest() -> None:
    assert action_digest(REQUEST) == action_digest(REQUEST)


def test_the_parts_of_a_tool_chain_are_named() -> None:
    found = action.toolchain_versions()
    assert {"cc", "as", "ld"} <= set(found)
    assert all(found.values())
    assert set(action.library_versions()) == {"islpy", "lark", "numpy"}


@pytest.mark.parametrize("tool", ["cc", "as", "ld"])
def test_another_tool_makes_another_action(tool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before, found = action_digest(REQUEST), toolchain.versions()
    for changed in ({**found, tool: "2.99"}, {name: version for name, version in found.items() if name != tool}):
        action.toolchain_versions.cache_clear()
        monkeypatch.setattr(toolchain, "versions", lambda _, changed=changed: changed)
        assert action_digest(REQUEST) != before


@pytest.mark.parametrize("library", action.LIBRARIES)
def test_another_library_makes_another_action(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before, version = action_digest(REQUEST), importlib.metadata.version
    action.library_versions.cache_clear()
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "9.9" if name == library else version(name))
    assert action_digest(REQUEST) != before


def test_a_program_that_is_not_found_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    which = toolchain.gcc.shutil.which
    monkeypatch.setattr(toolchain.gcc.shutil, "which", lambda name: None if name in ("as", "ld") else which(name))
    found = action.toolchain_versions()
    assert "cc" in found
    assert not {"as", "ld"} & set(found)
    assert action_digest(REQUEST).startswith("sha256:")
