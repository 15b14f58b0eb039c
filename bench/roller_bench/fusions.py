"""Compare both sides of the boundaries of fusion that the performance model cannot decide, on this machine.

`python -m roller_bench.fusions FILE.onnx... --threads 1` prints a JSON document for each boundary: the estimates of its
sides, and the least seconds of calls of the model with each of them, in turns. Other boundaries stay as the model says.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path

from roller_bench.tuning import Row, time_call
from roller_svc.compiler.kernel_cache import KernelCache
from roller_svc.errors import RollerError, require
from roller_svc.graph.compile import ModelOptions, build_model
from roller_svc.graph.load import load_graph
from roller_svc.graph.weights import Weights
from roller_svc.graph.wiring.kernels import TuneOptions, build_here
from roller_svc.hardware.catalog import restrict_cores
from roller_svc.model import device_spec
from roller_svc.settings import settings

ROUNDS = 200


def compare_boundaries(file: Path, threads: int, top_k: int) -> Iterator[Row]:
    """Yield the seconds of both sides of each boundary that `tune="online"` explores."""
    weights, cache = Weights(), KernelCache(settings().cache_folder)
    tune = TuneOptions("online", variables=("fusion",))
    options = ModelOptions(restrict_cores(device_spec("local", None), threads), top_k=top_k, tune=tune)
    graph = load_graph(file, weights, byte_group=options.hardware.byte_group)
    source = require(build_model(graph, weights, options, cache).online, "choices")
    fusions = source.find_fusions(build_here)
    choices = source.find_choices(build_here, fusions.kernels)
    kernels = choices.assign({})
    used = choices.bind(source.make_plans(source.graph, kernels, share_memory=True)[source.kind])
    for variable, boundary in fusions.variables:
        row: Row = {
            "file": file.name, "threads": threads, "used": variable.choices[0],
            "fused_estimate_s": boundary.merged_s, "separate_estimate_s": boundary.apart_s,
        }  # fmt: skip
        flipped = fusions.flip(source.graph, boundary, kernels)
        plan = None if flipped is None else source.make_plans(*flipped, share_memory=True).get(source.kind)
        other, fault = (None, "no kernel for a node") if plan is None else choices.bind_right(plan)
        if other is None:
            yield row | {"error": fault}
            continue
        pairs = [[time_call(model, choices.sample) for model in (used, other)] for _ in range(ROUNDS)]
        seconds = [min(each) for each in zip(*pairs, strict=True)]
        yield row | {"used_s": seconds[0], "other_s": seconds[1], "load": os.getloadavg()[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--threads", nargs="+", type=int, default=[1])
    parser.add_argument("--top-k", type=int, default=4)
    options = parser.parse_args()
    for file, threads in itertools.product(options.files, options.threads):
        try:
            for row in compare_boundaries(file, threads, options.top_k):
                print(json.dumps(row), flush=True)
        except RollerError as error:
            print(json.dumps({"file": file.name, "threads": threads, "error": error.message}), flush=True)


if __name__ == "__main__":
    main()
