"""Compile a model for a GPU in this process, without a device: python -m roller_bench.zoo.gpu_worker FILE TARGET PLAN.

Kernels are kept in ROLLER_CACHE. The last line of the output is a JSON object.
"""

from __future__ import annotations

import json
import math
import resource
import sys
import time
from typing import Any

from roller_svc.api import Kernel
from roller_svc.errors import RollerError, UnsupportedModelError
from roller_svc.model import Model, compile_model

Json = dict[str, Any]
PREFIX = "ROW "
SHOWN_CHARACTERS = 300  # of a refusal


def compile_row(file: str, target: str, plan: str) -> Json:
    """Return what a compile took, and what it made; or why it was refused."""
    start, cpu = time.perf_counter(), time.process_time()
    try:
        model = compile_model(file, target, plan=plan, select="model", top_k=1)
    except RollerError as refused:
        return {"refused": {"code": refused.code, "reason": refused.message[:SHOWN_CHARACTERS], "nodes": _nodes(refused)}}
    finally:
        seconds = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu}
    peak = {name: resource.getrusage(who).ru_maxrss << 10 for name, who in _PROCESSES.items()}
    return {**seconds, "stages": model.report["seconds"], "peak_rss_bytes": peak, **describe(model)}


def describe(model: Model) -> Json:
    """Return the plan, kernels and memory of a compiled model."""
    report, plan = model.report, model.plan
    of_classes = {each["kernel"] for each in report["classes"]}
    return {
        "plan": report["plan"],
        "classes": len(report["classes"]),
        "nodes": report["passes"][-1]["nodes_after"],
        "cache": report["cache"],
        "launches": plan["launches"],
        "lowerings": report["lowerings"],
        "memory_bytes": {
            "arena": plan["arena"]["bytes"],
            "tensors": plan["arena"]["tensor_bytes"],
            "weights": plan["weights_bytes"],
            "packed": plan["packed_bytes"],
        },
        "spills": {kernel.expression[:SHOWN_CHARACTERS]: spilled for kernel in model.kernels if (spilled := _spill_bytes(kernel))},
        "joint_kernels": [_joint(kernel) for kernel in model.kernels if kernel.digest not in of_classes],
    }


def _spill_bytes(kernel: Kernel) -> int:
    return max((used.spill_bytes for used in kernel.resources), default=0)


def _joint(kernel: Kernel) -> Json:
    """Return the resources of a kernel that a lowering has made of others. Its launches are those of one function."""
    launch, used = kernel.launches[0], kernel.resources[0]
    return {
        "name": launch.name,
        "blocks": math.prod(launch.grid),
        "threads": math.prod(launch.block),
        "registers": used.registers_per_thread,
        "shared_bytes": used.shared_bytes,
        "spill_bytes": used.spill_bytes,
        "binary_bytes": len(kernel.binary),
    }


def _nodes(refused: RollerError) -> list[str]:
    """Return each node that is not supported, with its reason."""
    if not isinstance(refused, UnsupportedModelError):
        return []
    return [f"{each.operator} {each.name}: {each.reason}"[:SHOWN_CHARACTERS] for each in refused.nodes]


_PROCESSES = {"own": resource.RUSAGE_SELF, "compilers": resource.RUSAGE_CHILDREN}

if __name__ == "__main__":
    print(PREFIX + json.dumps(compile_row(*sys.argv[1:])), flush=True)
