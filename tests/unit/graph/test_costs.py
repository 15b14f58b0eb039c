"""Costs of nodes, kept across compiles."""

from __future__ import annotations

from pathlib import Path

import pytest
from graphs import add_input, add_random, builder_of

from roller_svc.compiler.action import estimate_digest
from roller_svc.compiler.kernel_cache import KernelCache
from roller_svc.compiler.partition_cache import PartitionCache
from roller_svc.graph import costs as module
from roller_svc.graph.costs import CostTable
from roller_svc.hardware import load
from roller_svc.ir.constraints import WinogradMode
from roller_svc.ir.graph import Constant, OpNode
from roller_svc.ir.program import TensorProgram

CPU = load("cpu-x86-avx2")


def product() -> tuple[OpNode, dict[str, Constant]]:
    builder, _ = builder_of()
    builder.call("matmul", [add_input(builder, "x", 4, 64), add_random(builder, 0, 64, 96)])
    (node,) = builder.nodes
    assert isinstance(node, OpNode)
    return node, builder.constants


def test_stored_costs_are_not_computed_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    node, constants = product()
    first = CostTable(CPU)
    cost = first.cost(node, constants)
    assert cost is not None
    assert (cost.kernels, cost.seconds > 0) == (1, True)
    KernelCache(tmp_path).save_costs(CPU, WinogradMode.AUTO, first.stored)

    def refuse(*_: object) -> None:
        raise AssertionError("a cost is computed again")

    monkeypatch.setattr(module, "rank_partitions", refuse)
    again = CostTable(CPU, stored=KernelCache(tmp_path).load_costs(CPU, WinogradMode.AUTO))
    assert again.cost(node, constants) == cost
    with pytest.raises(AssertionError, match="computed again"):
        again.cost(node, {})  # another class: the weights are not constant


def test_kernels_are_counted_without_an_estimate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    node, constants = product()
    costs = CostTable(CPU)
    with monkeypatch.context() as patched:
        patched.setattr(module, "rank_partitions", lambda *_: pytest.fail("a program is estimated"))
        assert costs.can_have_fewer_kernels(node, constants, 2)
        assert not costs.can_have_fewer_kernels(node, constants, 1)
    KernelCache(tmp_path).save_costs(CPU, WinogradMode.AUTO, costs.stored)
    again = CostTable(CPU, stored=KernelCache(tmp_path).load_costs(CPU, WinogradMode.AUTO))
    monkeypatch.setattr(PartitionCache, "partitions", lambda *_: pytest.fail("a program is partitioned again"))
    assert not again.can_have_fewer_kernels(node, constants, 1)
    monkeypatch.undo()
    assert again.cost(node, constants) == costs.cost(node, constants) == CostTable(CPU).cost(node, constants)
    assert again.can_have_fewer_kernels(node, constants, 2)


def test_kernels_of_equal_nodes_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    costs, programs = CostTable(CPU), list[TensorProgram]()

    def record(program: TensorProgram) -> PartitionCache:
        programs.append(program)
        return PartitionCache(program)

    monkeypatch.setattr(module, "PartitionCache", record)
    for _ in range(3):  # layers
        node, constants = product()
        assert not costs.can_have_fewer_kernels(node, constants, 1)
    assert len(programs) == 1
    assert costs.can_have_fewer_kernels(node, {}, 2)
    assert [program.constants for program in programs] == [("x1",), ()]


def test_costs_are_those_of_a_device_and_an_option(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path)
    cache.save_costs(CPU, WinogradMode.AUTO, {"a": [1, 2e-6], "b": None, "c": [2]})
    assert cache.load_costs(CPU, WinogradMode.AUTO) == {"a": [1, 2e-6], "b": None, "c": [2]}
    assert cache.load_costs(CPU, WinogradMode.NEVER) == {}
    assert cache.load_costs(load("cpu-x86-avx512"), WinogradMode.AUTO) == {}


@pytest.mark.parametrize("content", [b"", b"[1]", b"{", b'{"a": [1, -1]}', b'{"a": "x"}', b'{"a": []}', b"\xff", b"[" * 100_000])
def test_damaged_files_count_as_missing(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "costs" / f"{estimate_digest(CPU, WinogradMode.AUTO)}.json"
    path.parent.mkdir()
    path.write_bytes(content)
    assert KernelCache(tmp_path).load_costs(CPU, WinogradMode.AUTO) == {}
