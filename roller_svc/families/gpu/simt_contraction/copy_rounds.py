"""Items of a copy and threads of a block → the item of each thread in each round, so that rounds have fixed steps.

An item has digits along k and along the columns. If threads do not divide these and items are numbered through, each
round has digits of its own, and ptxas keeps an address for each round in registers during the whole mainloop. Therefore
each digit has as many threads as divide it, and one digit has the remaining factor of the threads, which leaves places
idle in its last round. The addresses of all rounds are then that of the first one plus constants.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Expr, Op, OpKind
from roller_svc.ir.index import add, ceil_div, div, lt, mod, mul, num

ADDRESS_REGISTERS = 3  # of a round with addresses of its own, by ptxas
MIN_ADJACENT_ITEMS = 8  # of adjacent threads: a sector of 32 bytes, of 4-byte items
MAX_ROUNDS_RATIO = 2  # of rounds to those of items that are numbered through: one warp has them all, others wait


@dataclass(frozen=True, slots=True)
class DividedThreads:
    """Threads along each digit of a copy's items, and a factor of them, `rest`, along the digit `partial` too."""

    extents: tuple[int, ...]  # of digits, least first; adjacent threads have adjacent items
    threads: tuple[int, ...]
    partial: int
    rest: int

    @property
    def rounds(self) -> int:
        return self._whole_rounds * self._partial_rounds

    @property
    def _whole_rounds(self) -> int:
        """Return the rounds for each step along the partial digit."""
        return math.prod(self._places(i) for i in range(len(self.extents)) if i != self.partial)

    @property
    def _partial_rounds(self) -> int:
        return ceil_div(self._places(self.partial), self.rest)

    def _places(self, digit: int) -> int:
        return self.extents[digit] // self.threads[digit]

    def positions(self, thread: Expr, at_round: Expr) -> tuple[Expr, ...]:
        """Return the digits of a thread's item in a round."""
        positions = []
        slowest, whole = div(at_round, self._whole_rounds), mod(at_round, self._whole_rounds)
        for i, first in enumerate(self._thread_digits(thread)):
            if i == self.partial:
                positions.append(add(mul(slowest, num(self.threads[i] * self.rest)), first))
            else:
                step, whole = mod(whole, self._places(i)), div(whole, self._places(i))
                positions.append(add(mul(step, num(self.threads[i])), first))
        return tuple(positions)

    @property
    def is_partial(self) -> bool:
        """Return whether some threads have no item in the last rounds."""
        return self._places(self.partial) % self.rest > 0

    def partial_digit(self, thread: Expr) -> Expr:
        """Return the digit of a thread's first item that decides whether it has an item in the last rounds."""
        return self._thread_digits(thread)[self.partial]

    def has_item(self, digit: Expr, at_round: Expr) -> Expr:
        """Return the condition that a thread has an item in a round, by its `partial_digit`."""
        whole = self._places(self.partial) // self.rest
        busy = self._places(self.partial) % self.rest * self.threads[self.partial]
        is_busy = lt(digit, num(busy))
        is_early = lt(at_round, num(whole * self._whole_rounds))
        return Op(OpKind.LOR, (is_early, is_busy), DType.INT8) if whole else is_busy

    def _thread_digits(self, thread: Expr) -> list[Expr]:
        """Return the digits of a thread's first item."""
        digits, left = [], math.prod(self.threads) * self.rest
        for i, count in enumerate(self.threads):
            own = count * self.rest if i == self.partial else count
            digits.append(thread if own == left else mod(thread, own))
            thread, left = (num(0) if own == left else div(thread, own)), left // own
        return digits


def divide_threads(extents: tuple[int, ...], threads: int, round_registers: int) -> DividedThreads | None:
    """Divide a block's threads among the digits of a copy's items; None if numbering the items takes fewer registers.

    Args:
        round_registers: Registers that hold the item of one round.
    """
    rounds, addresses = ceil_div(math.prod(extents), threads), own_addresses(extents, threads)
    if addresses == 0:
        return None
    rest, along = threads, []
    for extent in extents:
        along.append(math.gcd(rest, extent))
        rest //= along[-1]
    if along[0] < extents[0] and along[0] % MIN_ADJACENT_ITEMS:
        return None
    choices = [DividedThreads(extents, tuple(along), i, rest) for i in range(len(extents))]
    best = min(choices, key=lambda one: one.rounds)
    is_smaller = (best.rounds - rounds) * round_registers < addresses * ADDRESS_REGISTERS
    return best if is_smaller and best.rounds <= MAX_ROUNDS_RATIO * rounds else None


def own_addresses(extents: tuple[int, ...], threads: int) -> int:
    """Return the rounds whose digits are not those of an earlier one plus constants, if items are numbered through."""
    stride = threads
    for extent in extents[:-1]:
        if stride % extent and extent % stride:
            period = extent // math.gcd(stride, extent)
            return min(period, ceil_div(math.prod(extents), threads)) - 1
        if extent % stride == 0:
            return 0  # digits above this one are the round's
        stride //= extent
    return 0
