"""Parallel regions of C kernels, and their number of threads."""

from __future__ import annotations

from dataclasses import dataclass

from roller_svc.codegen import dialect as dialects
from roller_svc.ir.kernel import Buffer, LaunchSpec, Phase, Role
from roller_svc.ir.origin import shown
from roller_svc.ir.schedule import Let, Loop, LoopKind, Node, ScheduleTree, iter_nodes

# The threads of a parallel region: limited by the kernel, the caller's OpenMP setting and its affinity. The thread pool
# of toolchain/pool.c knows the last two.
THREADS = """#if defined(ROLLER_POOL)
static int threads_i32(int most) { return most; }
#elif defined(_OPENMP)
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


def is_single_threaded(tree: ScheduleTree) -> bool | None:
    """Return True if the tree has no parallel loop, False if all its work is in parallel loops, else None."""
    nodes, parallel = list(tree.body), False
    while nodes:
        match nodes.pop():
            case Let(body=body) | Loop(kind=LoopKind.PARALLEL, extent=1, body=body):
                nodes += body
            case Loop(kind=LoopKind.PARALLEL) as loop:
                if _has_parallel(parallel_nest(loop)[-1].body):
                    return None
                parallel = True
            case _ if parallel or _has_parallel(tree.body):
                return None
            case _:
                return True
    return not parallel


def parallel_nest(loop: Loop) -> list[Loop]:
    """Return a parallel loop and the parallel loops perfectly nested in it."""
    loops = [loop]
    while len(body := loops[-1].body) == 1 and isinstance(body[0], Loop) and body[0].kind is LoopKind.PARALLEL:
        loops.append(body[0])
    return loops


def _has_parallel(nodes: tuple[Node, ...]) -> bool:
    return any(isinstance(n, Loop) and n.kind is LoopKind.PARALLEL and n.extent > 1 for n in iter_nodes(nodes))


def has_one_loop(tree: ScheduleTree) -> bool:
    """Return whether a tree whose work is all in parallel loops has only one nest of them."""
    nodes, loops = list(tree.body), 0
    while nodes:
        node = nodes.pop()
        if isinstance(node, Let) or (isinstance(node, Loop) and node.extent == 1):
            nodes += node.body
        else:
            loops += 1
    return loops == 1


def region_function(name: str) -> str:
    """Return the name of a tree's function that is called in a region. No tensor of a program has such a name."""
    return f"tasks_{name}"


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a function in a region."""

    launch: LaunchSpec
    tasks: int  # of its largest parallel loop; 0: a single thread calls it
    per_task: bool  # a call computes one task

    def lines(self, pragma: str) -> list[str]:
        """Print the call; if it computes one task, in a loop with the pragma."""
        if not self.per_task:
            return [f"{self.launch.name}({', '.join(self.launch.args)});"]
        head = f"for (long task = 0; task < {shown(self.tasks)}; task++)"
        return [pragma, head, f"  {self.launch.name}({', '.join((*self.launch.args, 'task'))});"]


def region(name: str, calls: tuple[Call, ...], args: tuple[Buffer, ...], cores: int) -> str:
    """Emit a function that makes the calls in one parallel region, with a barrier after each call.

    The work is in separate functions: in a body that gcc outlines from a region `restrict` is lost, and values are
    reloaded after every store. They are not inlined either, because gcc then runs out of registers for addresses.
    """
    sizes = {a.symbol: a.bytes for a in args}
    max_threads = min(cores, max(call.tasks for call in calls))
    threads = f"num_threads(threads_i32({max_threads}))"
    head = f"void {name}({', '.join(parameter(a) for a in args)}) {{\n"
    if len(calls) == 1 and calls[0].per_task and not calls[0].launch.zeroed:
        # a combined `parallel for` starts its tasks sooner than a loop in a region
        lines = calls[0].lines(f"#pragma omp parallel for schedule(dynamic, 1) {threads}")
        return head + "".join(f"  {line}\n" for line in lines) + "}\n"
    lines = [f"  #pragma omp parallel {threads}", "  {"]
    for call in calls:
        if call is not calls[0]:
            lines.append("    #pragma omp barrier")
        if call.launch.zeroed:
            lines += ["    #pragma omp single", "    {"]
            lines += [f"      __builtin_memset({symbol}, 0, {sizes[symbol]});" for symbol in call.launch.zeroed]
            lines += ["    }"]
        if not call.tasks:
            lines.append("    #pragma omp single nowait")
        lines += [f"    {line}" for line in call.lines("#pragma omp for schedule(dynamic, 1) nowait")]
    return head + "\n".join(lines) + "\n  }\n}\n"


def phases(calls: tuple[Call, ...]) -> tuple[Phase, ...]:
    """Return the calls as phases that can be executed outside of a region; nothing if one of them needs a region."""
    if any(call.launch.zeroed or (call.tasks and not call.per_task) for call in calls):
        return ()
    return tuple(Phase(call.launch.name, call.launch.args, call.tasks) for call in calls)


def parameter(buffer: Buffer) -> str:
    if buffer.role is Role.STATUS:
        return "long long *status"
    const = "const " if buffer.role is Role.INPUT else ""
    return f"{const}{dialects.C.storage_type(buffer.dtype)} *restrict {buffer.symbol}"
