"""Rewrites that keep the value of a sum of products change neither its kernels' families and units nor its estimate."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
SIZES = ((64, 4096, 1024), (256, 4096, 1024), (1024, 1024, 1024), (2048, 512, 4096))
NUM_REWRITES = 2000
# A leaf is a tensor or a number. Others are (operator, operands). A mask is 0 where k <= m, or n <= m, fails.
Node = str | tuple[str, "Node"] | tuple[str, "Node", "Node"]
A, B, C, D = "A[m, k]", "B[k, n]", "C[m, k]", "D[k, n]"
AB, CD = ("*", A, B), ("*", C, D)
MASK, PART, WIDEN = "where", "part", "cast"
FLOATS: tuple[Node, ...] = (
    AB,
    ("-", AB),
    ("+", AB, CD),
    ("-", AB, CD),
    ("*", AB, "2.0"),
    ("*", AB, "S[k]"),
    ("*", AB, "R[m]"),
    (PART, AB),
    (MASK, AB),
    (WIDEN, AB),
    ("*", ("-", A, "S[k]"), B),
    ("-", ("*", AB, "R[m]"), ("*", CD, "4.0")),
    ("*", ("*", AB, "S[k]"), ("*", "0.5", "T[n]")),
    ("/", ("*", AB, "R[m]"), "3.0"),
)
INTEGERS: tuple[Node, ...] = (
    AB,
    ("-", AB),
    ("*", ("-", A, "R[m]"), B),
    ("*", ("-", A, "R[m]"), ("-", B, "T[n]")),
    ("*", ("-", A, "9"), B),
    ("*", AB, "R[m]"),
    (MASK, AB),
    ("*", ("+", A, "R[m]"), ("-", "T[n]", B)),
    ("+", ("*", ("*", AB, "R[m]"), "3"), CD),
)
FLOAT_DTYPES = (DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32)
INTEGER_DTYPES = (DType.INT8, DType.UINT8)


@dataclass(frozen=True)
class Program:
    """A sum over k in float32 or int32. Its tensors have `dtype`, factors of one axis that of the sum."""

    body: Node
    dtype: DType
    size: tuple[int, int, int]

    @property
    def accumulator(self) -> DType:
        return DType.FLOAT32 if self.dtype.is_float else DType.INT32

    def types(self, text: str) -> dict[str, TensorType]:
        m, n, k = self.size
        matrices = {"A": (m, k), "B": (k, n), "C": (m, k), "D": (k, n)}
        types = {name: TensorType(self.dtype, shape) for name, shape in matrices.items()}
        factor = self.dtype if self.dtype.is_float else DType.INT8
        types |= {name: TensorType(factor, (extent,)) for name, extent in (("R", m), ("T", n), ("S", k))}
        return {name: type_ for name, type_ in types.items() if f"{name}[" in text}


def _programs() -> Iterator[Program]:
    for bodies, dtypes in ((FLOATS, FLOAT_DTYPES), (INTEGERS, INTEGER_DTYPES)):
        for number, (body, dtype) in enumerate((body, dtype) for body in bodies for dtype in dtypes):
            yield Program(body, dtype, SIZES[number % len(SIZES)])


PROGRAMS = tuple(_programs())


def text_of(node: Node, dtype: DType) -> str:
    """Return the text of an expression, whose integers are converted before they are multiplied."""
    match node:
        case str():
            return node if dtype.is_float or "[" not in node else f"{node}.cast(int32)"
        case (operator, left, right):
            return f"({text_of(left, dtype)} {operator} {text_of(right, dtype)})"
        case ("-", operand):
            return f"(-{text_of(operand, dtype)})"
        case ("where", operand):
            return f"where(k <= m, {text_of(operand, dtype)}, {'0.0' if dtype.is_float else '0'})"
        case ("part", operand):
            return f"where(n <= m, {text_of(operand, dtype)}, {'0.0' if dtype.is_float else '0'})"
        case ("when", operand):
            return f"({text_of(operand, dtype)}).when([m >= k], {'0.0' if dtype.is_float else '0'})"
        case ("cast", operand):
            return f"({text_of(operand, dtype)}).cast(float32)"
    raise AssertionError(node)


def commute(node: Node) -> Node:
    match node:
        case ("*" | "+" as operator, left, right):
            return (operator, right, left)
    return node


def associate(node: Node) -> Node:
    """Rewrite (x * y) * z as x * (y * z), and back."""
    match node:
        case ("*" | "+" as operator, (inner, x, y), z) if inner == operator:
            return (operator, x, (operator, y, z))
        case ("*" | "+" as operator, x, (inner, y, z)) if inner == operator:
            return (operator, (operator, x, y), z)
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
        case ("-", left, right):
            return ("+", left, ("-", right))
    return node


def move_mask(node: Node) -> Node:
    """Rewrite where(x * y) as where(x) * y, where(x + y) as a sum, where as when, and back."""
    match node:
        case ("where" | "when" | "part" as mask, ("*", left, right)):
            return ("*", (mask, left), right)
        case ("*", ("where" | "when" | "part" as mask, left), right):
            return (mask, ("*", left, right))
        case ("where" | "when" as mask, operand):
            return ("when" if mask == "where" else "where", operand)
    return node


def move_float_mask(node: Node) -> Node:
    """Do as move_mask, but leave a mask at its product or factor: at the product, kernels leave masked tiles out."""
    match node:
        case ("where" | "when" | "part", ("*", _, _)) | ("*", ("where" | "when" | "part", _), _):
            return node
    return move_mask(node)


def move_cast(node: Node) -> Node:
    """Rewrite a product in float32 as a product of factors in float32, and back."""
    match node:
        case ("cast", ("*", left, right)):
            return ("*", ("cast", left), ("cast", right))
        case ("*", ("cast", left), ("cast", right)):
            return ("cast", ("*", left, right))
        case ("cast", operand):
            return ("cast", ("cast", operand))
    return node


def distribute(node: Node) -> Node:
    """Rewrite (x - y) * z of integers as x * z - y * z."""
    match node:
        case ("*", ("+" | "-" as operator, left, right), factor):
            return (operator, ("*", left, factor), ("*", right, factor))
    return node


def write_division(node: Node) -> Node:
    """Rewrite a multiplication by a power of two as a division, and back."""
    inverse = {"2.0": "0.5", "0.5": "2.0", "4.0": "0.25", "0.25": "4.0"}
    match node:
        case ("*" | "/" as operator, left, str(number)) if number in inverse:
            return ("/" if operator == "*" else "*", left, inverse[number])
    return node


REWRITES: tuple[Callable[[Node], Node], ...] = (commute, associate, negate_twice, move_sign)
FLOAT_REWRITES = (*REWRITES, move_float_mask, move_cast, write_division)
INTEGER_REWRITES = (*REWRITES, move_mask, distribute)  # of floats, sums that are factors are rounded


def rewritten(node: Node, rewrite: Callable[[Node], Node], dice: random.Random) -> Node:
    """Rewrite the node or one below it."""
    if isinstance(node, str) or dice.random() < 0.5:
        return rewrite(node)
    place = dice.randrange(1, len(node))
    operands = [rewritten(each, rewrite, dice) if i == place else each for i, each in enumerate(node[1:], 1)]
    return (node[0], operands[0]) if len(operands) == 1 else (node[0], operands[0], operands[1])


@cache
def estimated(body: str, program: Program, target: str) -> tuple[tuple[tuple[str, str], ...], float]:
    """Return family and unit of each kernel of the best plan, and the plan's seconds."""
    parsed = parse(f"Y[m, n]: {program.accumulator.value} +=! {body}", program.types(body))
    (plan,) = estimate_program(PartitionCache(parsed), hardware.load(target)).plans
    kernels = tuple((each.program.family, each.program.unit.name) for each in plan.choices)
    return kernels, plan.estimate.seconds


def check(seed: int, target: str) -> None:
    dice = random.Random(seed)
    program = PROGRAMS[seed % len(PROGRAMS)]
    rewrites = FLOAT_REWRITES if program.dtype.is_float else INTEGER_REWRITES
    changed = program.body
    for _ in range(dice.randrange(2, 9)):
        changed = rewritten(changed, dice.choice(rewrites), dice)
    plain, spelled = (text_of(body, program.dtype) for body in (program.body, changed))
    kernels, seconds = estimated(plain, program, target)
    others, other_s = estimated(spelled, program, target)
    said = f"{target} {program.dtype} {program.size}: {plain} as {spelled}"
    assert others == kernels, said
    assert other_s <= MAX_ESTIMATE_RATIO * seconds, said
    assert seconds <= MAX_ESTIMATE_RATIO * other_s, said


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("seed", range(0, len(PROGRAMS), 8))
def test_a_rewrite_keeps_kernels_and_estimate(seed: int, target: str) -> None:
    check(seed, target)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(TARGETS)))
def test_two_thousand_rewrites_keep_kernels_and_estimates(number: int) -> None:
    for seed in range(NUM_REWRITES):
        if seed // len(PROGRAMS) % len(TARGETS) == number:  # each target has all programs
            check(seed, TARGETS[number])
