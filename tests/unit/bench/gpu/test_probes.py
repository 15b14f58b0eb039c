"""bench/gpu's probes: their texts compile to what they are for and do what they say in the emulator; what they ask of a
device is read as it is meant; and what they leave fits a spec."""

from __future__ import annotations

import types
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from emulator_support import module

from roller_svc import hardware
from roller_svc.hardware.schema import MeasuredModel
from roller_svc.ir.dtype import DType
from roller_svc.ir.hardware import Measured
from roller_svc.ir.kernel import Buffer, KernelSource, Role
from roller_svc.toolchain import compile_source, sass_text

H200, A100 = hardware.load("nvidia-h200-sxm"), hardware.load("nvidia-a100-sxm-80gb")


@pytest.fixture
def bench() -> Any:
    from roller_bench.gpu import probe_kernels, probing

    return types.SimpleNamespace(kernels=probe_kernels, probing=probing)


def every_kernel(bench: Any, sizes: Any) -> dict[str, Any]:
    groups = (bench.kernels.barrier_probes, bench.kernels.tma_probes, bench.kernels.atomic_probes)
    return {kernel.name: kernel for group in groups for kernel in group(H200, sizes)}


def small(bench: Any) -> dict[str, Any]:
    return every_kernel(bench, bench.kernels.ProbeSizes(cores=2, rounds=128, rows=512, bins=8))


def emulated(source: KernelSource, /, **inputs: np.ndarray) -> dict[str, Any]:
    """What it leaves, its outputs beginning with zeros. The emulator wants some memory; one word is nobody's."""
    outputs = tuple(b.symbol for b in source.buffers_of(Role.OUTPUT))
    launches = tuple(replace(launch, zeroed=outputs) for launch in source.launches)
    nobodys = Buffer("nobodys", "nobodys", Role.OUTPUT, DType.UINT32, (1,))
    left = module(replace(source, launches=launches, buffers=(*source.buffers, nobodys))).run(inputs)
    return {name: values for name, values in left.items() if name != "nobodys"}


@pytest.mark.slow  # the next test compiles them too
def test_every_text_compiles_to_the_instructions_that_it_is_for(bench: Any) -> None:
    expected = {
        "mbarrier_round_trip": ("SYNCS.ARRIVE", "SYNCS.PHASECHK"), "cluster_sync": ("UCGABAR_ARV", "UCGABAR_WAIT"),
        "tma_thread_rows_128": ("UTMALDG.2D",), "tma_elect_rows_128": ("UTMALDG.2D", "ELECT"),
        "tma_thread_rows_32": ("UTMALDG.2D",), "atomic_red_64": ("REDG.E.ADD.F32",), "atomic_cas_64": ("CAS",),
    }  # fmt: skip
    for name, kernel in every_kernel(bench, bench.kernels.ProbeSizes(H200.num_cores)).items():
        compiled = compile_source(kernel.source)
        assert [used.spill_bytes for used in compiled.resources] == [0], name
        text = sass_text(compiled.binary)
        assert all(word in text for word in expected.get(name, ())), name
    assert "REDG" not in sass_text(compile_source(small(bench)["atomic_cas_8"].source).binary)


@pytest.mark.slow
@pytest.mark.parametrize("target", [H200.id, A100.id])
def test_every_probe_of_a_device_compiles_for_it(bench: Any, target: str) -> None:
    names = bench.probing.probe_names(target)
    assert ("tma" in names) == (target == H200.id)
    for name in names:
        rows = bench.probing.run_probe(bench.probing.ProbeTask(name, target, run=False))
        assert {row["status"] for row in rows} == {"compiled"}, name


@pytest.mark.emulator
@pytest.mark.parametrize("name", ["mbarrier_round_trip", "cluster_sync", "launch_cluster_2"])
def test_barriers_come_to_an_end(bench: Any, name: str) -> None:
    """The emulator stops a kernel whose threads wait for what does not come."""
    assert emulated(small(bench)[name].source) == {}


@pytest.mark.emulator
@pytest.mark.parametrize("name", ["tma_thread_rows_128", "tma_thread_rows_32"])
def test_boxes_are_brought_within_the_tensor(bench: Any, name: str) -> None:
    """Its barriers count what comes, and a room is not filled again before it has."""
    kernel = small(bench)[name]
    (source,) = kernel.source.buffers_of(Role.INPUT)
    assert emulated(kernel.source, source=np.ones(source.shape, np.uint32)) == {}
    assert kernel.amount == 8192 * 128 * 4  # bytes of a box, rounds, blocks


@pytest.mark.emulator
@pytest.mark.parametrize("name", ["atomic_red_8", "atomic_cas_8"])
def test_all_additions_arrive(bench: Any, name: str) -> None:
    kernel = small(bench)[name]
    left = emulated(kernel.source, values=np.full(8, 1.0, np.float32))["results"]
    assert left.sum() == kernel.amount
    assert (left > 0).all()


@pytest.mark.emulator
def test_the_emulator_rounds_to_the_nearest_tf32(bench: Any) -> None:
    given = bench.probing.rounding_inputs()
    found = emulated(bench.kernels.box_copy(H200.arch, bench.kernels.rounded_box(), given.size), X=given)["Y"]
    how, share = bench.probing.rounding_mode(given, found)
    assert how.startswith("nearest")
    assert share == 1.0


def rounded(given: np.ndarray, how: str) -> np.ndarray:
    """To tf32, in the ways that there are."""
    low, residue = given >> 13, given & 0x1FFF
    up = {
        "cut off": np.zeros_like(low, bool),
        "nearest, ties to even": (residue > 0x1000) | ((residue == 0x1000) & (low & 1 == 1)),
        "nearest, ties away": residue >= 0x1000,
        "neither nearest nor cut off": residue > 0,
    }[how]
    return ((low + up) << 13).astype(np.uint32)


@pytest.mark.parametrize("how", ["cut off", "nearest, ties to even", "nearest, ties away", "neither nearest nor cut off"])
def test_how_a_device_rounds_is_told_apart(bench: Any, how: str) -> None:
    given = bench.probing.rounding_inputs()
    found, share = bench.probing.rounding_mode(given, rounded(given, how))
    assert found == how
    assert (share == 1.0) == how.startswith("nearest,")
    assert bench.probing.rounding_mode(given, given)[0].startswith("none")


@pytest.mark.emulator
def test_a_box_beyond_a_small_tensor_is_filled_with_zeros(bench: Any) -> None:
    for rows in bench.probing.SMALL_ROWS:
        view = bench.kernels.small_box(rows)
        assert view.end_bytes < 128 << 10
        given = np.arange(1, rows * 32 + 1, dtype=np.uint32)
        found = emulated(bench.kernels.box_copy(H200.arch, view, given.size), X=given)["Y"]
        assert np.array_equal(found, bench.probing.expected_small_box(given, rows))


def test_a_measured_row_is_an_entry_of_a_spec_and_names_the_field_that_it_replaces(bench: Any) -> None:
    one = Measured("latency_l2", "s", 132, 1e-7, 2e-7, 3e-7, 1.5e-7, 9, "a load of l2", "levels.l2.latency_s")
    row = bench.probing._measured_row(one, H200)
    assert MeasuredModel(**row["entry"]).quiet == row["value"] == 1.5e-7
    assert row["spec_value"] == H200.level("l2").latency_s
    assert (row["least"], row["most"], row["samples"]) == (1e-7, 3e-7, 9)
    bench.probing._measured_row(replace(one, figure=None), H200)


def test_the_constants_are_those_of_calibration_and_stand_for_fields_of_every_spec(bench: Any) -> None:
    kernels, sizes = bench.probing.kernels, bench.probing.sizes_of
    for hw in (H200, A100):
        chosen = [kernel for kernel in kernels(hw, sizes(hw)) if kernel.name in bench.probing.CONSTANTS]
        missing = set(bench.probing.CONSTANTS) - {kernel.name for kernel in chosen}
        assert missing == (set() if hw is H200 else {"pdl_node"})  # an A100 has no programmatic edges
        fields = {kernel.field for kernel in chosen if kernel.field}
        assert all(bench.probing.spec_value(hw, field) > 0 for field in fields)
