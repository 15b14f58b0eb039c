"""Wrappers of instructions: their assembly is what their names say."""

from __future__ import annotations

import re

import pytest

from roller_svc.codegen.cuda.instructions import instruction
from roller_svc.runtime.emulator.text import HOST_INTRINSICS

WRAPPERS = {
    name: found.text
    for name in sorted(HOST_INTRINSICS)
    if (found := instruction(name)) is not None and not name.startswith("mfma_")  # builtins: tests/unit/test_mfma.py
}
MMA = [name for name in WRAPPERS if name.startswith("mma_")]


ORDERS = {
    "named_any": [1, 2, 3, 0],  # the result follows from a predicate that the other operands make
    "add_bf16x2": [0, 1, 3, 2],  # a * 1 + b
    "sub_bf16x2": [0, 2, 3, 1],  # b * -1 + a
}
PAIRS = [name for name in WRAPPERS if name.endswith("x2")]


@pytest.mark.parametrize("name", WRAPPERS)
def test_operands_stand_in_the_order_of_their_numbers(name: str) -> None:
    """The template names them in ascending order, and words of arrays follow each other in the lists behind it."""
    for statement in WRAPPERS[name].split("asm volatile(")[1:] or [WRAPPERS[name]]:
        check_operands(name, statement)


def check_operands(name: str, statement: str) -> None:
    numbers = list(dict.fromkeys(int(n) for n in re.findall(r"%(\d+)", statement)))
    constraints = re.findall(r'"[+=]?[a-z]"\((\w+)(?:\[(\d+)\])?', statement)
    ascending = list(range(len(constraints)))
    assert numbers == ORDERS.get(name, ascending)
    for array in {array for array, word in constraints if word}:
        words = [int(word) for found, word in constraints if found == array]
        assert words == list(range(len(words)))
    arrays = list(dict.fromkeys(array for array, _ in constraints))
    assert arrays == [array for array in ("d", "a", "b") if array in arrays] or not name.startswith("mma_")


@pytest.mark.parametrize("short", ["f16", "bf16"])
def test_pack_puts_first_value_in_low_half(short: str) -> None:
    """cvt's first operand becomes the high half (PTX ISA)."""
    text = WRAPPERS[f"pack_{short}"]
    assert f'"cvt.rn.{short}x2.f32 %0, %1, %2;"' in text
    assert text.index('"f"(high)') < text.index('"f"(low)')


@pytest.mark.parametrize("name", MMA)
def test_products_are_of_the_shape_and_types_that_they_are_called_by(name: str) -> None:
    _, shape, types = name.split("_")
    a, b = re.findall(r"[su]8|e\dm\d", types) or (types, types)
    template = "".join(re.findall(r'^ *(?:asm\()?"(.*)"$', WRAPPERS[name], re.MULTILINE))
    summed = {"s8": "s32", "u8": "s32", "f64": "f64"}.get(a, "f32")
    assert template.startswith(f"mma.sync.aligned.{shape}.row.col.{summed}.{a}.{b}.{summed} ")
    d, *_, c = re.findall(r"\{([^}]*)\}", template)
    assert c == d, "sums are added to"


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("suffix", ["", "_transposed"])
def test_ldmatrix_transposes_with_trans_suffix(count: int, suffix: str) -> None:
    assert f".x{count}{'.trans' if suffix else ''}.shared.b16" in WRAPPERS[f"load_matrix_{count}{suffix}"]


@pytest.mark.parametrize("size", [4, 8, 16])
def test_copies_are_as_wide_as_they_say_and_fill_up_with_zeros(size: int) -> None:
    text = WRAPPERS[f"copy_async_{size}"]
    assert f"inside ? {size} : 0" in text
    assert re.search(rf"\.shared\.global \[%0\], \[%1\], {size}, %2;", text)


def test_waits_are_for_all_groups_but_those_that_are_named() -> None:
    assert re.search(r'"cp\.async\.wait_group %0;" :: "n"\(PENDING\)', WRAPPERS["await_copies"])
    assert "cp.async.commit_group;" in WRAPPERS["commit_copies"]


REGISTERS_ONLY = (
    "round_tf32", "shared_address", "exp2_approx", "rcp_approx", "pack_f16", "pack_bf16", "and_or", *PAIRS,
    *MMA,
)  # fmt: skip


@pytest.mark.parametrize("name", [name for name in WRAPPERS if name not in {*REGISTERS_ONLY, "event_wait"}])
def test_what_goes_through_memory_tells_the_compiler(name: str) -> None:
    assert "asm volatile(" in WRAPPERS[name]
    assert '"memory")' in WRAPPERS[name]
