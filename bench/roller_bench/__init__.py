"""Benchmarks of kernels, compilation, the model and the service: a distribution beside its cases and results."""

from __future__ import annotations

from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
BENCH = CHECKOUT / "bench"
DATA, RESULTS = BENCH / "data", BENCH / "results"
