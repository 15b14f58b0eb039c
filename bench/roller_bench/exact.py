"""Compare bits of a model that is tuned by `exact=True` in fresh processes, while it explores and afterwards.

`python -m roller_bench.exact FILE THREADS PROCESSES` prints a JSON document. No process knows the trials of another one.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roller_svc.graph.inputs import random_arrays
from roller_svc.graph.wiring.index import FILE
from roller_svc.graph.wiring.online import OnlineTuning
from roller_svc.model import compile_model
from roller_svc.settings import settings

AFTERWARDS = 200  # calls of the committed model
WORKER = "--one"


def tune_once(file: str, threads: int) -> dict[str, Any]:
    """Return the digests of all results of this process, and the kernels that it has bound."""
    (settings().cache_folder / FILE).unlink(missing_ok=True)
    options = {"exact": True, "share": 1.0}
    model = compile_model(file, threads=threads, tune="online", tune_options=options)
    inputs, digests, calls, before = random_arrays(model.inputs), set(), 0, model.digest
    tuning = model.tuning
    assert isinstance(tuning, OnlineTuning)
    while tuning.state == "exploring":
        digests.add(_digest(model.run(inputs)))
        calls += 1
    digests |= {_digest(model.run(inputs)) for _ in range(AFTERWARDS)}
    removed = sum(map(len, tuning.tree.get("removed", {}).values()))
    return {
        "results": sorted(digests), "model": model.digest, "trials": tuning.trials, "calls": calls, "removed": removed,
        "is_rebound": model.digest != before,
        "state": tuning.state, "notes": tuning.notes, "load": os.getloadavg()[0],
    }  # fmt: skip


def _digest(results: Mapping[str, Any]) -> str:
    content = hashlib.sha256()
    for name in sorted(results):
        content.update(results[name].tobytes())
    return content.hexdigest()[:16]


def compare_processes(file: str, threads: int, processes: int) -> dict[str, Any]:
    """Return what each process has found, and how many different results there are."""
    command = [sys.executable, "-m", "roller_bench.exact", WORKER, file, str(threads)]
    rows = []
    for _ in range(processes):
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
    different = {digest for row in rows for digest in row["results"]}
    models = {row["model"] for row in rows}
    return {"file": Path(file).name, "threads": threads, "results": len(different), "models": len(models), "processes": rows}


def main(arguments: list[str]) -> None:
    """Run one process of the comparison, or all of them."""
    if arguments[0] == WORKER:
        print(json.dumps(tune_once(arguments[1], int(arguments[2]))))
    else:
        print(json.dumps(compare_processes(arguments[0], int(arguments[1]), int(arguments[2])), indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
