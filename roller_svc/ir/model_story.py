"""The story of a model on a device: its nodes, when each core does what, and where tensors lie.

`GET /v1/models/{digest}/story`, `Model.story`, `roller model plan` and the page read this value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from roller_svc.ir.canonical import OMIT_DEFAULT, Key

EXECUTE, WAIT, LAUNCH, SYNCHRONIZE = "execute", "wait", "launch", "synchronize"  # kinds of instructions


@dataclass(frozen=True, slots=True)
class StoryPass:
    """A pass over the graph."""

    name: str
    nodes_before: int
    nodes_after: int


@dataclass(frozen=True, slots=True)
class StoryModelKernel:
    """The kernel of a class of equal nodes. The program with its inputs is what `kernels:explain` takes."""

    digest: str
    expression: str
    inputs: tuple[tuple[str, str, tuple[int, ...]], ...]  # name, dtype, shape
    outputs: tuple[str, ...]
    constants: tuple[str, ...]
    seconds: float  # of a run, by the performance model
    floor_seconds: Annotated[float | None, OMIT_DEFAULT] = None  # the least of any kernel of its program


@dataclass(frozen=True, slots=True)
class StoryNode:
    """A node of the graph after the passes."""

    name: str
    operator: str
    members: tuple[str, ...]  # names of the nodes that are fused; its own where it was not fused
    seconds: float  # of all its steps in a call
    result: str  # type of its first result
    kernel: Annotated[int | None, OMIT_DEFAULT] = None  # None: a loop, a copy, or a view
    view: Annotated[bool, OMIT_DEFAULT] = False  # its result is its input's memory


@dataclass(frozen=True, slots=True)
class StoryEdge:
    """A tensor that one node writes and another reads."""

    source: Annotated[int, Key("from")]
    target: Annotated[int, Key("to")]
    bytes: int


@dataclass(frozen=True, slots=True)
class StoryStepOfModel:
    """A launch of a kernel, a copy, or a loop."""

    name: str  # of its node, or of the output or state that it stores
    kind: str  # "kernel", "copy" or "loop"
    seconds: float  # on all cores
    node: Annotated[int | None, OMIT_DEFAULT] = None
    kernel: Annotated[int | None, OMIT_DEFAULT] = None


@dataclass(frozen=True, slots=True)
class StoryInstruction:
    """An action of a vEU, or of the whole device. Times are predicted, from the start of the call."""

    kind: str
    start_s: float
    end_s: float
    step: Annotated[int | None, OMIT_DEFAULT] = None
    veu: Annotated[int | None, OMIT_DEFAULT] = None  # None: all of them
    order: Annotated[int | None, OMIT_DEFAULT] = None  # in the program of the vEU, over all launches
    phase: Annotated[int | None, OMIT_DEFAULT] = None
    tasks: Annotated[tuple[int, int] | None, OMIT_DEFAULT] = None  # the first rTask, and how many
    waits: Annotated[tuple[tuple[int, int], ...], OMIT_DEFAULT, Key("for")] = ()  # instructions that have to end before


@dataclass(frozen=True, slots=True)
class StoryBuffer:
    """Memory in the arena, from its first use to its last."""

    name: str
    offset_bytes: int
    bytes: int
    start_s: float
    end_s: float
    read_by: tuple[int, ...]  # steps
    written_by: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelStory:
    """The story of a model on a device."""

    name: str
    target: str
    device: str
    plan: str  # its kind
    seconds: float  # of a call, by the performance model
    veus: int
    passes: tuple[StoryPass, ...]
    kernels: tuple[StoryModelKernel, ...]
    nodes: tuple[StoryNode, ...]
    edges: tuple[StoryEdge, ...]
    steps: tuple[StoryStepOfModel, ...]
    instructions: tuple[StoryInstruction, ...]  # by the start
    buffers: tuple[StoryBuffer, ...]
    arena_bytes: int  # also for the events of a persistent kernel, behind the buffers
    tensor_bytes: int  # of all tensors, if each had memory of its own
