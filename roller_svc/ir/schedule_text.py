"""Schedule tree → indented lines, for people and golden tests."""

from __future__ import annotations

from roller_svc.ir.schedule import (
    AnyThread,
    Barrier,
    Branch,
    BulkCopy,
    Compute,
    CpAsync,
    CpAsyncCommitGroup,
    CpAsyncWaitGroup,
    Exp2,
    HorizontalReduce,
    Let,
    LoadMatrix,
    Loop,
    Mma,
    Node,
    PackFragment,
    Part,
    Prefetch,
    RemoteShared,
    RingPage,
    RoundFragment,
    Routine,
    Storage,
    Transpose,
    WarpReduce,
    WarpScan,
    child_lists,
)
from roller_svc.ir.schedule_hopper import HopperNode, describe_hopper_node


def render(nodes: tuple[Node, ...], depth: int = 0) -> str:
    """Return one line a node; its children follow, indented by two spaces."""
    pad = "  " * depth
    lines: list[str] = []
    for node in nodes:
        match node:
            case Loop(var=var, extent=extent, kind=kind):
                lines.append(f"{pad}{kind.value} {var} in {extent}")
            case Let(var=var):
                lines.append(f"{pad}let {var}")
            case Storage(tensor=tensor, dtype=dtype, shape=shape, scope=scope):
                lines.append(f"{pad}{scope.value} {tensor}: {dtype.value}{list(shape)}")
            case Compute(tensor=tensor, combine=combine):
                lines.append(f"{pad}{tensor}[...] {combine.value if combine else ''}=")
            case Branch():
                lines.append(f"{pad}branch")
            case Routine(name=name):
                lines.append(f"{pad}routine {name}")
            case Part(name=name):
                lines.append(f"{pad}# {name}")
            case Barrier():
                lines.append(f"{pad}barrier")
            case Prefetch(tensor=tensor, for_write=for_write, to_l2=to_l2):
                how = f"{' to write' if for_write else ''}{' to L2' if to_l2 else ''}"
                lines.append(f"{pad}prefetch {tensor}{how}")
            case Transpose(tensor=tensor, source=source):
                lines.append(f"{pad}{tensor}[...] = {source.tensor}[...] transposed")
            case (
                WarpReduce(tensor=tensor, combine=combine, lanes=lanes)
                | HorizontalReduce(tensor=tensor, combine=combine, lanes=lanes)
            ):
                lines.append(f"{pad}{tensor}[...] {combine.value}= of {lanes} lanes")
            case WarpScan(tensor=tensor, combine=combine, lanes=lanes):
                lines.append(f"{pad}{tensor}[...] {combine.value}= of earlier ones of {lanes} lanes")
            case _:
                lines.append(f"{pad}{_matrix_line(node)}")
        lines.extend(render(body, depth + 1) for body in child_lists(node) if body)
    return "\n".join(lines)


def _matrix_line(node: Node) -> str:
    """Return the line of a node of tensor cores."""
    match node:
        case CpAsync(tensor=tensor, elements=elements):
            return f"copy {elements} to {tensor}[...]"
        case BulkCopy(tensor=tensor):
            return f"copy a row to {tensor}[...]"
        case RingPage(page=page, fills=fills):
            return f"{page.tensor} = a page of the ring{' to fill' if fills else ''}"
        case CpAsyncCommitGroup():
            return "commit copies"
        case CpAsyncWaitGroup(pending=pending):
            return f"await copies, {pending} pending"
        case LoadMatrix(tensor=tensor, source=source, count=count, transposed=transposed):
            return f"{tensor} = {count} {'transposed ' if transposed else ''}matrices of {source}"
        case RoundFragment(tensor=tensor):
            return f"round {tensor} to tf32"
        case Mma(tensor=tensor, a=a, b=b):
            return f"{tensor} += {a} * {b}"
        case PackFragment(tensor=tensor, first=first, dtype=dtype):
            return f"{tensor}[...] = two of {first.tensor} as {dtype.value}"
        case Exp2(tensor=tensor):
            return f"{tensor}[...] = 2 ** {tensor}[...]"
        case AnyThread(var=var):
            return f"{var} = any thread"
        case RemoteShared(remote=remote, tensor=tensor):
            return f"{remote} = {tensor} of another block"
        case _ if isinstance(node, HopperNode):
            return describe_hopper_node(node)
        case _:
            return type(node).__name__
