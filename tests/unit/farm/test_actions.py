"""Why a request misses: the parts of keys, the nearest stored action, and what is forgotten."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select

from roller_svc import hardware
from roller_svc.compiler import action
from roller_svc.compiler.action import PARTS, ActionKey, action_digest, action_key, part_contents
from roller_svc.compiler.request import build_request
from roller_svc.errors import CompileError
from roller_svc.farm.actions import ActionLog, explanation_json
from roller_svc.farm.database.connect import Database
from roller_svc.farm.database.tables import action_parts, actions
from roller_svc.farm.models import ModelRequest, model_digest, model_key, model_part_contents
from roller_svc.farm.queue import OperationQueue, Submission
from roller_svc.farm.store import Artifact, Store
from roller_svc.ir.report import BuildRequest


def request(text: str = "y[i] = x[i] * 2.0", **options: Any) -> BuildRequest:
    defaults: dict[str, Any] = {"target": "cpu-x86-avx2", "top_k": 1, "select": "model"}
    return build_request(text, {"x": ("float32", (64,))}, **defaults | options)


class Setup:
    def __init__(self, database: Database, root: Path) -> None:
        self.database = database
        self.store = Store(root)
        self.log = ActionLog(database, self.store)
        self.queue = OperationQueue(database, "a" * 64, max_alive=100)

    def submit(self, wanted: BuildRequest) -> ActionKey:
        key = action_key(wanted)
        self.log.record(key, part_contents(wanted))
        self.queue.submit(Submission(key.digest, {}, "queue"))
        return key

    def build(self, wanted: BuildRequest) -> ActionKey:
        key = self.submit(wanted)
        claim = self.queue.claim("worker")
        assert claim is not None
        facts: dict[str, object] = {"digest": "sha256:" + key.digest[:6:-1]}
        assert self.queue.finish(claim, self.store.publish(key.digest, Artifact(str(facts["digest"]), facts, {})))
        return key

    def differences(self, wanted: BuildRequest) -> dict[str, dict[str, tuple[object, object]]]:
        nearest = self.log.explain(action_key(wanted), part_contents(wanted)).nearest
        assert nearest is not None
        return {part.part: {each.field: (each.this, each.nearest) for each in part.fields} for part in nearest.differences}

    def rows(self) -> tuple[int, int]:
        with self.database.read() as connection:
            return tuple(connection.scalar(select(func.count()).select_from(each)) for each in (actions, action_parts))


@pytest.fixture
def setup(database: Database, tmp_path: Path) -> Setup:
    return Setup(database, tmp_path / "store")


@pytest.mark.slow
def test_many_record_the_same_parts_at_once(setup: Setup) -> None:
    wanted = [request(f"y[i] = x[i] * {number}.0") for number in range(8)]
    keys = [(action_key(each), part_contents(each)) for each in wanted for _ in range(3)]
    start = threading.Barrier(len(keys))

    def record(key: ActionKey, contents: Mapping[str, object]) -> None:
        start.wait()
        setup.log.record(key, contents)

    with ThreadPoolExecutor(len(keys)) as pool:
        list(pool.map(record, *zip(*keys, strict=True)))
    distinct = {digest for key, _ in keys for digest in key.parts.values()}
    assert setup.rows() == (len(wanted), len(distinct))


def changed_parts(one: ActionKey, other: ActionKey) -> set[str]:
    return {part for part in PARTS if one.parts[part] != other.parts[part]}


def spec_with(**changes: object) -> Mapping[str, object]:
    return hardware.to_mapping(dataclasses.replace(hardware.load("cpu-x86-avx2"), **changes))


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"text": "y[i] = x[i] * 3.0"}, "expression"),
        ({"top_k": 2}, "options"),
        ({"allow_tf32": True}, "options"),
        ({"constants": ["x"]}, "options"),
        ({"winograd": "never"}, "options"),
        ({"donate": ["x"]}, "options"),
        ({"target": None, "hardware": spec_with(num_cores=7)}, "spec"),
    ],
)
def test_a_change_of_a_request_is_one_of_one_part_and_of_the_digest(options: dict[str, Any], part: str) -> None:
    if "target" in options:
        options = {"hardware": options["hardware"], "target": "local"}
    before, after = action_key(request()), action_key(request(**options))
    assert changed_parts(before, after) == {part}
    assert before.digest != after.digest


def test_keys_have_the_digests_of_actions_and_ignore_spaces() -> None:
    assert action_key(request()).digest == action_digest(request())
    assert action_key(request("y[i]   =   x[i] * 2.0")) == action_key(request())


def test_versions_of_compilers_and_of_the_generator_are_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    before = action_key(request())
    with monkeypatch.context() as patch:
        patch.setattr(action, "toolchain_versions", lambda _: {"cc": "99"})
        assert changed_parts(before, action_key(request())) == {"compiler"}
    monkeypatch.setattr(action, "generator_digest", lambda: "f" * 64)
    assert changed_parts(before, action_key(request())) == {"generator"}


def test_an_empty_store_has_nothing_near(setup: Setup) -> None:
    explanation = setup.log.explain(action_key(request()), part_contents(request()))
    assert (explanation.result, explanation.nearest) == (None, None)
    assert set(explanation.parts) == set(PARTS)
    assert setup.log.explain_known(action_digest(request())) is None


def test_a_hit_is_explained_by_its_result(setup: Setup) -> None:
    key = setup.build(request())
    explanation = setup.log.explain_known(key.digest)
    assert explanation is not None
    assert explanation.result == "sha256:" + key.digest[:6:-1]
    assert (explanation.parts, explanation.nearest) == (key.parts, None)


def test_a_miss_names_the_parts_and_fields_that_differ(setup: Setup) -> None:
    setup.build(request())
    assert setup.differences(request(top_k=7, winograd="never")) == {"options": {"top_k": (7, 1), "winograd": ("never", "auto")}}
    text = "z[i] = x[i]"
    assert setup.differences(request(text)) == {"expression": {"expression": (text, "y[i] = x[i] * 2.0")}}
    found = setup.differences(request(hardware=spec_with(num_cores=7), target="local"))
    assert found == {"spec": {"num_cores": (7, 2)}}


def test_another_compiler_is_named_with_both_versions(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    setup.build(request())
    found = action.toolchain_versions(hardware.load("cpu-x86-avx2").family)
    monkeypatch.setattr(action, "toolchain_versions", lambda _: {**found, "cc": "99"})
    assert setup.differences(request()) == {"compiler": {"toolchain.cc": ("99", found["cc"])}}


def test_the_same_expression_is_nearer_than_more_equal_parts(setup: Setup) -> None:
    setup.build(request("z[i] = x[i]"))
    other_device = setup.build(request(top_k=3, target="nvidia-h200-sxm"))
    setup.build(request("w[i] = x[i]"))
    nearest = setup.log.explain(action_key(request()), part_contents(request())).nearest
    assert nearest is not None
    assert nearest.action == other_device.digest
    assert [part.part for part in nearest.differences] == ["spec", "options"]


def test_of_equally_near_ones_the_latest_is_taken_and_only_what_is_stored(setup: Setup) -> None:
    first, second = setup.build(request(top_k=2)), setup.build(request(top_k=3))
    setup.submit(request(top_k=4))  # is not built
    assert setup.differences(request()) == {"options": {"top_k": (1, 3)}}
    setup.store.objects.remove([f"ac/{second.digest.removeprefix('sha256:')}"])
    nearest = setup.log.explain(action_key(request()), part_contents(request())).nearest
    assert nearest is not None
    assert nearest.action == first.digest


def test_what_was_submitted_is_explained_by_its_digest(setup: Setup) -> None:
    setup.build(request())
    key = setup.submit(request(top_k=5))
    explanation = setup.log.explain_known(key.digest)
    assert explanation is not None
    document: Any = explanation_json(explanation)
    assert document["result"] is None
    fields = [{"field": "top_k", "this": 5, "nearest": 1}]
    assert document["nearest"]["differences"] == [{"part": "options", "fields": fields}]


def test_a_remembered_error_is_part_of_the_explanation(setup: Setup) -> None:
    key = setup.submit(request())
    claim = setup.queue.claim("worker")
    assert claim is not None
    assert setup.queue.fail(claim, CompileError("no"), 60.0)
    explanation = setup.log.explain_known(key.digest)
    assert explanation is not None
    document: Any = explanation_json(explanation)
    error = document["remembered_error"]
    assert (error["code"], error["message"], error["until"][-1]) == ("compile-failed", "no", "Z")


def test_a_stored_action_without_a_record_is_known(setup: Setup) -> None:
    digest = "sha256:" + "b" * 64
    setup.store.publish(digest, Artifact("sha256:" + "c" * 64, {"digest": "sha256:" + "c" * 64}, {}))
    explanation = setup.log.explain_known(digest)
    assert explanation is not None
    assert (explanation.result, explanation.parts) == ("sha256:" + "c" * 64, {})


def test_parts_are_stored_once_and_forgotten_with_their_last_action(setup: Setup) -> None:
    first, second = setup.build(request()), setup.build(request(top_k=2))
    setup.log.record(first, part_contents(request()))
    assert setup.rows() == (2, 6)  # two options, four parts in common
    setup.log.forget([first.digest])
    assert setup.rows() == (1, 5)
    setup.log.forget([second.digest])
    assert setup.rows() == (0, 0)


def test_what_was_not_built_is_forgotten_in_time(setup: Setup) -> None:
    built = setup.build(request())
    setup.submit(request(top_k=2))
    setup.log.forget_unbuilt(3600.0)
    assert setup.rows()[0] == 2
    setup.log.forget_unbuilt(-1.0)
    assert setup.rows()[0] == 1
    assert setup.log.explain_known(built.digest) is not None


def test_models_have_keys_of_their_own_kind(setup: Setup) -> None:
    spec = hardware.load("cpu-x86-avx2")
    model = ModelRequest("a" * 64, "onnx", "cpu-x86-avx2", {"top_k": 1})
    key = model_key(model, spec)
    assert key.digest == model_digest(model, spec)
    other = dataclasses.replace(model, options={"top_k": 2})
    assert changed_parts(key, model_key(other, spec)) == {"options"}
    setup.build(request())
    assert setup.log.explain(key, model_part_contents(model, spec)).nearest is None
