"""CUDA or HIP source → the C++ program that the emulator compiles: the source, and tables of buffers and launches.

The source is changed in three ways. Definitions of wrappers (device functions around an `asm`) become comments,
because the emulator's headers implement them on the host; any other `asm` is an error. Floating variables are
initialised to NaN. In a cluster, or a cooperative launch, each block gets its own shared memory.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator

from roller_svc.errors import LaunchError
from roller_svc.ir.kernel import Buffer, KernelSource, LaunchSpec, Role
from roller_svc.ir.quoting import quote_string
from roller_svc.ir.tensor_map import MapMode, TensorMap

_INT8 = ("s8s8", "s8u8", "u8s8", "u8u8")
_FLOAT8 = ("e4m3e4m3", "e4m3e5m2", "e5m2e4m3", "e5m2e5m2")
# Wrappers that the emulator's headers implement on the host in place of the source's own definitions.
# `shared_address` is used by wrappers only.
HOST_INTRINSICS = frozenset({
    "f16_to_f32", "f32_to_f16", "f32_to_bf16", "f32_to_e4m3", "f32_to_e5m2", "in_range", "round_tf32",
    "exp2_approx", "rcp_approx", "max_f32", "min_f32", "pack_f16", "pack_bf16", "e4m3x2_to_f16x2",
    "fma_f16x2", "and_or",
    *(f"{operation}_{short}x2" for operation in ("add", "sub", "mul") for short in ("f16", "bf16")),
    "add_pair_f16", "add_pair_bf16",
    "mul_rn_f32", "mul_rn_f64",
    "shared_address", "commit_copies", "await_copies",
    *(f"copy_async_{size}" for size in (4, 8, 16)),
    *(f"load_matrix_{count}{suffix}" for count in (1, 2, 4) for suffix in ("", "_transposed")),
    *(f"mma_{shape}_{types}" for shape in ("m16n8k16", "m16n8k8") for types in ("f16", "bf16")),
    "mma_m16n8k8_tf32", "mma_m16n8k8_f64", "mma_m8n8k4_f64",
    *(f"mma_{shape}_{types}" for shape in ("m16n8k32", "m8n8k16") for types in _INT8),
    *(f"mma_m16n8k32_{types}" for types in _FLOAT8),
    *(f"mfma_16x16x{types}" for types in ("16_f16", "16_bf16", "4_f32", "16_s8", "32_s8", "4_f64")),
    "barrier_init", "barrier_arrive", "barrier_arrive_remote", "barrier_expect", "barrier_wait", "fence_barrier_init",
    "barrier_test_wait", "arrive_after_copies", "copy_bulk",
    "grid_launch_dependents", "grid_wait", "fence_async", "bulk_commit", "bulk_wait", "bulk_wait_read", "prefetch_map", "elect_one",
    "named_barrier", "named_any",
    *(f"tma_load_{rank}d{suffix}" for rank in range(1, 6) for suffix in ("", "_multicast")),
    *(f"tma_load_im2col_{rank}d{suffix}" for rank in range(3, 6) for suffix in ("", "_multicast")),
    *(f"tma_store_{rank}d" for rank in range(1, 6)),
    *(f"store_matrix_{count}{suffix}" for count in (1, 2, 4) for suffix in ("", "_transposed")),
    "wgmma_fence", "wgmma_commit", "wgmma_wait", "registers_decrease", "registers_increase",
    "cluster_sync", "cluster_rank", "map_shared_rank", "event_arrive", "event_finish", "event_wait",
    "load_acquire", "load_relaxed", "exchange_relaxed", "sleep_ns", "timer_ns",
})  # fmt: skip
# Families of wrappers with many members: only the members that a kernel uses are defined.
_WGMMA = re.compile(r"wgmma_m64n(\d+)k\d+_(f16|bf16|tf32|(?:s8|u8){2}|(?:e4m3|e5m2){2})_([kmr])([km])")
_HOLD = re.compile(r"hold_results_(\d+)(_s32)?")

_WORD = r"[A-Za-z_][A-Za-z0-9_]*"
_DEVICE_FUNCTION = re.compile(
    rf"^(?:template\s*<[^<>;{{}}()]*>\s*)?__device__[^;{{}}()]*?\b({_WORD})\s*\([^{{}};]*\)\s*(?={{)", re.MULTILINE
)
_ASM = re.compile(r"\b(?:asm|__asm__|__asm)\b")
_STATIC_SHARED = re.compile(rf"^( *)__shared__ ([^;=\[\]]*?)\b({_WORD})((?:\[[^\[\]]*\])*);(?=$)", re.MULTILINE)
_DYNAMIC_SHARED = re.compile(rf"\bextern\s+__shared__\s[^;=]*?\b({_WORD})\s*\[\s*\]\s*;")
_NOT_CODE = re.compile(r"/\*.*?\*/|//[^\n]*|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'", re.DOTALL)
# A local variable without a value. The compiler's pattern is a large negative number, which a maximum would hide.
_UNINITIALISED = re.compile(rf"^ +(?:__align__\(\d+\) )?(?:float|double) ({_WORD})(?:\[\d+\])*;(?=$)", re.MULTILINE)
# The opaque parameter of hardware; the emulator has its own fields (tensor_map.h).
_OPAQUE_MAP = re.compile(r"^struct __align__\(128\) TensorMap \{[^{}]*\};", re.MULTILINE)
_BOUNDS = re.compile(rf"__launch_bounds__\(\s*(\d+)[^()]*\)\s*({_WORD})\s*\(")
_MIN_ALIGNMENT, _SWIZZLE_ALIGNMENT = 16, 1024  # bytes
_ROLES = {Role.INPUT: "INPUT", Role.OUTPUT: "OUTPUT", Role.WORKSPACE: "WORKSPACE"}


def program_source(source: KernelSource) -> str:
    """Return program.cpp, which runtime.cpp runs. Raises LaunchError for a launch that a device would reject."""
    _check_bounds(source)
    _check_clusters(source)
    text = _UNINITIALISED.sub(r"\g<0> emulator::poison(\1);", comment_out_wrappers(source.text))
    if _has_tma_or_several_blocks(source):
        text = _DYNAMIC_SHARED.sub(_block_dynamic, text)
    if any(launch.cluster > 1 or launch.cooperative for launch in source.launches):
        text = _STATIC_SHARED.sub(r"\1__shared__ \2\3_of_first\4; auto &\3 = emulator::own(\3_of_first);", text)
    return f'#include "emulator.h"\n#line 1 "kernel.cu"\n{text}\n{_tables(source)}'


def _check_clusters(source: KernelSource) -> None:
    """Check that each launch has the cluster size that its kernel declares."""
    for launch in source.launches:
        declared = re.search(rf"__global__([^;{{}}]*?)\b{launch.name}\s*\(", source.text)
        attribute = re.search(r"__cluster_dims__\(\s*(\d+)", declared[1]) if declared else None
        blocks = int(attribute[1]) if attribute else 1
        if blocks != launch.cluster:
            raise LaunchError(f"{launch.name} is for clusters of {blocks} blocks and launched with {launch.cluster}")


def _check_bounds(source: KernelSource) -> None:
    """Check that no block has more threads than its kernel allows (CUDA programming guide, "Launch Bounds")."""
    max_threads = {name: int(threads) for threads, name in _BOUNDS.findall(source.text)}
    for launch in source.launches:
        threads = math.prod(launch.block)
        if threads > max_threads.get(launch.name, threads):
            raise LaunchError(f"{launch.name} is for blocks of {max_threads[launch.name]} threads and launched with {threads}")


def comment_out_wrappers(text: str) -> str:
    """Comment out the wrappers, keeping the lines. Raises LaunchError for an `asm` elsewhere."""
    code = _NOT_CODE.sub(lambda match: _blank_text(match[0]), text)
    lines = text.split("\n")
    visible = code
    opaque = [("TensorMap", match.start(), match.end()) for match in _OPAQUE_MAP.finditer(code)]
    for name, start, end in (*_device_functions(code), *opaque):
        definition = "" if name in HOST_INTRINSICS or name == "TensorMap" else _host_intrinsic(name)
        if definition is None:
            continue
        visible = visible[:start] + _blank_text(visible[start:end]) + visible[end:]
        _comment_out(lines, text, start, end)
        lines[text.count("\n", 0, start)] = definition + lines[text.count("\n", 0, start)]
    if stray := _ASM.search(visible):
        line = text.count("\n", 0, stray.start()) + 1
        raise LaunchError(
            f"line {line} of the kernel has an asm without a host implementation in the emulator",
            code="emulator-no-twin",
        )
    return "\n".join(lines)


def _comment_out(lines: list[str], text: str, start: int, end: int) -> None:
    for number in range(text.count("\n", 0, start), text.count("\n", 0, end) + 1):
        lines[number] = f"// {lines[number]}"


def _host_intrinsic(name: str) -> str | None:
    """Return the macro that implements one member of a family of wrappers; None for other functions."""
    if match := _WGMMA.fullmatch(name):
        n, types, a, b = match.groups()
        operands = (types if types[0] in "sue" else types * 2).upper()
        result = "int" if types[0] in "su" else "float"
        define = "EMULATOR_WGMMA_REGISTERS" if a == "r" else "EMULATOR_WGMMA"
        transposed = ", ".join("true" if place == "m" else "false" for place in (a, b))
        return f"{define}({name}, {result}, {operands}, {n}, {transposed}) "
    if match := _HOLD.fullmatch(name):
        return f"EMULATOR_HOLD({name}, {'int' if match[2] else 'float'}, {match[1]}) "
    return None


def _has_tma_or_several_blocks(source: KernelSource) -> bool:
    """Whether the alignment or the owning block of dynamic shared memory matters."""
    return any(launch.tensor_maps or launch.cluster > 1 or launch.cooperative for launch in source.launches)


def _block_dynamic(declaration: re.Match[str]) -> str:
    """Replace the array by a pointer into the block's own memory, aligned exactly as declared."""
    text, name, start = declaration[0], declaration[1], declaration.start(1) - declaration.start()
    first = f"{text[:start]}{name}_of_first{text[start + len(name) :]}"
    element = f"{name}_of_first[{_dynamic_shift(text)} / sizeof {name}_of_first[0]]"
    return f"{first} auto *const {name} = &emulator::own({element});"


def _dynamic_shift(declaration: str) -> int:
    """Return the offset of dynamic memory from a multiple of the largest swizzle's alignment, in bytes."""
    attribute = re.search(r"__align__\((\d+)\)", declaration)
    alignment = int(attribute[1]) if attribute else _MIN_ALIGNMENT
    return alignment % _SWIZZLE_ALIGNMENT


def _device_functions(code: str) -> Iterator[tuple[str, int, int]]:
    """Yield (name, start, end) of each device function definition."""
    for match in _DEVICE_FUNCTION.finditer(code):
        depth = 0
        for position in range(match.end(), len(code)):
            depth += (code[position] == "{") - (code[position] == "}")
            if depth == 0:
                yield match[1], match.start(), position + 1
                break


def _blank_text(text: str) -> str:
    return "".join(c if c == "\n" else " " for c in text)


def _tables(source: KernelSource) -> str:
    """Return C++ tables of the buffers and launches."""
    numbers = {b.symbol: i for i, b in enumerate(source.buffers)}
    bulk = _has_tma_or_several_blocks(source)
    dynamic = {f[1] + "_of_first" * bulk: _dynamic_shift(f[0]) * bulk for f in _DYNAMIC_SHARED.finditer(source.text)}
    max_shared_bytes = max((launch.shared_bytes for launch in source.launches), default=0)
    lines = ['#line 1 "launches.cpp"']
    lines += [
        f"alignas(1024) thread_local unsigned char {name}[{max_shared_bytes + shift} + emulator::DYNAMIC_SLACK_BYTES];"
        for name, shift in sorted(dynamic.items())
    ]
    lines.append("namespace {")
    for i, launch in enumerate(source.launches):
        arguments = ", ".join(f"emulator::Argument{{b[{numbers[symbol]}]}}" for symbol in launch.args)
        lines += [_map(i, number, view, numbers[view.buffer]) for number, view in enumerate(launch.tensor_maps)]
        maps = "".join(f", emulator_map_{i}_{number}(b)" for number in range(len(launch.tensor_maps)))
        arguments = f"{arguments}{maps}".removeprefix(", ")
        lines.append(f"void emulator_run_{i}(void *const *b) {{ {launch.name}({arguments}); }}")
        zeroed = ", ".join(str(numbers[symbol]) for symbol in launch.zeroed)
        lines.append(f"const int emulator_zeroed_{i}[] = {{{zeroed + ', ' if zeroed else ''}-1}};")
    for name, shift in dynamic.items():
        lines.append(f"unsigned char *emulator_dynamic() {{ return {name} + {shift}; }}")
    buffers = ", ".join(_buffer(b, source) for b in source.buffers)
    launches = ", ".join(_launch(i, launch, has_dynamic=bool(dynamic)) for i, launch in enumerate(source.launches))
    lines += [
        f"const emulator::Buffer emulator_buffers[] = {{{buffers}}};",
        f"const emulator::Launch emulator_launches[] = {{{launches}}};",
        "}",
        f"extern const emulator::Program emulator_program = {{emulator_buffers, {len(source.buffers)}, "
        f"emulator_launches, {len(source.launches)}, {max_shared_bytes}ul}};",
    ]
    return "\n".join(lines) + "\n"


def _map(launch: int, number: int, view: TensorMap, buffer: int) -> str:
    """Return a C++ function that makes the tensor map from the buffer's address."""
    tiled = view.mode is MapMode.TILED

    def row(values: Iterable[int], suffix: str = "") -> str:
        return f"{{{', '.join(f'{value}{suffix}' for value in values)}}}"

    fields = (
        quote_string(view.symbol), f"static_cast<unsigned char *>(b[{buffer}]) + {view.offset_bytes}",
        quote_string(view.buffer), f"{view.dtype.bytes}u", str(view.rank), str(int(not tiled)), str(int(view.tf32)),
        f"{view.swizzle.value}u", f"{view.bytes}u", row(view.extents, "ul"),
        row((view.dtype.bytes, *view.strides_bytes), "ul"), row(view.box, "u"), row(view.element_strides, "u"),
        row(view.lower), row(view.upper),
    )  # fmt: skip
    return f"TensorMap emulator_map_{launch}_{number}(void *const *b) {{ return {{{', '.join(fields)}}}; }}"


def _buffer(buffer: Buffer, source: KernelSource) -> str:
    if buffer.role not in _ROLES:
        raise LaunchError(f"the emulator has no buffers for {buffer.role.value}: {buffer.name}")
    role = "UPDATED" if buffer in source.updated_buffers else _ROLES[buffer.role]
    is_constant = buffer.role is Role.INPUT and buffer.name in source.constants
    return f"{{{quote_string(buffer.name)}, emulator::{role}, {buffer.bytes}ul, {_boolean(is_constant)}}}"


def _launch(number: int, launch: LaunchSpec, *, has_dynamic: bool) -> str:
    grid, block = (f"{{{x}u, {y}u, {z}u}}" for x, y, z in (launch.grid, launch.block))
    dynamic = "emulator_dynamic" if has_dynamic else "nullptr"
    return (
        f"{{{quote_string(launch.name)}, emulator_run_{number}, {grid}, {block}, {launch.shared_bytes}ul, "
        f"{dynamic}, emulator_zeroed_{number}, {launch.cluster}u, {_boolean(launch.cooperative)}, "
        f"{_boolean(launch.programmatic)}}}"
    )


def _boolean(value: object) -> str:
    return "true" if value else "false"
