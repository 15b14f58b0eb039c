"""Compare the time from an expression to a cubin with Triton and TileLang. Prints JSON.

    python -m roller_bench.compile.run --python PEERS/bin/python --target nvidia-a100-sxm-80gb --out FILE.json

Each compiler compiles every case `--rounds` times, interleaved; nothing is cached between rounds. roller parses,
constructs, ranks, generates and compiles. A baseline traces, lowers and compiles one hand-written kernel in one
configuration. Loading a compiler and its first compilation are not counted. ratio = baseline's median / our median.
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

from roller_bench import BENCH
from roller_bench.compile.cases import CASES, Case
from roller_bench.compile.worker import WARM_UP
from roller_svc import hardware
from roller_svc.compiler.artifact import package_kernel
from roller_svc.compiler.pipeline import build_kernel
from roller_svc.compiler.request import build_request
from roller_svc.runtime.measure import host_name
from roller_svc.toolchain import versions

BASELINES = ("triton", "tilelang")
INSTALL = "python -m venv PEERS && PEERS/bin/pip install 'roller-svc[baselines]', and an nvcc of CUDA 13 for tilelang"

Json = dict[str, Any]
Compiler = Callable[[Case], Json]


class BaselineCompiler:
    """A worker process that compiles cases one by one."""

    def __init__(self, name: str, python: str, arch: int) -> None:
        # Triton's default; it warns if the variable is not set
        environment = os.environ | {"PYTHONPATH": str(BENCH), "TRITON_DEFAULT_FP_FUSION": "1"}
        self._process = subprocess.Popen(
            [python, "-m", "roller_bench.compile.worker", name, str(arch)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            bufsize=1,
            env=environment,
        )
        greeting = self._answer()
        if "missing" in greeting:
            self.close()
            raise SystemExit(f"{name} is not installed for {python} ({greeting['missing']}): {INSTALL}")
        self.ready_s: float = greeting["ready"]

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
            raise SystemExit(f"the worker exited with {code}: {INSTALL}")
        answer: Json = json.loads(line)
        return answer


def roller_compiler(target: str) -> Compiler:
    """Return roller's compiler, from expression to cubin."""

    def compiled(case: Case) -> Json:
        start = time.perf_counter()
        request = build_request(case.expression, case.inputs, target=target, top_k=1, select="model")
        binary = package_kernel(build_kernel(request)).compiled.binary
        return {"seconds": time.perf_counter() - start, "bytes": len(binary)}

    return compiled


@contextlib.contextmanager
def compilers(names: list[str], python: str, target: str) -> Iterator[tuple[dict[str, Compiler], dict[str, float]]]:
    """Yield all compilers, warmed up, and the seconds that each took for it."""
    roller = roller_compiler(target)
    ready = {"roller": roller(WARM_UP)["seconds"]}
    arch = hardware.load(target).arch.number
    with contextlib.ExitStack() as stack:
        workers = {name: BaselineCompiler(name, python, arch) for name in names}
        for name, worker in workers.items():
            stack.callback(worker.close)
            ready[name] = worker.ready_s
        yield {"roller": roller, **workers}, ready


def compare(case: Case, compilers_by_name: Mapping[str, Compiler], rounds: int) -> Json:
    """Compile a case in interleaved rounds, each of which begins with another compiler."""
    answers: dict[str, list[Json]] = {name: [] for name in compilers_by_name}
    names = list(compilers_by_name)
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            answers[name].append(compilers_by_name[name](case))
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
    """Return {baseline: number of cases, minimum and median ratio}."""
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
    return {
        "cpu": host_name(),
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],  # 1: nothing else is running
        "python": platform.python_version(),
        **versions(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="Python with the baselines installed (default: this one)")
    parser.add_argument("--peer", action="append", choices=BASELINES, help="baseline; may be repeated (default: both)")
    parser.add_argument("--target", default="nvidia-a100-sxm-80gb", metavar="ID")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument("--out", metavar="FILE", help="output file (default: stdout)")
    options = parser.parse_args()
    names = options.peer or list(BASELINES)
    machine_info, rows = machine(), []
    with compilers(names, options.python, options.target) as (compilers_by_name, ready):
        for case in CASES:
            rows.append(compare(case, compilers_by_name, options.rounds))
            shown = "  ".join(f"{name} {seconds:.2f} s" for name, seconds in rows[-1]["seconds"].items())
            print(f"{case.id:32} {shown}", file=sys.stderr)
    document = {
        "date": time.strftime("%Y-%m-%d"), "target": options.target, "machine": machine_info, "rounds": options.rounds,
        "ready_s": ready, "peers": summary(rows, names), "cases": rows,
    }  # fmt: skip
    text = json.dumps(document, indent=1) + "\n"
    if options.out:
        Path(options.out).write_text(text, encoding="utf-8")
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
