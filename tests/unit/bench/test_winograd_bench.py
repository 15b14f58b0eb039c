"""The benchmark of Winograd convolutions: all algorithms, their errors and their times."""

from __future__ import annotations

import json

import numpy as np
import pytest

from roller_bench import winograd
from roller_bench.winograd import Layer, bench_layer, convolve_float64, relative_errors
from roller_svc import hardware
from roller_svc.analysis.winograd import relative_error_bound

LAYER = Layer("made up", 24, 16, 12)


@pytest.mark.parametrize(("layer", "names"), [(LAYER, winograd.NAMES), (Layer("made up", 24, 16, 60, 2), winograd.LINE_NAMES)])
def test_layer_has_each_algorithm_within_its_error_bound(layer: Layer, names: dict[int, str]) -> None:
    row = bench_layer(layer, hardware.load("local"), plans=1, seconds=0.0)
    algorithms = row["algorithms"]
    assert list(algorithms) == list(names.values())
    assert all(each["calls"] >= winograd.MIN_ROUNDS and each["min_s"] > 0 for each in algorithms.values())
    assert all(0 < each["rms_error"] < each["max_error"] for each in algorithms.values())
    for tile in (2, 4):
        found = algorithms[names[tile]]
        assert found["max_error"] < found["error_bound"] == relative_error_bound(tile, layer.channels, layer.dims)
    assert algorithms[names[4]]["rms_error"] > algorithms["direct"]["rms_error"]


def test_float64_reference_is_the_sum_over_taps_and_channels() -> None:
    rng = np.random.default_rng(1)
    x, w = rng.random((1, 2, 3, 4), np.float32), rng.random((2, 2, 3, 3), np.float32)
    expected = np.zeros((1, 2, 3, 4))
    for f, c, y, i, j, column in np.ndindex(2, 2, 3, 3, 3, 4):
        row, source = y + i - 1, column + j - 1
        if 0 <= row < 3 and 0 <= source < 4:
            expected[0, f, y, column] += float(w[f, c, i, j]) * float(x[0, c, row, source])
    np.testing.assert_allclose(convolve_float64(x, w), expected, rtol=1e-12)


def test_errors_are_relative_to_the_scale_of_the_outputs() -> None:
    expected = np.array([2.0, -2.0, 2.0, -2.0])
    errors = relative_errors(expected + np.array([0.0, 0.0, 0.0, 0.2]), expected)
    assert errors == pytest.approx({"max_error": 0.1, "rms_error": 0.05})


def test_command_prints_one_document(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(winograd, "LAYERS", (LAYER,))
    monkeypatch.setattr(winograd, "bench_layer", lambda layer, hw, *_: {"size": layer.size, "cores": hw.num_cores})
    monkeypatch.setattr(winograd, "set_num_threads", lambda _: None)
    winograd.main(["--threads", "1"])
    document = json.loads(capsys.readouterr().out)
    assert document["layers"] == [{"size": 12, "cores": 1}]
    assert document["settings"]["threads"] == 1
    assert document["machine"]["date"]
