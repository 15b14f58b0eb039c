"""Measure how soon the page answers, on a machine at rest: `python tests/explorer/latencies.py`.

Each public case is opened by its link in headless Chromium, on each device. A new story takes from the request for it to
the verdict in the document, as it does after a pause in typing.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from explorer_pages import CHROMIUM, OPTIONS
from waiting import PATIENCE_S, wait_until

from roller_bench import DATA
from roller_bench.cases import BenchCase, performance_cases

Json = dict[str, Any]
TARGETS = ("nvidia-h200-sxm", "cpu-x86-avx512")
CASES = 60
EMPTY_VISITS = 10  # of the page without a program in the link
KIB = 1024
SIDES = {"dtype": "float16", "shape": [64, 64]}
WARMING = BenchCase("warming", "gemm", "C[m, n] +=! A[m, k] * B[k, n]", {"A": SIDES, "B": SIDES}, None)

# When the verdict is in the document, or an error: milliseconds since the visit began.
WATCH = """
new MutationObserver((_, observer) => {
  const verdict = document.querySelector('[data-testid=estimate]')?.textContent;
  const error = document.querySelector('[data-testid=diagnostics] b');
  if (!verdict && !error) return;
  observer.disconnect();
  document.documentElement.dataset.answered = JSON.stringify({ ms: performance.now(), refused: !verdict });
}).observe(document, { childList: true, subtree: true, characterData: true });
"""
READ = """
() => {
  const answered = JSON.parse(document.documentElement.dataset.answered);
  const paint = performance.getEntriesByName('first-contentful-paint')[0];
  const story = performance.getEntriesByType('resource').find((each) => each.name.endsWith('/v1/kernels:explain'));
  return {
    ...answered,
    paint_ms: paint.startTime,
    story_ms: answered.ms - story.startTime,
    explain_ms: story.responseEnd - story.startTime,
    bytes: story.encodedBodySize,
  };
}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=Path, default=DATA / "public.json")
    parser.add_argument("--count", type=int, default=CASES, help="cases, evenly spread over the file")
    parser.add_argument("--target", action="append", help=f"default: {' and '.join(TARGETS)}; may be repeated")
    options = parser.parse_args()
    cases = performance_cases(options.cases)
    chosen = cases[:: max(1, len(cases) // options.count)][: options.count]
    sys.stdout.write(json.dumps(measure(chosen, options.target or TARGETS), indent=1) + "\n")


def measure(cases: Sequence[BenchCase], targets: Sequence[str]) -> Json:
    """Return the latencies of a new service, which a visit for each device has warmed."""
    from playwright.sync_api import sync_playwright

    with serving() as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(OPTIONS))
        for target in targets:
            visit(browser, address + link_of(WARMING, target))
        empty = [visit(browser, address) for _ in range(EMPTY_VISITS)]
        stories = [visit(browser, address + link_of(case, target)) for case in cases for target in targets]
        browser.close()
    told = [each for each in stories if not each["refused"]]
    return {
        "load": round(os.getloadavg()[0], 1),
        "visits": len(empty),
        "first_paint_ms": summary([each["paint_ms"] for each in empty]),
        "estimate_ms": summary([each["ms"] for each in empty]),
        "stories": len(told),
        "refused": len(stories) - len(told),
        "new_story_ms": summary([each["story_ms"] for each in told]),
        "explain_ms": summary([each["explain_ms"] for each in told]),
        "explain_kib": summary([each["bytes"] / KIB for each in told]),
    }


@contextmanager
def serving() -> Iterator[str]:
    """Yield the address of a service in a process of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    program = "import sys; from roller_svc.cli import main; sys.exit(main())"
    with tempfile.TemporaryDirectory() as folder:
        options = ["serve", "--port", str(port), "--store", f"{folder}/store", "--no-calibrate"]
        command, quiet = [sys.executable, "-c", program, *options], subprocess.DEVNULL
        with subprocess.Popen(command, stdout=quiet, stderr=quiet) as service:
            try:
                wait_until(lambda: answers(port))
                yield f"http://127.0.0.1:{port}"
            finally:
                service.terminate()


def answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except ConnectionRefusedError:
        return False
    return True


def link_of(case: BenchCase, target: str) -> str:
    types = [("input", f"{name}={each['dtype']}[{','.join(map(str, each['shape']))}]") for name, each in case.inputs.items()]
    outputs = [("output", name) for name in case.outputs or ()]
    return "/?" + urlencode([("expr", case.expression), ("target", target), *types, *outputs])


def visit(browser: Any, address: str) -> Json:
    """Return when a tab without a cache had its first paint, its story and its verdict."""
    page = browser.new_page()
    page.add_init_script(WATCH)
    page.goto(address, timeout=PATIENCE_S * 1e3)
    page.wait_for_selector("html[data-answered]", state="attached", timeout=PATIENCE_S * 1e3)
    found: Json = page.evaluate(READ)
    page.context.close()
    return found


def summary(values: Sequence[float]) -> Json:
    ordered = sorted(values)
    return {"median": round(statistics.median(ordered), 1), "p95": round(ordered[int(0.95 * (len(ordered) - 1))], 1)}


if __name__ == "__main__":
    main()
