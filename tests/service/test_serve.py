"""`roller serve` as a process: one command starts it, Control-C ends it, kill -9 loses nothing."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).resolve().parents[2]
STOP_S = 30

BODY = {
    "expression": "C[m, n] +=! A[m, k] * B[k, n]",
    "inputs": {"A": {"dtype": "float32", "shape": [256, 256]}, "B": {"dtype": "float32", "shape": [256, 256]}},
    "target": "local",
    "options": {"top_k": 10, "select": "measure"},
}


@contextmanager
def service(store: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process and its address."""
    command = [sys.executable, "-m", "roller_svc", "serve", "--port", "0", "--store", str(store)]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if found := re.search(r"running on (http://\S+)", line):
                yield process, found[1]
                break
        else:
            pytest.fail("the service did not start")
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_control_c_ends_it(tmp_path: Path) -> None:
    with service(tmp_path) as (process, address):
        assert httpx.get(f"{address}/readyz", timeout=60).status_code == 200
        assert httpx.post(f"{address}/v1/kernels:compile", json=BODY, timeout=60).status_code in (200, 202)
        process.send_signal(signal.SIGINT)
        _, rest = process.communicate(timeout=STOP_S)
        assert process.returncode in (0, 130)
        assert "Traceback" not in rest


@pytest.mark.slow
def test_an_accepted_request_survives_kill_9(tmp_path: Path) -> None:
    with service(tmp_path) as (process, address):
        accepted = httpx.post(f"{address}/v1/kernels:compile", json=BODY, timeout=60)
        assert accepted.status_code == 202
        name = accepted.json()["name"]
        process.kill()
    with service(tmp_path) as (process, address):
        operation = httpx.get(f"{address}/v1/{name}?wait=60", timeout=90).json()
        assert operation["done"] is True
        assert operation["response"]["measurement"]["median_s"] > 0
        again = httpx.post(f"{address}/v1/kernels:compile", json=BODY, timeout=60).json()
        assert again["metadata"]["cache"] == "hit"
