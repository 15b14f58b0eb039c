"""A bounded memory of results by what they follow from; the one used longest ago goes first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from threading import Lock
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Memo(Generic[K, V]):
    """For pure functions, and safe for threads: two may compute one result at once, and put either. `most`: the sum of
    the weights of what is kept."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._weight = 0
        self._known: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._lock = Lock()

    def get(self, key: K) -> V | None:
        with self._lock:
            known = self._known.get(key)
            if known is None:
                return None
            self._known.move_to_end(key)
            return known[0]

    def put(self, key: K, value: V, weight: int = 1) -> None:
        with self._lock:
            if key in self._known:
                self._weight -= self._known.pop(key)[1]
            self._known[key] = value, weight
            self._weight += weight
            while self._weight > self._most:
                _, (_, gone) = self._known.popitem(last=False)
                self._weight -= gone

    def __len__(self) -> int:
        return len(self._known)
