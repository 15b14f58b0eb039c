"""Rewrites that keep the value of a sum of products change neither its kernels' families and units nor its estimate."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache

import pytest

from roller_svc import hardware
from roller_svc.compiler.partition_cache import PartitionCache
from roller_svc.compiler.plans import estimate_program
from roller_svc.frontend.parse import parse
from roller_svc.ir.dtype import DType
from roller_svc.ir.program import TensorType

MAX_ESTIMATE_RATIO = 1.05
TARGETS = ("nvidia-h200-sxm", "nvidia-a100-sxm-80gb", "cpu-x86-avx512")
SIZES = ((64, 4096, 4096), (1024, 1024, 1024), (2048, 512, 4096), (256, 4096, 1024), (4096, 4096, 4096))
# An expression is a tensor or (operator, operands).
Node = str | tuple[str, "Node", "Node"] | tuple[str, "Node"]
A, B, C, D = "A[m, k]", "B[k, n]", "C[m, k]", "D[k, n]"
BODIES: tuple[Node, ...] = (
    ("*", A, B),
    ("-", ("*", A, B)),
    ("+", ("*", A, B), ("*", C, D)),
    ("-", ("*", A, B), ("*", C, D)),
)
DTYPES = (DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32)
PROGRAMS = tuple((body, dtype, size) for body in BODIES for dtype in DTYPES for size in SIZES)


def text_of(node: Node) -> str:
    match node:
        case str():
            return node
        case ("-", operand):
            return f"(-{text_of(operand)})"
        case (operator, left, right):
            return f"({text_of(left)} {operator} {text_of(right)})"


def commute(node: Node) -> Node:
    match node:
        case ("*" | "+" as operator, left, right):
            return (operator, right, left)
    return node


def negate_twice(node: Node) -> Node:
    return ("-", ("-", node))


def move_sign(node: Node) -> Node:
    """Rewrite -(x * y) as (-x) * y, and x + y as x - (-y)."""
    match node:
        case ("-", ("*", left, right)):
            return ("*", ("-", left), right)
        case ("*", ("-", left), right):
            return ("-", ("*", left, right))
        case ("+", left, right):
            return ("-", left, ("-", right))
    return node


REWRITES: tuple[Callable[[Node], Node], ...] = (commute, negate_twice, move_sign)


def rewritten(node: Node, rewrite: Callable[[Node], Node], dice: random.Random) -> Node:
    """Rewrite the node or one below it."""
    if isinstance(node, str) or dice.random() < 0.5:
        return rewrite(node)
    place = dice.randrange(1, len(node))
    operands = [rewritten(each, rewrite, dice) if i == place else each for i, each in enumerate(node[1:], 1)]
    return (node[0], operands[0]) if len(operands) == 1 else (node[0], operands[0], operands[1])


@cache
def estimated(body: str, dtype: DType, size: tuple[int, int, int], target: str) -> tuple[tuple[tuple[str, str], ...], float]:
    """Return family and unit of each kernel of the best plan, and the plan's seconds."""
    m, n, k = size
    shapes = {"A": (m, k), "B": (k, n), "C": (m, k), "D": (k, n)}
    inputs = {name: TensorType(dtype, shape) for name, shape in shapes.items() if f"{name}[" in body}
    program = parse(f"R[m, n]: float32 +=! {body}", inputs)
    (plan,) = estimate_program(PartitionCache(program), hardware.load(target)).plans
    kernels = tuple((each.program.family, each.program.unit.name) for each in plan.choices)
    return kernels, plan.estimate.seconds


def check(seed: int, target: str) -> None:
    dice = random.Random(seed)
    body, dtype, size = PROGRAMS[seed % len(PROGRAMS)]
    changed = body
    for _ in range(dice.randrange(1, 5)):
        changed = rewritten(changed, dice.choice(REWRITES), dice)
    kernels, seconds = estimated(text_of(body), dtype, size, target)
    others, other_s = estimated(text_of(changed), dtype, size, target)
    said = f"{target} {dtype} {size}: {text_of(body)} as {text_of(changed)}"
    assert others == kernels, said
    assert other_s <= MAX_ESTIMATE_RATIO * seconds, said
    assert seconds <= MAX_ESTIMATE_RATIO * other_s, said


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("seed", range(0, len(PROGRAMS), 12))
def test_a_rewrite_keeps_kernels_and_estimate(seed: int, target: str) -> None:
    check(seed, target)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_two_thousand_rewrites_keep_kernels_and_estimates(target: str) -> None:
    for seed in range(2000):
        check(seed, target)
