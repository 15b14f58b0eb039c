"""The code in a cubin's ELF, and damage of it."""

from __future__ import annotations

import random

import pytest
from reference_kernels import cuda_scale

from roller_svc.errors import CompileError
from roller_svc.toolchain.binaries import code_object
from roller_svc.toolchain.binaries.elf import elf_errors, read_code
from roller_svc.toolchain.nvrtc import compile_cuda


@pytest.fixture(scope="module")
def binary() -> bytes:
    return compile_cuda(cuda_scale()).binary


def test_a_cubin_has_the_code_of_its_kernels(binary: bytes) -> None:
    code = read_code(binary)
    assert set(code) == {"flip", "scale"}
    assert all(content and content in binary for content in code.values())


def test_other_bytes_are_rejected(binary: bytes) -> None:
    big_endian = binary[:5] + b"\2" + binary[6:]
    for damaged in (b"", b"\x7fELF\x02", binary[:100], binary[:1000], b"\x7fELF\x01" + binary[5:], big_endian):
        with pytest.raises(CompileError) as raised:
            read_code(damaged)
        assert raised.value.code == "bad-cubin"


def test_any_damage_is_rejected_or_harmless(binary: bytes) -> None:
    numbers = random.Random(0)
    headers = [*range(64), *range(int.from_bytes(binary[0x28:0x30], "little"), len(binary))]
    rejected = 0
    for _ in range(400):
        damaged = bytearray(binary)
        for place in numbers.sample(headers, 3):
            damaged[place] = numbers.choice((0, 1, 127, 255))
        try:
            read_code(bytes(damaged))
        except CompileError:
            rejected += 1
    assert rejected


def test_structures_that_are_nested_too_deep_are_rejected() -> None:
    with pytest.raises(CompileError) as raised, elf_errors("code object", "bad-code-object"):
        code_object._unpack(b"\x91" * 20_000 + b"\0", 0)
    assert raised.value.code == "bad-code-object"
