"""Launches of a C kernel → one parallel region; how many threads it may have."""

from __future__ import annotations

from dataclasses import dataclass

from roller_svc.codegen import dialect as dialects
from roller_svc.ir.kernel import Buffer, LaunchSpec, Role
from roller_svc.ir.schedule import Let, Loop, LoopKind, Node, ScheduleTree, iter_nodes

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


def is_single_threaded(tree: ScheduleTree) -> bool | None:
    """How the threads of a region run it: one of them alone, as nothing in it is parallel (True), or together, as all
    it does is in parallel loops (False). None: neither."""
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
    """A parallel loop and those that are perfectly nested in it."""
    loops = [loop]
    while len(body := loops[-1].body) == 1 and isinstance(body[0], Loop) and body[0].kind is LoopKind.PARALLEL:
        loops.append(body[0])
    return loops


def _has_parallel(nodes: tuple[Node, ...]) -> bool:
    return any(isinstance(n, Loop) and n.kind is LoopKind.PARALLEL and n.extent > 1 for n in iter_nodes(nodes))


def has_one_loop(tree: ScheduleTree) -> bool:
    """Whether parallel loops are but one nest, of a tree that is nothing but parallel loops."""
    nodes, loops = list(tree.body), 0
    while nodes:
        node = nodes.pop()
        if isinstance(node, Let) or (isinstance(node, Loop) and node.extent == 1):
            nodes += node.body
        else:
            loops += 1
    return loops == 1


def region_function(name: str) -> str:
    """The function that does a tree's work with the threads of a region. No tensor of a program has such a name."""
    return f"tasks_{name}"


@dataclass(frozen=True, slots=True)
class Call:
    """Of a function in a region. `tasks`: of its largest parallel loop; 0 where one thread alone calls it. `by_task`: a
    call does one of them."""

    launch: LaunchSpec
    tasks: int
    per_task: bool

    def lines(self, pragma: str) -> list[str]:
        """The call, in a loop with that pragma where it does one task."""
        if not self.per_task:
            return [f"{self.launch.name}({', '.join(self.launch.args)});"]
        head = f"for (long task = 0; task < {self.tasks}; task++)"
        return [pragma, head, f"  {self.launch.name}({', '.join((*self.launch.args, 'task'))});"]


def region(name: str, calls: tuple[Call, ...], args: tuple[Buffer, ...], cores: int) -> str:
    """A function that makes the calls one after the other in one parallel region: threads begin once, and meet after
    each call. What threads do stands in functions of its own, as a body that gcc takes out of a region knows nothing of
    `restrict`: it would load anew, and compute anew, after every store. Nor are they inlined there: gcc runs out of
    registers for addresses then (two launches of 47 us together gained 8 %)."""
    sizes = {a.symbol: a.bytes for a in args}
    max_threads = min(cores, max(call.tasks for call in calls))
    threads = f"num_threads(threads_i32({max_threads}))"
    head = f"void {name}({', '.join(parameter(a) for a in args)}) {{\n"
    if len(calls) == 1 and calls[0].per_task and not calls[0].launch.zeroed:
        # a loop that begins its threads gives out its tasks sooner than one that threads come to (0.06 to 0.7 us)
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


def parameter(buffer: Buffer) -> str:
    if buffer.role is Role.STATUS:
        return "long long *status"
    const = "const " if buffer.role is Role.INPUT else ""
    return f"{const}{dialects.C.storage_type(buffer.dtype)} *restrict {buffer.symbol}"
