"""The ring of a persistent kernel: pages of shared memory through which constant operands stream ahead of barriers.

Pages are numbered through a run of a block. One warp, the last of the block, fills them in the order in which rTasks read
them. A page has two mbarriers: its lanes arrive at the first once their copies are there, and the warps that have read it
at the second. The k-th use of a page is phase k of both.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from roller_svc.codegen.cuda.instructions import HOPPER, instruction
from roller_svc.errors import InvariantError, require
from roller_svc.ir.hardware import Arch, HardwareSpec

WARP = 32
MIN_PAGES = 2
PAGE_ALIGNMENT_BYTES = 128
BARRIER_BYTES = 16  # of the two mbarriers of a page
MAX_SHARES = WARP  # arrivals of a warp


@dataclass(frozen=True, slots=True)
class PageUse:
    """How the rTasks of a launch use the pages of a ring."""

    parameters: tuple[int, ...]  # the operands that stream, which have to be constant
    page_bytes: int
    warps: int  # that read a page
    shared_bytes: int  # of the rTasks beside their pages
    bytes: int  # of the operands, fetched by all rTasks
    pages_in_flight: int  # of a block that fetches its own pages
    registers: int  # of a thread, by the performance model
    tasks: int
    busy_s: float = 0.0  # of the launch, if its operand took no time to fetch


@dataclass(frozen=True, slots=True)
class Ring:
    """The pages of a block, behind the shared memory of its rTasks."""

    pages: int
    page_bytes: int
    warps: int  # arrivals that free a page
    offset_bytes: int

    @property
    def bytes(self) -> int:
        """Bytes of the pages."""
        return self.pages * self.page_bytes

    @property
    def end_bytes(self) -> int:
        """The end of the ring and of its mbarriers in shared memory."""
        return self.offset_bytes + self.pages * (self.page_bytes + BARRIER_BYTES)


def plan_ring(uses: Iterable[PageUse], shared_bytes: int, static_bytes: int, hw: HardwareSpec) -> Ring | None:
    """Return the ring with the most pages; None if these uses share no ring.

    Args:
        uses: those of all launches that stream. The warps of each divide those of the one with the most.
        shared_bytes: of the other rTasks of the kernel.
        static_bytes: of shared memory that the kernel has beside rTasks and ring.
        hw: the device.
    """
    known = tuple(uses)
    warps = max((each.warps for each in known), default=0)
    if not known or any(warps % each.warps or warps // each.warps > MAX_SHARES for each in known):
        return None
    page = -(-max(each.page_bytes for each in known) // PAGE_ALIGNMENT_BYTES) * PAGE_ALIGNMENT_BYTES
    end = max(shared_bytes, *(each.shared_bytes for each in known))
    offset = -(-end // PAGE_ALIGNMENT_BYTES) * PAGE_ALIGNMENT_BYTES
    free = hw.limits.shared_bytes_per_block - static_bytes - offset
    pages = max(0, free) // (page + BARRIER_BYTES)
    return Ring(pages, page, warps, offset) if pages >= MIN_PAGES else None


def ring_text(ring: Ring, declaration: str, arch: Arch) -> str:
    """Return the functions that rTasks and the warp that fills pages call. `declaration`: of dynamic shared memory."""
    has_bulk_copies = arch >= HOPPER
    wait = wait_wrapper(arch)
    fence = "\n  fence_barrier_init();" if has_bulk_copies else ""
    commit = "barrier_arrive" if has_bulk_copies else "arrive_after_copies"
    inline, word = "__device__ __forceinline__", "unsigned long long"
    return f"""enum {{ RING_PAGES = {ring.pages}, RING_PAGE_BYTES = {ring.page_bytes}, RING_WARPS = {ring.warps} }};
{inline} unsigned char *ring_memory() {{
  {declaration}
  return shared_memory + {ring.offset_bytes};
}}
{inline} {word} *ring_filled(unsigned int number) {{
  return ({word} *)(ring_memory() + RING_PAGES * RING_PAGE_BYTES) + number % RING_PAGES;
}}
{inline} {word} *ring_free(unsigned int number) {{ return ring_filled(number) + RING_PAGES; }}
{inline} unsigned int ring_parity(unsigned int number) {{ return number / RING_PAGES & 1; }}
{inline} unsigned char *ring_page(unsigned int number) {{
  return ring_memory() + number % RING_PAGES * RING_PAGE_BYTES;
}}
{inline} void ring_begin() {{
  for (unsigned int page = 0; page < RING_PAGES; page++) {{
    barrier_init(ring_filled(page), {WARP});
    barrier_init(ring_free(page), RING_WARPS);
  }}{fence}
}}
{inline} unsigned char *ring_take(unsigned int number) {{
  {wait}(ring_filled(number), ring_parity(number));
  return ring_page(number);
}}
template <int WARPS> {inline} void ring_release(unsigned int number) {{
  __syncwarp();
  if (threadIdx.x % {WARP} < RING_WARPS / WARPS) barrier_arrive(ring_free(number));
}}
{inline} unsigned char *ring_claim(unsigned int number) {{
  {wait}(ring_free(number), ring_parity(number) ^ 1);
  return ring_page(number);
}}
{inline} void ring_commit(unsigned int number) {{ {commit}(ring_filled(number)); }}
{inline} void ring_skip(unsigned int number) {{
  {wait}(ring_filled(number), ring_parity(number));
  for (unsigned int warp = 0; warp < RING_WARPS; warp++) barrier_arrive(ring_free(number));
}}
"""


def ring_wrappers(arch: Arch) -> tuple[str, ...]:
    """Return the wrappers that the text of a ring calls, with those that these need."""
    names = ["barrier_init", "barrier_arrive", "named_barrier", "named_any", wait_wrapper(arch)]
    names += ["fence_barrier_init"] if arch >= HOPPER else ["arrive_after_copies"]
    needs = (need for name in names for need in require(instruction(name), f"instruction {name}").needs)
    return tuple(dict.fromkeys((*needs, *names)))


def wait_wrapper(arch: Arch) -> str:
    """Return the wrapper that waits for a phase of an mbarrier."""
    return "barrier_wait" if arch >= HOPPER else "barrier_test_wait"


def check_ring(ring: Ring | None, uses: Iterable[PageUse]) -> Ring:
    """Return a ring that there is. Raises InvariantError otherwise."""
    if ring is None:
        raise InvariantError(f"rTasks that stream have no ring in common: {sorted(set(map(str, uses)))}")
    return ring
