"""The schedule tree: how a kernel is computed, as loop, storage and compute nodes (Halide's schedule tree).

Loop variables are AxisRefs in the expressions below them. Tensors are named: buffers in memory, or storage nodes above.
Code generation is one depth-first walk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Expr, Load
from roller_svc.ir.program import Combine
from roller_svc.ir.schedule_hopper import HopperNode, hopper_expressions
from roller_svc.ir.tensor_map import TensorMap

SHARED_ALIGNMENT_BYTES = 128  # all banks once: a swizzled row starts at the first


class LoopKind(Enum):
    SERIAL = "serial"
    PARALLEL = "parallel"  # CPU: iterations run on any thread
    VECTOR = "vector"  # innermost: iterations are lanes of a vector
    UNROLL = "unroll"
    BLOCK = "block"  # GPU: an iteration is a thread block
    THREAD = "thread"  # GPU: an iteration is a thread; nested ones make up the block, the innermost varies fastest


class Scope(Enum):
    REGISTER = "register"
    STACK = "stack"  # private memory of one thread
    SHARED = "shared"  # of one thread block


@dataclass(frozen=True, slots=True)
class Loop:
    """`var` from 0 to extent - 1; iterations at or beyond `limit` do not run."""

    var: str
    extent: int
    kind: LoopKind
    body: tuple[Node, ...]
    stop: Expr | None = None


@dataclass(frozen=True, slots=True)
class Let:
    """An index computed once. `checked`, of one from data: a tensor and the dimension of it that it must be inside of;
    out of range it is 0, and the status says so."""

    var: str
    value: Expr
    body: tuple[Node, ...]
    bounds_check: tuple[str, int] | None = None


@dataclass(frozen=True, slots=True)
class Storage:
    """Room for a tensor while the body runs. Contents are undefined at first. `pad`: elements added to each row.
    `pinned`, of registers: what is put there is used from there, not read again where it came from. `in_order`, of a
    CPU's registers: values are joined to them in the order of the tree, so that memory is read in that order.
    `window`: the room is a part of a tensor in memory, from that element on, and holds what is there.

    Shared rooms only: `swizzled` permutes the 16-byte chunks of each row so that a column of chunks lies in different
    banks; `over` names shared rooms, out of scope and dead by then, whose memory this one takes; `alignment_bytes`: of
    its first byte.
    """

    tensor: str
    dtype: DType
    shape: tuple[int, ...]
    scope: Scope
    body: tuple[Node, ...]
    pad: int = 0
    swizzled: bool = False
    aliases: tuple[str, ...] = ()
    no_rematerialize: bool = False
    ordered: bool = False
    subview_of: Load | None = None
    alignment_bytes: int = SHARED_ALIGNMENT_BYTES


@dataclass(frozen=True, slots=True)
class Compute:
    """tensor[index] = value, or, with `combine`, joined to what is there. `atomic`: other threads may write it too.

    `checked[d]`: dimension d comes from data; out of range, nothing is written and the status says so. `streamed`:
    vectors of it go past the caches, where the machine can do that: nobody reads them soon.
    """

    tensor: str
    index: tuple[Expr, ...]
    value: Expr
    combine: Combine | None = None
    atomic: bool = False
    bounds_checked: tuple[bool, ...] = ()
    nontemporal: bool = False


@dataclass(frozen=True, slots=True)
class Branch:
    cond: Expr
    then: tuple[Node, ...]
    otherwise: tuple[Node, ...] = ()


@dataclass(frozen=True, slots=True)
class Routine:
    """A body that recurs: in other places of the tree, in other candidates' trees, with other sizes of blocks.

    Where the language has functions it becomes one, shared by all that do the same, called with places of tensors and
    with numbers from around it. `name` says what it does. Says nothing about what is computed.
    """

    name: str
    body: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Barrier:
    """All threads of a block meet."""


@dataclass(frozen=True, slots=True)
class Prefetch:
    """A hint to bring the cache line of the element that lies `ahead` elements behind tensor[index] in memory, perhaps
    past the tensor's end, close to the core: it will be read soon or, `for_write`, written. `to_second`: into the
    second cache and no nearer, for the first has no room to spare."""

    tensor: str
    index: tuple[Expr, ...]
    distance: int
    for_write: bool = False
    to_l2: bool = False


@dataclass(frozen=True, slots=True)
class WarpReduce:
    """tensor[index], one value in each thread, becomes the join of `lanes` neighbours', for all of them to see.

    `lanes` is a power of two, at most a warp; neighbours start at a thread whose number is a multiple of it. All
    threads of a warp meet here.
    """

    tensor: str
    index: tuple[Expr, ...]
    combine: Combine
    lanes: int


@dataclass(frozen=True, slots=True)
class HorizontalReduce:
    """tensor[index] = the join of `lanes` neighbours along a storage node's last dimension, `first` being the first."""

    tensor: str
    index: tuple[Expr, ...]
    first: Load
    lanes: int
    combine: Combine


@dataclass(frozen=True, slots=True)
class Transpose:
    """A block of `rows` by `columns` (None: as many as a vector has lanes), turned on its way through vector registers.

    Element j of row i comes from `source` + i * `source_stride` + j and goes to tensor[index] + j * `stride` + i, both
    counted in elements. A CPU's; all of the block must exist on both sides. `lanes`: of the vectors (None: of the
    widest ones). The tensor lies in a storage node or, where `along` says which dimension j moves along while i moves
    along the last one, in memory. A few columns: the source has no gaps between rows. A few rows, in memory: the tensor
    has none between columns. `dtype`: of an element, where it is several neighbours of the source.
    """

    tensor: str
    index: tuple[Expr, ...]
    stride: int
    source: Load
    source_stride: int
    rows: int | None = None
    columns: int | None = None
    lanes: int | None = None
    column_dim: int | None = None
    dtype: DType | None = None


@dataclass(frozen=True, slots=True)
class CpAsync:
    """`elements` neighbours from memory into a shared room, asynchronously: they are there once awaited (cp.async).

    `index` and `source` are of the first of them; together they are 4, 8 or 16 bytes, aligned to that on both sides.
    Where `guard` fails nothing is read and zeros arrive.
    """

    tensor: str
    index: tuple[Expr, ...]
    source: Load
    elements: int
    guard: Expr | None = None


@dataclass(frozen=True, slots=True)
class CpAsyncCommitGroup:
    """The copies that this thread has begun since the last one become a group, perhaps an empty one."""


@dataclass(frozen=True, slots=True)
class CpAsyncWaitGroup:
    """All of this thread's groups but the `pending` youngest have arrived, for this thread to see."""

    pending: int


@dataclass(frozen=True, slots=True)
class LoadMatrix:
    """`count` (1, 2, 4) matrices of 8 rows of 16 bytes from a shared room into a fragment of a warp (ldmatrix).

    Lane 8i + r names row r of matrix i: `source[at]` is its first element, aligned to 16 bytes. tensor[index..., i]
    becomes the lane's word of matrix i: word lane % 4 of row lane / 4, or, `transposed`, for elements of 16 bits those
    at 2 (lane % 4) and 2 (lane % 4) + 1 of column lane / 4. Elements of 32 bits have no such instruction: `transposed`
    and `count` 1, `at` is the lane's own word.
    """

    tensor: str
    index: tuple[Expr, ...]
    count: int
    source: str
    source_index: tuple[Expr, ...]
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class RoundFragment:
    """`count` words tensor[index..., i], float32, rounded to tf32, to nearest."""

    tensor: str
    index: tuple[Expr, ...]
    count: int


@dataclass(frozen=True, slots=True)
class PackFragment:
    """tensor[index], a word of a fragment, becomes two neighbours along the last dimension of a room in registers,
    float32, rounded to `dtype` of 16 bits, `first` in the low half."""

    tensor: str
    index: tuple[Expr, ...]
    first: Load
    dtype: DType


@dataclass(frozen=True, slots=True)
class Exp2:
    """tensor[index], float32 in registers, becomes 2 to its power within 2 units of the last place (ex2.approx.ftz);
    0 below the least normal number."""

    tensor: str
    index: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class AnyThread:
    """`var` is 1 in the body where `cond` holds in any thread of the block, else 0. All threads of it meet here.

    `threads`: those of the block, who come from several such nodes, each from that of its role.
    """

    var: str
    cond: Expr
    body: tuple[Node, ...]
    threads: int | None = None


@dataclass(frozen=True, slots=True)
class Mma:
    """A warp's tensor[index..., :] (four a lane, 16 x 8 results) += a[a_index..., :] * b[b_index..., :], fragments of
    16 x 32 and 32 x 8 bytes in the layout of mma.sync m16n8k(32 bytes)."""

    tensor: str
    index: tuple[Expr, ...]
    a: str
    a_index: tuple[Expr, ...]
    a_dtype: DType
    b: str
    b_index: tuple[Expr, ...]
    b_dtype: DType


Node = (
    Loop | Let | Storage | Compute | Branch | Routine | Barrier | WarpReduce | HorizontalReduce | Prefetch | Transpose
    | CpAsync | CpAsyncCommitGroup | CpAsyncWaitGroup | LoadMatrix | RoundFragment | Mma | PackFragment | Exp2 | AnyThread
    | HopperNode
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ScheduleTree:
    """One kernel launch. `name` is its entry symbol; `zeroed` buffers are zero before it runs.

    `raster`: thread blocks with neighbouring numbers take that many values of the last block loop but one before the
    innermost moves on, so that blocks that run together share what they read; 1: the innermost varies fastest.
    `resident`: blocks that a core shall hold at once: the compiler gives threads no more registers than that leaves.
    `maps`: of what bulk copies move; their buffers are tensors' names. `cluster`: neighbouring blocks that
    run together.
    """

    name: str
    body: tuple[Node, ...]
    zeroed: tuple[str, ...] = ()
    raster: int = 1
    resident: int = 1
    tensor_maps: tuple[TensorMap, ...] = ()
    cluster: int = 1


def child_lists(node: Node) -> tuple[tuple[Node, ...], ...]:
    """The child lists of a node."""
    match node:
        case Loop(body=body) | Let(body=body) | Storage(body=body) | Routine(body=body) | AnyThread(body=body):
            return (body,)
        case Branch(then=then, otherwise=otherwise):
            return (then, otherwise)
        case _:
            return ()


def expressions(node: Node) -> tuple[Expr, ...]:
    """What a node itself computes and reads, its children left out."""
    match node:
        case Compute(index=index, value=value):
            return (*index, value)
        case Transpose(index=index, source=source):
            return (*index, source)
        case CpAsync(index=index, source=source, guard=guard):
            return (*index, source) if guard is None else (*index, source, guard)
        case HorizontalReduce(index=index, first=first):
            return (*index, first)
        case Branch(cond=cond) | AnyThread(cond=cond):
            return (cond,)
        case Let(value=value):
            return (value,)
        case Loop(stop=limit) if limit is not None:
            return (limit,)
        case Storage(subview_of=window) if window is not None:
            return (window,)
        case Prefetch(index=index) | WarpReduce(index=index):
            return index
        case _ if isinstance(node, HopperNode):
            return hopper_expressions(node)
        case _:
            return ()


def iter_nodes(nodes: tuple[Node, ...]) -> Iterator[Node]:
    """Every node, depth first."""
    for node in nodes:
        yield node
        for body in child_lists(node):
            yield from iter_nodes(body)


def block_extents(tree: ScheduleTree) -> tuple[int, int]:
    """(number of thread blocks, threads in a block) that the tree's loops ask for."""
    blocks = threads = 1
    nodes = tree.body
    while nodes:
        inside: tuple[Node, ...] = ()
        for node in nodes:
            if isinstance(node, Loop) and node.kind is LoopKind.BLOCK:
                blocks *= node.extent
            if isinstance(node, Loop) and node.kind is LoopKind.THREAD:
                threads *= node.extent
            for body in child_lists(node):
                inside += body
        nodes = inside
    return blocks, threads
