"""A bounded cache with least-recently-used eviction."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from threading import Lock
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

ENTRY_BYTES = 512  # of memory that CPython takes for an entry beside its content: key, dictionary, links, headers


class LruCache(Generic[K, V]):
    """Thread-safe LRU cache bounded by the total weight of its entries.

    Threads may compute the same value concurrently, so values must be results of pure functions.
    """

    def __init__(self, max_weight: int) -> None:
        self._max_weight = max_weight
        self._weight = 0
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._lock = Lock()

    def get(self, key: K) -> V | None:
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            self._entries.move_to_end(key)
            return entry[0]

    def put(self, key: K, value: V, weight: int = 1) -> None:
        with self._lock:
            if key in self._entries:
                self._weight -= self._entries.pop(key)[1]
            self._entries[key] = value, weight
            self._weight += weight
            while self._weight > self._max_weight:
                _, (_, evicted) = self._entries.popitem(last=False)
                self._weight -= evicted

    def __len__(self) -> int:
        return len(self._entries)
