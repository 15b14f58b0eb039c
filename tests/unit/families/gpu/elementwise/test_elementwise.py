"""Maps on GPUs: vector accesses, tiles transposed through shared memory, edges."""

from __future__ import annotations

import re

import pytest
from cases_gpu import Types, case
from sampling import every, slow

from roller_svc import hardware
from roller_svc.compiler.plans import best_plans, rank_best_partition
from roller_svc.families.common.gpu.elementwise_space import choose_padding, lanes_along
from roller_svc.frontend.lang import parse
from roller_svc.frontend.parse import parse as parse_program
from roller_svc.ir.dtype import DType
from roller_svc.ir.program import TensorType
from roller_svc.perf.banks import conflict_cycles

CASES: dict[str, tuple[str, Types]] = {
    "bias": ("y[n, m] = relu(x[n, m] + b[m])", {"x": ("float32", (64, 256)), "b": ("float32", (256,))}),
    "half": ("y[i] = x[i] * 2.0", {"x": ("float16", (8192,))}),
    "bytes": ("y[i] = x[i] + 1", {"x": ("int8", (10240,))}),
    "widening": ("y[i, j] = x[i, j] * s[j]", {"x": ("int8", (40, 96)), "s": ("float32", (96,))}),
    "a rest": ("y[i] = x[i] * 2.0", {"x": ("float32", (4099,))}),
    "half with a rest": ("y[i] = x[i] + z[i]", {"x": ("float16", (5003,)), "z": ("float16", (5003,))}),
    "odd rows": ("y[i, j] = x[i, j] + b[j]", {"x": ("float32", (99, 51)), "b": ("float32", (51,))}),
    "rows of six": ("y[i, j] = x[i, j] + b[i]", {"x": ("float32", (500, 6)), "b": ("float32", (500,))}),
    "channels": ("y[n, c, h, w] = x[n, c, h, w] * s[c]", {"x": ("float16", (2, 20, 14, 14)), "s": ("float16", (20,))}),
    "ragged planes": ("y[n, c, h, w] = relu(x[n, c, h, w] * s[c] + b[c])",
                      {"x": ("float16", (2, 24, 7, 7)), "s": ("float32", (24,)), "b": ("float32", (24,))}),
    "odd and crossed": ("y[i, j] = x[j, i] + b[j]", {"x": ("float32", (51, 99)), "b": ("float32", (51,))}),
    "two ragged results": ("a[i, j] = exp(x[i, j]); b[i, j] = a[i, j] + x[i, j]", {"x": ("float32", (70, 35))}),
    "shifted in ragged rows": ("y[i, j] = x[i, j] + z[i, j + 1]",
                               {"x": ("float32", (64, 33)), "z": ("float32", (64, 34))}),
    "two results": ("a[i, j] = exp(x[i, j]); b[i, j] = a[i, j] + x[i, j]", {"x": ("float32", (64, 72))}),
    "transpose": ("y[j, i] = x[i, j]", {"x": ("float32", (128, 96))}),
    "transpose of halves": ("y[j, i] = x[i, j]", {"x": ("float16", (128, 192))}),
    "transpose of bytes": ("y[j, i] = x[i, j]", {"x": ("int8", (256, 128))}),
    "transpose of doubles": ("y[j, i] = x[i, j] * 2.0", {"x": ("float64", (64, 96))}),
    "transpose with edges": ("y[j, i] = x[i, j]", {"x": ("float32", (97, 131))}),
    "transpose with even edges": ("y[j, i] = x[i, j]", {"x": ("float16", (104, 200))}),
    "transpose of odd halves": ("y[j, i] = x[i, j]", {"x": ("float16", (389, 263))}),
    "transpose of odd bytes": ("y[j, i] = x[i, j]", {"x": ("int8", (515, 389))}),
    "transpose of bytes with rows of fours": ("y[j, i] = x[i, j]", {"x": ("int8", (516, 388))}),
    "symmetric": ("y[i, j] = x[i, j] + x[j, i]", {"x": ("float32", (96, 96))}),
    "to channels last": ("y[n, h, w, c] = x[n, c, h, w]", {"x": ("float32", (2, 40, 12, 12))}),
    "from channels last": ("y[n, c, h, w] = x[n, h, w, c]", {"x": ("float16", (2, 12, 12, 40))}),
    "few channels last": ("y[n, h, w, c] = x[n, c, h, w]", {"x": ("float32", (2, 3, 32, 32))}),
    "heads": ("y[b, h, s, d] = x[b, s, h, d]", {"x": ("float16", (2, 32, 4, 64))}),
    "reversed axes": ("y[k, j, i] = x[i, j, k]", {"x": ("float32", (40, 12, 36))}),
    "crossed twice": ("y[i, j] = x[j, i] * z[j, i]", {"x": ("float32", (96, 64)), "z": ("float16", (96, 64))}),
    "shifted": ("y[i, j] = x[i, j + 1] where j in 128", {"x": ("float32", (64, 130))}),
    "padded": ("y[i, j] = x[i, j - 2].when([j >= 2, j - 2 < 60], 0.0) where j in 64", {"x": ("float32", (64, 60))}),
    "table": ("y[i, j] = t[r[i], j]", {"t": ("float16", (50, 64)), "r": ("int32", (128,))}),
    "columns": ("a[i] = x[i, 0] + x[i, 2]; b[i] = x[i, 1] * 2.0", {"x": ("float32", (1003, 3))}),
    "whole vectors of columns": ("a[i] = x[i, 0] + x[i, 2]; b[i] = x[i, 1] * 2.0", {"x": ("float32", (4096, 3))}),
    "columns of halves": ("a[i] = x[i, 0] - x[i, 1]; b[i] = x[i, 1]", {"x": ("bfloat16", (512, 2))}),
    "some columns of bytes": ("a[i] = x[i, 1]; b[i] = x[i, 2]; c[i] = x[i, 5]", {"x": ("int8", (777, 8))}),
    "columns of planes": ("a[i, j] = x[i, j, 0, 1] * x[i, j, 1, 0]; b[i, j] = x[i, j, 1, 1]", {"x": ("float32", (31, 17, 2, 2))}),
    "columns of rows": ("a[i, j] = x[i, 0] * z[i, j]; b[i, j] = x[i, 1] + z[i, j]",
                        {"x": ("float32", (40, 2)), "z": ("float32", (40, 64))}),
    "guarded columns": ("a[i] = x[i, 1].when([i > 3], 0.0); b[i] = x[i, 2]", {"x": ("float32", (777, 4))}),
    "one point": ("y[i] = x[i]", {"x": ("float32", (1,))}),
}  # fmt: skip


@pytest.mark.emulator
@pytest.mark.parametrize("count", [1, slow(3)])
@pytest.mark.parametrize("name", every(2, CASES))
def test_tiles_match_the_interpreter(name: str, count: int) -> None:
    case(*CASES[name]).check_some(count)


@pytest.mark.parametrize(
    ("name", "loads"),
    [
        ("bias", "uint4"),
        ("half", "uint4"),
        ("bytes", "uint4"),
        ("a rest", "uint4"),
        ("channels", "uint4"),
        ("rows of six", "uint4"),
        ("transpose", "uint4"),
        ("transpose of halves", "uint4"),
        ("heads", "uint4"),
        ("table", "uint4"),
        ("odd rows", "uint4"),
        ("ragged planes", "uint4"),
        ("odd and crossed", ""),
    ],
)
def test_the_best_tiles_access_memory_as_wide_as_rows_allow(name: str, loads: str) -> None:
    found = case(*CASES[name])
    text = found.text(found.ranked[0])
    assert set(re.findall(r"= \*\(const (\w+) \*\)&[xt]\[", text)) == ({loads} if loads else set())
    assert bool(re.search(r"\*\(\w+ \*\)&y\[", text)) == bool(loads)


@pytest.mark.parametrize(
    "name",
    [
        "transpose",
        "transpose of halves",
        "from channels last",
        "crossed twice",
        "transpose of odd halves",
        "transpose of odd bytes",
        "transpose of bytes with rows of fours",
    ],
)
def test_tensors_across_the_result_are_staged(name: str) -> None:
    found = case(*CASES[name])
    assert "__shared__" in found.text(found.ranked[0])


@pytest.mark.parametrize("name", ["bias", "heads", "channels", "table"])
def test_tensors_along_the_result_are_not_staged(name: str) -> None:
    found = case(*CASES[name])
    assert "__shared__" not in found.text(found.ranked[0])


@pytest.mark.parametrize(
    ("places", "size", "cycles"),
    [
        ([4 * i for i in range(32)], 4, 1),
        ([0] * 32, 4, 1),  # one word, sent to all
        ([128 * i for i in range(32)], 4, 32),  # one bank
        ([8 * i for i in range(32)], 4, 2),
        ([132 * i for i in range(32)], 4, 1),
        ([2 * i for i in range(32)], 2, 1),  # two lanes a word
        ([16 * i for i in range(32)], 16, 4),  # a quarter of the warp at a time
        ([8 * i for i in range(32)], 8, 2),
        ([128 * i for i in range(32)], 16, 32),
    ],
)
def test_bank_conflicts(places: list[int], size: int, cycles: int) -> None:
    assert conflict_cycles(places, size) == cycles


def test_a_padded_tile_of_floats_has_no_conflicts() -> None:
    """32 x 32 floats, eight lanes of four along each line: one more element a row keeps all lanes apart."""
    buffer = choose_padding(32, 4, 4, (8, 4, 32))
    assert (buffer.pad, buffer.write_cycles, buffer.read_cycles) == (1, 4, 1)


@pytest.mark.parametrize(("row", "size", "pad", "writes"), [(64, 2, 2, 2), (128, 1, 4, 1)], ids=["halves", "bytes"])
def test_rows_of_single_elements_are_one_word_apart_in_the_banks(row: int, size: int, pad: int, writes: int) -> None:
    """Lanes load whole sectors: two lines of halves, whose words share banks, or one line of bytes."""
    buffer = choose_padding(row, 1, size, (32, 1, row))
    assert (buffer.pad, buffer.write_cycles, buffer.read_cycles) == (pad, writes, 1)


@pytest.mark.parametrize(("width", "size", "lanes"), [(4, 4, 8), (1, 4, 8), (1, 2, 16), (1, 1, 32), (4, 1, 8)])
def test_lanes_along_a_line_load_whole_sectors(width: int, size: int, lanes: int) -> None:
    assert lanes_along(128 // width, width * size) == lanes


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        ("float16", (16387, 8191)),
        ("float16", (8191, 8191)),
        ("bfloat16", (8192, 8191)),
        ("int8", (4100, 4100)),
        ("int8", (46340, 46340)),
        ("int8", (8191, 8191)),
    ],
)
@pytest.mark.parametrize("target", ["nvidia-h200-sxm", "nvidia-a100-sxm-80gb"])
def test_large_transposes_of_narrow_types_take_at_most_twice_their_traffic(dtype: str, shape: tuple[int, int], target: str) -> None:
    types = {"x": TensorType(DType(dtype), shape)}
    spec = hardware.load(target)
    _, ranked, _ = rank_best_partition(parse("y[j, i] = x[i, j]", types), spec, 1)
    estimate = best_plans(ranked, 1)[0].estimate
    traffic_s = 2 * types["x"].bytes / spec.levels[0].bandwidth_bytes_per_s
    assert estimate.seconds < 2 * traffic_s + spec.limits.launch_overhead_s


ROPE = "y = rope(x, cos, sin)"
ROPE_OF_HALVES = """y[t, h, s, d] = (x[t, h, s, d].cast(`float32`) * cos[t, d]
    + x[t, h, 1 - s, d].cast(`float32`) * where(s == 0, -sin[t, d], sin[t, d])).cast(`bfloat16`)"""


@pytest.mark.parametrize("target", ["nvidia-h200-sxm", "nvidia-a100-sxm-80gb", "amd-mi300x"])
def test_rotated_halves_are_estimated_no_slower_than_an_axis_of_halves(target: str) -> None:
    def seconds(text: str, shape: tuple[int, ...]) -> float:
        table = TensorType(DType.FLOAT32, (8192, 64))
        program = parse_program(text, {"x": TensorType(DType.BFLOAT16, shape), "cos": table, "sin": table})
        _, ranked, _ = rank_best_partition(program, hardware.load(target), 1)
        return best_plans(ranked, 1)[0].estimate.seconds

    assert seconds(ROPE, (8192, 32, 128)) <= seconds(ROPE_OF_HALVES, (8192, 32, 2, 64))
