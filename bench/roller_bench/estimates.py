"""Time POST /v1/estimates, for one operator and for a batch, cold and cached. Prints JSON.

Each round starts a service on loopback, as `roller serve` does, and warms it up with another program. "cold" is the
first request, "again" is the same request repeated.

    python -m roller_bench.estimates --rounds 5
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import httpx

from roller_bench import DATA
from roller_bench.cases import BenchCase, performance_cases

TARGETS = ("nvidia-h200-sxm", "nvidia-h100-sxm", "nvidia-a100-sxm-80gb", "nvidia-v100-sxm2", "amd-mi50")
START_S, REQUEST_S = 60.0, 120.0
WARMING = {"expression": "C[i] = A[i] + A[i]", "inputs": {"A": {"dtype": "float32", "shape": [77]}}}


@contextmanager
def service() -> Iterator[httpx.Client]:
    """Start a service and warm it up; yield a client."""
    with tempfile.TemporaryDirectory() as store:
        command = [sys.executable, "-m", "roller_svc", "serve", "--port", "0", "--store", store]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        try:
            with httpx.Client(base_url=_address(process), timeout=REQUEST_S) as client:
                post_items(client, [WARMING])
                yield client
        finally:
            process.terminate()
            process.wait()


def _address(process: subprocess.Popen[str]) -> str:
    """Read the address from uvicorn's log."""
    until = time.monotonic() + START_S
    for line in process.stderr or ():
        if "running on " in line:
            return line.split("running on ")[1].split()[0]
        if time.monotonic() > until:
            break
    raise SystemExit(f"the service did not start within {START_S:g} s")


def post_items(client: httpx.Client, items: Sequence[dict[str, Any]]) -> float:
    """Return the seconds of one batch request, including parsing of the response."""
    start = time.perf_counter()
    response = client.post("/v1/estimates", json={"items": list(items), "targets": list(TARGETS), "top_k": 1})
    response.raise_for_status()
    estimates = response.json()["estimates"]
    seconds = time.perf_counter() - start
    assert len(estimates) == len(items) * len(TARGETS)
    return seconds


def singles(client: httpx.Client, items: Sequence[dict[str, Any]]) -> list[float]:
    """Return the seconds of one request per item, cycling through the devices."""
    seconds_by_item = []
    for i, item in enumerate(items):
        start = time.perf_counter()
        body = {"items": [item], "targets": [TARGETS[i % len(TARGETS)]], "top_k": 1}
        client.post("/v1/estimates", json=body).raise_for_status()
        seconds_by_item.append(time.perf_counter() - start)
    return seconds_by_item


def item_of(case: BenchCase) -> dict[str, Any]:
    return {"expression": case.expression, "inputs": case.inputs} | (
        {} if case.outputs is None else {"outputs": list(case.outputs)}
    )


def quantiles(seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {"p50_s": statistics.median(ordered), "p90_s": ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=Path, default=DATA / "public.json")
    parser.add_argument("--count", type=int, default=100, help="operators in the batch (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="service starts (default: %(default)s)")
    options = parser.parse_args()
    cases = list(performance_cases(options.cases))
    items = [item_of(case) for case in islice(cases[:: max(1, len(cases) // options.count)], options.count)]
    times: dict[str, list[float]] = {name: [] for name in ("one_cold", "one_again", "batch_cold", "batch_again")}
    for _ in range(options.rounds):
        with service() as client:
            times["batch_cold"].append(post_items(client, items))
            times["batch_again"].append(post_items(client, items))
        with service() as client:
            times["one_cold"] += singles(client, items)
            times["one_again"] += singles(client, items)
    report = {"operators": len(items), "devices": len(TARGETS), "rounds": options.rounds}
    print(json.dumps(report | {name: quantiles(seconds) for name, seconds in times.items()}, indent=1))


if __name__ == "__main__":
    main()
