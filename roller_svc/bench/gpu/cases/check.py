"""A check: one program, and what is demanded of the kernel that computes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Type = tuple[str, tuple[int, ...]]
Inputs = tuple[tuple[str, Type], ...]

HALVES = ("float16", "bfloat16")
# (m, n, k): whole tiles; k a multiple of 4 and of 2 elements only, for the narrower copies; nothing divides anything
SHAPES = {"whole": (192, 128, 160), "by4": (132, 100, 36), "by2": (70, 34, 50), "odd": (67, 33, 51)}
LAYOUTS = {"nn": ("mk", "kn"), "nt": ("mk", "nk"), "tn": ("km", "kn")}


@dataclass(frozen=True, slots=True)
class Check:
    """One program, and what is demanded of its kernel: `unit` and `tiles` as `api.compile` has `family` and `tiles`.

    `product` is the einsum that a program is which is too large for the interpreter: then all of its elements are
    compared with a product of the same operands in float32, and not a sample alone. `finite`: inputs that are given no
    infinity and no NaN: what a kernel leaves out of a sum because it is masked counts as 0 times such a number.
    """

    id: str
    family: str
    expression: str
    inputs: Inputs
    allow_tf32: bool = False
    unit: str | None = None
    tiles: tuple[tuple[str, int], ...] = ()
    hints: Mapping[str, Any] = field(default_factory=dict)
    product: str | None = None
    finite: tuple[str, ...] = ()

    @property
    def types(self) -> dict[str, dict[str, Any]]:
        """The inputs as requests have them."""
        return {name: {"dtype": dtype, "shape": list(shape)} for name, (dtype, shape) in self.inputs}


def product_check(
    family: str, name: str, dtype: str, extents: tuple[int, int, int], layout: str = "nn", **more: Any
) -> Check:
    """Of two matrices, m x n x k."""
    sizes = dict(zip("mnk", extents, strict=True))
    (a, b), cast = LAYOUTS[layout], ".cast(`int32`)" if "int8" in dtype else ""
    shapes = [tuple(sizes[axis] for axis in index) for index in (a, b)]
    text = f"C[m,n] +=! A[{','.join(a)}]{cast} * B[{','.join(b)}]{cast}"
    return Check(f"{name}-{layout}-{dtype}", family, text, (("A", (dtype, shapes[0])), ("B", (dtype, shapes[1]))),
                 **more)  # fmt: skip
