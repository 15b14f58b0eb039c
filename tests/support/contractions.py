"""Contractions as the pipeline makes them, for tests of matrix units."""

from __future__ import annotations

from roller_svc import hardware
from roller_svc.compiler.partition_cache import partition
from roller_svc.frontend.parse import parse
from roller_svc.ir.dtype import DType
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.hardware import ComputeUnit, HardwareSpec
from roller_svc.ir.program import TensorType

A100 = hardware.load("nvidia-a100-sxm-80gb")
LAYOUTS = {"nn": ("m,k", "k,n"), "nt": ("m,k", "n,k"), "tn": ("k,m", "k,n"), "tt": ("k,m", "n,k")}


def group(expression: str, hw: HardwareSpec = A100, **inputs: tuple[str, tuple[int, ...]]) -> KernelGroup:
    """The one kernel group of a program."""
    types = {name: TensorType(DType(dtype), shape) for name, (dtype, shape) in inputs.items()}
    (found,) = partition(parse(expression, types, None), hw)
    return found


def matmul(m: int, n: int, k: int, dtype: str = "float16", *, layout: str = "nn", hw: HardwareSpec = A100) -> KernelGroup:
    """C = A B, with A and B stored along k or not."""
    extents = {"m": m, "n": n, "k": k}
    a, b = LAYOUTS[layout]
    shapes = [tuple(extents[axis] for axis in index.split(",")) for index in (a, b)]
    return group(f"C[m,n] +=! A[{a}] * B[{b}]", hw, A=(dtype, shapes[0]), B=(dtype, shapes[1]))


def batched(batch: int, m: int, n: int, k: int) -> KernelGroup:
    return group("C[b,m,n] +=! A[b,m,k] * B[b,k,n]", A=("float16", (batch, m, k)), B=("float16", (batch, k, n)))


def conv(n: int, c: int, size: int, f: int, kernel: int, hw: HardwareSpec = A100) -> KernelGroup:
    """A convolution without padding, channels innermost."""
    out = size - kernel + 1
    return group(
        f"Y[n,y,x,f] +=! X[n,y+r,x+s,c] * W[r,s,c,f] where r in {kernel}, s in {kernel}, y in {out}, x in {out}",
        hw,
        X=("float16", (n, size, size, c)),
        W=("float16", (kernel, kernel, c, f)),
    )


def unit(hw: HardwareSpec, name: str) -> ComputeUnit:
    return next(u for u in hw.units if u.name == name)
