"""A check: one program and the constraints on its kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Type = tuple[str, tuple[int, ...]]
Inputs = tuple[tuple[str, Type], ...]

HALVES = ("float16", "bfloat16")
# (m, n, k): whole tiles; k a multiple of 4 or 2 elements only, for narrower copies; no common divisors
SHAPES = {"whole": (192, 128, 160), "by4": (132, 100, 36), "by2": (70, 34, 50), "odd": (67, 33, 51)}
LAYOUTS = {"nn": ("mk", "kn"), "nt": ("mk", "nk"), "tn": ("km", "kn")}


@dataclass(frozen=True, slots=True)
class Check:
    """One program and the constraints on its kernel."""

    id: str
    family: str
    expression: str
    inputs: Inputs
    allow_tf32: bool = False
    unit: str | None = None  # the option `family`
    tiles: tuple[tuple[str, int], ...] = ()  # the option `tiles`
    hints: Mapping[str, Any] = field(default_factory=dict)
    product: str | None = None  # einsum equation of a program too large for the interpreter: compared in float32
    donate: tuple[str, ...] = ()  # the option `donate`
    finite: tuple[str, ...] = ()  # inputs without infinities and NaN: masked elements may be multiplied by 0

    @property
    def types(self) -> dict[str, dict[str, Any]]:
        """Return the inputs as in a request."""
        return {name: {"dtype": dtype, "shape": list(shape)} for name, (dtype, shape) in self.inputs}


def product_check(family: str, name: str, dtype: str, extents: tuple[int, int, int], layout: str = "nn", **more: Any) -> Check:
    """Return the check of a product of two matrices, extents (m, n, k)."""
    sizes = dict(zip("mnk", extents, strict=True))
    (a, b), cast = LAYOUTS[layout], ".cast(`int32`)" if "int8" in dtype else ""
    shapes = [tuple(sizes[axis] for axis in index) for index in (a, b)]
    text = f"C[m,n] +=! A[{','.join(a)}]{cast} * B[{','.join(b)}]{cast}"
    return Check(f"{name}-{layout}-{dtype}", family, text, (("A", (dtype, shapes[0])), ("B", (dtype, shapes[1]))), **more)
