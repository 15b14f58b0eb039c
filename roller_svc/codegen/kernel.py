"""Schedule trees of a program's groups → KernelSource with all launches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain

from roller_svc.codegen.buffer_ref import BufferRef
from roller_svc.codegen.c import threads
from roller_svc.codegen.c import visitor as c
from roller_svc.codegen.c.preamble import SHARED_SCRATCH_LINKAGE, Function, preamble, scratch_definition
from roller_svc.codegen.c.visitor import FunctionContext
from roller_svc.codegen.cuda import function as cuda
from roller_svc.codegen.names import Names
from roller_svc.errors import InvariantError
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Expr, axes_of, loads_of
from roller_svc.ir.hardware import HardwareSpec, TargetKind
from roller_svc.ir.kernel import Buffer, KernelSource, Language, LaunchSpec, Role, RuntimeCheck
from roller_svc.ir.origin import named
from roller_svc.ir.printer import expression_text
from roller_svc.ir.program import TensorProgram, TensorType
from roller_svc.ir.quoting import quote_comment, require_identifier
from roller_svc.ir.schedule import Compute, Let, Node, ScheduleTree, Scope, Storage, Transpose, expressions, iter_nodes

MICRO_KERNEL_OPTIONS = ("-O2", "-fno-tree-slp-vectorize")
STATUS = Buffer("status", "status", Role.STATUS, DType.INT64, (4,))


@dataclass(frozen=True, slots=True)
class GroupLaunches:
    """The launches of one group."""

    trees: tuple[ScheduleTree, ...]
    views: tuple[tuple[str, TensorType], ...]  # types in which the group accesses tensors in memory
    prepack_trees: tuple[ScheduleTree, ...] = ()  # launches on constants alone, which come first


@dataclass(frozen=True, slots=True)
class Program:
    """One call of a kernel: the launches of its groups, in order."""

    name: str
    groups: tuple[GroupLaunches, ...]

    @property
    def trees(self) -> tuple[ScheduleTree, ...]:
        return tuple(tree for part in self.groups for tree in part.trees)

    @property
    def prepack_trees(self) -> tuple[ScheduleTree, ...]:
        return tuple(tree for part in self.groups for tree in part.prepack_trees)


@dataclass(frozen=True, slots=True)
class Tasks:
    """A launch on a GPU as rTasks of a kernel with others."""

    function: cuda.TaskFunction
    args: tuple[Buffer, ...]  # of its parameters


def tensors_in_memory(
    program: TensorProgram, types: Mapping[str, TensorType], workspace: Iterable[tuple[str, TensorType]]
) -> dict[str, Buffer]:
    """Return {tensor id: buffer}: the program's inputs and outputs in order, then the workspaces of its groups.

    Plans in one translation unit share workspaces by name; the largest size is taken.
    """
    names = Names()
    buffers: dict[str, Buffer] = {}
    for name, type_ in program.inputs:
        donated = name in program.donated
        buffers[name] = Buffer(name, names.of(name), Role.INPUT, type_.dtype, type_.shape, donated)
    for output in program.outputs:
        type_ = types[output.tensor]
        buffers[output.tensor] = Buffer(output.name, names.of(output.tensor), Role.OUTPUT, type_.dtype, type_.shape)
    for tensor, type_ in workspace:
        buffer = Buffer(tensor, names.of(tensor), Role.WORKSPACE, type_.dtype, type_.shape)
        known = buffers.setdefault(tensor, buffer)
        if known.role is Role.WORKSPACE and known.bytes < buffer.bytes:
            buffers[tensor] = buffer
    return buffers


def with_program_indices(source: KernelSource, program: TensorProgram) -> KernelSource:
    """Return the source with run-time checks that name indices as in the program, not as in the kernel."""
    names = {s.output: s.name for s in program.statements}
    indices_by_dimension: dict[tuple[str, int], list[Expr]] = {}
    for statement in program.statements:
        for load in statement.reads:
            for d in (d for d, checked in enumerate(load.bounds_checked) if checked):
                indices_by_dimension.setdefault((names.get(load.tensor, load.tensor), d), []).append(load.index[d])
        for d in (d for d, checked in enumerate(statement.bounds_checked) if checked):
            indices_by_dimension.setdefault((statement.name, d), []).append(statement.index[d])

    def described(check: RuntimeCheck) -> RuntimeCheck:
        indices = dict.fromkeys(indices_by_dimension.get((check.tensor, check.dimension), ()))
        if not indices:
            return check
        text = " or ".join(expression_text(i, names) for i in indices)
        return replace(check, index=text, axis=", ".join(sorted({a for i in indices for a in axes_of(i)})))

    return replace(source, checks=tuple(described(c) for c in source.checks))


def emit(name: str, parts: tuple[GroupLaunches, ...], buffers: dict[str, Buffer], hw: HardwareSpec, comment: str) -> KernelSource:
    """Emit the source of one program in the device's language."""
    return emit_together((Program(name, parts),), buffers, hw, comment)


def emit_together(
    programs: tuple[Program, ...],
    buffers: dict[str, Buffer],
    hw: HardwareSpec,
    comment: str,
    constants: frozenset[str] | None = None,
) -> KernelSource:
    """Emit one translation unit of several programs over the same buffers.

    `constants`: the tensors that programmatic launches may read before they wait; None: launches do not wait.
    """
    parts = tuple(part for program in programs for part in program.groups)
    for tree in (tree for program in programs for tree in (*program.prepack_trees, *program.trees)):
        require_identifier(tree.name)
    name = programs[0].name
    if hw.family is TargetKind.CPU:
        return _emit_c(programs, buffers, hw, comment)
    if hw.family in (TargetKind.CUDA, TargetKind.AMD):
        return _emit_gpu(name, parts, buffers, hw, comment, constants)
    raise InvariantError(f"no generator for {hw.family.value}")


def _emit_c(programs: tuple[Program, ...], buffers: dict[str, Buffer], hw: HardwareSpec, comment: str) -> KernelSource:
    context = FunctionContext(hw.vector_bytes, hw.num_cores, in_parallel_region=True, permutes_bytes=hw.permutes_bytes)
    parts = [part for program in programs for part in program.groups]
    trees = {tree.name: (tree, part) for part in parts for tree in part.trees}
    together = [each for program in programs for _, each in _launch_together(program)]
    alone = {each[0].name for each in together if len(each) == 1}
    functions, calls = _c_functions(trees, buffers, context, joined=frozenset(trees) - alone)
    prepack_trees = {tree.name: (tree, part) for part in parts for tree in part.prepack_trees}
    prepack_functions, prepack_calls = _c_functions(prepack_trees, buffers, replace(context, in_parallel_region=False), functions)
    regions, launches = _emit_launches(programs, calls, buffers, hw.num_cores)
    texts = [*(f.text for f in (*prepack_functions, *functions)), *regions]
    launches = [*(replace(call.launch, is_prepack=True) for call in prepack_calls.values()), *launches]
    functions += prepack_functions
    scratch = scratch_definition(functions)
    linkage = SHARED_SCRATCH_LINKAGE if len(programs) > 1 else "static"
    text = f"{quote_comment(comment)}{preamble(tuple(functions), scratch and f'{linkage} {scratch}')}" + "\n".join(texts)
    used = _used_buffers(buffers, launches)
    if any(STATUS.symbol in launch.args for launch in launches):
        used = (*used, STATUS)
    named = _with_caller_names(_checks(functions), buffers)
    options = ("-fopenmp", "-fopenmp-simd", *_optimisation(programs), *_features(functions))
    if hw.arch.prefix == "x86-64-v":
        options = (*options, f"-mprefer-vector-width={8 * hw.vector_bytes}")
    return KernelSource(
        programs[0].name, Language.C, hw.arch, text, used, tuple(launches), named, options, scratch_definition=scratch
    )


def _optimisation(programs: tuple[Program, ...]) -> tuple[str, ...]:
    """Return the optimisation options.

    Trees with a micro-kernel are vectorized already: -O3 doubles the compile time and makes them hardly faster.
    """
    trees = (tree for program in programs for tree in program.trees)
    return MICRO_KERNEL_OPTIONS if all(_has_registers(tree) for tree in trees) else ("-O3",)


def _features(functions: Iterable[Function]) -> tuple[str, ...]:
    """Return the options of instruction sets beyond the architecture's that the functions use."""
    used = {name for f in functions for name in f.helpers}
    vector = {"-mavx512vnni": "dot_vi32x16", "-mavxvnni": "dot_vi32x8", "-mavx512bf16": "dot_vf32"}
    return tuple(option for option, helper in vector.items() if any(name.startswith(helper) for name in used))


def _has_registers(tree: ScheduleTree) -> bool:
    return any(isinstance(n, Storage) and n.scope is Scope.REGISTER for n in iter_nodes(tree.body))


def _c_functions(
    trees: Mapping[str, tuple[ScheduleTree, GroupLaunches]],
    buffers: dict[str, Buffer],
    context: FunctionContext,
    before: Iterable[Function] = (),
    joined: frozenset[str] = frozenset(),
) -> tuple[list[Function], dict[str, threads.Call]]:
    """Emit a function for each tree, and return the calls by the tree's name.

    Functions are called in a parallel region if the context has one and all work of the tree is in parallel loops.
    `before`: functions that are emitted already. `joined`: trees that always share a launch with others.
    """
    functions: list[Function] = []
    calls: dict[str, threads.Call] = {}
    for name, (tree, part) in trees.items():
        args = _args(tree, buffers)
        if _has_checks(tree.body):
            args = (*args, STATUS)
        above = _emitted_so_far((*before, *functions))
        shared = context.in_parallel_region and threads.is_single_threaded(tree) is False
        own_context = replace(
            context,
            in_parallel_region=shared,
            per_task=shared and threads.has_one_loop(tree),
            is_launch=name not in joined,
        )
        function = c.emit_function(tree, _views(part, buffers), args, own_context, above)
        functions.append(function)
        called = threads.region_function(name) if own_context.in_parallel_region else name
        launch = LaunchSpec(called, tuple(a.symbol for a in args), zeroed=tree.zeroed)
        calls[name] = threads.Call(launch, function.tasks, own_context.per_task)
    return functions, calls


def _emit_launches(
    programs: tuple[Program, ...], calls: Mapping[str, threads.Call], buffers: dict[str, Buffer], cores: int
) -> tuple[list[str], list[LaunchSpec]]:
    """Return the functions with parallel regions, and the launches of all programs."""
    regions: list[str] = []
    launches: dict[str, LaunchSpec] = {}
    for name, trees in dict(chain.from_iterable(_launch_together(p) for p in programs)).items():
        inside = tuple(calls[tree.name] for tree in trees)
        if any(threads.is_single_threaded(tree) is False for tree in trees):
            args = _union(tuple(call.launch for call in inside), buffers)
            regions.append(threads.region(name, inside, args, cores))
            launches[name] = LaunchSpec(name, tuple(a.symbol for a in args), phases=threads.phases(inside))
        else:
            launches[name] = inside[0].launch
    return regions, list(launches.values())


def _launch_together(program: Program) -> list[tuple[str, tuple[ScheduleTree, ...]]]:
    """Return (launch name, trees): one launch if all trees fit in one parallel region, else one for each tree."""
    single_threaded = [threads.is_single_threaded(tree) for tree in program.trees]
    if len(single_threaded) > 1 and None not in single_threaded and False in single_threaded:
        return [(program.name, program.trees)]
    return [(tree.name, (tree,)) for tree in program.trees]


def _checks(functions: Iterable[Function]) -> list[RuntimeCheck]:
    return [check for function in functions for check in function.checks]


def _emitted_so_far(functions: tuple[Function, ...]) -> c.EmittedSoFar:
    routines = {text: name for f in functions for name, text in f.routines}
    return c.EmittedSoFar(len(_checks(functions)), routines)


def _union(launches: tuple[LaunchSpec, ...], buffers: dict[str, Buffer]) -> tuple[Buffer, ...]:
    """Return the buffers of all the launches."""
    symbols = {symbol for launch in launches for symbol in launch.args}
    return tuple(b for b in (*buffers.values(), STATUS) if b.symbol in symbols)


def _emit_gpu(
    name: str,
    parts: tuple[GroupLaunches, ...],
    buffers: dict[str, Buffer],
    hw: HardwareSpec,
    comment: str,
    constants: frozenset[str] | None,
) -> KernelSource:
    dialect = cuda.dialect_of(hw.arch)
    functions: list[cuda.Function] = []
    launches: list[LaunchSpec] = []
    checks: list[RuntimeCheck] = []
    once = [(part, tree, True) for part in parts for tree in part.prepack_trees]
    for part, tree, is_prepack in (*once, *((each, tree, False) for each in parts for tree in each.trees)):
        args = _args(tree, buffers)
        own_constants = None if is_prepack else constants
        function = cuda.emit_function(tree, _views(part, buffers), args, hw.arch, len(checks), own_constants)
        functions.append(function)
        checks += function.checks
        launches.append(
            LaunchSpec(
                tree.name,
                tuple(a.symbol for a in args),
                (function.grid, 1, 1),
                (function.block, 1, 1),
                function.shared_bytes,
                tree.zeroed,
                is_prepack,
                tensor_maps=function.tensor_maps,
                cluster=tree.cluster,
                programmatic=own_constants is not None,
            )
        )
    names = (name for function in functions for name in function.helpers)
    text = f"{quote_comment(comment)}{cuda.preamble(names, hw.arch)}" + "\n".join(f.text for f in functions)
    used = _used_buffers(buffers, launches)
    return KernelSource(name, dialect.language, hw.arch, text, used, tuple(launches), _with_caller_names(checks, buffers))


def emit_task_functions(program: Program, buffers: dict[str, Buffer], hw: HardwareSpec, first_check: int = 0) -> tuple[Tasks, ...]:
    """Emit the launches of a program as rTasks, in order. Raises InvariantError for a launch that cannot be rTasks.

    `first_check`: the run-time checks of other functions in the same kernel.
    """
    tasks: list[Tasks] = []
    for part in program.groups:
        for tree in part.trees:
            args = _args(tree, buffers)
            function = cuda.emit_task_function(tree, _views(part, buffers), args, hw.arch, first_check)
            first_check += len(function.checks)
            tasks.append(Tasks(function, args))
    return tuple(tasks)


def _with_caller_names(checks: list[RuntimeCheck], buffers: dict[str, Buffer]) -> tuple[RuntimeCheck, ...]:
    """Return the checks with the caller's names of the tensors."""
    names = {tensor: b.name for tensor, b in buffers.items()} | {b.symbol: b.name for b in buffers.values()}
    return tuple(replace(k, tensor=names.get(k.tensor, k.tensor)) for k in checks)


def _views(part: GroupLaunches, buffers: dict[str, Buffer]) -> dict[str, BufferRef]:
    return {
        tensor: BufferRef(buffers[tensor].symbol, buffers[tensor].dtype, _shape(tensor, type_))
        for tensor, type_ in part.views
        if tensor in buffers
    }


def _shape(tensor: str, type_: TensorType) -> tuple[int, ...]:
    """Return the shape of a tensor in memory, whose extents know that they are its layout."""
    return tuple(named(extent, f"{tensor}.shape[{d}]") for d, extent in enumerate(type_.shape))


def _args(tree: ScheduleTree, buffers: dict[str, Buffer]) -> tuple[Buffer, ...]:
    """Return the buffers that a launch accesses, in the order of `buffers`."""
    accessed: set[str] = set()
    for node in iter_nodes(tree.body):
        if isinstance(node, Compute | Transpose):
            accessed.add(node.tensor)
        for expr in expressions(node):
            accessed.update(load.tensor for load in loads_of(expr))
    return tuple(buffer for tensor, buffer in buffers.items() if tensor in accessed)


def _has_checks(nodes: tuple[Node, ...]) -> bool:
    for node in iter_nodes(nodes):
        if isinstance(node, Compute) and any(node.bounds_checked):
            return True
        if isinstance(node, Let) and node.bounds_check is not None:
            return True
        for expr in expressions(node):
            if any(any(load.bounds_checked) for load in loads_of(expr)):
                return True
    return False


def _used_buffers(buffers: dict[str, Buffer], launches: list[LaunchSpec]) -> tuple[Buffer, ...]:
    """Return every input and output, and the workspaces that a launch accesses."""
    symbols = {symbol for launch in launches for symbol in (*launch.args, *(m.buffer for m in launch.tensor_maps))}
    return tuple(b for b in buffers.values() if b.role is not Role.WORKSPACE or b.symbol in symbols)
