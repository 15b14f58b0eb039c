"""The story of a program on a device: tiles that were tried, programs made of them, and what each of these costs.

`POST /v1/kernels:explain`, `roller_svc.explain`, `roller explain` and the reports of kernels read this value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from roller_svc.ir.canonical import OMIT_DEFAULT, Key
from roller_svc.ir.estimate import Sensitivity, Term

Extents = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StoryLevel:
    """A memory level of the device, the outermost first."""

    name: str
    scope: str
    capacity_bytes: int
    bandwidth_bytes_per_s: float
    latency_s: float
    assumed: bool  # whether the spec marks the bandwidth as assumed


@dataclass(frozen=True, slots=True)
class StoryDevice:
    """The device."""

    id: str
    name: str
    arch: str
    cores: int
    clock_hz: float
    levels: tuple[StoryLevel, ...]
    tile_levels: tuple[str, ...]  # of tiles of blocks, and of threads


@dataclass(frozen=True, slots=True)
class StoryLimit:
    """A rule that a tile breaks, what the tile needs, and what there is."""

    rule: str
    needs: int | float
    has: int | float


@dataclass(frozen=True, slots=True)
class StoryGrowth:
    """A tile that is one step larger along an axis."""

    axis: int
    extent: int
    reuse: float | None  # traffic saved per byte of footprint (ROLLER §3.3); None: it takes no bytes
    footprint_bytes: int
    traffic_bytes: int
    limit: Annotated[StoryLimit | None, OMIT_DEFAULT] = None


@dataclass(frozen=True, slots=True)
class StoryStep:
    """A tile that a search visited."""

    tile: Extents
    footprint_bytes: int
    traffic_bytes: int  # of the whole space with such tiles, from the level outside
    decision: Annotated[str, Key("outcome")]  # "accepted", "grown" (only larger tiles are aligned) or "rejected"
    parent: Annotated[int | None, OMIT_DEFAULT] = None  # step that it was made of; None: a first tile
    axis: Annotated[int | None, OMIT_DEFAULT] = None  # along which the parent grew, or was halved; None: along several
    base: Annotated[Extents | None, OMIT_DEFAULT] = None  # the thread's tile, where the search has several
    saturated: Annotated[bool, OMIT_DEFAULT] = False  # compute time covers memory time: ROLLER's test
    limit: Annotated[StoryLimit | None, OMIT_DEFAULT] = None
    seconds: Annotated[float | None, OMIT_DEFAULT] = None  # of the fastest program made of it, among those estimated
    growth: Annotated[tuple[StoryGrowth, ...], OMIT_DEFAULT] = ()  # best data reuse first


@dataclass(frozen=True, slots=True)
class StorySearch:
    """A search for tiles of one level, on one unit, for one view of a group: a tree."""

    kind: str  # a `SearchKind`
    group: str  # name of the kernel group
    unit: str
    family: str
    view: str  # how the family reads the group: its kind, "transposed contraction", ...
    level: str
    axes: tuple[str, ...]
    roles: tuple[str, ...]
    extents: Extents
    steps: tuple[StoryStep, ...]
    base: Annotated[Extents | None, OMIT_DEFAULT] = None  # thread's tile that all its tiles are made of
    reduce_threads: Annotated[int, OMIT_DEFAULT] = 1
    epsilon: Annotated[float | None, OMIT_DEFAULT] = None  # bound on padding
    capacity_bytes: Annotated[int | float | None, OMIT_DEFAULT] = None  # that footprints may fill, where they stay in a level


@dataclass(frozen=True, slots=True)
class StoryFound:
    """Where a tile was found."""

    search: int
    step: int


@dataclass(frozen=True, slots=True)
class StoryOperations:
    """Operations of a kernel: by its definition, and executed, without padding."""

    definition: int
    executed: int


@dataclass(frozen=True, slots=True)
class StoryAxis:
    """An axis of a group."""

    name: str
    role: str
    extent: int


@dataclass(frozen=True, slots=True)
class StoryKernel:
    """A kernel of a program: its tiles, where they were found, and the terms of its seconds."""

    group: str
    kind: str
    view: str
    family: str
    axes: tuple[StoryAxis, ...]
    stored: tuple[str, ...]  # tensors that it writes
    program: Any  # unit, tiles and options
    seconds: float
    bound: str  # the longest stage
    occupancy: float
    waves: int
    uncertainty: float
    operations: StoryOperations
    found: tuple[StoryFound, ...]  # of the thread's tile, then of the block's tile
    terms: tuple[Term, ...]  # which combine to the seconds
    runs_once: Annotated[bool, OMIT_DEFAULT] = False  # before all calls


@dataclass(frozen=True, slots=True)
class StoryProgram:
    """A plan of the whole expression."""

    seconds: float
    bound: str
    uncertainty: float
    kernels: tuple[StoryKernel, ...]
    limited_by: Annotated[tuple[Sensitivity, ...] | None, OMIT_DEFAULT] = None  # of the first program alone


@dataclass(frozen=True, slots=True)
class StoryConstruction:
    """Counts of the construction of one group, over all its units and views."""

    group: str
    tiles_visited: int
    programs: int  # that were estimated
    rejections: Any  # {rule: tiles}
    refusals: tuple[str, ...]  # "unit: reason" of units that cannot compute the group


@dataclass(frozen=True, slots=True)
class Story:
    """The story of a program on a device."""

    expression: str
    target: str
    device: StoryDevice
    constructions: tuple[StoryConstruction, ...]
    searches: tuple[StorySearch, ...]
    programs: tuple[StoryProgram, ...]  # best first, by the model
    roofline: Any  # of the first program
    floor: Any  # of the expression
    notes: tuple[str, ...]
