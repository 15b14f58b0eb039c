"""Collect the store: remove what no name refers to, and what was not used for the longest time beyond a quota.

A kernel, a model and an upload are *items*: a name, the names that go with it (actions, listings) and their blobs. An
item that is pinned stays, and so does one that was used within the grace period. A blob stays while an item that stays
refers to it. Nothing is removed while results are being written (store_lock.py). Names are removed before their blobs,
so that a reader finds a complete result, or none. A collection lets publications go on after each HOLD_S, and then
chooses again: what they refer to stays.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from roller_svc.farm.backup import check_restored
from roller_svc.farm.blobs import BLOBS
from roller_svc.farm.objects import ObjectInfo, Objects
from roller_svc.farm.store import (
    ACTIONS,
    DERIVED,
    KERNELS,
    MODELS,
    PINS,
    UPLOADS,
    Json,
    Store,
    parse_json,
)
from roller_svc.farm.store_lock import Collecting, collecting, store_time_s
from roller_svc.farm.store_uses import USES

GRACE_S = 3600.0  # longer than a publication, and than the time between two writes of a use
BATCH = 500  # removals between two looks at the lock; of S3, one request
HOLD_S = 1.0  # for which removals hold up publications
PAUSE_S = 0.2  # in which these go on


@dataclass(slots=True)
class Item:
    """A kernel, a model or an upload."""

    name: str
    use_time_s: float
    blobs: set[str] = field(default_factory=set)  # with those of the names that go with it
    followers: list[str] = field(default_factory=list)
    is_pinned: bool = False

    @property
    def names(self) -> list[str]:
        """Names in the order in which they are removed: an action before what it refers to."""
        return [*self.followers, self.name]


@dataclass(frozen=True, slots=True)
class Survey:
    """All that is in a store."""

    items: dict[str, Item]
    blobs: dict[str, ObjectInfo]  # by digest
    dangling: list[ObjectInfo]  # names that refer to nothing
    time_s: float  # by the store's clock

    @property
    def size_bytes(self) -> int:
        return sum(blob.size_bytes for blob in self.blobs.values())


@dataclass(frozen=True, slots=True)
class Removals:
    """Names and blobs that a collection removes."""

    names: list[str]
    blobs: list[str]  # their digests
    size_bytes: int  # of the blobs


@dataclass(frozen=True, slots=True)
class CollectionReport:
    """Results of a collection. `size_bytes` is the size of the blobs that are left."""

    removed_actions: list[str]
    removed_items: int
    removed_blobs: int
    removed_bytes: int
    size_bytes: int


class Surveyor:
    """Reads all names of a store. What was read once is not read again while its object is the same."""

    def __init__(self, store: Store) -> None:
        self._objects = store.objects
        self._store = store
        self._contents: dict[str, tuple[str, bytes | None]] = {}
        self._manifests: dict[bytes, Json] = {}

    def survey(self, blobs: dict[str, ObjectInfo] | None = None) -> Survey:
        """Read all names, and list the blobs unless they are given: those of an earlier survey."""
        items: dict[str, Item] = {}
        dangling: list[ObjectInfo] = []
        for folder in (KERNELS, MODELS, UPLOADS):
            for info in self._objects.list(f"{folder}/"):
                items[info.name] = Item(info.name, info.write_time_s, self._item_blobs(info))
        for info in self._objects.list(f"{ACTIONS}/"):
            self._follow(items, info, self._action_item(info), self._blobs_of(self._read(info)), dangling)
        for info in self._objects.list(f"{DERIVED}/"):
            kernel = info.name.removeprefix(f"{DERIVED}/").partition(".")[0]
            entry = parse_json(self._read(info)) or {}
            self._follow(items, info, f"{KERNELS}/{kernel}", {str(entry.get("blob"))}, dangling)
        for info in self._objects.list(f"{USES}/"):
            item = items.get(info.name.removeprefix(f"{USES}/"))
            if item is None:
                dangling.append(info)
            else:
                item.use_time_s = max(item.use_time_s, info.write_time_s)
                item.followers.append(info.name)
        pinned = {info.name.removeprefix(f"{PINS}/") for info in self._objects.list(f"{PINS}/")}
        for name, item in items.items():
            item.is_pinned = name.partition("/")[2] in pinned
        if blobs is None:
            blobs = {info.name.rpartition("/")[2]: info for info in self._objects.list(f"{BLOBS}/")}
        return Survey(items, blobs, dangling, store_time_s(self._objects))

    def _follow(self, items: dict[str, Item], info: ObjectInfo, name: str, blobs: set[str], dangling: list[ObjectInfo]) -> None:
        """Add a name to the item that it refers to."""
        item = items.get(name)
        if item is None:
            dangling.append(info)
            return
        item.followers.append(info.name)
        item.blobs |= blobs
        item.use_time_s = max(item.use_time_s, info.write_time_s)

    def _item_blobs(self, info: ObjectInfo) -> set[str]:
        folder, _, digest = info.name.partition("/")
        return {digest} if folder == UPLOADS else self._blobs_of(self._read(info))

    def _action_item(self, info: ObjectInfo) -> str:
        manifest = self._manifest(self._read(info)) or {}
        folder = MODELS if manifest.get("folder") == MODELS else KERNELS
        return f"{folder}/{str(manifest.get('digest')).removeprefix('sha256:')}"

    def _blobs_of(self, pointer: bytes | None) -> set[str]:
        """Return the digests of a manifest and of its files."""
        if pointer is None:
            return set()
        files = (self._manifest(pointer) or {}).get("files")
        found = {pointer.decode("ascii", "replace")}
        return found | {str(digest) for digest in files.values()} if isinstance(files, dict) else found

    def _manifest(self, pointer: bytes | None) -> Json | None:
        if pointer is None:
            return None
        if pointer not in self._manifests:
            manifest = parse_json(self._store.get(pointer.decode("ascii", "replace")))
            if manifest is None:  # it may be repaired
                return None
            self._manifests[pointer] = manifest
        return self._manifests[pointer]

    def _read(self, info: ObjectInfo) -> bytes | None:
        known = self._contents.get(info.name)
        if known is None or known[0] != info.version:
            known = self._contents[info.name] = (info.version, self._objects.read(info.name))
        return known[1]


def collect(
    store: Store, quota_bytes: int | None = None, *, grace_s: float = GRACE_S, keep: Collection[str] = ()
) -> CollectionReport:
    """Remove what no name refers to, and items until the blobs fit the quota, those unused the longest first.

    `keep` names items that stay, as `models/<digest>`. Raises StoreError if others use the store's lock for long, or if the
    store is not restored completely: nothing refers to its blobs yet.
    """
    check_restored(store)
    store.uses.flush()
    store.objects.remove_staged()
    surveyor = Surveyor(store)
    survey = surveyor.survey()
    size_bytes, count = survey.size_bytes, len(survey.blobs)
    removed_items, removed_actions = set[str](), set[str]()
    while not _is_empty(choose_removals(survey, quota_bytes, grace_s, keep)):
        with collecting(store.objects) as right:
            survey = surveyor.survey(survey.blobs)
            removals = choose_removals(survey, quota_bytes, grace_s, keep)
            blobs = {survey.blobs[digest].name: digest for digest in removals.blobs}
            removed = _remove(store.objects, right, [*removals.names, *blobs], HOLD_S)
        removed_items |= removed & survey.items.keys()
        removed_actions |= {name for name in removed if name.startswith(f"{ACTIONS}/")}
        for name in removed & blobs.keys():
            del survey.blobs[blobs[name]]
        time.sleep(PAUSE_S)
        survey = surveyor.survey(survey.blobs)
    return CollectionReport(
        [f"sha256:{name.removeprefix(f'{ACTIONS}/')}" for name in sorted(removed_actions)],
        len(removed_items),
        count - len(survey.blobs),
        size_bytes - survey.size_bytes,
        survey.size_bytes,
    )


def choose_removals(survey: Survey, quota_bytes: int | None, grace_s: float, keep: Collection[str] = ()) -> Removals:
    """Choose what a collection removes."""
    oldest_s = survey.time_s - grace_s
    uses = Counter(itertools.chain.from_iterable(item.blobs for item in survey.items.values()))
    garbage = {digest for digest, blob in survey.blobs.items() if not uses[digest] and blob.write_time_s <= oldest_s}
    names = [name.name for name in survey.dangling if name.write_time_s <= oldest_s]
    size_bytes = survey.size_bytes - _size_bytes(survey, garbage)
    if quota_bytes is not None:
        removable = [item for item in survey.items.values() if item.use_time_s <= oldest_s and not item.is_pinned]
        for item in sorted(removable, key=lambda item: item.use_time_s):
            if size_bytes <= quota_bytes:
                break
            if item.name in keep:
                continue
            names += item.names
            uses.subtract(item.blobs)
            freed = {
                digest
                for digest in item.blobs & survey.blobs.keys()
                if not uses[digest] and survey.blobs[digest].write_time_s <= oldest_s
            }
            size_bytes -= _size_bytes(survey, freed - garbage)
            garbage |= freed
    return Removals(names, sorted(garbage), survey.size_bytes - size_bytes)


def _size_bytes(survey: Survey, digests: Iterable[str]) -> int:
    return sum(survey.blobs[digest].size_bytes for digest in digests)


def _is_empty(removals: Removals) -> bool:
    return not removals.names and not removals.blobs


def _remove(objects: Objects, right: Collecting, names: list[str], limit_s: float = math.inf) -> set[str]:
    """Remove objects in order, for a time; return the names of those that are removed."""
    until_s = time.monotonic() + limit_s
    removed = set[str]()
    for batch in _batches(names):
        right.check()
        objects.remove(batch)
        removed.update(batch)
        if time.monotonic() > until_s:
            break
    return removed


def _batches(names: list[str]) -> Iterator[list[str]]:
    return (names[start : start + BATCH] for start in range(0, len(names), BATCH))


@dataclass(frozen=True, slots=True)
class Damage:
    """Faults of a store: blobs that do not match their hash, names whose results are not complete."""

    blobs: list[str]
    names: list[str]
    checked_blobs: int
    checked_names: int


def verify(store: Store, *, remove: bool = False) -> Damage:
    """Check every blob and every name; remove the damaged ones if told so, which makes them misses that are rebuilt."""
    damage = find_damage(store)
    if remove and (damage.blobs or damage.names):
        with collecting(store.objects) as right:
            names = [name for name in damage.names if not store.is_complete(name)]
            blobs = [name for name in damage.blobs if store.get(name.rpartition("/")[2]) is None]
            _remove(store.objects, right, [*names, *blobs])
    return damage


def find_damage(store: Store) -> Damage:
    """Read every blob and every name."""
    blobs = [info.name for info in store.objects.list(f"{BLOBS}/")]
    folders = (ACTIONS, KERNELS, MODELS, UPLOADS, DERIVED)
    names = [info.name for folder in folders for info in store.objects.list(f"{folder}/")]
    return Damage(
        [name for name in blobs if store.get(name.rpartition("/")[2]) is None],
        [name for name in names if not store.is_complete(name)],
        len(blobs),
        len(names),
    )
