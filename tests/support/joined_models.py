"""Run models as one kernel in the emulator, in many orders of threads, each with and without the race detector.

    python tests/support/joined_models.py                        (all models and targets, 20 orders of each)
    python tests/support/joined_models.py sigmoid --target nvidia-h200-sxm --orders 3
    python tests/support/joined_models.py --lint                 (machine code for whole devices, which is not run)

Each model is compiled as `waves` and `persistent`, for a device of as many cores as the emulator runs blocks together.
Outputs are compared with the interpreter's, and their bits with those of the launches and the CUDA graph of the same
kernels; where `waves` has other kernels, its bits with those of their launches. Prints a line for each model and target.
Exits 1 where a result or a bit differs, or a kernel spills.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gpu_models import DECODE_MODELS, LAYER, NASNET, PARTIAL, constant
from persistent import STREAMED, find_faults

from roller_bench.gpu.graph_models import lstm, sigmoid
from roller_bench.gpu.graphs import write_model
from roller_svc import hardware
from roller_svc.errors import ArgumentError
from roller_svc.graph.interpret import interpret
from roller_svc.graph.load import load_graph
from roller_svc.graph.lowerings import persistent, waves
from roller_svc.graph.lowerings.joined import NOT_JOINABLE_CODE
from roller_svc.graph.weights import Weights
from roller_svc.ir.dtype import DType
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.kernel import CompiledKernel
from roller_svc.ir.model_plan import ModelPlan, unroll_steps
from roller_svc.model import Model, compile_model
from roller_svc.runtime.binding import Array
from roller_svc.runtime.graphs.emulated import MAX_TOGETHER, EmulatedModel
from roller_svc.settings import read_settings, use
from roller_svc.toolchain import compile_cxx

TARGETS = ("nvidia-a100-sxm-80gb", "nvidia-h200-sxm")
ORDERS = 20
LENGTH = 19  # keys of a paged cache
# How far a result may be from the interpreter's: a part of the output's largest value.
TOLERANCES = {DType.FLOAT32: 2e-4, DType.FLOAT16: 4e-3, DType.BFLOAT16: 2e-2}
MODELS: dict[str, Callable[[], dict[str, Any]]] = {
    "sigmoid": lambda: sigmoid(1024, 128),
    "lstm": lambda: lstm(constant, 64, steps=20, layers=4),
    "encoder": lambda: LAYER,
    "nasnet": lambda: NASNET,
    "decode_16": lambda: DECODE_MODELS["decode_16"],
    "decode_4": lambda: DECODE_MODELS["decode_4"],
    "partial": lambda: PARTIAL,
}
LARGE_MODELS = ("decode-1b", "decode-8b", "decode-8b-int4")  # of bench/gpu, whose weights stream: for --lint
load_spec = hardware.load
Source = dict[str, Any] | Path
Arrays = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A model with arrays of its inputs and states, and what the interpreter makes of them."""

    source: dict[str, Any]
    inputs: Arrays
    states: Arrays
    wanted: Mapping[str, Array]

    def run(self, plan: ModelPlan, model: Model, seed: int | None = None, *, races: bool = False) -> Arrays:
        """Run a plan with a model's kernels; return outputs and states."""
        kernels: list[CompiledKernel] = [bundle.compiled for bundle in model._kernel_bundles]
        emulated = EmulatedModel(plan, kernels, model._variants[0].loaded.weights, compile_cxx, seed=seed, races=races)
        states = {name: array.copy() for name, array in self.states.items()}
        return emulated.run(self.inputs, states) | states

    def has_equal_bits(self, results: Mapping[str, Array], others: Mapping[str, Array]) -> bool:
        return all(results[name].tobytes() == others[name].tobytes() for name in self.wanted)

    def error(self, results: Mapping[str, Array]) -> float:
        """Return the largest difference from the interpreter, in tolerances."""
        errors = []
        for name, want in self.wanted.items():
            dtype = DType(str(want.dtype))
            exact, got = want.astype(np.float64), results[name].astype(np.float64)
            errors.append(float(np.abs(got - exact).max() / (TOLERANCES[dtype] * np.abs(exact).max())))
        return max(errors)


def make_case(source: dict[str, Any]) -> Case:
    """Return a model with random arrays. Pages of a cache that are beyond its length have numbers of no page."""
    rng, weights = np.random.default_rng(1), Weights()
    loaded = load_graph(copy.deepcopy(source), weights)
    arrays: Arrays = {
        name: rng.standard_normal(type_.shape).astype(ml_dtypes.bfloat16 if type_.dtype is DType.BFLOAT16 else type_.dtype.value)
        for name, type_ in loaded.inputs
        if type_.dtype is not DType.INT32
    }
    if loaded.states:
        pages = dict(loaded.inputs)["pages"].shape[1]
        arrays |= {"position": np.array([LENGTH - 1], np.int32), "lengths": np.array([LENGTH], np.int32)}
        arrays |= {"pages": np.arange(pages, 0, -1, dtype=np.int32).reshape(1, pages)}
    wanted = interpret(loaded, weights, arrays)
    states = {name: arrays[name] for name in loaded.states}
    return Case(source, {name: each for name, each in arrays.items() if name not in states}, states, wanted)


def check_case(case: Case, target: str, orders: int) -> tuple[bool, str]:
    """Return whether all is right, and a line that says what ran."""
    by_waves, joined = (_try_compile(case.source, target, kind) for kind in (waves.KIND, persistent.KIND))
    if joined is None:
        return False, "refused"
    plan = joined._variants[0].plan
    launches = dataclasses.replace(plan, steps=plan.fallback, fallback=())
    results = {"launches": case.run(launches, joined), "graph": case.run(launches, joined, seed=1)}
    in_waves = {} if by_waves is None else {waves.KIND: case.run(by_waves._variants[0].plan, by_waves)}
    if by_waves is not None and _kernels_of(by_waves) != _kernels_of(joined):  # only one of them streams weights
        alone = compile_model(copy.deepcopy(case.source), target, plan="launches", select="model", top_k=1, runtime="emulator")
        in_waves = {"launches of other kernels": case.run(alone._variants[0].plan, alone)} | in_waves
    else:
        results |= in_waves
    start = time.perf_counter()
    results |= {f"order {seed}": case.run(plan, joined, seed) for seed in range(orders)}
    # The detector's calls between operations leave other sums and products to be fused by the compiler of the host.
    watched = {"launches, watched": case.run(launches, joined, races=True)}
    watched |= {f"order {seed}, watched": case.run(plan, joined, seed, races=True) for seed in range(orders)}
    seconds = time.perf_counter() - start
    error = max(map(case.error, [*results.values(), *watched.values(), *in_waves.values()]))
    others = [
        name
        for runs in (results, watched, in_waves)
        for name, each in runs.items()
        if not case.has_equal_bits(each, next(iter(runs.values())))
    ]
    used = joined._kernel_bundles[-1].compiled.resources
    spills, registers = max(each.spill_bytes for each in used), max(each.registers_per_thread for each in used)
    parts = [
        f"{len(list(unroll_steps(plan.fallback)))} steps in {len(plan.steps)} launches",
        f"{registers} registers, {spills} bytes spilled",
        f"error {error:.2g} of the tolerance",
        f"{orders} orders in {seconds:.0f} s",
        f"other bits: {', '.join(others)}" if others else "equal bits",
        *([] if by_waves is not None else ["no waves"]),
    ]
    return error <= 1 and not spills and not others, "; ".join(parts)


def _kernels_of(model: Model) -> list[str]:
    """Return the keys of the kernels of a model's nodes; the last one is of all nodes."""
    return [kernel.source.key for kernel in model._variants[0].plan.kernels[:-1]]


def lint_model(source: Source, target: str) -> tuple[bool, str]:
    """Return whether the machine code of a persistent kernel is as it should be, and a line about it."""
    model = _try_compile(source, target, persistent.KIND)
    if model is None:
        return False, "refused"
    compiled = model._kernel_bundles[-1].compiled
    (launch, *_), (used, *_) = compiled.source.launches, compiled.resources
    faults = find_faults(compiled)
    streamed = compiled.source.text.count(STREAMED)
    line = f"{launch.grid[0]} blocks of {launch.block[0]} threads; {used.registers_per_thread} registers; {streamed} stream"
    return not faults, f"{line}; {', '.join(faults) or 'no faults'}"


def _try_compile(source: Source, target: str, kind: str) -> Model | None:
    """Return the model, or None if a node refuses `waves`."""
    try:
        return compile_model(copy.deepcopy(source), target, plan=kind, select="model", top_k=1, runtime="emulator")
    except ArgumentError as refused:
        if refused.code != NOT_JOINABLE_CODE:
            raise
        return None


def _load_small(target: str) -> HardwareSpec:
    return dataclasses.replace(load_spec(target), num_cores=MAX_TOGETHER)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", choices=[[], *MODELS, *LARGE_MODELS], help="models (default: all)")
    parser.add_argument("--target", action="append", choices=TARGETS, help="a target (default: all)")
    parser.add_argument("--lint", action="store_true", help="read the machine code for whole devices in place of running it")
    parser.add_argument("--orders", type=int, default=ORDERS, help="orders of threads (default: %(default)s)")
    options = parser.parse_args()
    if not options.lint and set(options.models) & set(LARGE_MODELS):
        parser.error(f"{', '.join(LARGE_MODELS)} are too large to be run: --lint")
    if not options.lint:
        hardware.load = _load_small
    failures = 0
    with tempfile.TemporaryDirectory(prefix="roller-joined-") as cache:
        use(read_settings(cache=Path(cache)))
        for name in options.models or [*MODELS, *(LARGE_MODELS if options.lint else ())]:
            source: Source = MODELS[name]() if name in MODELS else Path(cache) / name
            if isinstance(source, Path):
                write_model(name, source)
            case = None if isinstance(source, Path) or options.lint else make_case(source)
            for target in options.target or TARGETS:
                is_right, line = lint_model(source, target) if case is None else check_case(case, target, options.orders)
                failures += not is_right
                print(f"{'ok' if is_right else 'WRONG':<6}{name:<10} {target}: {line}; load {os.getloadavg()[0]:.1f}", flush=True)
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main())
