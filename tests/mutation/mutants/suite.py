"""List every mutant, and explain those that survive."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

from tests.mutation.mutants import (
    attention_mutants,
    memory_bound_mutants,
    mma_async_mutants,
    mma_mutants,
    simt_mutants,
    softmax_mutants,
    wgmma_attention_mutants,
    wgmma_mutants,
    wgmma_ring_mutants,
)
from tests.mutation.mutants.mutation import Mutation

MUTATIONS: tuple[Mutation, ...] = (
    *mma_async_mutants.MUTATIONS,
    *mma_mutants.MUTATIONS,
    *wgmma_ring_mutants.MUTATIONS,
    *wgmma_mutants.MUTATIONS,
    *simt_mutants.MUTATIONS,
    *memory_bound_mutants.MUTATIONS,
    *attention_mutants.MUTATIONS,
    *wgmma_attention_mutants.MUTATIONS,
    *softmax_mutants.MUTATIONS,
)

# Why a bug that the suite does not find is not found.
_ASSEMBLY = "the emulator has a twin of the wrapper and does not read its assembly, which a GPU alone can judge"
SURVIVORS = {
    "mma async: the assembly of mma takes words of a in another order": _ASSEMBLY,
    "mma async: the assembly of ldmatrix does not turn": _ASSEMBLY,
    "mma async: the assembly waits for other groups": _ASSEMBLY,
    "mma async: a wide variable is not aligned": "a CPU's compiler aligns local arrays of 16 bytes on its own",
}

# Changes that no machine can tell from the original, and that are no mutations therefore.
EQUIVALENT = {
    "mma stream-k: the last share is not cut at the last tile's end": (
        "what lies beyond is a tile beyond the edge: nothing of it is read or stored but partial sums that nobody adds"
    ),
    "mma int8 t4: items are dealt to threads in another order": "each is still fetched and stored once",
    "row sum: shuffles down in place of butterflies": "only lane 0 of the last round is stored, whose sum is the same",
    "softmax: the neighbour's maximum is subtracted": "the quotient does not depend on what is subtracted from both",
    "attention steps: sums begin with one": "the first step's factor, of a maximum from -inf on, is 0",
    "attention fading: the second pass makes more steps": "keys beyond the last have no weight",
    "mma vector: zeros before a guarded read, where a select behind it gives zero again": "the select decides",
}


def _sample() -> Iterator[str]:
    """Yield the ids of every 100th mutant of a family, at least one of each."""
    families: dict[str, list[str]] = {}
    for mutation in MUTATIONS:
        families.setdefault(mutation.case.family, []).append(mutation.id)
    for ids in families.values():
        ids.sort(key=lambda id_: zlib.crc32(id_.encode()))
        yield from ids[: -(-len(ids) // 100)]


SAMPLE = frozenset(_sample())
"""The mutants that every run of the tests tries; the others are slow tests."""
