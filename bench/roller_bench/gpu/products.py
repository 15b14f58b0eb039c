"""Compare all elements of a product with PyTorch's float32 product on the device."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from roller_svc.runtime.binding import Array

# Unit roundoff of the result types. Tensor cores truncate float32 additions instead of rounding, twice its roundoff
# (M. Fasi, N. Higham, M. Mikaitis, S. Pranesh: Numerical behavior of NVIDIA tensor cores, PeerJ CS 2021).
_ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}
_CUT_OFF = 2.0**-23


@dataclass(frozen=True, slots=True)
class FullProductCheck:
    """The comparison of all elements.

    The allowed error is the rounding of the result plus, for each of k additions, 2^-23 of the sum of the absolute
    products, once for the kernel and once for the reference.
    """

    elements: int
    wrong: int
    worst: float  # largest error over the allowed error

    @property
    def detail(self) -> str:
        return f"{self.wrong} of {self.elements} elements are wrong, by up to {self.worst:.3g} times the allowed error"


def check_full_product(equation: str, arrays: Mapping[str, Array], results: Mapping[str, Array]) -> FullProductCheck | None:
    """Compare the result of an einsum; return None if there is no PyTorch with a device."""
    if importlib.util.find_spec("torch") is None:
        return None
    import torch

    if not torch.cuda.is_available():
        return None
    torch.backends.cuda.matmul.allow_tf32 = False
    operands = [torch.from_numpy(array.astype(np.float32)).cuda() for array in arrays.values()]
    (result,) = results.values()
    found = torch.from_numpy(result.astype(np.float32)).cuda()
    reference = torch.einsum(equation, *operands)
    sizes = torch.einsum(equation, *(operand.abs() for operand in operands))
    summed = set(equation.partition("->")[0]) - set(equation.partition("->")[2]) - {","}
    terms, index = equation.split(",")[0], next(iter(summed))
    k = operands[0].shape[terms.index(index)]
    allowed = _ROUNDOFF[result.dtype.name] * reference.abs() + 2 * k * _CUT_OFF * sizes
    share = ((found - reference).abs() / allowed).nan_to_num(nan=float("inf"))
    return FullProductCheck(found.numel(), int((share > 1).sum()), float(share.max()))
