"""Constant columns of few bits: which operands stay integers in panels, and what the micro-kernel computes from them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cases_cpu import AVX2, skip_where_features_lack

import roller_svc
from roller_svc import hardware
from roller_svc.compiler.lower_and_emit import lower
from roller_svc.compiler.partition_cache import PartitionCache
from roller_svc.compiler.plans import rank_partitions
from roller_svc.families.cpu.contraction.packed_columns import PackedColumns, packed_columns
from roller_svc.frontend.lang import parse
from roller_svc.ir.dtype import DType
from roller_svc.ir.group import AxisRole, GroupKind
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.program import TensorProgram, TensorType
from roller_svc.ir.schedule import Storage, iter_nodes

AVX512 = hardware.load("cpu-x86-avx512")
Types = dict[str, tuple[str, tuple[int, ...]]]
NIBBLE = "bitwise_and(w[n, k // 2] >> k % 2 * 4, 15)"
FORMS = {  # the weight, and its tensors for columns, depth and points with one scale
    "int4": f"({NIBBLE} - 8).cast(float32) * s[n, k // {{g}}]",
    "zeros": f"({NIBBLE}.cast(int32) - z[n, k // {{g}}].cast(int32)).cast(float32) * s[n, k // {{g}}]",
    "channels": f"{NIBBLE}.cast(float32) * c[n]",
    "int8": "b[n, k].cast(float32) * s[n, k // {g}]",
    "columns": "v[k, n].cast(float32) * c[n]",
}


def types_of(form: str, rows: int, columns: int, depth: int, group: int) -> Types:
    blocks = -(-depth // group)
    known: Types = {
        "x": ("float32", (rows, depth)),
        "w": ("uint8", (columns, -(-depth // 2))),
        "b": ("int8", (columns, depth)),
        "v": ("uint8", (depth, columns)),
        "s": ("float32", (columns, blocks)),
        "z": ("uint8", (columns, blocks)),
        "c": ("float32", (columns,)),
        "o": ("float32", (columns,)),
    }
    return {name: type_ for name, type_ in known.items() if f"{name}[" in FORMS[form] or name in ("x", "o")}


def text(form: str, group: int) -> str:
    return f"t[m, n] +=! x[m, k] * ({FORMS[form].format(g=group)}); y[m, n] = max(t[m, n] + o[n], 0)"


def product(form: str, rows: int, columns: int, depth: int, group: int = 32) -> TensorProgram:
    types = types_of(form, rows, columns, depth, group)
    program = parse(text(form, group), {name: TensorType(DType(dtype), shape) for name, (dtype, shape) in types.items()}, ("y",))
    return replace(program, constants=tuple(name for name in types if name != "x"))


def panels(program: TensorProgram, hw: HardwareSpec) -> dict[str, tuple[DType, tuple[int, ...]]]:
    """The buffers of packed columns of the first plan that is a contraction."""
    ranked = rank_partitions(PartitionCache(program), hw, 1)
    found = next(each for each in ranked if each.groups[0].kind is GroupKind.CONTRACTION)
    (tree,) = lower(found.groups[0], found.candidates[0][0].program, hw)
    storages = [node for node in iter_nodes(tree.body) if isinstance(node, Storage) and node.tensor.startswith(".b_")]
    return {node.tensor: (node.dtype, node.shape) for node in storages}


def recognise(weight: str, types: Types) -> PackedColumns | None:
    given = {name: TensorType(DType(dtype), shape) for name, (dtype, shape) in types.items()}
    program = replace(parse(f"y[m, n] +=! x[m, k] * ({weight})", given), constants=tuple(types.keys() - {"x"}))
    groups = next(each for each in PartitionCache(program).partitions(AVX512) if each[0].operands is not None)
    assert groups[0].operands is not None
    (k,) = groups[0].space.role(AxisRole.K)
    return packed_columns(groups[0].operands.b, k.members)


@pytest.mark.parametrize(
    ("form", "depth", "bits", "run"),
    [
        ("int4", 64, 4, 32),
        ("zeros", 64, 4, 32),
        ("channels", 64, 4, 64),
        ("int4", 100, 8, 32),
        ("int8", 100, 8, 32),
        ("columns", 50, 8, 50),
    ],
)
def test_integers_and_values_of_runs_are_found(form: str, depth: int, bits: int, run: int) -> None:
    found = recognise(FORMS[form].format(g=32), types_of(form, 8, 32, depth, 32))
    assert found is not None
    assert (found.bits, found.run) == (bits, run), "a depth of whole words has words"


@pytest.mark.parametrize(
    ("weight", "types"),
    [
        ("b[n, k].cast(float32) * s[n, k // 8]", {"b": ("int8", (32, 64)), "s": ("float32", (32, 8))}),
        ("b[n, k].cast(float32) * s[n, k]", {"b": ("int8", (32, 64)), "s": ("float32", (32, 64))}),
        ("b[n, k].cast(float32) * a[n, k].cast(float32)", {"b": ("int8", (32, 64)), "a": ("int8", (32, 64))}),
        ("(b[n, k].cast(float32) * c[n]).cast(float16)", {"b": ("int8", (32, 64)), "c": ("float32", (32,))}),
        ("exp(b[n, k].cast(float32))", {"b": ("int8", (32, 64))}),
        ("b[n, k].cast(float32) * t[q[n, k // 32]]", {"b": ("int8", (32, 64)), "t": ("float32", (9,)), "q": ("int8", (32, 2))}),
        ("b[n, k].cast(float32)", {"b": ("int16", (32, 64))}),
    ],
)  # fmt: skip
def test_other_operands_are_not(weight: str, types: Types) -> None:
    """Short runs, scales of each k, two integers, types and functions that vectors round otherwise, indices from data."""
    assert recognise(weight, {"x": ("float32", (8, 64)), **types}) is None


def test_panels_of_few_rows_stay_integers() -> None:
    found = panels(product("zeros", 8, 2048, 256), AVX512)
    dtype, shape = found[".b_packed"]
    assert dtype is DType.INT32
    assert shape[1] == 256 // 8, "eight points of k in a word"
    assert {name: each[0] for name, each in found.items() if "value" in name} == {
        ".b_value0": DType.INT32, ".b_value1": DType.FLOAT32,
    }  # fmt: skip
    assert panels(product("int8", 1, 64, 250), AVX512)[".b_packed"][0] is DType.INT8


def test_panels_that_many_rows_read_are_floats() -> None:
    assert panels(product("int4", 256, 64, 256), AVX512)[".b_packed"][0] is DType.FLOAT32


def test_estimates_of_few_rows_follow_the_bytes() -> None:
    hw = replace(AVX512, num_cores=1)
    rank = {form: rank_partitions(PartitionCache(product(form, 1, 8192, 8192)), hw, 1)[0] for form in ("int4", "int8")}
    wide = {"x": TensorType(DType.FLOAT32, (1, 8192)), "w": TensorType(DType.FLOAT32, (8192, 8192))}
    floats = rank_partitions(PartitionCache(replace(parse("y[m, n] +=! x[m, k] * w[n, k]", wide), constants=("w",))), hw, 1)[0]
    seconds = {form: each.candidates[0][0].estimate.seconds for form, each in rank.items()}
    assert 2 * max(seconds.values()) < floats.candidates[0][0].estimate.seconds


@pytest.mark.parametrize("target", [AVX2, AVX512], ids=lambda hw: hw.id)
@pytest.mark.parametrize(
    ("form", "size"),
    [
        ("int4", (1, 100, 1184, 32)), ("zeros", (3, 33, 96, 16)), ("channels", (8, 40, 80, 80)), ("int4", (2, 17, 100, 64)),
        ("int8", (5, 70, 77, 32)), ("columns", (1, 48, 51, 51)), ("int8", (1, 64, 2048, 128)),
    ],
    ids=str,
)  # fmt: skip
def test_results(form: str, size: tuple[int, int, int, int], target: HardwareSpec) -> None:
    skip_where_features_lack(target)
    _, columns, depth, group = size
    random, types = np.random.default_rng(0), types_of(form, *size)
    values: dict[str, Any] = {
        name: random.standard_normal(shape, np.float32) if dtype == "float32" else random.integers(0, 100, shape).astype(dtype)
        for name, (dtype, shape) in types.items()
    }
    x, offsets = values.pop("x").astype(np.float64), values["o"]
    kernel = roller_svc.compile(text(form, group), types, outputs=("y",), target=target.id, select="model", constants=tuple(values))
    assert kernel.candidates[0].program.family == "cpu/contraction"
    nibbles = np.stack([values["w"] & 15, values["w"] >> 4], -1).reshape(columns, -1)[:, :depth] if "w" in values else None
    integers = {"int8": values.get("b"), "columns": values["v"].T if "v" in values else None}.get(form, nibbles)
    assert integers is not None
    of_column = np.arange(depth) // group
    zeros = {"int4": 8, "zeros": values["z"][:, of_column].astype(int) if "z" in values else 0}.get(form, 0)
    scales = values["s"][:, of_column] if "s" in values else values["c"][:, None]
    weights = (integers.astype(int) - zeros).astype(np.float32) * scales
    want = np.maximum(x @ weights.astype(np.float64).T + offsets, 0)
    ready = kernel.prepare(**values)
    for _ in range(2):
        got = ready(x=x.astype(np.float32))["y"]
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-6 * depth * float(np.abs(weights).max()))
