"""Races that the emulator reports in any thread schedule, and accesses that do not race."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest
from emulator_support import INPUT, module, one_block, wrappers

from roller_svc.errors import WrongAnswerError
from roller_svc.ir.kernel import KernelSource
from tests.unit.runtime.emulator.test_tensor_cores import BARRIER, EXPECTED, LOAD, TEXT, A, B, K, M, N, product

pytestmark = pytest.mark.emulator

TOP = wrappers("copy_async_4", "copy_async_16", "commit_copies", "await_copies", "load_matrix_4")
SETTING = """__shared__ __align__(16) float s[128];
const int i = (int)threadIdx.x;
if (i < 0) c[i] = a[i];
"""


def kernel(body: str, threads: int = 32, blocks: int = 1) -> KernelSource:
    source = one_block(SETTING + body, threads, 0, TOP)
    return dataclasses.replace(source, launches=(dataclasses.replace(source.launches[0], grid=(blocks, 1, 1)),))


RACES = {
    "a write, then a read": ("s[i] = 1;#\nc[i] = s[i ^ 1];@", 32),
    "a read, then a write": ("s[i] = 1;\n__syncthreads();\nc[i] = s[i ^ 1];#\ns[i] = 2;@", 32),
    "two reads, then a write": ("s[i] = 1;\n__syncthreads();\nc[i] = s[i / 2];#\nif (i == 0)\n s[0] = 2;@", 32),
    "two writes of one value": ("s[0] = 1;#@", 2),
    "one byte of four": ("((unsigned char *)s)[i] = 1;#\nif (i == 1)\n  s[0] = 2;@", 2),
    "two warps": ("s[i] = 1;#\n__syncwarp();\nif (i < 32) c[i] = s[i ^ 32];@", 64),
    "a shuffle orders no memory": ("s[i] = 1;#\nint k = __shfl_sync(0xffffffff, i, i ^ 1);\nc[i] = s[k];@", 32),
    "an atomic and a plain read": ("atomicAdd(&s[0], 1.0f);#\nif (i == 1)\n  c[0] = s[0];@", 2),
    "atomics and a plain read": ("atomicAdd(&s[0], 1.0f);#\nif (i == 63)\n  c[0] = s[0];@", 64),
    "an output": ("c[i / 2] = a[i];#@", 32),
    "a copy and its own thread": ("copy_async_4(&s[i], &a[i], true);#\ncommit_copies();\nc[i] = s[i];@\n"
                                  "await_copies<0>();", 1),
    "a copy that lands, without a barrier": ("copy_async_4(&s[i], &a[i], true);#\ncommit_copies(); await_copies<0>();\n"
                                             "c[i] = s[i ^ 1];@", 32),
    "a copy over what is read": ("s[i] = 1;\n__syncthreads();\nc[i] = s[i ^ 1];#\n"
                                 "copy_async_4(&s[i], &a[i], true);@\ncommit_copies(); await_copies<0>();", 32),
    "rows of ldmatrix": ("unsigned int w[4];\n*(uint4 *)&s[4 * i] = make_uint4(1, 2, 3, 4);#\n"
                         "load_matrix_4(w, &s[4 * (i ^ 1)]);@", 32),
}  # fmt: skip


@pytest.mark.parametrize("name", RACES)
def test_races_are_reported_with_both_lines(name: str) -> None:
    """`#` and `@` follow the two accesses."""
    body, threads = RACES[name]
    lines = {f"{TOP}\n{SETTING}{body.partition(mark)[0]}".count("\n") + 1 for mark in "#@"}
    with pytest.raises(WrongAnswerError) as raised:
        module(kernel(re.sub("[#@]", "", body), threads), races=True).run(INPUT)
    found = re.search(r"race: .* at line (\d+), thread .* at line (\d+), and", raised.value.message)
    assert found, raised.value.message
    assert {int(found[1]), int(found[2])} == lines


FINE = {
    "a barrier between": ("s[i] = a[i];\n__syncthreads();\nc[i] = s[i ^ 1];", 32),
    "a barrier of the warp between": ("s[i] = i;\n__syncwarp();\nif (i < 32) c[i] = s[i ^ 1];", 64),
    "neighbouring bytes": ("((unsigned short *)s)[i] = 1; ((unsigned short *)s)[64 + i] = 2; c[i] = a[i];", 32),
    "reads of all": ("if (i == 0) s[0] = 7;\n__syncthreads();\nc[i] = s[0];", 32),
    "atomics": ("if (i == 0) s[0] = 0;\n__syncthreads();\natomicAdd(&s[0], 1.0f);\n__syncthreads();\n"
                "if (i < 32) c[i] = s[0];", 64),
    "a copy, awaited, and a barrier": ("copy_async_4(&s[i], &a[i], true);\ncommit_copies(); await_copies<0>();\n"
                                       "__syncthreads();\nc[i] = s[i ^ 1];", 32),
    "a copy and its own thread": ("copy_async_4(&s[i], &a[i], true);\ncommit_copies(); await_copies<0>();\n"
                                  "c[i] = s[i];", 32),
    "a volatile read among atomics": ("if (i == 0) s[0] = 0;\n__syncthreads();\natomicAdd(&s[0], 1.0f);\n"
                                      "if (*(volatile float *)s < 0) c[i] = 0;\nif (i < 32) c[i] = a[i];", 64),
    "a warp's atomics on memory": ("if (i == 0) c[0] = 0;\n__syncthreads();\natomicAdd(&c[0], a[i]);", 32),
}  # fmt: skip


@pytest.mark.parametrize("name", FINE)
def test_ordered_accesses_do_not_race(name: str) -> None:
    body, threads = FINE[name]
    for seed in range(2):
        module(kernel(body, threads), seed, races=True).run(INPUT)


@pytest.mark.parametrize("at", [-1, 30])
def test_reads_outside_a_buffer_are_found_inside_a_page(at: int) -> None:
    """30 floats end 8 bytes before their page, far from the page before. No result reveals the read."""
    source = one_block(f"const int i = (int)threadIdx.x;\nc[i] = i;\nif (a[{at}] == 0) c[i] = 0;", 30)
    source = dataclasses.replace(source, buffers=tuple(dataclasses.replace(b, shape=(30,)) for b in source.buffers))
    arrays = {"A": INPUT["A"][:30]}
    np.testing.assert_array_equal(module(source).run(arrays)["C"], np.arange(30, dtype=np.float32))
    with pytest.raises(WrongAnswerError, match=f"touches byte {4 * at} of A, which has 120 bytes, at line 4"):
        module(source, races=True).run(arrays)


def test_blocks_of_a_launch_are_not_ordered() -> None:
    with pytest.raises(WrongAnswerError, match=r"race: .* of C at line .* of another block writes it"):
        module(kernel("c[i] = a[i];", blocks=2), races=True).run(INPUT)
    late = "s[i] = i < 2 + (int)blockIdx.x ? c[0] : 0;\n__syncthreads();\nif (blockIdx.x == 1 && i == 5) c[0] = 1;"
    with pytest.raises(WrongAnswerError, match=r"thread 5 writes byte 0 of C at .* of another block reads it"):
        module(kernel(late, blocks=2), races=True).run(INPUT)
    apart = kernel("const int at = 16 * (int)blockIdx.x + i;\ns[i] = a[at];\nc[at] = s[i];", threads=16, blocks=2)
    np.testing.assert_array_equal(module(apart, races=True).run(INPUT)["C"], INPUT["A"])


@pytest.mark.parametrize("seed", range(3))
def test_the_product_on_tensor_cores_has_no_race(seed: int) -> None:
    found = module(product(M, N, K), seed, races=True).run({"A": A, "B": B})["C"]
    np.testing.assert_array_equal(found, EXPECTED)


@pytest.mark.parametrize(("old", "new"), [(BARRIER, ""), (BARRIER + LOAD, LOAD + BARRIER)])
def test_a_missing_barrier_shows_in_the_threads_own_order(old: str, new: str) -> None:
    source = product(M, N, K)
    wrong = dataclasses.replace(source, text=source.text.replace(TEXT, TEXT.replace(old, new)))
    with pytest.raises(WrongAnswerError, match="race: "):
        module(wrong, 0, races=True).run({"A": A, "B": B})
