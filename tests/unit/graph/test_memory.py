"""Placement of buffers: nothing alive overlaps, and what is dead is reused."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from roller_svc.graph.memory import ALIGNMENT_BYTES, Lifetime, align, place

LIFETIMES = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 8), st.integers(1, 5000)).map(lambda t: Lifetime(t[0], t[0] + t[1], t[2])),
    max_size=40,
)


@settings(max_examples=200)
@given(LIFETIMES)
def test_buffers_that_live_together_do_not_overlap(buffers: list[Lifetime]) -> None:
    offsets, total = place(buffers)
    for i, a in enumerate(buffers):
        assert offsets[i] % ALIGNMENT_BYTES == 0
        assert offsets[i] + a.bytes <= total
        for j in range(i):
            b = buffers[j]
            if a.first <= b.last and b.first <= a.last:
                assert offsets[i] + a.bytes <= offsets[j] or offsets[j] + b.bytes <= offsets[i]


@settings(max_examples=100)
@given(LIFETIMES)
def test_the_arena_is_between_the_peak_and_the_sum(buffers: list[Lifetime]) -> None:
    _, total = place(buffers)
    peak = max((sum(align(b.bytes) for b in buffers if b.first <= t <= b.last) for t in range(40)), default=0)
    assert peak <= total <= sum(align(b.bytes) for b in buffers)


def test_a_chain_takes_two_buffers() -> None:
    chain = [Lifetime(i, i + 1, 1000) for i in range(50)]
    assert place(chain)[1] == 2 * align(1000)


def test_no_buffers() -> None:
    assert place([]) == ((), 0)
