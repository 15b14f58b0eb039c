"""Exclude collections of the store from publications, by objects in the store: any process on any machine may do both.

    writers/<token>    a publication is in progress
    collecting/lock    a collection removes objects; its content is the collector's token

A writer adds its object and then looks for a collection; a collector adds its lock and then waits until there is no
writer. Each sees the other, because a read sees every write that has ended. Both die with their processes: an object
that is not renewed is ignored after a time by the store's clock, before which its owner stops by its own clock. One from
the future, by a clock that was ahead, is ignored if it is not seen to change for that time.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Iterator

from roller_svc.errors import StoreError
from roller_svc.farm.objects import Objects
from roller_svc.farm.sightings import Sighting, Sightings

WRITERS, LOCK = "writers", "collecting/lock"
WRITER_S = 600.0  # after which a writer is dead; it gives up after half of it
COLLECTOR_S = 120.0  # after its last renewal, a collector is dead
RENEW_S = 20.0  # between renewals; one request takes less than COLLECTOR_S - RENEW_S
WAIT_S = 30.0  # of a collector for writers; of a writer, beyond COLLECTOR_S, for a collector
PAUSE_S = 0.05


class Writing:
    """The right to write blobs and names, until a collector may ignore it."""

    def __init__(self) -> None:
        self._until_s = time.monotonic() + WRITER_S / 2

    def check(self) -> None:
        """Raise StoreError if the right has ended. Call it before a name is written."""
        if time.monotonic() > self._until_s:
            raise StoreError(f"the store took more than {WRITER_S / 2:g} s to write a result", code="store-slow")


class Collecting:
    """The right to remove objects, which is renewed while it is used."""

    def __init__(self, objects: Objects, token: bytes) -> None:
        self._objects = objects
        self._token = token
        self._renewed_s = time.monotonic()

    def check(self) -> None:
        """Renew the right. Raises StoreError if it was lost. Call it before each few removals."""
        if self._objects.read(LOCK) != self._token or time.monotonic() > self._renewed_s + COLLECTOR_S - RENEW_S:
            raise StoreError("the collection was overtaken by another one", code="store-busy")
        if time.monotonic() > self._renewed_s + RENEW_S:
            self._renewed_s = time.monotonic()
            self._objects.note(LOCK, self._token)


@contextlib.contextmanager
def writing(objects: Objects) -> Iterator[Writing]:
    """Hold off collections. Raises StoreError if one takes too long."""
    name = f"{WRITERS}/{uuid.uuid4().hex}"
    give_up_s = time.monotonic() + COLLECTOR_S + WAIT_S
    locks: Sightings[str] = Sightings()
    try:
        right = Writing()
        objects.note(name)
        while _is_collected(objects, name, locks):
            objects.remove([name])
            if time.monotonic() > give_up_s:
                raise StoreError("the store is being collected; try again", code="store-busy")
            time.sleep(PAUSE_S)
            right = Writing()
            objects.note(name)
        yield right
    finally:
        objects.remove([name])


@contextlib.contextmanager
def collecting(objects: Objects) -> Iterator[Collecting]:
    """Hold off writers and other collections. Raises StoreError if it cannot within a time."""
    token = uuid.uuid4().hex.encode()
    if not objects.create(LOCK, token):
        lock = objects.info(LOCK)
        if lock is not None and -COLLECTOR_S <= store_time_s(objects) - lock.write_time_s <= COLLECTOR_S:
            raise StoreError("another collection of the store is running", code="store-busy")
        objects.remove([LOCK])
        if not objects.create(LOCK, token):
            raise StoreError("another collection of the store has begun", code="store-busy")
    right = Collecting(objects, token)
    try:
        _wait_for_writers(objects, right)
        yield right
    finally:
        if objects.read(LOCK) == token:
            objects.remove([LOCK])


def store_time_s(objects: Objects) -> float:
    """Return the store's clock, which gives objects their times."""
    name = f"collecting/{uuid.uuid4().hex}"
    objects.note(name)
    probe = objects.info(name)
    objects.remove([name])
    return time.time() if probe is None else probe.write_time_s


def _is_collected(objects: Objects, name: str, locks: Sightings[str]) -> bool:
    """Whether a collection is running that a writer has to wait for."""
    lock = objects.info(LOCK)
    if lock is None:
        return False
    own = objects.info(name)
    if own is not None and own.write_time_s - lock.write_time_s > COLLECTOR_S:
        return False
    return locks.ages_s({LOCK: Sighting(lock.version)})[LOCK] <= COLLECTOR_S


def _wait_for_writers(objects: Objects, right: Collecting) -> None:
    give_up_s = time.monotonic() + WAIT_S
    while True:
        writers = list(objects.list(f"{WRITERS}/"))
        now_s = store_time_s(objects) if writers else 0.0
        if all(abs(now_s - writer.write_time_s) > WRITER_S for writer in writers):
            objects.remove(writer.name for writer in writers)
            return
        if time.monotonic() > give_up_s:
            raise StoreError("results are being written to the store; try again", code="store-busy")
        time.sleep(PAUSE_S)
        right.check()
