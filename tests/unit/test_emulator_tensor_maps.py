"""Copies by tensor maps in the emulator beside the same in numpy, written from the manuals apart from it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from emulated import module
from tmacopies import arrived
from tmakernels import CASES, bringing, swizzled, tiled, unsigned

from roller_svc.ir.dtype import DType
from roller_svc.runtime.binding import numpy_dtype

pytestmark = pytest.mark.emulator


@pytest.mark.parametrize("name", CASES)
def test_a_copy_brings_what_is_expected(name: str) -> None:
    view, coordinates, offsets = CASES[name]
    memory = np.arange(1, -(-view.reach_bytes // view.dtype.bytes) + 1).astype(numpy_dtype(unsigned(view)))
    found = module(bringing(view, memory.size, coordinates, offsets)).run({"X": memory})["Y"]
    assert np.array_equal(found, swizzled(arrived(view, memory, coordinates, offsets), view))


def test_tf32_is_rounded_on_the_way() -> None:
    view = replace(tiled((32, 8), (128,), (32, 8), dtype=DType.FLOAT32), tf32=True)
    values = np.random.default_rng(1).standard_normal(256).astype(np.float32)
    found = module(bringing(view, 256, (0, 0))).run({"X": values.view(np.uint32)})["Y"]
    assert not (found & 0x1FFF).any()
    assert (np.abs(found.view(np.float32) - values) <= np.abs(values) * 2**-11 * (1 + 2**-10)).all()
