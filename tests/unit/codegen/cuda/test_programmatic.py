"""Launches behind programmatic edges: where they wait, what they load before, and faults that the emulator sees."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import ml_dtypes
import numpy as np
import pytest
from emulator_support import module

from roller_svc import hardware, toolchain
from roller_svc.codegen.cuda.programmatic import find_first_access, find_read_tensors
from roller_svc.compiler.explain import parse_request, rank_request
from roller_svc.compiler.lower_and_emit import emit_plan
from roller_svc.compiler.plans import merge_ranked_plans
from roller_svc.compiler.request import build_request
from roller_svc.errors import InvariantError, WrongAnswerError
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Load
from roller_svc.ir.index import lt, num, ref
from roller_svc.ir.kernel import KernelSource, Role
from roller_svc.ir.program import Combine
from roller_svc.ir.schedule import Barrier, Branch, Compute, CpAsync, Let, Loop, LoopKind, Node, Part, Routine, Scope, Storage
from roller_svc.toolchain.binaries.sass import sass_text

H200 = "nvidia-h200-sxm"
F32 = DType.FLOAT32
WAIT = "grid_wait();"


def load(tensor: str) -> Load:
    return Load(tensor, (ref("i"),), F32)


COPY = CpAsync("ring", (num(0),), load("W"), 4)
STORE = Compute("C", (ref("i"),), load("r"))
USE = Compute("r", (), load("A"))
MEMORY = {"A", "C"}  # W is constant


@pytest.mark.parametrize(
    ("nodes", "wanted"),
    [
        ((COPY, USE, STORE), USE),
        ((COPY, Loop("i", 4, LoopKind.SERIAL, (COPY, USE))), Loop("i", 4, LoopKind.SERIAL, (COPY, USE))),
        ((Loop("i", 4, LoopKind.THREAD, (COPY, Storage("r", F32, (), Scope.REGISTER, (Barrier(), USE)))),), USE),
        ((Let("j", ref("i"), (COPY, STORE)),), STORE),
        ((Let("j", load("A"), (STORE,)),), Let("j", load("A"), (STORE,))),
        ((Branch(lt(ref("i"), num(3)), (STORE,)),), Branch(lt(ref("i"), num(3)), (STORE,))),  # some threads come to it
        ((Part("A"), Routine("C", (COPY,)), Loop("A", 4, LoopKind.THREAD, (Part("C"), USE))), USE),  # no names of tensors
    ],
)
def test_each_thread_waits_before_the_first_access_that_all_come_to(nodes: tuple[Node, ...], wanted: Node) -> None:
    assert find_first_access(nodes, MEMORY) == wanted


def test_a_launch_without_accesses_has_no_place_to_wait() -> None:
    with pytest.raises(InvariantError, match="accesses no memory"):
        find_first_access((COPY,), MEMORY)


def test_what_is_updated_is_read() -> None:
    assert find_read_tensors((USE, STORE), MEMORY) == {"A"}
    assert find_read_tensors((Compute("C", (ref("i"),), load("r"), Combine.SUM),), MEMORY) == {"C"}


def test_what_parts_and_loops_are_called_is_not_read() -> None:
    assert find_read_tensors((Part("C"), Loop("C", 4, LoopKind.SERIAL, (USE, STORE))), MEMORY) == {"A"}


@cache
def emitted(expression: str, *, programmatic: bool = True) -> KernelSource:
    """The first plan of `expression`, in which B is constant; that of a product of few rows streams B."""
    rows, n, k = 2, 40, 256
    shapes = {"A": (rows, k), "B": (n, k), "R": (rows, n)}
    inputs = {name: ("bfloat16", shape) for name, shape in shapes.items() if f"{name}[" in expression}
    constants = tuple(name for name in inputs if name == "B")
    request = replace(build_request(expression, inputs, target=H200, constants=constants), programmatic=programmatic)
    hw, forms = hardware.load(H200), parse_request(request)
    plans = merge_ranked_plans(rank_request(request, forms, hw), 20)
    streams = [each for each in plans if any(c.program.family == "gpu/streamed_rows" for c in each.plan.choices)]
    grouped = [*streams, *plans][0]
    return emit_plan(grouped.plan, forms[0], grouped.groups, hw)


PRODUCT = "C[m, n]: float32 +=! A[m, k] * B[n, k]; D[m, n]: bfloat16 = C[m, n] + R[m, n]"
ADD = "C[m, n]: bfloat16 = R[m, n] + R[m, n]"


def body_of(source: KernelSource) -> str:
    return source.text[source.text.index("{", source.text.index('extern "C"')) :]


def test_pages_of_a_constant_matrix_are_requested_before_the_wait() -> None:
    source = emitted(PRODUCT)
    assert all(launch.programmatic for launch in source.launches)
    before, after = body_of(source).split(WAIT)
    assert set(re.findall(r"copy_async_16\([^;]*\((\w) \+", before)) == {"B"}
    assert not re.search(r"\b[ARD]\[", before)
    assert re.search(r"\bA\[", after)
    assert re.search(r"\bD\[", after)


def test_only_constants_and_results_that_are_not_read_are_restricted() -> None:
    (parameters,) = re.findall(r'extern "C"[^{]*\(([^(){]*)\) \{', emitted(PRODUCT).text)
    restricted = {each.rsplit(" ", 1)[1].lstrip("*"): "__restrict__" in each for each in parameters.split(", ")}
    assert restricted == {"A": False, "B": True, "R": False, "D": True}


def test_a_plain_launch_does_not_wait() -> None:
    source = emitted(PRODUCT, programmatic=False)
    assert not any(launch.programmatic for launch in source.launches)
    assert "grid_" not in source.text


def arrays(source: KernelSource) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    named = {each.name: each.shape for each in source.buffers_of(Role.INPUT)}
    return {name: rng.integers(-4, 5, shape).astype(ml_dtypes.bfloat16) for name, shape in named.items()}


@pytest.mark.parametrize("seed", [0, 5])
def test_a_programmatic_launch_computes_the_same_without_races(seed: int) -> None:
    source = emitted(PRODUCT)
    given = arrays(source)
    a, b, r = (given[name].astype(np.float32) for name in "ABR")
    results = module(source, seed, races=True).run(given)
    np.testing.assert_array_equal(results["D"], (a @ b.T + r).astype(ml_dtypes.bfloat16))


def wait_at_the_end(body: str) -> str:
    return f"{body.replace(WAIT, '')[: body.replace(WAIT, '').rindex('}')]}{WAIT}}}"


@pytest.mark.parametrize(
    ("change", "races", "message"),
    [
        (lambda body: body.replace(WAIT, ""), False, "ends without grid_wait"),
        (lambda body: body.replace(WAIT, f"if (threadIdx.x) {WAIT}"), False, "ends without grid_wait"),
        (wait_at_the_end, True, "before grid_wait"),
        (lambda body: body.replace("(B + ", "(A + ", 1), False, "before grid_wait"),
    ],
    ids=["no wait", "not all threads wait", "too late", "the first page is not constant"],
)
def test_a_launch_that_does_not_wait_in_time_is_a_fault(change: Callable[[str], str], races: bool, message: str) -> None:
    source = emitted(PRODUCT)
    body = body_of(source)
    changed = replace(source, text=source.text.removesuffix(body) + change(body))
    assert changed.text != source.text
    with pytest.raises(WrongAnswerError, match=message):
        module(changed, races=races).run(arrays(source))


ACCESS = re.compile(r"\b((?:LDG|STG|ATOMG|REDG|RED|ATOM|LDGSTS|UBLKCP|UTMALDG|LD|ST)\b[.\w]*|ACQBULK|PREEXIT)")


@pytest.mark.parametrize(("expression", "before"), [(PRODUCT, {"LDGSTS"}), (ADD, set())])
def test_machine_code_accesses_memory_behind_the_wait(expression: str, before: set[str]) -> None:
    source = emitted(expression)
    code = sass_text(toolchain.compile_source(source).binary)
    found = [each.split(".")[0] for each in ACCESS.findall(code)]
    assert "PREEXIT" in found
    place = found.index("ACQBULK")
    assert set(found[:place]) - {"PREEXIT"} == before
    assert {"LDG", "STG"} <= set(found[place:])
    assert not re.search(r"LDG\S*\.CONSTANT", code)
