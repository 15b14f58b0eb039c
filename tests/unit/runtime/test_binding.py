"""Binding of arrays: which are rejected, copied, or written in place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import ml_dtypes
import numpy as np
import pytest
from reference_kernels import tensor

from roller_svc.errors import ArgumentError
from roller_svc.ir.dtype import DType
from roller_svc.ir.kernel import Buffer, Role
from roller_svc.runtime import binding
from roller_svc.runtime.binding import (
    ALIGNMENT_BYTES,
    PAGE_BYTES,
    Array,
    Binding,
    NumpyArrays,
    aligned_empty,
    numpy_dtype,
)

SIGNATURE = (tensor("A", "a", Role.INPUT), tensor("B", "b", Role.INPUT), tensor("C", "c", Role.OUTPUT))


def bind(
    buffers: Iterable[Buffer],
    arrays: Mapping[str, object],
    out: Mapping[str, object] | None = None,
    alignment_bytes: int = ALIGNMENT_BYTES,
) -> Binding[Array]:
    return binding.bind(buffers, arrays, out, NumpyArrays(alignment_bytes))


def arrays() -> dict[str, np.ndarray]:
    return {"A": np.ones((4, 6), np.float32), "B": np.ones((4, 6), np.float32)}


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


@pytest.mark.parametrize(
    ("changes", "code", "message"),
    [
        ({"B": None}, "not-an-array", "got NoneType"),
        ({"B": [1.0]}, "not-an-array", "got list"),
        ({"B": np.ones((4, 6))}, "dtype-mismatch", "has dtype float64, expected float32"),
        ({"B": np.ones((4, 6), ">f4")}, "dtype-mismatch", "has dtype >f4"),
        ({"B": np.ones((4, 6), ml_dtypes.bfloat16)}, "dtype-mismatch", "bfloat16"),
        ({"B": np.ones((6, 4), np.float32)}, "shape-mismatch", r"has shape \(6, 4\), expected \(4, 6\)"),
        ({"B": np.ones(24, np.float32)}, "shape-mismatch", "24"),
        ({"X": np.ones(1)}, "unknown-argument", "unknown argument 'X'; expected: A, B"),
    ],
)
def test_arguments_that_do_not_fit(changes: dict[str, object], code: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message) as raised:
        bind(SIGNATURE, arrays() | changes)
    assert raised.value.code == code


def test_missing_arguments_are_named() -> None:
    with pytest.raises(ArgumentError, match="missing arguments: A, B") as raised:
        bind(SIGNATURE, {})
    assert raised.value.code == "missing-argument"


@pytest.mark.parametrize(
    ("out", "code"),
    [
        ({"D": np.ones((4, 6), np.float32)}, "unknown-output"),
        ({"C": np.ones((4, 6))}, "dtype-mismatch"),
        ({"C": np.ones((4, 5), np.float32)}, "shape-mismatch"),
        ({"C": np.broadcast_to(np.float32(1), (4, 6))}, "out-not-writeable"),
        ({"C": 3}, "not-an-array"),
    ],
)
def test_outputs_that_do_not_fit(out: dict[str, object], code: str) -> None:
    with pytest.raises(ArgumentError) as raised:
        bind(SIGNATURE, arrays(), out)
    assert raised.value.code == code


def test_a_scalar_may_be_a_numpy_scalar_but_not_as_an_output() -> None:
    scalars = (tensor("s", "s", Role.INPUT, shape=()), tensor("t", "t", Role.OUTPUT, shape=()))
    assert bind(scalars, {"s": np.float32(3)}).memory["s"] == 3
    with pytest.raises(ArgumentError, match="cannot be written"):
        bind(scalars, {"s": np.float32(3)}, {"t": np.float32(3)})


@pytest.mark.parametrize("offset", [0, 1, 4, 60])
def test_inputs_arrive_dense_and_aligned(offset: int) -> None:
    raw = np.zeros(24 * 4 + 64 + offset, np.uint8)
    start = -address(raw) % 64 + offset
    shifted = raw[start : start + 96].view(np.float32).reshape(4, 6)
    shifted[...] = np.arange(24).reshape(4, 6)
    for given in (shifted, np.asfortranarray(shifted), shifted[::-1][::-1], np.repeat(shifted, 2, 0)[::2]):
        bound = bind(SIGNATURE, arrays() | {"A": given}).memory["a"]
        assert bound.flags.c_contiguous
        assert address(bound) % ALIGNMENT_BYTES == 0
        assert np.array_equal(bound, given)


def test_an_aligned_dense_input_is_not_copied() -> None:
    given = aligned_empty((4, 6), np.dtype(np.float32))
    assert address(bind(SIGNATURE, arrays() | {"A": given}).memory["a"]) == address(given)


@pytest.mark.parametrize(("elements", "alignment"), [(16, ALIGNMENT_BYTES), (1024, PAGE_BYTES), (5000, PAGE_BYTES)])
def test_large_arrays_begin_with_a_page(elements: int, alignment: int) -> None:
    """Avoids 4K aliasing of loads with recent stores."""
    held = [aligned_empty((elements,), np.dtype(np.float32)) for _ in range(4)]
    assert {address(array) % alignment for array in held} == {0}


def test_an_aligned_dense_output_is_written_in_place() -> None:
    target = aligned_empty((4, 6), np.dtype(np.float32))
    bound = bind(SIGNATURE, arrays(), {"C": target})
    assert address(bound.memory["c"]) == address(target)
    assert bound.copies == ()
    bound.copy_back()
    assert bound.results()["C"] is target


@pytest.mark.parametrize("kind", ["strided", "overlaps an input", "is an input"])
def test_other_outputs_are_copied_to_at_the_end(kind: str) -> None:
    given = arrays() | {"A": aligned_empty((4, 6), np.dtype(np.float32))}
    given["A"][...] = 1
    base = aligned_empty((5, 6), np.dtype(np.float32))
    base[...] = 0
    target = {"strided": np.zeros((6, 4), np.float32).T, "overlaps an input": base[1:], "is an input": given["A"]}[kind]
    if kind == "overlaps an input":
        given["A"] = base[:4]
    bound = bind(SIGNATURE, given, {"C": target})
    assert not np.may_share_memory(bound.memory["c"], target)
    bound.memory["c"][...] = 7
    assert not (given["A"] == 7).any()
    bound.copy_back()
    assert bound.results()["C"] is target
    assert (target == 7).all()


def test_two_outputs_never_share_memory() -> None:
    signature = (tensor("C", "c", Role.OUTPUT), tensor("D", "d", Role.OUTPUT))
    target = aligned_empty((4, 6), np.dtype(np.float32))
    memory = bind(signature, {}, {"C": target, "D": target}).memory
    assert not np.may_share_memory(memory["c"], memory["d"])


@pytest.mark.parametrize("given", [(), ("C",), ("D",), ("D", "C")], ids=str)
def test_results_have_the_order_of_the_kernels_outputs(given: tuple[str, ...]) -> None:
    signature = (tensor("C", "c", Role.OUTPUT), tensor("D", "d", Role.OUTPUT))
    for memory in (np.zeros((4, 6), np.float32), np.zeros((6, 4), np.float32).T):
        assert list(bind(signature, {}, {name: memory.copy("K") for name in given}).results()) == ["C", "D"]


def test_a_scatter_target_is_an_input_and_an_output() -> None:
    signature = (tensor("C", "c_in", Role.INPUT), tensor("C", "c_out", Role.OUTPUT))
    given = arrays()["A"]
    memory = bind(signature, {"C": given}, {"C": given}).memory
    assert not np.may_share_memory(memory["c_in"], memory["c_out"])


@pytest.mark.parametrize("dtype", list(DType))
def test_every_type_has_a_numpy_type_of_its_size(dtype: DType) -> None:
    assert numpy_dtype(dtype).itemsize == dtype.bytes
    assert numpy_dtype(dtype).name == dtype.value
    array = aligned_empty((3, 2), numpy_dtype(dtype))
    assert bind((tensor("A", "a", Role.INPUT, dtype, (3, 2)),), {"A": array}).memory["a"] is array


def test_a_kernel_that_asks_for_less_alignment_gets_fewer_copies() -> None:
    given = aligned_empty((5, 6), np.dtype(np.float32)).reshape(30)[1:25].reshape(4, 6)
    given[...] = 1
    assert address(bind(SIGNATURE, arrays() | {"A": given}).memory["a"]) != address(given)
    assert address(bind(SIGNATURE, arrays() | {"A": given}, alignment_bytes=1).memory["a"]) == address(given)
    # Never less than an element's own.
    shifted = aligned_empty((97,), np.dtype(np.uint8))[1:97].view(np.float32).reshape(4, 6)
    shifted[...] = 1
    assert address(bind(SIGNATURE, arrays() | {"A": shifted}, alignment_bytes=1).memory["a"]) % 4 == 0
