"""Several launches of a C kernel → one parallel region; how many threads it may have."""

from __future__ import annotations

from roller_svc.codegen import dialect as dialects
from roller_svc.ir.kernel import Buffer, LaunchSpec, Role
from roller_svc.ir.schedule import Let, Loop, LoopKind, Node, ScheduleTree, descend

# What a parallel region may use: no more than the text was made for, the caller's OpenMP setting and affinity allow.
THREADS = """#if defined(_OPENMP)
int omp_get_max_threads(void);
#if defined(__linux__)
int sched_getaffinity(int, unsigned long, unsigned long *);
#endif
static int threads_i32(int most) {
  int set = omp_get_max_threads(), allowed = 0;
#if defined(__linux__)
  unsigned long mask[16] = {0};  // 1024 processors
  if (sched_getaffinity(0, sizeof mask, mask) == 0)
    for (unsigned i = 0; i < sizeof mask / sizeof *mask; i++) allowed += __builtin_popcountl(mask[i]);
#endif
  if (allowed > 0 && allowed < set) set = allowed;
  return set < most ? set : most;
}
#endif"""


def begun_by_one(tree: ScheduleTree) -> bool | None:
    """How the threads of a region run it: one of them alone, as nothing in it is parallel (True), or together, as all
    it does is in parallel loops (False). None: neither."""
    nodes, parallel = list(tree.body), False
    while nodes:
        match nodes.pop():
            case Let(body=body):
                nodes += body
            case Loop(kind=LoopKind.PARALLEL, extent=extent) if extent > 1:
                parallel = True
            case _ if parallel or any(_is_parallel(node) for node in descend(tree.body)):
                return None
            case _:
                return True
    return False


def _is_parallel(node: Node) -> bool:
    return isinstance(node, Loop) and node.kind is LoopKind.PARALLEL and node.extent > 1


def region(
    name: str, launches: tuple[LaunchSpec, ...], serial: frozenset[str], args: tuple[Buffer, ...], cores: int
) -> str:
    """A function that runs the launches one after the other in one parallel region, those named in `serial` on one
    thread: threads begin once, and meet at the end of each loop."""
    sizes = {a.symbol: a.bytes for a in args}
    lines = [f"  #pragma omp parallel num_threads(threads_i32({cores}))", "  {"]
    for launch in launches:
        if launch.zeroed:
            lines += ["    #pragma omp single", "    {"]
            lines += [f"      __builtin_memset({symbol}, 0, {sizes[symbol]});" for symbol in launch.zeroed]
            lines += ["    }"]
        if launch.name in serial:
            lines.append("    #pragma omp single")
        lines.append(f"    {launch.name}({', '.join(launch.args)});")
    parameters = ", ".join(parameter(a) for a in args)
    return f"void {name}({parameters}) {{\n" + "\n".join(lines) + "\n  }\n}\n"


def parameter(buffer: Buffer) -> str:
    if buffer.role is Role.STATUS:
        return "long long *status"
    const = "const " if buffer.role is Role.INPUT else ""
    return f"{const}{dialects.C.storage_type(buffer.dtype)} *restrict {buffer.symbol}"
