"""Compile models for GPUs without a device, cold and warm, one process after the other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from roller_bench.zoo.gpu_worker import PREFIX

Json = dict[str, Any]
TIMEOUT_S = 1200.0
PLANS = ("auto", "persistent")
TIMES = ("seconds", "cpu_seconds", "stages", "peak_rss_bytes", "cache")


def compile_models(files: Sequence[str], targets: Sequence[str], plans: Sequence[str] = PLANS) -> Iterator[Json]:
    """Yield a row for each model and target.

    Each compile has a process of its own. The cache of a model and target is empty before the first plan: the second
    finds the kernels of the first. Warm compiles follow all cold ones.
    """
    for file in files:
        for target in targets:
            with tempfile.TemporaryDirectory(prefix="roller-gpu-zoo-") as cache:
                cold = {plan: _run(file, target, plan, cache) for plan in plans}
                warm = {plan: _run(file, target, plan, cache) for plan, row in cold.items() if "seconds" in row}
            rows = {plan: _row(row, warm.get(plan, {})) for plan, row in cold.items()}
            yield {"file": Path(file).name, "target": target, "load": os.getloadavg()[0], "plans": rows}


def _row(cold: Json, warm: Json) -> Json:
    """Return a cold compile with the times of a warm one."""
    if "seconds" not in cold:
        return cold
    times = {name: cold[name] for name in TIMES}
    again = {name: warm[name] for name in TIMES} if "seconds" in warm else warm
    return {**{name: value for name, value in cold.items() if name not in TIMES}, "cold": times, "warm": again}


def _run(file: str, target: str, plan: str, cache: str) -> Json:
    """Return the row that a worker prints, or its error: a crash is a result."""
    environment = os.environ | {"ROLLER_CACHE": cache}
    command = [sys.executable, "-m", "roller_bench.zoo.gpu_worker", file, target, plan]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"over {TIMEOUT_S:.0f} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith(PREFIX)]
    if lines:
        row: Json = json.loads(lines[-1].removeprefix(PREFIX))
        return row
    return {"error": f"exit code {done.returncode}: {(done.stderr.strip().splitlines() or ['no output'])[-1][:300]}"}
