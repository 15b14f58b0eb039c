"""The result of a lowering as bytes: the plan that runs a call, the tables of its kernel, and the key of the kernel."""

from __future__ import annotations

import hashlib
import io
import json
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roller_svc.errors import ArgumentError
from roller_svc.graph.lowerings.lowering import UnrolledPlan
from roller_svc.graph.weights import Weights
from roller_svc.ir.canonical import to_json
from roller_svc.ir.graph import Constant
from roller_svc.ir.kernel import KernelSource
from roller_svc.ir.model_plan import ModelKernel, ModelPlan
from roller_svc.runtime.saved.plan_json import plan_from_json, plan_to_json

_PLAN, _JOINT, _TABLE = "plan", "joint", "table"


@dataclass(frozen=True, slots=True)
class StoredLowering:
    """A plan as JSON with the tables that are not weights of the model, and the key of its own kernel."""

    plan: Any
    tables: tuple[NDArray[Any], ...]
    joint: str

    def to_bytes(self) -> bytes:
        """Return what `read_lowering` reads."""
        texts = {_PLAN: json.dumps(self.plan), _JOINT: self.joint}
        arrays: dict[str, Any] = {name: np.frombuffer(text.encode(), np.uint8) for name, text in texts.items()}
        arrays |= {f"{_TABLE}{number}": table for number, table in enumerate(self.tables)}
        content = io.BytesIO()
        np.savez(content, **arrays)
        return content.getvalue()

    def restore(self, unrolled: UnrolledPlan, joint: KernelSource, seconds: float, weights: Weights) -> ModelPlan | None:
        """Return the plan with its kernels; None if it is not one of a plan with these. The weights get the tables.

        Args:
            unrolled: the plan that was lowered.
            joint: the kernel that the lowering has made.
            seconds: the estimate of a call.
            weights: the constants of the model.
        """
        kernels = (*unrolled.plan.kernels, ModelKernel(joint, seconds, 1))
        for table in self.tables:
            weights.add(table)
        try:
            plan = plan_from_json(self.plan, kernels)
        except ArgumentError:
            return None
        return plan if all(weights.has(Constant(each.type, each.digest)) for each in plan.weights) else None


def store_lowering(lowered: ModelPlan, unrolled: UnrolledPlan, joint: str, weights: Weights) -> StoredLowering:
    """Return what a lowering has made of a plan. `joint`: the key of the kernel that it has made."""
    new = lowered.weights[len(unrolled.plan.weights) :]
    return StoredLowering(plan_to_json(lowered), tuple(weights.array(Constant(each.type, each.digest)) for each in new), joint)


def read_lowering(content: bytes) -> StoredLowering | None:
    """Return what `to_bytes` has written; None for anything else."""
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            plan, joint = (arrays[name].tobytes().decode() for name in (_PLAN, _JOINT))
            tables = tuple(arrays[f"{_TABLE}{number}"] for number in range(len(arrays.files) - 2))
        return StoredLowering(json.loads(plan), tables, joint)
    except (OSError, ValueError, KeyError, RecursionError):
        return None


def lowering_digest(kind: str, unrolled: UnrolledPlan, generator: str) -> str:
    """Return a hash of everything that decides what a lowering makes of a plan.

    `generator`: a hash of the device and of the sources of this package.
    """
    kernels = [
        [
            kernel.source.key,
            kernel.estimate_s,
            [to_json(each) for each in known.resources],
            known.refused,
            *map(str, known.page_uses),
        ]
        for kernel, known in zip(unrolled.plan.kernels, unrolled.kernels, strict=True)
    ]
    content = json.dumps([kind, generator, kernels, plan_to_json(unrolled.plan)])
    return hashlib.sha256(content.encode()).hexdigest()
