"""A limit of workspace: the plans that are kept need no more, as their sources say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import roller_svc
from roller_svc.compiler.action import action_digest
from roller_svc.compiler.explain import rank_request
from roller_svc.compiler.lower_and_emit import emit_plan
from roller_svc.compiler.plans import merge_ranked_plans, select_for_measurement
from roller_svc.compiler.request import build_request, resolve_spec
from roller_svc.errors import NoCandidateError
from roller_svc.frontend.parse import parse

PRODUCT = "C[m, n] +=! A[m, k] * B[k, n]"
CHAIN = "T[m, n]: float32 +=! A[m, k] * B[k, n]\nC[m, n] +=! T[m, k] * D[k, n]"
SUM = "s[] +=! x[i]"
SOFTMAX = "m[i] >=! x[i, j]\ns[i] +=! exp(x[i, j] - m[i])\ny[i, j] = exp(x[i, j] - m[i]) / s[i]"
H200 = "nvidia-h200-sxm"


def tensor(dtype: str, **shapes: tuple[int, ...]) -> dict[str, Any]:
    return {name: (dtype, shape) for name, shape in shapes.items()}


Case = tuple[str, dict[str, Any], dict[str, Any], int]
# A request, and the least workspace of its plans.
CASES: list[Case] = [
    (PRODUCT, tensor("float32", A=(64, 512), B=(512, 64)), {"target": "cpu-x86-avx512"}, 0),
    (PRODUCT, tensor("float32", A=(64, 512), B=(512, 64)), {"target": "cpu-x86-avx512", "constants": ["B"]}, 131072),
    (CHAIN, tensor("float16", A=(64, 64), B=(64, 64), D=(64, 64)), {"target": H200, "outputs": ["C"]}, 16384),
    (PRODUCT, tensor("float16", A=(64, 8192), B=(8192, 64)), {"target": H200}, 0),
    (SOFTMAX, tensor("float32", x=(8, 65536)), {"target": H200, "outputs": ["y"]}, 128),
]


def workspaces(case: Case, limit_bytes: int | None) -> list[int]:
    """Return the workspaces of the best plans, and of those to measure, as their sources have them."""
    expression, inputs, options, _ = case
    request = build_request(expression, inputs, max_workspace_bytes=limit_bytes, top_k=4, **options)
    program = parse(request.expression, dict(request.inputs), request.outputs)
    program, hw = replace(program, constants=request.constants), resolve_spec(request)
    partitions = rank_request(request, (program,), hw)
    best = merge_ranked_plans(partitions, request.top_k)
    plans = (*best, *select_for_measurement(best, partitions, request.top_k))
    return [emit_plan(each.plan, program, each.groups, hw).workspace_bytes for each in plans]


@pytest.mark.parametrize("case", CASES)
def test_plans_need_no_more_than_the_limit(case: Case) -> None:
    least_bytes, free = case[-1], workspaces(case, None)
    for limit_bytes in {least_bytes, least_bytes + 64, free[0]}:
        assert max(workspaces(case, limit_bytes)) <= limit_bytes
    assert workspaces(case, free[0])[0] == free[0]
    assert workspaces(case, 1 << 40)[:4] == free[:4]
    if least_bytes:
        with pytest.raises(NoCandidateError, match=f"least workspace of a plan is {least_bytes} bytes") as refused:
            workspaces(case, least_bytes - 1)
        assert str(least_bytes) in str(refused.value.hint)


def test_a_limit_excludes_the_fastest_plans() -> None:
    assert workspaces(CASES[-1], None)[0] > 128


def test_a_product_of_constants_takes_the_candidate_that_fits() -> None:
    """It runs once, so that its fastest candidate is of no use to calls, and may need more than the limit."""
    text = "v[i, j] +=! w1[i, k] * w2[k, j]; y[m, j] +=! x[m, i] * v[i, j]"
    inputs = tensor("float16", x=(64, 64), w1=(64, 16384), w2=(16384, 64))
    options = {"target": "nvidia-a100-sxm-80gb", "constants": ["w1", "w2"], "outputs": ["y"]}
    assert max(workspaces((text, inputs, options, 0), 16384)) <= 16384


def test_the_limit_is_part_of_the_action_only_if_it_is_set() -> None:
    def digest(**options: Any) -> str:
        return action_digest(build_request(SUM, tensor("float32", x=(64,)), target="cpu-x86-avx2", **options))

    assert digest() == digest(max_workspace_bytes=None) != digest(max_workspace_bytes=0)
    assert digest(max_workspace_bytes=0) != digest(max_workspace_bytes=64)


def test_kernels_are_compiled_within_the_limit() -> None:
    inputs = tensor("float32", A=(8, 16), B=(16, 32))
    options: dict[str, Any] = {"constants": ["B"], "select": "model", "top_k": 1}
    kernel = roller_svc.compile(PRODUCT, inputs, **options)
    needed = kernel.parts.compiled.source.workspace_bytes
    assert roller_svc.compile(PRODUCT, inputs, max_workspace_bytes=needed, **options).digest == kernel.digest
    with pytest.raises(NoCandidateError, match="max_workspace_bytes=0"):
        roller_svc.compile(PRODUCT, inputs, max_workspace_bytes=0, **options)
