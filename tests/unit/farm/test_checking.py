"""Requests' digests from processes that can be stopped."""

from __future__ import annotations

import hashlib
import json
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace

import pytest

from roller_svc.compiler.action import PARTS, ActionKey, action_digest, action_key
from roller_svc.compiler.request import build_request, read_request
from roller_svc.errors import (
    ArgumentError,
    BuildServiceError,
    ExprSyntaxError,
    InputError,
    KernelTimeoutError,
    RollerError,
    ScheduleError,
)
from roller_svc.farm import checking as module
from roller_svc.farm.build import LOADED_GENERATOR, BuildTask
from roller_svc.farm.checking import MAX_ATTEMPTS, RequestValidator, ScheduleChecker, ScheduleTask, check_task, compute_key
from roller_svc.ir.constraints import OpClass

REQUEST = build_request("y[i] = x[i] * 2.0", {"x": ("float32", (64,))}, target="cpu-x86-avx2")


@pytest.fixture
def checking() -> Iterator[RequestValidator]:
    made = RequestValidator(60.0)
    yield made
    made.close()


class Failing:
    """In place of the processes: raises the errors in turn, then answers."""

    def __init__(self, *errors: RollerError) -> None:
        self.errors = list(errors)
        self.asked = 0

    def call(self, _: BuildTask) -> ActionKey:
        self.asked += 1
        if self.errors:
            raise self.errors.pop(0)
        return ActionKey("sha256:" + "0" * 64, "kernel", dict.fromkeys(PARTS, "0" * 64))

    def close(self, *, kill: bool) -> None:
        assert kill


def test_a_digest_is_the_actions_and_is_remembered(checking: RequestValidator) -> None:
    assert not checking.is_cached(REQUEST)
    assert checking.digest(REQUEST) == action_digest(REQUEST)
    assert checking.key(REQUEST) == action_key(REQUEST)
    assert checking.is_cached(REQUEST)
    assert not checking.is_cached(replace(REQUEST, top_k=3))


def test_a_refusal_is_the_parsers_and_is_remembered(checking: RequestValidator) -> None:
    wrong = replace(REQUEST, expression="y[i] = x[i +")
    for _ in range(2):
        with pytest.raises(ExprSyntaxError) as refused:
            checking.digest(wrong)
        assert refused.value.column == 9
    assert checking.is_cached(wrong)


def test_a_refusal_is_checked_again_after_a_time() -> None:
    checking = RequestValidator(20.0, remember_errors_s=0.0)
    checking.close()
    stub = Failing(KernelTimeoutError("the machine was busy"))
    checking._workers = stub
    with pytest.raises(InputError):
        checking.digest(REQUEST)
    assert not checking.is_cached(REQUEST)
    assert checking.digest(REQUEST) == "sha256:" + "0" * 64
    assert checking.digest(REQUEST) == "sha256:" + "0" * 64  # a key stands
    assert stub.asked == 2


def test_a_program_that_takes_too_long_is_refused_once_and_for_all(checking: RequestValidator) -> None:
    stub = Failing(KernelTimeoutError("late"))
    checking._workers = stub
    for _ in range(2):
        with pytest.raises(InputError) as refused:
            checking.digest(REQUEST)
        assert refused.value.code == "check-timeout"
    assert stub.asked == 1


def test_a_process_that_died_is_no_fault_of_the_program(checking: RequestValidator) -> None:
    lost = [BuildServiceError("died", code="worker-lost") for _ in range(MAX_ATTEMPTS)]
    stub = Failing(*lost)
    checking._workers = stub
    with pytest.raises(BuildServiceError):
        checking.digest(REQUEST)
    assert not checking.is_cached(REQUEST)
    stub.errors = lost[1:]
    assert checking.digest(REQUEST) == "sha256:" + "0" * 64


def test_a_stalled_machine_is_not_remembered(checking: RequestValidator) -> None:
    stub = Failing(BuildServiceError("stalled", code="worker-stalled"))
    checking._workers = stub
    with pytest.raises(BuildServiceError):
        checking.digest(REQUEST)
    assert stub.asked == 1
    assert not checking.is_cached(REQUEST)


SCHEDULE = ScheduleTask("y[i] = x[i] * 2.0", {"x": ("float32", (64,))}, None, "y: split i 100", "cpu-x86-avx2")


def test_a_schedule_is_checked_in_a_process_that_can_be_stopped() -> None:
    checker = ScheduleChecker(60.0)
    try:
        assert checker.check(SCHEDULE) == check_task(SCHEDULE)
        legal = checker.check(replace(SCHEDULE, schedule="y: split i 8"))
        assert (legal.problems, legal.tree) == ((), "serial i.outer in 8\n  serial i.inner in 8\n    let i\n      y[...] =")
        with pytest.raises(ExprSyntaxError):
            checker.check(replace(SCHEDULE, expression="y[i] = x[i +"))
    finally:
        checker.close()
    for errors, code in (
        ([KernelTimeoutError("late")], "check-timeout"),
        ([BuildServiceError("died", code="worker-lost")] * MAX_ATTEMPTS, "worker-lost"),
        ([BuildServiceError("stalled", code="worker-stalled")], "worker-stalled"),
    ):
        stub = Failing(*errors)
        checker._workers = stub
        with pytest.raises(RollerError) as refused:
            checker.check(SCHEDULE)
        assert (refused.value.code, stub.asked) == (code, len(errors))


def test_a_schedule_of_a_request_is_checked_where_its_key_is_computed(checking: RequestValidator) -> None:
    """Reading a request applies no step: that may take minutes."""
    request = read_request("y[i] = x[i]", {"x": ("float32", (64,))}, schedule="# halves\ny: split i 100", target="cpu-x86-avx2")
    for _ in range(2):
        with pytest.raises(ScheduleError) as refused:
            checking.digest(request)
        error = refused.value
        assert (error.code, error.step, error.line, error.hint) == ("schedule-extent", 0, 2, "y: split i 64")
    assert checking.is_cached(request)
    with pytest.raises(ArgumentError, match="family and schedule"):
        compute_key(BuildTask(replace(request, family=OpClass.SIMT), LOADED_GENERATOR))


@pytest.mark.parametrize("tree", ["1", '{"problems": [], "tree": 1}', '{"problems": [{"step": 1}], "tree": null}'])
def test_an_answer_of_another_form_is_refused(tree: str) -> None:
    with pytest.raises((ValueError, TypeError)):
        module._parse_schedule(json.loads(tree))


def test_other_code_names_no_action() -> None:
    assert compute_key(BuildTask(REQUEST, LOADED_GENERATOR)) == action_key(REQUEST)
    with pytest.raises(BuildServiceError) as refused:
        compute_key(BuildTask(REQUEST, "0" * 64))
    assert refused.value.code == "generator-replaced"


class Distinct:
    """In place of the processes: another key, or another error, for each program, as a process sends it."""

    def __init__(self, *, is_wrong: bool) -> None:
        self.is_wrong = is_wrong

    def call(self, task: BuildTask) -> ActionKey:
        digest = hashlib.sha256(task.request.expression.encode()).hexdigest()
        if self.is_wrong:
            raise ExprSyntaxError(f"the program {digest} is wrong", column=9, hint=f"write it as {digest}")
        parts = {part: digest if part == "expression" else "0" * 64 for part in PARTS}
        text = task.request.expression.replace(" ", "*")  # as long
        return module._parse_key(json.loads(json.dumps({"digest": f"sha256:{digest}", "parts": parts, "text": text})))


@pytest.mark.parametrize("is_wrong", [False, True])
def test_the_bound_of_what_is_remembered_is_what_it_takes(monkeypatch: pytest.MonkeyPatch, is_wrong: bool) -> None:
    """Long requests are not kept, nor the frames that an error has passed."""
    monkeypatch.setattr(module, "MAX_BYTES", 1 << 18)
    checking = RequestValidator(20.0)
    checking.close()
    checking._workers = Distinct(is_wrong=is_wrong)

    def ask(number: int) -> None:
        ballast = bytes(10_000)  # a local of a frame
        request = replace(REQUEST, expression=REQUEST.expression + " " * 2_000 + str(number))
        for _ in range(2):
            try:
                checking.key(request)
            except InputError:
                assert is_wrong
        assert checking.is_cached(request)
        assert ballast

    ask(0)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for number in range(1000):
        ask(number)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 1 << 15 < after - before < 1 << 18
