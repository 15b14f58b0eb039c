"""Write the C++ header that launches a saved kernel of a GPU, by the driver API of CUDA or by HIP."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from roller_svc.ir.kernel import (
    ALIGNMENT_BYTES,
    Buffer,
    CompiledKernel,
    KernelSource,
    Language,
    LaunchSpec,
    Resources,
    Role,
    align_blocks,
)
from roller_svc.ir.quoting import quote_comment, quote_string, require_identifier
from roller_svc.ir.tensor_map import MapMode, Swizzle, TensorMap
from roller_svc.runtime.saved.launch import LAST_DRIVER_TO_FIX, MAX_DEFAULT_SHARED_BYTES, SMALL_BYTES
from roller_svc.runtime.saved.metadata import L2_PROMOTION_BYTES, MAP_ALIGNMENT_BYTES, data_type


@dataclass(frozen=True, slots=True)
class _Api:
    """The names of one driver interface. `fill` is the format of a call that fills memory with zero bytes."""

    header: str
    library: str
    prefix: str
    status: str
    success: str
    address: str
    launch: str
    fill: str


_APIS = {
    Language.CUDA: _Api(
        "cuda.h", "-lcuda", "cu", "CUresult", "CUDA_SUCCESS", "CUdeviceptr", "cuLaunchKernel",
        "cuMemsetD8Async({address}, 0, {size}, stream)",
    ),
    Language.HIP: _Api(
        "hip/hip_runtime_api.h", "-lamdhip64", "hip", "hipError_t", "hipSuccess", "hipDeviceptr_t", "hipModuleLaunchKernel",
        "hipMemsetAsync({address}, 0, {size}, stream)",
    ),
}  # fmt: skip
_TYPES = {"cu": {"module": "CUmodule", "function": "CUfunction", "stream": "CUstream"},
          "hip": {"module": "hipModule_t", "function": "hipFunction_t", "stream": "hipStream_t"}}  # fmt: skip
_SWIZZLES = {Swizzle.NONE: "NONE", Swizzle.B32: "32B", Swizzle.B64: "64B", Swizzle.B128: "128B"}


def cpp_launcher(compiled: CompiledKernel) -> str:
    """Return a header for C++17 with the class NAME_launcher, NAME being the kernel's."""
    source = compiled.source
    api, types, name = _APIS[source.language], _TYPES[_APIS[source.language].prefix], require_identifier(source.name)
    guard, launches = f"{name}_LAUNCH_HPP", source.launches
    about = (
        f"Launch {name}, which is compiled for {source.arch}. Link with {api.library}.\n"
        "Load kernel.cubin or kernel.hsaco with a current context, once a device. Then launch with the addresses of dense,\n"
        "row-major arrays on that device, multiples of 64 bytes. Outputs overlap nothing else. Nothing waits for the kernel.\n"
        "Calls may overlap if each has a workspace of its own. "
        "Every function returns the status of the driver."
    )
    about += "".join(f"\n{row}" for row in _arguments(source))
    parameters = [*(f"{api.address} {each}" for each in _addresses(source)), f"{types['stream']} stream"]
    lines = [
        quote_comment(about) + f"#ifndef {guard}",
        f"#define {guard}",
        f"#include <{api.header}>",
        "#include <cstddef>",
        "#include <cstdint>",
        f"class {name}_launcher {{",
        " public:",
        f"    static constexpr std::size_t workspace_bytes = {source.workspace_bytes};",
        "    /* Load the bytes of the binary. */",
        f"    {api.status} load(const void *image) {{",
        f"        {api.status} status = {api.prefix}ModuleLoadData(&module_, image);",
        *(line for number, launch in enumerate(launches) for line in _load(api, launch, number, compiled.resources[number])),
        "        return status;",
        "    }",
        f"    {api.status} unload() {{ return {api.prefix}ModuleUnload(module_); }}",
        f"    {api.status} launch({', '.join(parameters)}) const {{",
        f"        {api.status} status = {api.success};",
        *(line for number, launch in enumerate(launches) for line in _launch(api, source, launch, number)),
        "        return status;",
        "    }",
        "",
        " private:",
        f"    {types['module']} module_ = nullptr;",
        f"    {types['function']} functions_[{len(launches)}] = {{}};",
        "};",
        "#endif",
        "",
    ]
    return "\n".join(lines)


def _addresses(source: KernelSource) -> list[str]:
    """Return the parameters' names: inputs, outputs, and the workspace if there is one."""
    return [f"p_{require_identifier(b.symbol)}" for b in source.run_buffers] + ["workspace"] * bool(source.workspace_bytes)


def _arguments(source: KernelSource) -> list[str]:
    rows = [f"p_{b.symbol}: {b.dtype.value}{list(b.shape)}, {_role(source, b)}" for b in source.run_buffers]
    if source.workspace_bytes:
        rows.append(f"workspace: workspace_bytes, aligned to {ALIGNMENT_BYTES} bytes, of any content")
    return rows


def _role(source: KernelSource, buffer: Buffer) -> str:
    return "updated in place" if buffer in source.updated_buffers else buffer.role.value


def _load(api: _Api, launch: LaunchSpec, number: int, used: Resources) -> Iterable[str]:
    entry = quote_string(launch.name)
    yield f"        if (!status) status = {api.prefix}ModuleGetFunction(&functions_[{number}], module_, {entry});"
    if api.prefix == "cu" and launch.shared_bytes and used.shared_bytes > MAX_DEFAULT_SHARED_BYTES:
        attribute = "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES"
        yield f"        if (!status) status = cuFuncSetAttribute(functions_[{number}], {attribute}, {launch.shared_bytes});"


def _launch(api: _Api, source: KernelSource, launch: LaunchSpec, number: int) -> Iterable[str]:
    offsets, _ = align_blocks(source.buffers_of(Role.WORKSPACE))
    sizes = {b.symbol: b.bytes for b in source.buffers}

    def address(symbol: str, offset_bytes: int = 0) -> str:
        base, offset_bytes = ("workspace", offsets[symbol] + offset_bytes) if symbol in offsets else (f"p_{symbol}", offset_bytes)
        if not offset_bytes:
            return base
        return f"{base} + {offset_bytes}" if api.prefix == "cu" else f"static_cast<char *>({base}) + {offset_bytes}"

    yield "        {"
    for symbol in launch.zeroed:
        yield f"            if (!status) status = {api.fill.format(address=address(symbol), size=sizes[symbol])};"
    values = []
    for position, symbol in enumerate(launch.args):
        values.append(f"a{position}")
        yield f"            {api.address} a{position} = {address(symbol)};"
    for position, view in enumerate(launch.tensor_maps):
        values.append(f"map{position}")
        yield from _encode(view, f"map{position}", address(view.buffer, view.offset_bytes))
    yield f"            void *parameters[] = {{{', '.join(f'&{each}' for each in values)}}};"
    sizes_text = ", ".join(map(str, (*launch.grid, *launch.block, launch.shared_bytes)))
    yield f"            if (!status) status = {api.launch}(functions_[{number}], {sizes_text}, stream, parameters, nullptr);"
    yield "        }"


def _encode(view: TensorMap, name: str, address: str) -> Iterable[str]:
    enum, rank = "CU_TENSOR_MAP", view.rank
    yield f"            alignas({MAP_ALIGNMENT_BYTES}) CUtensorMap {name};"
    arrays = {
        "extents": ("std::uint64_t", view.extents),
        "strides": ("std::uint64_t", view.strides_bytes or (0,)),
        "steps": ("std::uint32_t", view.element_strides),
    }
    is_tiled = view.mode is MapMode.TILED
    arrays |= {"box": ("std::uint32_t", view.box)} if is_tiled else {"lower": ("int", view.lower), "upper": ("int", view.upper)}
    for what, (type_, values) in arrays.items():
        yield f"            const {type_} {name}_{what}[] = {_initializer(values)};"
    shape = f"{name}_box, {name}_steps" if is_tiled else f"{name}_lower, {name}_upper, {view.box[0]}, {view.box[1]}, {name}_steps"
    modes = (
        f"{enum}_INTERLEAVE_NONE, {enum}_SWIZZLE_{_SWIZZLES[view.swizzle]}, "
        f"{enum}_L2_PROMOTION_L2_{L2_PROMOTION_BYTES}B, {enum}_FLOAT_OOB_FILL_NONE"
    )
    yield (
        f"            if (!status) status = cuTensorMapEncode{'Tiled' if is_tiled else 'Im2col'}(&{name}, "
        f"{enum}_DATA_TYPE_{data_type(view)}, {rank}, reinterpret_cast<void *>({address}), "
        f"{name}_extents, {name}_strides, {shape}, {modes});"
    )
    if view.end_bytes - view.offset_bytes < SMALL_BYTES:
        yield f"            int {name}_driver = 0; /* drivers up to {LAST_DRIVER_TO_FIX} set a bit that is for larger tensors */"
        yield f"            if (!status) status = cuDriverGetVersion(&{name}_driver);"
        yield f"            if ({name}_driver <= {LAST_DRIVER_TO_FIX}) {name}.opaque[1] &= ~(std::uint64_t{{1}} << 21);"


def _initializer(values: Sequence[int]) -> str:
    return "{" + ", ".join(map(str, values)) + "}"
