"""The most efficient candidate: fewer tasks, and less time on one worker."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from roller_svc.compiler import efficient
from roller_svc.compiler.efficient import find_efficient
from roller_svc.compiler.pipeline import CompiledCandidates, compile_candidates, select_candidate
from roller_svc.hardware import load
from roller_svc.hardware.catalog import restrict_cores
from roller_svc.ir.dtype import DType
from roller_svc.ir.kernel import Measurement
from roller_svc.ir.options import SelectionMode
from roller_svc.ir.program import TensorType
from roller_svc.ir.report import BuildReport, BuildRequest, CandidateResult

US = 1e-6
VECTOR, MATRIX = TensorType(DType.FLOAT32, (256,)), TensorType(DType.FLOAT32, (256, 512))
ROWS = TensorType(DType.FLOAT32, (192, 256))


def compiled(first: TensorType = VECTOR, cores: int = 2, top_k: int = 8) -> CompiledCandidates:
    """Return compiled candidates of a product: a nest for a vector; rows have constant weights, which are packed."""
    text, constants = ("C[n] +=! A[k] * B[k, n]", ()) if first is VECTOR else ("C[m, n] +=! A[m, k] * B[k, n]", ("B",))
    hw = restrict_cores(load("local"), cores)
    inputs = (("A", first), ("B", MATRIX))
    request = BuildRequest(text, inputs, select=SelectionMode.MODEL, top_k=top_k, hardware=hw, constants=constants)
    return compile_candidates(request, for_model=True)


def selected(candidates: CompiledCandidates) -> tuple[CompiledCandidates, BuildReport]:
    return candidates, select_candidate(candidates)


def tasks(result: CandidateResult | None) -> int:
    assert result is not None
    return result.plan.choices[0].program.grid


def test_one_core_has_no_other_kernel():
    assert find_efficient(*selected(compiled(cores=1))) is None


def test_the_model_takes_a_kernel_with_fewer_tasks_beyond_a_margin(monkeypatch: pytest.MonkeyPatch):
    candidates, report = selected(compiled())
    assert tasks(report.winner) == 2
    monkeypatch.setattr(efficient, "MODELLED_RATIO", 1.0)
    found = find_efficient(candidates, report)
    assert tasks(found) == 1
    assert found.compiled is not None
    monkeypatch.setattr(efficient, "MODELLED_RATIO", 2.0)
    assert find_efficient(candidates, report) is None


def test_the_model_looks_beyond_the_candidates_that_may_be_built_unless_one_alone_may(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(efficient, "MODELLED_RATIO", 1.0)
    assert tasks(find_efficient(*selected(compiled(top_k=2)))) == 1
    assert find_efficient(*selected(compiled(top_k=1))) is None


def test_kernels_with_packed_weights_are_left_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(efficient, "MODELLED_RATIO", 0.0)
    candidates, report = selected(compiled(ROWS))
    assert report.winner.source.prepacked_buffers
    assert find_efficient(candidates, report) is None


@pytest.mark.parametrize(("alone_s", "is_kept"), [((10 * US, 9 * US), True), ((10 * US, 9.6 * US), False)])
def test_a_measured_kernel_is_kept_beyond_a_margin(monkeypatch: pytest.MonkeyPatch, alone_s: tuple[float, float], is_kept: bool):
    """Of the candidates, those with one task take `alone_s[1]` on one worker, the fastest `alone_s[0]`."""
    monkeypatch.setattr(efficient, "MODELLED_RATIO", 1.0)
    candidates, report = selected(compiled())
    other = find_efficient(candidates, report)
    assert other is not None
    timed = Measurement(1 * US, 1 * US, 3, "cpu")
    results = tuple(replace(each, measurement=timed) for each in (report.winner, other))
    seconds = {results[i].compiled.source.key: alone_s[i] for i in range(2)}
    backend: Any = SimpleNamespace(
        to_device=lambda arrays: arrays, load=lambda kernel: SimpleNamespace(bind=lambda _: seconds[kernel.source.key])
    )
    monkeypatch.setattr(efficient, "measure", lambda call, _: Measurement(call, call, 3, "cpu"))
    found = find_efficient(replace(candidates, backend=backend), replace(report, results=results))
    assert (found is not None) is is_kept
    assert not is_kept or tasks(found) == 1
