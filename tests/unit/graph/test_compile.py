"""Kernels of a model: what keys of their objects tell apart, how often a link takes them, and what is done once or later."""

from __future__ import annotations

import gc
import threading
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from graphs import add_input, add_random, builder_of

from roller_svc import hardware
from roller_svc.codegen.c.model import MODEL
from roller_svc.compiler import autotune, pipeline
from roller_svc.compiler.kernel_cache import KernelCache
from roller_svc.compiler.request import build_request
from roller_svc.graph import compile as compiling
from roller_svc.graph.compile import BuiltModel, ModelOptions, build_model
from roller_svc.graph.objects import link_kernels
from roller_svc.ir.options import SelectionMode
from roller_svc.runtime.cpu import CpuModule
from roller_svc.toolchain import gcc, pool


class CountedCache(KernelCache):
    """A cache that counts what is taken out and put in."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.loaded: Counter[str] = Counter()
        self.saved: Counter[str] = Counter()

    def load_object(self, key: str) -> bytes | None:
        self.loaded[key] += 1
        return super().load_object(key)

    def save_object(self, key: str, content: bytes) -> None:
        self.saved[key] += 1
        super().save_object(key, content)


def build(cache: KernelCache) -> BuiltModel:
    """Return a model of two kernels."""
    builder, weights = builder_of()
    product = builder.call("matmul", [add_input(builder, "x", 8, 16), add_random(builder, 0, 16, 8)])
    graph = builder.finish([("y", builder.call("softmax", [product], axis=1))])
    return build_model(graph, weights, ModelOptions(hardware.load("local"), select=SelectionMode.MODEL, top_k=1), cache)


def test_a_link_takes_each_object_once(tmp_path: Path) -> None:
    cache = CountedCache(tmp_path)
    built = build(cache)
    first = built.link(MODEL)
    assert len(cache.saved) == len(built.plan.kernels) + 1  # and that of the plan
    cache.loaded.clear()
    assert built.link(MODEL) == first
    assert cache.loaded == cache.saved
    assert set(cache.saved.values()) == {1}


@pytest.mark.parametrize(
    ("flags", "flag"), [("COMMON_FLAGS", "-fno-plt"), ("GCC_FLAGS", "-fno-plt"), ("COMPILE_FLAGS", "-DROLLER_OTHER")]
)
def test_other_flags_make_other_objects(flags: str, flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = CountedCache(tmp_path)
    build(cache).link(MODEL)
    before = set(cache.saved)
    monkeypatch.setattr(gcc, flags, (*getattr(gcc, flags), flag))
    cache.saved.clear()
    build(cache).link(MODEL)
    changed = set(cache.saved) - before
    assert changed
    assert changed == set(cache.saved)


def test_kernels_are_linked_alone_when_they_are_needed(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path)
    for built in (build(cache), build(cache)):  # the second one finds its kernels in the cache
        assert [bundle.compiled.binary for bundle in built.kernels] == [b"", b""]
        linked = link_kernels(built.kernels, cache)
        assert [bundle.digest for bundle in linked] == [bundle.digest for bundle in built.kernels]
        assert link_kernels(linked, KernelCache(tmp_path / "empty")) == linked
        softmax = next(each for each in linked if "exp" in each.expression)
        (name,) = [buffer.name for buffer in softmax.compiled.source.buffers if buffer.shape == (8, 8)][:1]
        results = CpuModule(softmax.compiled).run({name: np.zeros((8, 8), np.float32)})
        np.testing.assert_allclose(next(iter(results.values())), 1 / 8)


def test_the_thread_pool_is_compiled_before_it_is_linked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_objects", {})
    names: list[str] = []
    compile_sandboxed = pool.compile_sandboxed

    def record(*given: Any) -> str:
        names.append(threading.current_thread().name)
        return compile_sandboxed(*given)

    monkeypatch.setattr(pool, "compile_sandboxed", record)
    built = build(KernelCache(tmp_path))
    for thread in threading.enumerate():
        if thread.name == "roller-pool":
            thread.join()
    assert built.link(MODEL)
    assert names == ["roller-pool"]


def test_the_collector_of_cycles_is_paused_in_passes_and_in_builds_of_modelled_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_enabled: dict[str, bool] = {}

    def record(name: str) -> None:
        function = getattr(compiling, name)

        def recorded(*given: Any, **named: Any) -> Any:
            is_enabled[name] = gc.isenabled()
            return function(*given, **named)

        monkeypatch.setattr(compiling, name, recorded)

    for name in ("run_passes", "find_classes", "compile_candidates", "choose_plan"):
        record(name)
    build(KernelCache(tmp_path))
    assert is_enabled == {"run_passes": False, "find_classes": True, "compile_candidates": False, "choose_plan": True}


def test_ranks_and_texts_exclude_each_other_and_compilers_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    printing = threading.Lock()
    is_locked: dict[str, bool] = {}

    def record(module: ModuleType, name: str) -> None:
        function = getattr(module, name)

        def recorded(*given: Any, **named: Any) -> Any:
            is_locked[name] = printing.locked()
            return function(*given, **named)

        monkeypatch.setattr(module, name, recorded)

    record(pipeline, "rank_request")
    record(autotune, "emit_plan")
    record(autotune, "compile_unlinked")
    request = build_request("y[i] = x[i] * 2.0", {"x": ("float32", (64,))}, top_k=1, select="model")
    pipeline.compile_candidates(request, for_model=True, printing=printing)
    assert is_locked == {"rank_request": True, "emit_plan": True, "compile_unlinked": False}
    assert not printing.locked()
