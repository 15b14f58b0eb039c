"""Scatters on CPUs: large targets are copied by all threads, in vectors, before the writes in order."""

from __future__ import annotations

import pytest
from cases_cpu import cpu_case

from roller_svc.compiler.lower_and_emit import lower
from roller_svc.hardware import load
from roller_svc.ir.schedule import Loop, LoopKind, Prefetch, iter_nodes

AVX2 = load("cpu-x86-avx2")


@pytest.mark.parametrize(
    ("text", "data", "rows"),
    [
        ("data[at[b], m] =. up[b, m]", (9, 37), 37),
        ("data[at[b], m] +=. up[b, m]", (300, 1030), 1030),
        ("data[at[b], m] =. up[b, m]", (70000, 5), 5),
    ],
)
def test_scatter_copies_targets_of_every_size(text: str, data: tuple[int, ...], rows: int) -> None:
    cpu_case(text, {"data": ("float32", data), "at": ("int32", (4,)), "up": ("float32", (4, rows))}).check_some(1)


@pytest.mark.parametrize(("rows", "shared"), [(16, False), (4096, True)])
def test_large_target_copy_is_parallel(rows: int, shared: bool) -> None:
    types = {"data": ("float32", (rows, 256)), "at": ("int32", (2,)), "up": ("float32", (2, 256))}
    case = cpu_case("data[at[b], m] =. up[b, m]", types)
    copy, writes = lower(case.group, case.ranked[0].program, AVX2)
    kinds = {n.kind for n in iter_nodes(copy.body) if isinstance(n, Loop)}
    assert LoopKind.VECTOR in kinds
    assert (LoopKind.PARALLEL in kinds) == shared == any(isinstance(n, Prefetch) for n in iter_nodes(copy.body))
    assert all(n.kind is LoopKind.SERIAL for n in iter_nodes(writes.body) if isinstance(n, Loop))
