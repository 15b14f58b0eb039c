"""Put a kernel's name before the names of its launches, and in C add a function that makes all of them."""

from __future__ import annotations

import re
from dataclasses import replace

from roller_svc.codegen import dialect as dialects
from roller_svc.codegen.names import Names
from roller_svc.ir.kernel import Buffer, KernelSource, Language, LaunchSpec, Role, align_blocks
from roller_svc.ir.quoting import require_identifier
from roller_svc.ir.symbol_names import default_name


def name_symbols(source: KernelSource, name: str) -> KernelSource:
    """Return the source with `name` before the names of its launches; "" for a name of the source's own digest.

    In C it also gets a function `name`_run, which makes all launches.
    """
    name = require_identifier(name or default_name(source.key))
    renamed = {launch.name: f"{name}_{launch.name}" for launch in source.launches}
    # A tensor may have the name of a launch, but only functions are called.
    called = re.compile(rf"\b({'|'.join(renamed)})(?=\()")
    text = called.sub(lambda match: renamed[match[1]], source.text)
    launches = tuple(_rename(launch, renamed) for launch in source.launches)
    named = replace(source, name=name, text=text, launches=launches)
    if source.language is not Language.C:
        return named
    run = _run_definition(named)
    return replace(named, text=f"{text}\n{run}", run_definition=run)


def _rename(launch: LaunchSpec, renamed: dict[str, str]) -> LaunchSpec:
    phases = tuple(replace(phase, name=renamed.get(phase.name, phase.name)) for phase in launch.phases)
    return replace(launch, name=renamed[launch.name], phases=phases)


def pointer_type(buffer: Buffer) -> str:
    """Return the type of a launch's parameter in C source."""
    if buffer.role is Role.STATUS:
        return "long long *"
    return f"{'const ' if buffer.role is Role.INPUT else ''}{dialects.C.storage_type(buffer.dtype)} *"


def _run_definition(source: KernelSource) -> str:
    """Return the function that makes all launches, behind declarations of these."""
    buffers = {b.symbol: b for b in source.buffers}
    offsets, _ = align_blocks(source.buffers_of(Role.WORKSPACE))
    names = Names()
    names.reserve(*(launch.name for launch in source.launches))
    for buffer in source.buffers:
        names.of(buffer.symbol)
    workspace = names.of(".workspace")  # of no buffer

    def argument(symbol: str) -> str:
        if symbol in offsets:
            return f"({pointer_type(buffers[symbol])})((char *){workspace} + {offsets[symbol]})"
        return names.of(symbol)

    lines = []
    for launch in source.launches:
        types = ", ".join(pointer_type(buffers[symbol]) for symbol in launch.args) or "void"
        lines.append(f"void {launch.name}({types});")
    parameters = [f"{pointer_type(b)}{names.of(b.symbol)}" for b in source.run_buffers]
    lines.append(f"int {source.name}_run({', '.join((*parameters, f'void *{workspace}'))}) {{")
    statuses = [names.of(b.symbol) for b in source.buffers_of(Role.STATUS)]
    lines += [f"  long long {status}[4] = {{0}};" for status in statuses]
    if not offsets:
        lines.append(f"  (void){workspace};")
    for launch in source.launches:
        lines += [f"  __builtin_memset({argument(s)}, 0, {buffers[s].bytes});" for s in launch.zeroed]
        arguments = [argument(symbol) for symbol in launch.args]
        lines.append(f"  {launch.name}({', '.join(arguments)});")
        lines += [f"  if ({status}[0]) return 1;" for status in statuses if status in arguments]
    return "\n".join((*lines, "  return 0;", "}", ""))
