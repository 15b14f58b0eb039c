"""What names an action: whatever decides a kernel changes its digest."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from typing import Any

import pytest

from roller_svc import toolchain
from roller_svc.compiler import action
from roller_svc.compiler.action import action_digest
from roller_svc.compiler.request import build_request

REQUEST = build_request("y[i] = x[i] * 2.0", {"x": ("float32", (64,))}, target="cpu-x86-avx2", top_k=1, select="model")


@pytest.fixture(autouse=True)
def _asked_anew() -> Iterator[None]:
    caches = (action.toolchain_versions, action.library_versions)
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


ADD = "C[m, n] +=! A[m, k] * B[k, n]"
SQUARES = {"A": ("float32", (8, 8)), "B": ("float32", (8, 8))}
SCATTER = "g[at[n]] +=. x[n]"
SCATTERED = {"g": ("float32", (8,)), "at": ("int32", (4,)), "x": ("float32", (4,))}
# Digests that stores have: of the action, and of its options.
KNOWN = [
    (ADD, SQUARES, {"target": "cpu-x86-avx2"},
     "sha256:d25518fafb04876b47b8654c39b39426afa433f6ccc1e25d56d4d1a64a03006a",
     "bded22cdfde5f29a0ecacf4efe13eb705dbdacfb011b203853957d1732666465"),
    (ADD, SQUARES, {"target": "cpu-x86-avx2", "select": "model", "top_k": 3, "constants": ["B"], "winograd": "never",
                    "name": "mine", "outputs": ["C"]},
     "sha256:bbdf905b672246d726eaec3236d1feca5a6057e19867acf8d6687004ec235eaf",
     "f546f956e9225e685fbc2e389a79a8493d84d30660be3c2dd561360f191831f7"),
    (ADD, SQUARES, {"target": "nvidia-t4", "allow_tf32": True, "family": "mma", "tiles": {"split_k": 4, "stages": 2}},
     "sha256:a0ee533de5d94e27d2c630b2f4ebfe31e0b20ada361abca2f86824b38fe5ecdf",
     "3b58b60ebf0c285d17429286ce6486a30737faca47a8f4f476f771baab4555ed"),
    (ADD, SQUARES, {"target": "nvidia-t4", "runtime": "emulator"},
     "sha256:d1ad6fc7cb2acbcb386a41bc58e033f570c6770d308a708597678c2638355a47",
     "431392b228690d159a49546ff29f75dcd4131b76f691a14844fb14becd6f4912"),
    (SCATTER, SCATTERED, {"target": "cpu-x86-avx2", "donate": ["g"]},
     "sha256:a1f3d9ac51503c293b3fc81d1a3528953f5002d01f689a278b303ab8e53bb91d",
     "d0d8051c5506aeeddc00c09890751039d9a578d2165904321aded76243940d93"),
]  # fmt: skip


@pytest.mark.parametrize(("expression", "inputs", "options", "digest", "options_hash"), KNOWN)
def test_the_digests_of_stores_stay(
    expression: str,
    inputs: dict[str, Any],
    options: dict[str, Any],
    digest: str,
    options_hash: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(action, "generator_digest", lambda: "g")
    monkeypatch.setattr(action, "toolchain_versions", lambda _: {"cc": "1"})
    monkeypatch.setattr(action, "library_versions", lambda: {"numpy": "1"})
    monkeypatch.setattr(action.hardware, "to_mapping", lambda spec: {"id": spec.id})
    key = action.action_key(build_request(expression, inputs, **options))
    assert (key.digest, key.parts["options"]) == (digest, options_hash)
