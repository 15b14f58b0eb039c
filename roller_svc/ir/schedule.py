"""The schedule tree: loop, storage and compute nodes that say how a kernel is computed (Halide's schedule tree).

Loop variables are AxisRefs in the expressions below their loop. Tensors are referred to by name: a name is a buffer in
memory or an enclosing storage node. Code generators visit the tree once, depth first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum

from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Expr, Load
from roller_svc.ir.program import Combine
from roller_svc.ir.schedule_hopper import HopperNode, hopper_expressions
from roller_svc.ir.tensor_map import TensorMap

SHARED_ALIGNMENT_BYTES = 128  # one access to each bank: swizzled rows start at bank 0


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
    SHARED = "shared"  # memory of one thread block


@dataclass(frozen=True, slots=True)
class Loop:
    """Run the body for `var` from 0 to extent - 1."""

    var: str
    extent: int
    kind: LoopKind
    body: tuple[Node, ...]
    stop: Expr | None = None  # iterations from here on do not run; None: `extent`


@dataclass(frozen=True, slots=True)
class Let:
    """Bind an index that is computed once."""

    var: str
    value: Expr
    body: tuple[Node, ...]
    bounds_check: tuple[str, int] | None = None  # (tensor, dimension); out of range `var` is 0 and the status says so


@dataclass(frozen=True, slots=True)
class Storage:
    """Allocate a tensor while the body runs. Its contents are undefined at first.

    `swizzled` permutes the 16-byte chunks of each row, so that a column of chunks is spread over the banks.
    `no_rematerialize` keeps the compiler from loading a register's value again from where it came from.
    `ordered` keeps reductions into a CPU's registers in tree order, and so the order of their memory accesses.
    """

    tensor: str
    dtype: DType
    shape: tuple[int, ...]
    scope: Scope
    body: tuple[Node, ...]
    pad: int = 0  # elements added to each row
    swizzled: bool = False  # shared memory only
    aliases: tuple[str, ...] = ()  # shared buffers, out of scope by now, whose memory this one reuses
    no_rematerialize: bool = False  # registers only
    ordered: bool = False  # registers of a CPU only
    subview_of: Load | None = None  # first element of the part of a tensor in memory that this storage is
    alignment_bytes: int = SHARED_ALIGNMENT_BYTES  # of the first byte; shared memory only
    overlays: tuple[
        str, ...
    ] = ()  # adjacent shared buffers in scope, the last ones if this one is larger, whose memory the body uses

    @property
    def elements(self) -> int:
        """Elements, padding of rows among them."""
        return math.prod(self.shape[:-1]) * (self.shape[-1] + self.pad) if self.shape else 1

    @property
    def bytes(self) -> int:
        return self.elements * self.dtype.bytes


def shared_bytes(buffers: Iterable[Storage]) -> int:
    """Return the shared memory of buffers that are allocated one inside the other, the first outermost."""
    end = 0
    for buffer in buffers:
        start = -(-end // buffer.alignment_bytes) * buffer.alignment_bytes
        end = start + -(-buffer.bytes // SHARED_ALIGNMENT_BYTES) * SHARED_ALIGNMENT_BYTES
    return end


@dataclass(frozen=True, slots=True)
class Compute:
    """tensor[index] = value; with `combine`, accumulate the value into tensor[index]."""

    tensor: str
    index: tuple[Expr, ...]
    value: Expr
    combine: Combine | None = None
    atomic: bool = False  # other threads may write the element too
    bounds_checked: tuple[bool, ...] = ()  # dimensions whose index comes from data: out of range, nothing is written
    nontemporal: bool = False  # vector stores are non-temporal where the machine has such stores


@dataclass(frozen=True, slots=True)
class Branch:
    cond: Expr
    then: tuple[Node, ...]
    otherwise: tuple[Node, ...] = ()
    # The condition selects one lane of a warp; sm_90 may take another, always the same one.
    elect: bool = field(default=False, kw_only=True)
    unlikely: bool = field(default=False, kw_only=True)  # the body stays rolled, and off the main path


@dataclass(frozen=True, slots=True)
class Routine:
    """A body that may be outlined: it recurs in this tree or in the trees of other candidates.

    A language with functions emits one function for equal bodies. Its arguments are addresses of tensors and numbers.
    `name` describes the body. The node does not change results.
    """

    name: str
    body: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """Names the nodes that follow in its list, up to the next Part. It computes nothing and changes no text."""

    name: str


@dataclass(frozen=True, slots=True)
class Barrier:
    """Synchronize all threads of a block."""


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Prefetch the cache line of the element `distance` elements after tensor[index], perhaps past the tensor's end."""

    tensor: str
    index: tuple[Expr, ...]
    distance: int  # elements
    for_write: bool = False
    to_l2: bool = False  # into L2 only, so that L1 is not polluted


@dataclass(frozen=True, slots=True)
class WarpReduce:
    """Reduce tensor[index], one value a thread, over groups of `lanes` threads. All of them get the result.

    The threads of a group are `stride` apart. `lanes * stride` is a power of two, at most a warp, and such runs of
    threads start at multiples of it. The node is warp-collective.
    """

    tensor: str
    index: tuple[Expr, ...]
    combine: Combine
    lanes: int
    stride: int = 1


@dataclass(frozen=True, slots=True)
class WarpScan:
    """Replace tensor[index], one value a thread, by the combination of those of the threads before it in its group.

    A group has `lanes` threads of one warp, each `stride` after the one before; `lanes` is a power of two. `place` is a
    thread's place in its group. The first thread of a group gets `neutral`. The node is warp-collective.
    """

    tensor: str
    index: tuple[Expr, ...]
    combine: Combine
    lanes: int
    stride: int
    place: Expr
    neutral: Expr
    gate: str | None = None  # of linear steps: the scalar register with their factors, which are composed as well
    may_reset: bool = False  # of linear steps: whether a factor of zero forgets what is before


@dataclass(frozen=True, slots=True)
class HorizontalReduce:
    """tensor[index] = the reduction of `lanes` consecutive elements of a storage node's last dimension from `first`."""

    tensor: str
    index: tuple[Expr, ...]
    first: Load
    lanes: int
    combine: Combine


@dataclass(frozen=True, slots=True)
class Transpose:
    """Transpose a block of `rows` by `columns` in vector registers. CPUs only.

    Element j of row i is copied from `source` + i * `source_stride` + j to tensor[index] + j * `stride` + i, counted
    in elements. float16 and bfloat16 become float32 if the tensor is. The whole block must exist on both sides. With
    `columns`, the source has no gaps between rows. With `rows` and a tensor in memory, the tensor has no gaps between
    columns.
    """

    tensor: str
    index: tuple[Expr, ...]
    stride: int
    source: Load
    source_stride: int
    rows: int | None = None  # None: `lanes`
    columns: int | None = None  # None: `lanes`
    lanes: int | None = None  # of the vectors; None: of the widest ones
    column_dim: int | None = None  # tensor in memory: its dimension that j varies; i varies the last. None: a storage
    dtype: DType | None = None  # of an element that is several consecutive elements of the source


@dataclass(frozen=True, slots=True)
class CpAsync:
    """Copy `elements` contiguous elements from memory to shared memory asynchronously (cp.async).

    `index` and `source` are those of the first element. The elements are 4, 8 or 16 bytes, aligned to their size on
    both sides. Where `guard` does not hold, nothing is read and zeros are written.
    """

    tensor: str
    index: tuple[Expr, ...]
    source: Load
    elements: int
    guard: Expr | None = None


@dataclass(frozen=True, slots=True)
class BulkCopy:
    """Copy `elements` contiguous elements from memory to a page that this thread's RingPage fills (cp.async.bulk).

    `index` and `source` are those of the first element. The bytes are a multiple of 16, aligned to 16 on both sides.
    """

    tensor: str
    index: tuple[Expr, ...]
    source: Load
    elements: Expr


@dataclass(frozen=True, slots=True)
class RingPage:
    """Bind a storage to a page of a persistent kernel's ring while the body runs.

    Pages are read in the order in which they are filled. A reader waits until its page is filled, and each of its warps
    gives it back after the body. The warp that fills a page waits until all have; the body's copies then fill it.
    """

    page: Storage  # without a body of its own
    number: Expr  # of the page, counted from the first of the rTask
    body: tuple[Node, ...]
    fills: bool


@dataclass(frozen=True, slots=True)
class CpAsyncCommitGroup:
    """Commit the copies that this thread has issued since the last commit as one group, perhaps an empty one."""


@dataclass(frozen=True, slots=True)
class CpAsyncWaitGroup:
    """Wait for all of this thread's groups but the latest `pending` ones. Only this thread sees their data then."""

    pending: int


@dataclass(frozen=True, slots=True)
class LoadMatrix:
    """Load `count` (1, 2, 4) matrices of 8 rows of 16 bytes from shared memory into a warp's fragment (ldmatrix).

    Lane 8i + r addresses row r of matrix i: source[source_index] is its first element, aligned to 16 bytes.
    tensor[index..., i] becomes the lane's word of matrix i: word lane % 4 of row lane / 4. `transposed`, with elements
    of 16 bits: elements 2 (lane % 4) and 2 (lane % 4) + 1 of column lane / 4. Elements of 32 bits have no such
    instruction: `transposed` with `count` 1 loads the lane's own word at `source_index`.
    """

    tensor: str
    index: tuple[Expr, ...]
    count: int
    source: str
    source_index: tuple[Expr, ...]
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class RoundFragment:
    """Round `count` float32 words tensor[index..., i] to tf32, to nearest."""

    tensor: str
    index: tuple[Expr, ...]
    count: int


@dataclass(frozen=True, slots=True)
class PackFragment:
    """Pack two consecutive float32 registers from `first` into tensor[index], a word of a fragment.

    They are rounded to `dtype`, of 16 bits. The first is in the low half.
    """

    tensor: str
    index: tuple[Expr, ...]
    first: Load
    dtype: DType


@dataclass(frozen=True, slots=True)
class Exp2:
    """Replace the float32 register tensor[index] by 2 to its power (ex2.approx.ftz).

    The result is within 2 ulp, and 0 below the smallest normal number.
    """

    tensor: str
    index: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class AnyThread:
    """Bind `var` to 1 where `cond` holds in any thread of the block, else to 0. The node synchronizes the block."""

    var: str
    cond: Expr
    body: tuple[Node, ...]
    threads: int | None = None  # of the block, where each role of warps has such a node of its own


@dataclass(frozen=True, slots=True)
class RemoteShared:
    """Bind `remote` to the shared tensor of another block of the cluster, to be read in the body (mapa)."""

    remote: str
    tensor: str
    rank: Expr  # of the block in the cluster
    body: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Mma:
    """A warp's tensor[index..., :] += a[a_index..., :] * b[b_index..., :] (mma.sync m16n8k, 32 bytes along k).

    The accumulator has 16 x 8 elements, four a lane. The fragments are 16 x 32 and 32 x 8 bytes. With `a_below`, a lane's
    words of rows 0 to 7 and of rows 8 to 15 are in two places, each with the words of k in their order.
    """

    tensor: str
    index: tuple[Expr, ...]
    a: str
    a_index: tuple[Expr, ...]
    a_dtype: DType
    b: str
    b_index: tuple[Expr, ...]
    b_dtype: DType
    a_below: tuple[Expr, ...] | None = None  # index of the words of rows 8 to 15


Node = (
    Loop
    | Let
    | Storage
    | Compute
    | Branch
    | Routine
    | Part
    | Barrier
    | WarpReduce
    | WarpScan
    | HorizontalReduce
    | Prefetch
    | Transpose
    | CpAsync
    | BulkCopy
    | RingPage
    | CpAsyncCommitGroup
    | CpAsyncWaitGroup
    | LoadMatrix
    | RoundFragment
    | Mma
    | PackFragment
    | Exp2
    | AnyThread
    | RemoteShared
    | HopperNode
)


@dataclass(frozen=True, slots=True)
class PageStream:
    """A launch as rTasks that read operands from pages, which one warp of the block fills ahead of them."""

    operands: tuple[str, ...]  # the tensors, which have to be constant
    body: tuple[Node, ...]  # of the rTasks
    fill: tuple[Node, ...]  # of the warp
    tiles: int  # which the rTasks take in turn
    pages: int  # of a tile
    page_bytes: int
    bytes: int  # of the operands, fetched by all rTasks
    pages_in_flight: int  # of a block that fetches its own pages
    registers: int  # of a thread that fetches none, by the performance model


@dataclass(frozen=True, slots=True)
class ScheduleTree:
    """One kernel launch.

    `raster` rows of tiles are taken down each column first, so that concurrent blocks share operands: it counts values
    of the last block loop but one. 1: the innermost block loop varies fastest.
    """

    name: str  # entry symbol
    body: tuple[Node, ...]
    zeroed: tuple[str, ...] = ()  # buffers that are zero before the launch
    raster: int = 1
    resident: int = 1  # blocks a core must hold: bounds the registers of a thread
    tensor_maps: tuple[TensorMap, ...] = ()  # of TMA copies; their buffers are names of tensors
    cluster: int = 1  # consecutive blocks of a cluster
    stream: PageStream | None = None  # the same work in a persistent kernel with a ring


def child_lists(node: Node) -> tuple[tuple[Node, ...], ...]:
    """Return the child lists of a node."""
    match node:
        case Loop(body=body) | Let(body=body) | Storage(body=body) | Routine(body=body) | AnyThread(body=body):
            return (body,)
        case RemoteShared(body=body) | RingPage(body=body):
            return (body,)
        case Branch(then=then, otherwise=otherwise):
            return (then, otherwise)
        case _:
            return ()


def expressions(node: Node) -> tuple[Expr, ...]:
    """Return the expressions of a node itself, without those of its children."""
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
        case Let(value=value) | RemoteShared(rank=value) | RingPage(number=value):
            return (value,)
        case BulkCopy(index=index, source=source, elements=elements):
            return (*index, source, elements)
        case Loop(stop=limit) if limit is not None:
            return (limit,)
        case Storage(subview_of=window) if window is not None:
            return (window,)
        case Prefetch(index=index) | WarpReduce(index=index):
            return index
        case WarpScan(index=index, place=place, neutral=neutral):
            return (*index, place, neutral)
        case _ if isinstance(node, HopperNode):
            return hopper_expressions(node)
        case _:
            return ()


def iter_nodes(nodes: tuple[Node, ...]) -> Iterator[Node]:
    """Yield every node, depth first."""
    stack = [*reversed(nodes)]
    while stack:
        node = stack.pop()
        yield node
        for body in reversed(child_lists(node)):
            stack.extend(reversed(body))


def block_extents(tree: ScheduleTree) -> tuple[int, int]:
    """Return (thread blocks, threads of a block) of the tree's loops."""
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
