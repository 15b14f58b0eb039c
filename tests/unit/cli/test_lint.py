"""Lint of one program: findings as JSON and as text."""

from __future__ import annotations

import json

import pytest

from roller_svc.cli import main

TARGET = "nvidia-l40s"
MATMUL = "C[m, n] +=! A[m, k] * B[k, n]"


def test_lint_of_one_program(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["lint", MATMUL, "--input", "A=float32[64,64]", "--input", "B=float32[64,64]", "--target", TARGET]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["target"] == TARGET
    assert found["instructions"]["FFMA"] > 0
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert all(launch["name"] in shown for launch in found["launches"])
    assert f"FFMA {found['launches'][0]['counts']['FFMA']}" in shown
    assert ("no findings" in shown) is (found["findings"] == [])
    assert all(finding["message"] in shown for finding in found["findings"])


def test_lint_is_for_cuda(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lint", "C[n] = A[n]", "--input", "A=float32[64]"]) == 2
    assert "machine code of CUDA kernels" in capsys.readouterr().err
