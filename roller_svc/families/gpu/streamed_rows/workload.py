"""Product of few rows on a matrix unit → positions of its axes, and how tiles divide the work of a block."""

from __future__ import annotations

from dataclasses import dataclass

from roller_svc.families.common.gpu.matrix.tile import MIN_ASYNC_ARCH
from roller_svc.families.gpu.streamed_rows.product import COPY_BYTES, StreamedProduct, find_streamed_product
from roller_svc.ir.dtype import DType
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.hardware import Arch, ComputeUnit, HardwareSpec, TargetKind, UnitKind
from roller_svc.ir.index import ceil_div
from roller_svc.ir.schedule import Scope, Storage, shared_bytes
from roller_svc.perf.footprint import Tile
from roller_svc.perf.workload import Workload

FRAGMENT_ROWS = 16  # of the matrix, in one mma.sync
ROWS_OF_MATRIX = 8  # of two: a lane has a row of each
FRAGMENT_COLUMNS = 8
RING, PARTIAL = ".ring", ".partial"
MIN_BULK_ARCH = Arch("sm_", 90)  # cp.async.bulk


@dataclass(frozen=True, slots=True)
class StreamedRows:
    """A product with the positions of its axes in the space."""

    product: StreamedProduct
    n: int
    k: int
    warp: int  # threads


@dataclass(frozen=True, slots=True)
class RingTile:
    """The work of a block: pages of `rows` rows of the matrix and `depth` points of k, in a ring of `stages`.

    A page of two matrices has eight rows of the first, eight of the second, and so on.
    """

    product: StreamedProduct
    rows: int
    depth: int
    warps_n: int
    warps_k: int  # warps that share the points of a page
    stages: int
    blocks: int

    @property
    def threads(self) -> int:
        return self.warps_n * self.warps_k * 32

    @property
    def steps(self) -> int:
        """Steps of a warp in a page."""
        return self.depth // (self.warps_k * self.product.step)

    @property
    def pages(self) -> int:
        """Pages of a tile of results."""
        return ceil_div(self.product.k.extent, self.depth)

    @property
    def results(self) -> int:
        """Rows of each matrix in a page: results of a tile for a row of x."""
        return self.rows // len(self.product.all)

    @property
    def tiles(self) -> int:
        return ceil_div(self.product.n.extent, self.results)

    @property
    def rounds(self) -> int:
        """Tiles of a block, at most."""
        return ceil_div(self.tiles, self.blocks)

    @property
    def row_elements(self) -> int:
        """Elements in memory of a page's row."""
        return self.depth // self.product.per_element

    @property
    def row_bytes(self) -> int:
        return self.row_elements * self.product.streamed.dtype.bytes

    @property
    def page_bytes(self) -> int:
        return self.rows * self.row_bytes

    @property
    def copies(self) -> int:
        """Copies of 16 bytes of a thread for a page."""
        return self.page_bytes // COPY_BYTES // self.threads

    @property
    def ring(self) -> Storage:
        """The pages. Rows are apart by an odd number of quarter-warp accesses, so that these are in different banks."""
        pad = 4 * self.product.chunk_bytes // self.product.streamed.dtype.bytes
        shape = (self.stages, self.rows, self.row_elements)
        return Storage(RING, self.product.streamed.dtype, shape, Scope.SHARED, (), pad)

    @property
    def page(self) -> Storage:
        """A page in the ring of a persistent kernel."""
        ring = self.ring
        return Storage(RING, ring.dtype, ring.shape[1:], Scope.SHARED, (), ring.pad)

    @property
    def partial(self) -> Storage:
        """Sums of the warps that share the points of a page."""
        return Storage(PARTIAL, DType.FLOAT32, (self.warps_k, self.rows, FRAGMENT_COLUMNS), Scope.SHARED, ())

    @property
    def shared_bytes(self) -> int:
        return shared_bytes((self.ring, self.partial))


def ring_tile(facts: StreamedRows, block: Tile, lanes: int, stages: int, blocks: int) -> RingTile:
    """Return the work of a block by a tile of its rProgram. `lanes` are the threads that share a row of results."""
    rows, depth = block[facts.n] * len(facts.product.all), block[facts.k]
    return RingTile(facts.product, rows, depth, rows // FRAGMENT_ROWS, lanes // facts.warp, stages, blocks)


def streaming_unit(product: StreamedProduct, hw: HardwareSpec) -> ComputeUnit | None:
    """Return the unit whose fragments multiply the product's type; None where no family streams it."""
    if hw.family is not TargetKind.CUDA or hw.arch < MIN_ASYNC_ARCH:
        return None
    units = (u for u in hw.units if u.kind is UnitKind.MMA and u.in_dtype is product.dtype and u.acc_dtype is DType.FLOAT32)
    return next(units, None)


def prepare(group: KernelGroup, base: Workload[None]) -> Workload[StreamedRows] | None:
    """Prepare a product of few rows on the matrix unit of its type."""
    if base.machine.unit.kind is not UnitKind.MMA:
        return None
    product = find_streamed_product(group)
    if product is None or streaming_unit(product, base.machine.hw) != base.machine.unit:
        return None
    names = [tuple(member.name for member in axis.members) for axis in base.space.axes]
    n, k = names.index((product.n.name,)), names.index((product.k.name,))
    if any(axis.name not in {m.name for m in product.m} for i, axis in enumerate(base.space.axes) if i not in (n, k)):
        return None
    return base.with_facts(StreamedRows(product, n, k, base.machine.hw.limits.warp_size))
