"""Notes on programs and plans: each is true, and programs that are fine have none."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest

import roller_svc
from roller_svc import hardware
from roller_svc.compiler.estimates.batch import EstimateCache, Item, estimate_item
from roller_svc.compiler.notes import MAX_VARIATION, add_notes, busy_notes
from roller_svc.compiler.partition_cache import PartitionCache
from roller_svc.compiler.pipeline import build_kernel
from roller_svc.compiler.plans import estimate_program
from roller_svc.compiler.request import build_request
from roller_svc.errors import RollerWarning, StrictError
from roller_svc.frontend.parse import parse
from roller_svc.ir.constraints import ScheduleConstraints
from roller_svc.ir.dtype import DType
from roller_svc.ir.kernel import Measurement
from roller_svc.ir.program import TensorType

H200 = "nvidia-h200-sxm"
GEMM = "c[m, n] +=! a[m, k] * b[k, n]"
MAX_CHARACTERS = 160

ATTENTION = """
s[h, m, n]: float32 +=! q[h, m, d] * k[h, n, d]; x[h, m] >=! s[h, m, n]; e[h, m, n] = exp(s[h, m, n] - x[h, m]);
z[h, m] +=! e[h, m, n]; y[h, m, d]: float32 +=! e[h, m, n] * v[h, n, d]; o[h, m, d] = y[h, m, d] / z[h, m]
"""
HEADS = ("bfloat16", (16, 2048, 128))


def both(dtype: str, extent: int) -> dict[str, Any]:
    return {"a": (dtype, (extent, extent)), "b": (dtype, (extent, extent))}


def notes(text: str, inputs: dict[str, Any], target: str = H200, **options: Any) -> tuple[str, ...]:
    (found,) = estimate_item(Item(text, inputs, options=options), [target], 1)
    assert all(len(note) <= MAX_CHARACTERS for note in found.notes)
    return found.notes


@pytest.mark.parametrize(
    ("text", "inputs", "options"),
    [
        (GEMM, both("float16", 2048), {}),
        (GEMM, both("float32", 2048), {"allow_tf32": True}),
        (GEMM, both("float32", 32), {}),  # the launch decides
        ("y[m] +=! a[m, k] * b[k]", {"a": ("float32", (4096, 4096)), "b": ("float32", (4096,))}, {}),
        ("y[m] +=! a[m, k] * s[m]", {"a": ("float32", (4096, 4096)), "s": ("float32", (4096,))}, {}),
        ("y[m] = exp(a[m])", {"a": ("float32", (1 << 20,))}, {}),
        (ATTENTION.replace("e[h, m, n] * v", "e[h, m, n].cast(`bfloat16`) * v"), {"q": HEADS, "k": HEADS, "v": HEADS}, {}),
    ],
)
def test_programs_that_are_fine_have_no_note(text: str, inputs: dict[str, Any], options: dict[str, Any]) -> None:
    assert notes(text, inputs, **options) == ()


@pytest.mark.parametrize("target", ["cpu-x86-avx512", "nvidia-t4", "nvidia-k80"])
def test_devices_without_such_a_unit_have_no_note(target: str) -> None:
    assert notes(GEMM, both("float32", 1024), target) == ()


def test_products_in_float32_name_the_option() -> None:
    (note,) = notes(GEMM, both("float32", 4096))
    assert note.startswith("c: no matrix unit, a and b in float32, and tf32 is not allowed; allow_tf32: ")
    plain, faster = (
        estimate_item(Item(GEMM, both("float32", 4096), options={"allow_tf32": tf32}), [H200], 1)[0].plans[0].estimate.seconds
        for tf32 in (False, True)
    )
    assert f"{plain / faster:.1f} times as fast" in note


FP8 = "float8_e4m3fn"
BLOCK_SCALED = """
p[m, n, g]: float32 +=! a[m, g * 128 + j].cast(`float32`) * b[n, g * 128 + j].cast(`float32`) where g in 16, j in 128;
c[m, n] +=! p[m, n, g] * s[m, g] * t[n // 128, g]
"""
SCALED = {"a": (FP8, (2048, 2048)), "b": (FP8, (2048, 2048)), "s": ("float32", (2048, 16)), "t": ("float32", (16, 16))}


@pytest.mark.parametrize(("text", "inputs"), [("c[m, n]: float32 +=! a[m, k] * b[n, k]", both(FP8, 4096)), (BLOCK_SCALED, SCALED)])
def test_float8_on_another_units_names_the_option(text: str, inputs: dict[str, Any]) -> None:
    (note,) = notes(text, inputs)
    assert note.startswith("c: not on a faster unit, wgmma_e4m3: it")
    assert "takes allow_tf32; allow_tf32: " in note
    assert notes(text, inputs, allow_tf32=True) == ()


@pytest.mark.parametrize(
    "text",
    [
        "c[m, n]: float32 +=! a[m, k].cast(`float32`) / s[m, k // 128] * (b[n, k].cast(`float32`) / t[n // 128, k // 128])",
        BLOCK_SCALED.replace("* s[m, g] * t[n // 128, g]", "/ s[m, g] / t[n // 128, g]"),
        BLOCK_SCALED.replace("* s[m, g] * t[n // 128, g]", "/ (s[m, g] * t[n // 128, g])"),
    ],
)
def test_scales_of_blocks_that_divide_name_the_inverses_that_are_faster(text: str) -> None:
    (note, *_) = notes(text, SCALED, allow_tf32=True)
    gain = float(note.split("multiply by inverses of ")[1].split(": ")[1].split()[0])
    assert note.split("multiply by inverses of ")[1].split(": ")[0] in ("s and t", "t and s")
    inverse = text.replace("/ (s[m, g] * t[n // 128, g])", "/ s[m, g] / t[n // 128, g]")
    inverse = re.sub(r"/ ([st]\[[^]]*\])", r"* (1.0 / \1)", inverse)
    slow, fast = (
        estimate_item(Item(each, SCALED, options={"allow_tf32": True}), [H200], 1)[0].plans[0].estimate.seconds
        for each in (text, inverse)
    )
    assert gain == pytest.approx(slow / fast, abs=0.06)


WEIGHTS: dict[str, Any] = {
    "x": ("bfloat16", (512, 2048)),
    "w": (FP8, (8, 2048, 2048)),
    "e": ("int32", (512,)),
    "s": ("float32", (8, 2048)),
}
OF_EXPERTS = "y[t, n] +=! x[t, k].cast(`float32`) * (w[e[t], k, n].cast(`float32`) * s[e[t], n])"


def test_scales_of_narrow_weights_are_named_where_they_are_faster_after_the_sum() -> None:
    dense = OF_EXPERTS.replace("e[t], ", "")
    one = {name: (dtype, shape[1:]) for name, (dtype, shape) in WEIGHTS.items() if name in "ws"} | {"x": WEIGHTS["x"]}
    for text, inputs in ((dense, one), (OF_EXPERTS, WEIGHTS)):
        (note, *_) = notes(text, inputs)
        gain = float(note.split("; s after the sum: ")[1].split()[0])
        scale = text.split(" * ")[-1].rstrip(")")
        after = text.replace(f" * {scale}", "").replace("y[", "z[") + f"; y[t, n] = z[t, n] * {scale}"
        slow, fast = (estimate_item(Item(each, inputs), [H200], 1)[0].plans[0].estimate.seconds for each in (text, after))
        assert gain == pytest.approx(slow / fast, abs=0.06)
        assert not any("after the sum" in note for note in notes(text, inputs | {"x": ("float16", (512, 2048))}))


INT4 = "(bitwise_and(q[k // 8, n] >> k % 8 * 4, 15) - 8).cast(`float32`) * s[k // 128, n]"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_scaled_int4_names_its_rounding_where_its_unit_cannot_scale_sums(dtype: str) -> None:
    inputs = {"x": (dtype, (512, 1024)), "q": ("int32", (128, 1024)), "s": ("float32", (8, 1024))}
    text = "y[m, n] +=! x[m, k].cast(`float32`) * ({}) where k in 1024"
    found = notes(text.format(INT4), inputs)
    if dtype == "float16":
        assert found == ()
        return
    (note,) = found
    gain = float(note.split("; q * s in bfloat16: ")[1].split()[0])
    rounded = text.format(INT4).replace(f"({INT4})", f"({INT4}).cast(`bfloat16`).cast(`float32`)")
    slow, fast = (
        estimate_item(Item(each, inputs), [H200], 1)[0].plans[0].estimate.seconds for each in (text.format(INT4), rounded)
    )
    assert gain == pytest.approx(slow / fast, abs=0.06)


PAGED = """
S[b, h, n]: float32 +=! Q[b, h, d].cast(`float32`) * K[T[b, n // 16], n % 16, h // 4, d].cast(`float32`) where n in 2048, h in 32;
M[b, h] >=! S[b, h, n]; E[b, h, n] = exp(S[b, h, n] - M[b, h]); Z[b, h] +=! E[b, h, n];
X[b, h, d]: float32 +=! E[b, h, n].cast(`bfloat16`) * V[T[b, n // 16], n % 16, h // 4, d].cast(`float32`);
Y[b, h, d] = X[b, h, d] / Z[b, h]
"""


@pytest.mark.parametrize(("features", "is_named"), [(192, False), (576, True)])
def test_the_rule_that_keeps_attention_from_one_kernel_is_named(features: int, is_named: bool) -> None:
    pages: Any = (FP8, (8200, 16, 8, features))
    inputs = {"Q": ("bfloat16", (64, 32, features)), "K": pages, "V": pages, "T": ("int32", (64, 128))}
    found = notes(PAGED, inputs, "nvidia-a100-sxm-80gb")
    wanted = ("S: no matrix unit, attention is not one kernel (mma_bf16: registers per thread)",)
    assert found == (wanted if is_named else ())


@pytest.mark.parametrize(("features", "is_named"), [(256, False), (320, True)])
def test_attention_that_one_kernel_would_slow_down_is_named(features: int, is_named: bool) -> None:
    heads: Any = ("float16", (16, 2048, features))
    found = notes("Y = attention(Q, K, V)", dict.fromkeys("QKV", heads), "amd-mi300x")
    assert [re.sub(r"[0-9.]+ times", "# times", note) for note in found] == is_named * [
        "Y_dot: attention is not one kernel (mfma_f16: # times as long by the model)"
    ]


def test_tiles_that_one_kernel_of_attention_cannot_have_are_no_error() -> None:
    heads = TensorType(DType.FLOAT16, (16, 2048, 320))
    program = parse("Y = attention(Q, K, V)", dict.fromkeys("QKV", heads))
    cache, constraints = PartitionCache(program), ScheduleConstraints(tiles=(("raster", 8),))
    found = add_notes(cache, estimate_program(cache, hardware.load("amd-mi300x"), 1, constraints), constraints)
    assert len(found.ranked.groups) == 3
    assert [note for note in found.notes if "not one kernel" in note] == []


def test_probabilities_of_few_queries_name_the_cast_that_is_faster() -> None:
    pages: Any = ("bfloat16", (1024, 16, 8, 128))
    inputs = {"Q": ("bfloat16", (8, 32, 128)), "K": pages, "V": pages, "T": ("int32", (8, 128))}
    in_float32 = PAGED.replace("E[b, h, n].cast(`bfloat16`)", "E[b, h, n]")
    (note,) = notes(in_float32, inputs)
    assert note.startswith("X: no matrix unit, E in float32, and tf32 is not allowed; E[b, h, n].cast(`bfloat16`): ")
    slow, fast = (estimate_item(Item(t, inputs), [H200], 1)[0].plans[0].estimate.seconds for t in (in_float32, PAGED))
    assert float(note.split("cast(`bfloat16`): ")[1].split()[0]) == pytest.approx(slow / fast, abs=0.06)
    assert notes(PAGED, inputs) == ()


def test_conditions_on_both_factors_are_named() -> None:
    text = "c[m, n]: float32 +=! where(k <= m + n, a[m, k] * b[k, n], 0.0)"
    (note,) = notes(text, both("float16", 2048))
    assert note.startswith("c: no matrix unit, the condition k <= m + n depends on both factors")
    assert notes("c[m, n]: float32 +=! where(k <= m, a[m, k] * b[k, n], 0.0)", both("float16", 2048)) == ()


@pytest.mark.parametrize(
    ("text", "inputs", "cause"),
    [
        ("y[m, n]: float32 +=! v[m, z] * x[c[m, z], n]",
         {"v": ("float16", (8192, 64)), "c": ("int32", (8192, 64)), "x": ("float16", (8192, 512))},
         "data selects the rows of x: c[m, z]"),
        ("y[b, c, t] +=! x[b, c, t + j] * w[c, j] where t in 4096",
         {"x": ("float16", (8, 256, 8191)), "w": ("float16", (256, 4096))},
         "its products have 1 x 32768 rows and columns, too few to fill a tile"),
    ],
)  # fmt: skip
def test_forms_without_a_matrix_unit_are_named(text: str, inputs: dict[str, Any], cause: str) -> None:
    (note,) = notes(text, inputs)
    assert note.startswith(f"y: no matrix unit, {cause}")


def test_probabilities_in_float32_name_the_cast_that_is_faster() -> None:
    inputs = {"q": HEADS, "k": HEADS, "v": HEADS}
    found = notes(ATTENTION, inputs)
    (note,) = [each for each in found if each.startswith("y: ")]
    assert "no matrix unit, e in float32" in note
    assert "; e[h, m, n].cast(`bfloat16`): " in note
    gain = float(note.split("cast(`bfloat16`): ")[1].split()[0])
    text = ATTENTION.replace("e[h, m, n] * v", "e[h, m, n].cast(`bfloat16`) * v")
    slow, fast = (estimate_item(Item(t, inputs), [H200], 1)[0].plans[0].estimate.seconds for t in (ATTENTION, text))
    assert gain == pytest.approx(slow / fast, abs=0.06)


def test_types_without_a_unit_are_named() -> None:
    (note,) = notes("c[m, n]: int32 +=! a[m, k].cast(`int32`) * b[k, n].cast(`int32`)", both("int16", 4096))
    assert "no unit of nvidia-h200-sxm multiplies int16 by int16" in note


def test_sums_of_another_type_are_named() -> None:
    (note,) = notes("c[m, n]: float64 +=! a[m, k].cast(`float64`) * b[k, n].cast(`float64`)", both("float16", 2048), "nvidia-t4")
    assert "sums in float64" in note


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("c[m, n] +=! a[m, k] * b[j, n]", "c: index k occurs in a alone, and j in b; are they meant to be one index?"),
        ("c[m, n] +=! a[m, k] * b[k, n] * w[j]", "c: index j occurs in w alone: its sum could be computed once"),
    ],
)
def test_an_index_of_one_factor_alone_is_named(text: str, expected: str) -> None:
    inputs = both("float16", 64) | ({"w": ("float16", (32,))} if "w" in text else {})
    assert expected in notes(text, inputs)


def test_unused_inputs_are_named() -> None:
    assert notes("y[i] = x[i]", {"x": ("float32", (64,)), "z": ("float32", (3,))}) == ("input z is not read",)


def test_a_large_workspace_is_named() -> None:
    text = "p[m, n, g]: float32 +=! a[m, g, k] * b[n, g, k]; y[m, n, g] = p[m, n, g] / p[m, n, 0]"
    inputs = {"a": ("float16", (4096, 32, 64)), "b": ("float16", (4096, 32, 64))}
    assert any(note.startswith("a call takes 2.15 GB of workspace: p 2.15") for note in notes(text, inputs))


def test_a_copied_target_names_the_donation_that_is_faster() -> None:
    text, inputs = "c[p[i], d] =. x[i, d]", {"c": ("float16", (1 << 18, 1024)), "p": ("int32", (64,)), "x": ("float16", (64, 1024))}
    (note,) = notes(text, inputs)
    assert "`copy` of kernel" in note
    assert "; donate c: " in note
    assert build_kernel(build_request(text, inputs, target=H200, donate=["c"], select="model")).notes == ()


def test_varying_times_tell_of_a_busy_machine() -> None:
    quiet = Measurement(1.0, 1.0 / MAX_VARIATION, 10, "cpu")
    assert list(busy_notes(quiet)) == []
    assert list(busy_notes(None)) == []
    (note,) = busy_notes(Measurement(3.0, 1.0, 10, "cpu"))
    assert note.startswith("the machine was busy: the median time is 3.0 times the least")


def test_notes_are_warnings_at_the_caller() -> None:
    inputs = {"x": ("float32", (64,)), "z": ("float32", (3,))}
    for call in (
        lambda: roller_svc.estimate("y[i] = x[i]", inputs, [H200]),
        lambda: roller_svc.compile("y[i] = x[i]", inputs, target="cpu-x86-avx2", select="model"),
    ):
        with pytest.warns(RollerWarning, match="input z is not read") as caught:
            call()
        assert [warning.filename for warning in caught] == [__file__]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", category=roller_svc.RollerWarning)
            call()


def test_strict_makes_notes_errors() -> None:
    text, inputs = "y[i] = x[i]", {"x": ("float32", (64,)), "z": ("float32", (3,))}
    for call in (
        lambda strict: roller_svc.estimate(text, inputs, [H200], strict=strict),
        lambda strict: roller_svc.compile(text, inputs, target="cpu-x86-avx2", select="model", strict=strict),
    ):
        with pytest.raises(StrictError, match="input z is not read") as refused:
            call(strict=True)
        assert refused.value.code == "has-notes"
        assert call(strict=False)
    roller_svc.estimate(text, {"x": ("float32", (64,))}, [H200], strict=True)


def test_the_service_reports_notes_and_caches_strict_estimates_apart() -> None:
    inputs = {"x": ("float32", (64,)), "z": ("float32", (3,))}
    cache = EstimateCache()
    for _ in range(2):
        plain, strict = (cache.estimates([Item("y[i] = x[i]", inputs, options={"strict": s})], [H200], 1)[0] for s in (False, True))
        assert plain["notes"] == ["input z is not read"]
        assert strict["error"]["code"] == "has-notes"


def test_a_missing_device_is_no_note() -> None:
    inputs = {"x": ("float32", (64,))}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kernel = roller_svc.compile("y[i] = x[i]", inputs, target="amd-mi250x", strict=True)
    (remark,) = kernel.report["notes"]
    assert remark.startswith("nothing was measured: this machine has no amd-mi250x")
