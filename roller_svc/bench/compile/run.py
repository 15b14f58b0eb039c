"""Seconds from an expression to a cubin beside Triton and TileLang, in one run → JSON with ratios.

    python -m roller_svc.bench.compile.run --python PEERS/bin/python --target nvidia-a100-sxm-80gb --out FILE.json

Every case is compiled `--rounds` times by each, taking turns; a round starts from the program, with nothing kept of
an earlier one. Ours parses, constructs, ranks, generates and compiles; a peer has one kernel written for it, in one
configuration, and traces, lowers and compiles that. Loading a compiler and its first compilation are not counted.
ratio = the peer's median / our median.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from roller_svc import hardware
from roller_svc.bench.compile.cases import CASES, Case
from roller_svc.bench.compile.worker import WARM_UP
from roller_svc.compiler.artifact import package_kernel
from roller_svc.compiler.pipeline import build_kernel
from roller_svc.compiler.request import build_request
from roller_svc.toolchain import versions

PEERS = ("triton", "tilelang")
INSTALL = "python -m venv PEERS && PEERS/bin/pip install 'roller-svc[peers]', and an nvcc of CUDA 13 for tilelang"

Json = dict[str, Any]
Compiler = Callable[[Case], Json]


class Peer:
    """A worker process that compiles one case after the other."""

    def __init__(self, name: str, python: str, arch: int) -> None:
        root = Path(__file__).resolve().parents[3]
        # Triton says itself that this is its default, and warns where it is not stated
        environment = os.environ | {"PYTHONPATH": str(root), "TRITON_DEFAULT_FP_FUSION": "1"}
        self._process = subprocess.Popen(
            [python, "-m", "roller_svc.bench.compile.worker", name, str(arch)], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, bufsize=1, env=environment,
        )  # fmt: skip
        hello = self._answer()
        if "missing" in hello:
            self.close()
            raise SystemExit(f"{name} is not there for {python} ({hello['missing']}): {INSTALL}")
        self.ready_s: float = hello["ready"]

    def __call__(self, case: Case) -> Json:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{case.id}\n")
        return self._answer()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _answer(self) -> Json:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            self.close()
            raise SystemExit(f"the worker ended (exit {code}): {INSTALL}")
        answer: Json = json.loads(line)
        return answer


def ours(target: str) -> Compiler:
    """The project's own way, from text to cubin."""

    def compiled(case: Case) -> Json:
        start = time.perf_counter()
        request = build_request(case.expression, case.inputs, target=target, top_k=1, select="model")
        binary = package_kernel(build_kernel(request)).compiled.binary
        return {"seconds": time.perf_counter() - start, "bytes": len(binary)}

    return compiled


@contextlib.contextmanager
def compilers(names: list[str], python: str, target: str) -> Iterator[tuple[dict[str, Compiler], dict[str, float]]]:
    """All that take part, warm, and how long each took to get there."""
    mine = ours(target)
    ready = {"roller": mine(WARM_UP)["seconds"]}
    arch = hardware.load(target).arch.number
    with contextlib.ExitStack() as stack:
        workers = {name: Peer(name, python, arch) for name in names}
        for name, worker in workers.items():
            stack.callback(worker.close)
            ready[name] = worker.ready_s
        yield {"roller": mine, **workers}, ready


def compared(case: Case, taking_part: Mapping[str, Compiler], rounds: int) -> Json:
    """Each round begins with another compiler, so that none always follows the same one."""
    answers: dict[str, list[Json]] = {name: [] for name in taking_part}
    names = list(taking_part)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            answers[name].append(taking_part[name](case))
    row: Json = {"id": case.id, "seconds": {}, "bytes": {}, "ratios": {}, "errors": {}}
    for name, found in answers.items():
        failed = [answer["error"] for answer in found if "error" in answer]
        if failed:
            row["errors"][name] = failed[0]
            continue
        row["seconds"][name] = statistics.median(answer["seconds"] for answer in found)
        row["bytes"][name] = found[0]["bytes"]
    for name, seconds in row["seconds"].items():
        if name != "roller" and "roller" in row["seconds"]:
            row["ratios"][name] = seconds / row["seconds"]["roller"]
    return row


def summary(rows: list[Json], names: list[str]) -> Json:
    """{peer: least and median ratio, and the median of its seconds}."""
    found: Json = {}
    for name in names:
        ratios = [row["ratios"][name] for row in rows if name in row["ratios"]]
        found[name] = {
            "cases": len(ratios),
            "min_ratio": min(ratios) if ratios else None,
            "median_ratio": statistics.median(ratios) if ratios else None,
        }
    return found


def machine() -> Json:
    model = next(
        (line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
         if line.startswith("model name")), platform.machine(),
    )  # fmt: skip
    return {
        "cpu": model, "cores": len(os.sched_getaffinity(0)), "load": os.getloadavg()[0],  # 1 is this run alone
        "python": platform.python_version(), **versions(),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="a Python that has the peers; default: this one")
    parser.add_argument("--peer", action="append", choices=PEERS, help="default: both; may be repeated")
    parser.add_argument("--target", default="nvidia-a100-sxm-80gb", metavar="ID")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument("--out", metavar="FILE", help="write the JSON there; default: stdout")
    options = parser.parse_args()
    names = options.peer or list(PEERS)
    began, rows = machine(), []
    with compilers(names, options.python, options.target) as (taking_part, ready):
        for case in CASES:
            rows.append(compared(case, taking_part, options.rounds))
            shown = "  ".join(f"{name} {seconds:.2f} s" for name, seconds in rows[-1]["seconds"].items())
            print(f"{case.id:32} {shown}", file=sys.stderr)
    document = {
        "date": time.strftime("%Y-%m-%d"), "target": options.target, "machine": began, "rounds": options.rounds,
        "ready_s": ready, "peers": summary(rows, names), "cases": rows,
    }  # fmt: skip
    text = json.dumps(document, indent=1) + "\n"
    if options.out:
        Path(options.out).write_text(text, encoding="utf-8")
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
