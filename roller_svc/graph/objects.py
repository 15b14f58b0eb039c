"""Objects of kernels that models are linked from. Each is compiled once: a cache keeps it.

A kernel alone is linked from its object when it is first needed: a call of the model does not need it.
"""

from __future__ import annotations

import hashlib
import os
import shlex
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from roller_svc.codegen.c.model import kernel_prefix, kernel_unit
from roller_svc.compiler.kernel_cache import KernelCache
from roller_svc.ir.kernel import KernelSource, Language
from roller_svc.runtime.saved.serialization import KernelBundle
from roller_svc.toolchain import compile_object, link_kernel, object_command, tool_version

Count = Callable[[int, int], None]  # done, of how many


def compile_objects(kernels: Sequence[KernelSource], cache: KernelCache, count: Count | None = None) -> dict[str, bytes]:
    """Return the kernels' objects by prefix. Those that the cache does not have are compiled on all cores.

    Raises CompileError, KernelTimeoutError, ToolchainMissingError.
    """
    sources = {source.key: source for source in kernels}
    done = 0

    def compile_missing(source: KernelSource) -> tuple[str, bytes]:
        nonlocal done
        compiled = compile_once(source, kernel_unit(source), cache)
        done += 1
        if count is not None:
            count(done, len(sources))
        return kernel_prefix(source), compiled

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return dict(pool.map(compile_missing, sources.values()))


def link_kernels(bundles: Sequence[KernelBundle], cache: KernelCache) -> tuple[KernelBundle, ...]:
    """Return the kernels with their binaries. Those that only have objects are linked on all cores.

    Raises CompileError, KernelTimeoutError, ToolchainMissingError.
    """

    def link(bundle: KernelBundle) -> KernelBundle:
        compiled = bundle.compiled
        if compiled.binary or compiled.source.language is not Language.C:
            return bundle
        source = compiled.source
        binary = link_kernel(source, compiled.object_code or compile_once(source, kernel_unit(source), cache))
        return replace(bundle, compiled=replace(compiled, binary=binary))

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return tuple(pool.map(link, bundles))


def compile_once(source: KernelSource, text: str, cache: KernelCache, *, parallel: bool | None = None) -> bytes:
    """Return the object of a text with a source's options, which is compiled unless the cache has it."""
    key = object_key(source, text, parallel=parallel)
    compiled = cache.load_object(key)
    if compiled is None:
        compiled = compile_object(source, text, parallel=parallel)
        cache.save_object(key, compiled)
    return compiled


def object_key(source: KernelSource, text: str, *, parallel: bool | None = None) -> str:
    """Return the digest of what determines the object of a text."""
    unit = replace(source, text=text)
    command = shlex.join(object_command(unit, parallel=parallel))
    content = f"{unit.key}\n{command}\n{tool_version(Language.C, source.arch)}"
    return hashlib.sha256(content.encode()).hexdigest()
