"""Hand-written CUDA kernels in the emulator, for the tests of it."""

from __future__ import annotations

import numpy as np
from reference_kernels import SM_80, tensor

from roller_svc.codegen.cuda.instructions import instruction
from roller_svc.compiler.backends import load_emulated
from roller_svc.ir.kernel import Buffer, CompiledKernel, KernelSource, Language, LaunchSpec, Role
from roller_svc.runtime.emulator import EmulatorModule


def cuda(text: str, buffers: tuple[Buffer, ...], *launches: LaunchSpec) -> KernelSource:
    return KernelSource("kernel", Language.CUDA, SM_80, text, buffers, launches)


def module(source: KernelSource, seed: int = 0, *, races: bool = False) -> EmulatorModule:
    """The emulator needs no binary."""
    return load_emulated(CompiledKernel(source, b"", "", ()), seed, races=races)


def wrappers(*names: str) -> str:
    """The definitions of these wrappers of instructions, as NVRTC gets them, and of what they call."""
    texts: dict[str, str] = {}

    def add(name: str) -> None:
        found = instruction(name)
        assert found is not None, name
        for need in found.needs:
            add(need)
        texts.setdefault(name, found.text)

    for name in names:
        add(name)
    return "\n".join(texts.values()) + "\n"


def words(values: np.ndarray) -> np.ndarray:
    """The bytes of the last dimension as uint32."""
    return np.ascontiguousarray(values).view(np.uint32)


VECTOR = (tensor("A", "a", Role.INPUT, shape=(32,)), tensor("C", "c", Role.OUTPUT, shape=(32,)))
INPUT = {"A": np.arange(32, dtype=np.float32)}


def one_block(body: str, threads: int = 32, shared_bytes: int = 0, top: str = "") -> KernelSource:
    """A kernel of one block over vectors A and C of 32 floats; its body begins on line 2 after `top`."""
    text = f'{top}extern "C" __global__ void one(const float *a, float *c) {{\n{body}\n}}\n'
    return cuda(text, VECTOR, LaunchSpec("one", ("a", "c"), (1, 1, 1), (threads, 1, 1), shared_bytes))
