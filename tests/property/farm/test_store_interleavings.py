"""Collections beside publications and reads, in every order of their requests to the store that hypothesis finds.

Threads take turns: one of them does one request to the store at a time, and a drawn schedule chooses which. Whatever
the order, a name that resolves is complete while nothing is removed, a result that is pinned is always there, a reader
never fails, and in the end the store has what was published and not collected.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from unittest import mock

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from sampling import examples
from waiting import PATIENCE_S

from roller_svc.errors import StoreError
from roller_svc.farm import store_lock
from roller_svc.farm.collection import collect, find_damage
from roller_svc.farm.objects import Objects
from roller_svc.farm.store import Artifact, Store

MAX_STEPS = 20_000
REQUESTS = ("read", "info", "write", "create", "note", "remove", "list")


class Turns:
    """Lets one thread go on at a time, by a schedule of threads and numbers of turns, then at random.

    In turn, two writers could look for a collector for ever: one of them is there whenever the collector looks.
    """

    def __init__(self, schedule: list[tuple[int, int]]) -> None:
        self._schedule = [number for number, count in schedule for _ in range(count)]
        self._random = random.Random(0)
        self._waiting: dict[threading.Thread, threading.Event] = {}
        self._running: set[threading.Thread] = set()
        self._changed = threading.Condition()
        self.failures: list[BaseException] = []

    def take(self) -> None:
        """Wait for a turn, if this thread has to take turns."""
        me = threading.current_thread()
        with self._changed:
            if me not in self._running:
                return
            turn = self._waiting[me] = threading.Event()
            self._changed.notify_all()
        assert turn.wait(PATIENCE_S)

    def run(self, actors: Iterable[Callable[[], None]]) -> None:
        threads = [threading.Thread(target=self._act, args=(actor,), daemon=True) for actor in actors]
        self._running.update(threads)
        for thread in threads:
            thread.start()
        for step in range(MAX_STEPS):
            with self._changed:
                assert self._changed.wait_for(lambda: self._waiting.keys() >= self._running, PATIENCE_S)
                waiting = [thread for thread in threads if thread in self._running]
                if not waiting:
                    break
                number = self._schedule[step] if step < len(self._schedule) else self._random.randrange(len(waiting))
                self._waiting.pop(waiting[number % len(waiting)]).set()
        else:
            pytest.fail("the threads wait for each other")
        if self.failures:
            raise self.failures[0]

    def _act(self, actor: Callable[[], None]) -> None:
        try:
            actor()
        except BaseException as failure:  # noqa: BLE001 - raised by `run`
            self.failures.append(failure)
        finally:
            with self._changed:
                self._running.discard(threading.current_thread())
                self._changed.notify_all()


def take_turns(objects: Objects, turns: Turns) -> None:
    """Let each request to the store wait for its turn."""
    for name in REQUESTS:
        request = getattr(objects, name)

        def requested(*given: object, request: Callable[..., object] = request) -> object:
            turns.take()
            found = request(*given)
            return iter(list(found)) if isinstance(found, Iterator) else found

        def removed(names: Iterable[str], request: Callable[..., object] = request) -> None:
            for each in names:
                turns.take()
                request([each])

        setattr(objects, name, removed if name == "remove" else requested)


def action(number: int) -> str:
    return f"sha256:{number + 1000:064x}"


def artifact(number: int) -> Artifact:
    """Artifacts whose numbers are equal modulo 2 share a blob."""
    files = {"source": bytes([number]) * 100, "binary": bytes([100 + number % 2]) * 100}
    return Artifact(f"sha256:{number:064x}", {"number": number}, files)


def publish(store: Store, number: int) -> None:
    assert store.publish(action(number), artifact(number)) == {"number": number}


def read(store: Store, number: int) -> None:
    facts = store.action_result(action(number))
    assert facts in (None, {"number": number})
    content = store.file(artifact(number).digest, "source")
    assert content in (None, artifact(number).files["source"])


def read_pinned(store: Store, number: int) -> None:
    assert store.action_result(action(number)) == {"number": number}
    assert store.files(artifact(number).digest) == artifact(number).files


def check_complete(store: Store) -> None:
    """Look at all names while no collection removes anything."""
    with store_lock.writing(store.objects):
        for folder in ("kernels", "ac"):
            for info in list(store.objects.list(f"{folder}/")):
                if store.objects.info(info.name) is not None:  # a publication may be going on
                    assert store.is_complete(info.name), info.name


def collect_all(store: Store) -> None:
    with contextlib.suppress(StoreError):  # another collection is running
        collect(store, 0, grace_s=-10.0)  # everything is old enough


PINNED = 9
ACTORS = st.sampled_from(
    [
        *((f"publish {number}", lambda store, number=number: publish(store, number)) for number in range(3)),
        *((f"read {number}", lambda store, number=number: read(store, number)) for number in range(2)),
        ("read pinned", lambda store: read_pinned(store, PINNED)),
        ("check", check_complete),
        ("collect", collect_all),
    ]
)


@pytest.mark.slow
@settings(
    max_examples=examples(150),
    suppress_health_check=[HealthCheck.data_too_large],
)
@example(  # the writers and the collector wait for each other if they take turns
    before=set(),
    garbage={0},
    schedule=[(0, 14)],
    actors=[("publish 0", lambda store: publish(store, 0)), ("publish 0", lambda store: publish(store, 0))],
)
@given(
    before=st.sets(st.integers(0, 2)),
    garbage=st.sets(st.integers(0, 2)),
    actors=st.lists(ACTORS, min_size=1, max_size=3),
    schedule=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 60)), max_size=30),
)
def test_whatever_the_order_results_are_complete_or_not_there(
    before: set[int],
    garbage: set[int],
    actors: list[tuple[str, Callable[[Store], None]]],
    schedule: list[tuple[int, int]],
) -> None:
    store = Store("memory:")
    for number in sorted(before):
        publish(store, number)
    for number in sorted(garbage):  # blobs of a publication that was killed
        for content in artifact(number).files.values():
            store.put(content)
    publish(store, PINNED)
    store.pin(artifact(PINNED).digest)
    turns = Turns(schedule)
    take_turns(store.objects, turns)
    with mock.patch.object(store_lock, "PAUSE_S", 0.0):
        turns.run([lambda: collect_all(store), *(lambda act=act: act(store) for _, act in actors)])
    read_pinned(store, PINNED)
    assert find_damage(store).names == []
    assert list(store.objects.list("writers/")) == []
    assert list(store.objects.list("collecting/")) == []
