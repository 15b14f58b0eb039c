"""Launch the kernel or model that is saved in the folder of this file. Needs Python alone, and the library of the arrays.

    kernel = Kernel()                    # reads metadata.json and loads the binary
    results = kernel(a=a, b=b)           # {"c": array}; kernel.run({"a": a}, out={"c": c}) for other names
    operator = torch_operator(kernel)    # c = operator(a, b), which torch.compile and CUDA graphs can capture
    results = Model()(x=x)               # likewise for the folder of a model, which is for a CPU

Arrays are dense and row-major: of numpy or torch for a CPU, of CuPy or torch for a GPU. Kernels of a GPU run on the
stream that is current in that library, and nothing waits for them.
"""

from __future__ import annotations

import ctypes
import json
import math
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

WORKSPACE_ALIGNMENT_BYTES = 64
# A kernel with more shared memory, static and dynamic together, needs an attribute (CUDA C++ guide, "Shared Memory").
MAX_DEFAULT_SHARED_BYTES = 48 << 10
# Members of enumerations of cuda.h.
MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
DATA_TYPES = {"UINT8": 0, "UINT16": 1, "UINT32": 2, "UINT64": 4, "TFLOAT32": 11}
ITEM_BYTES = {"UINT8": 1, "UINT16": 2, "UINT32": 4, "UINT64": 8, "TFLOAT32": 4}
SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
L2_PROMOTIONS = {0: 0, 64: 1, 128: 2, 256: 3}
# Drivers up to CUDA 13.1 set bit 85 of every map, which is only for tensors that span 128 KiB or more. CUTLASS clears
# it for smaller ones (copy_traits_sm90_tma.hpp, copy_traits_sm90_im2col.hpp); on Hopper it is reserved.
LAST_DRIVER_TO_FIX = 13010
SMALL_BYTES = 128 << 10


class Kernel:
    """A saved kernel. `inputs` and `outputs` are buffers with `name`, `dtype` and `shape`."""

    def __init__(self, folder: str | Path = Path(__file__).parent) -> None:
        self.metadata: dict[str, Any] = json.loads((Path(folder) / "metadata.json").read_text(encoding="utf-8"))
        buffers = self.metadata["buffers"]
        self.name: str = self.metadata["name"]
        self.inputs = [b for b in buffers if b["role"] == "input"]
        self.outputs = [b for b in buffers if b["role"] == "output"]
        self._workspaces = [b for b in buffers if b["role"] == "workspace"]
        self._binary = _Host(self.metadata, Path(folder)) if self.is_host else _Device(self.metadata, Path(folder))

    @property
    def is_host(self) -> bool:
        return bool(self.metadata["language"] == "c")

    def __call__(self, **arrays: Any) -> dict[str, Any]:
        """Run the kernel on arrays by name and return the outputs by name."""
        return self.run(arrays)

    def run(self, arrays: Mapping[str, Any], out: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Run the kernel on arrays by name and return the outputs by name, those of `out` if given.

        Arrays of a GPU begin at multiples of 64 bytes, as those of CuPy and torch do, but not all slices of them.
        Raises TypeError and ValueError for arrays that do not fit, IndexError for an index from data that is out of range
        (GPUs read 0 there), and RuntimeError for an error of the driver.
        """
        out = out or {}
        library, like = _check(self.inputs, self.outputs, arrays, out, is_host=self.is_host)
        with library.device(like):
            results = _make_results(library, self.outputs, out, like)
            memory = {b["symbol"]: library.address(arrays[b["name"]]) for b in self.inputs}
            memory |= {b["symbol"]: library.address(results[b["name"]]) for b in self.outputs}
            for buffer in self.inputs:
                if buffer["donated"]:  # the kernel updates the output of its name
                    library.copy(results[buffer["name"]], arrays[buffer["name"]])
            workspace = library.empty([self.metadata["workspace_bytes"] + WORKSPACE_ALIGNMENT_BYTES], "uint8", like)
            with _noted_writes(library, out):
                self.launch(memory, library.address(workspace), library.stream(like), library.ordinal(like))
        return results

    def launch(self, memory: Mapping[str, int], workspace: int = 0, stream: int = 0, device: int = 0) -> None:
        """Launch the kernel on addresses.

        Args:
            memory: addresses of inputs and outputs, by the `symbol` of the buffer.
            workspace: address of `workspace_bytes` of the metadata and 64 more.
            stream: handle of a stream of the current device; a CPU has none.
            device: number of the CUDA device to use if no context is current.
        """
        addresses, end = dict(memory), workspace + -workspace % WORKSPACE_ALIGNMENT_BYTES
        for buffer in self._workspaces:
            addresses[buffer["symbol"]] = end
            end += buffer["bytes"] + -buffer["bytes"] % WORKSPACE_ALIGNMENT_BYTES
        self._binary.launch(addresses, stream, device)


class Model:
    """A saved model. `variants` has one for each set of shapes, whose `inputs` and `outputs` are as those of a kernel.

    States are outputs whose arrays the caller gives, with the values before the call.
    """

    def __init__(self, folder: str | Path = Path(__file__).parent) -> None:
        self.metadata: dict[str, Any] = json.loads((Path(folder) / "metadata.json").read_text(encoding="utf-8"))
        self.name: str = self.metadata["name"]
        names = [f"{self.name}_{number}" if number else self.name for number in range(len(self.metadata["variants"]))]
        self.variants = [_Variant(Path(folder), *each) for each in zip(names, self.metadata["variants"], strict=True)]

    def __call__(self, **arrays: Any) -> dict[str, Any]:
        """Run the model on arrays by name and return the outputs by name."""
        return self.run(arrays)

    def run(
        self, arrays: Mapping[str, Any], out: Mapping[str, Any] | None = None, states: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Run the variant for the arrays' shapes and return the outputs by name, those of `out` if given.

        The arrays of `states` are updated. Raises TypeError and ValueError for arrays that do not fit, and IndexError for an
        index from data that is out of range.
        """
        given = states or {}
        variant = self._variant(arrays, given)
        if given.keys() != variant.states:
            raise TypeError(f"expected the states {sorted(variant.states)}, got {sorted(given)}")
        if both := sorted(given.keys() & (out or {}).keys()):
            raise TypeError(f"expected {', '.join(both)} in states alone, got it in out too")
        out = {**(out or {}), **given}
        library, like = _check(variant.inputs, variant.outputs, arrays, out, is_host=True)
        results = _make_results(library, variant.outputs, out, like)
        with _noted_writes(library, out):
            variant.launch(
                [library.address(arrays[b["name"]]) for b in variant.inputs],
                [library.address(results[b["name"]]) for b in variant.outputs],
            )
        return {name: array for name, array in results.items() if name not in variant.states}

    def _variant(self, arrays: Mapping[str, Any], states: Mapping[str, Any]) -> _Variant:
        first, *others = self.variants
        given = {name: list(getattr(array, "shape", ())) for name, array in {**arrays, **states}.items()}
        if not others or given.keys() != {b["name"] for b in first.choosing}:
            return first  # whose check says what is wrong
        for variant in self.variants:
            if all(given[b["name"]] == b["shape"] for b in variant.choosing):
                return variant
        known = "; ".join(", ".join(f"{b['name']}{b['shape']}" for b in variant.choosing) for variant in self.variants)
        shown = ", ".join(f"{name}{shape}" for name, shape in given.items())
        raise ValueError(f"there is no variant for the shapes {shown}; there are {known}")


class _Variant:
    """The shared object of a model for one set of shapes, with its weights."""

    def __init__(self, folder: Path, name: str, entry: Mapping[str, Any]) -> None:
        plan, files = entry["plan"], entry["files"]
        self.inputs = [_tensor(*each, role="input") for each in plan["inputs"]]
        self.outputs = [_tensor(*each, role="output") for each in (*plan["outputs"], *plan.get("states", ()))]
        self.states = {name for name, *_ in plan.get("states", ())}
        self.choosing = [*self.inputs, *(b for b in self.outputs if b["name"] in self.states)]
        self._workspace_bytes: int = plan["arena_bytes"]
        self._weights, self._packed = (_Block((folder / files[kind]).read_bytes()) for kind in ("weights", "packed"))
        self._run = _load(folder / files["binary"])[f"{name}_run"]
        self._run.restype = ctypes.c_long

    def launch(self, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        """Run the model on addresses, in the order of its inputs and outputs."""
        status, workspace = (ctypes.c_longlong * 4)(), _Block(bytes(self._workspace_bytes))
        listed = [(ctypes.c_void_p * max(len(addresses), 1))(*addresses) for addresses in (inputs, outputs)]
        memory = [ctypes.c_void_p(block.address) for block in (workspace, self._weights, self._packed)]
        if self._run(*listed, *memory, status) >= 0:
            raise IndexError(f"an index from data is out of range: {status[2]}")


def _load(path: Path) -> ctypes.CDLL:
    """Load a copy of a library: for a known path the loader returns what it loaded before."""
    with tempfile.NamedTemporaryFile(suffix=".so") as file:
        file.write(path.read_bytes())
        file.flush()
        return ctypes.CDLL(file.name)


class _Block:
    """Bytes at an aligned address."""

    def __init__(self, content: bytes) -> None:
        self._memory = ctypes.create_string_buffer(len(content) + WORKSPACE_ALIGNMENT_BYTES)
        self.address = ctypes.addressof(self._memory)
        self.address += -self.address % WORKSPACE_ALIGNMENT_BYTES
        ctypes.memmove(self.address, content, len(content))


def _tensor(name: str, dtype: str, shape: Sequence[int], *, role: str) -> dict[str, Any]:
    """Return a tensor of a model as the metadata of kernels has buffers."""
    bits = re.search(r"\d+", dtype)
    size = math.prod(shape) * (int(bits[0]) // 8 if bits else 1)
    return {"name": name, "dtype": dtype, "shape": list(shape), "bytes": size, "role": role, "donated": False, "alignment": 1}


class _Host:
    """A shared object of a CPU kernel."""

    def __init__(self, metadata: Mapping[str, Any], folder: Path) -> None:
        self._launches = metadata["launches"]
        self._bytes = {b["symbol"]: b["bytes"] for b in metadata["buffers"]}
        self._status = [b["symbol"] for b in metadata["buffers"] if b["role"] == "status"]
        library = _load(folder / "kernel.so")
        self._entries = [library[launch["entry"]] for launch in self._launches]

    def launch(self, addresses: Mapping[str, int], stream: int, device: int) -> None:
        status = (ctypes.c_int64 * 4)()
        addresses = {**addresses, **dict.fromkeys(self._status, ctypes.addressof(status))}
        for launch, entry in zip(self._launches, self._entries, strict=True):
            for symbol in launch["zeroed"]:
                ctypes.memset(addresses[symbol], 0, self._bytes[symbol])
            entry(*(ctypes.c_void_p(addresses[each["symbol"]]) for each in launch["parameters"]))
            if status[0]:
                raise IndexError(f"an index from data is out of range: {status[2]}")


class _Device:
    """A cubin or code object, loaded at the first launch on each device."""

    def __init__(self, metadata: Mapping[str, Any], folder: Path) -> None:
        self._is_cuda = metadata["language"] == "cuda"
        self._launches = metadata["launches"]
        self._bytes = {b["symbol"]: b["bytes"] for b in metadata["buffers"]}
        self._arch = metadata["arch"]
        self._image = (folder / ("kernel.cubin" if self._is_cuda else "kernel.hsaco")).read_bytes()
        self._functions: dict[int, list[ctypes.c_void_p]] = {}
        self._encode_cached = lru_cache(maxsize=256)(self._encode)
        try:
            self._driver: Any = ctypes.CDLL("libcuda.so.1" if self._is_cuda else "libamdhip64.so")
        except OSError as error:
            raise RuntimeError(f"there is no driver for {self._arch}: {error}") from error

    def launch(self, addresses: Mapping[str, int], stream: int, device: int) -> None:
        self._make_current(device)
        where = ctypes.c_void_p(stream)
        for number, (launch, function) in enumerate(zip(self._launches, self._current_functions(), strict=True)):
            for symbol in launch["zeroed"]:
                self._call("cuMemsetD8Async", "hipMemsetD8Async",
                           ctypes.c_void_p(addresses[symbol]), 0, ctypes.c_size_t(self._bytes[symbol]), where)  # fmt: skip
            values: list[Any] = []
            for position, each in enumerate(launch["parameters"]):
                if each["kind"] == "buffer":
                    values.append(ctypes.c_uint64(addresses[each["symbol"]]))
                else:
                    values.append(self._encode_cached(number, position, addresses[each["buffer"]]))
            pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
            sizes = map(ctypes.c_uint, (*launch["grid"], *launch["block"], launch["dynamic_shared_bytes"]))
            self._call("cuLaunchKernel", "hipModuleLaunchKernel", function, *sizes, where, pointers, None)

    def _make_current(self, device: int) -> None:
        """Make the primary context of a CUDA device current in a thread that has none. HIP does so itself."""
        context = ctypes.c_void_p()
        if self._is_cuda:
            self._call("cuCtxGetCurrent", "", ctypes.byref(context))
            if not context.value:
                self._call("cuDevicePrimaryCtxRetain", "", ctypes.byref(context), device)
                self._call("cuCtxSetCurrent", "", context)

    def _current_functions(self) -> list[ctypes.c_void_p]:
        """Return the functions of the current device."""
        device = ctypes.c_int()
        self._call("cuCtxGetDevice", "hipGetDevice", ctypes.byref(device))
        if device.value not in self._functions:
            module = ctypes.c_void_p()
            self._call("cuModuleLoadData", "hipModuleLoadData", ctypes.byref(module), self._image)
            functions = []
            for launch in self._launches:
                function = ctypes.c_void_p()
                self._call("cuModuleGetFunction", "hipModuleGetFunction", ctypes.byref(function), module, launch["entry"].encode())
                dynamic_bytes = launch["dynamic_shared_bytes"]
                if self._is_cuda and dynamic_bytes and launch["resources"]["shared_bytes"] > MAX_DEFAULT_SHARED_BYTES:
                    self._call("cuFuncSetAttribute", "", function, MAX_DYNAMIC_SHARED_SIZE_BYTES, dynamic_bytes)
                functions.append(function)
            self._functions[device.value] = functions
        return self._functions[device.value]

    def _encode(self, launch: int, parameter: int, address: int) -> Any:
        """Return a tensor map: 128 bytes at an address that is a multiple of 128."""
        view = self._launches[launch]["parameters"][parameter]
        storage = (ctypes.c_ubyte * (2 * view["bytes"]))()
        start = -ctypes.addressof(storage) % view["alignment"]
        aligned = (ctypes.c_ubyte * view["bytes"]).from_buffer(storage, start)
        rank = len(view["extents"])
        tensor = (
            ctypes.byref(aligned), DATA_TYPES[view["data_type"]], ctypes.c_uint32(rank),
            ctypes.c_void_p(address + view["offset_bytes"]), (ctypes.c_uint64 * rank)(*view["extents"]),
            (ctypes.c_uint64 * max(1, rank - 1))(*view["strides_bytes"]),
        )  # fmt: skip
        steps = (ctypes.c_uint32 * rank)(*view["element_strides"])
        modes = (0, SWIZZLES[view["swizzle_bytes"]], L2_PROMOTIONS[view["l2_promotion_bytes"]], 0)
        if view["mode"] == "tiled":
            self._call("cuTensorMapEncodeTiled", "", *tensor, (ctypes.c_uint32 * rank)(*view["box"]), steps, *modes)
        else:
            corners = ((ctypes.c_int * (rank - 2))(*view[corner]) for corner in ("lower_corner", "upper_corner"))
            self._call("cuTensorMapEncodeIm2col", "", *tensor, *corners, *map(ctypes.c_uint32, view["box"]), steps, *modes)
        version = ctypes.c_int()
        self._call("cuDriverGetVersion", "", ctypes.byref(version))
        steps_bytes = zip(view["extents"][1:], view["strides_bytes"], strict=True)
        size_bytes = sum((e - 1) * step for e, step in steps_bytes) + view["extents"][0] * ITEM_BYTES[view["data_type"]]
        if version.value <= LAST_DRIVER_TO_FIX and size_bytes < SMALL_BYTES:
            aligned[10] &= ~(1 << 5)
        return aligned

    def _call(self, cuda: str, hip: str, *arguments: Any) -> None:
        name = cuda if self._is_cuda else hip
        status = self._driver[name](*arguments)
        if status:
            raise RuntimeError(f"{name} failed with error {status}; the kernel is for {self._arch}")


@dataclass(frozen=True)
class _Library:
    """Operations on the arrays of one library."""

    address: Callable[[Any], int]
    is_dense: Callable[[Any], bool]
    empty: Callable[[Sequence[int], str, Any], Any]  # shape, dtype, an array of the same device
    copy: Callable[[Any, Any], object]
    stream: Callable[[Any], int]
    device: Callable[[Any], AbstractContextManager[object]]
    ordinal: Callable[[Any], int]  # number of the array's device
    is_writeable: Callable[[Any], bool]
    note_write: Callable[[Any], object]  # tells the library that an array was written


def _numpy() -> _Library:
    numpy = import_module("numpy")

    def empty(shape: Sequence[int], dtype: str, like: Any) -> Any:
        return numpy.empty(tuple(shape), _numpy_dtype(numpy, dtype))

    return _Library(
        lambda a: int(a.ctypes.data),
        lambda a: bool(a.flags.c_contiguous),
        empty,
        numpy.copyto,
        lambda _: 0,
        lambda _: nullcontext(),
        lambda _: 0,
        lambda a: bool(a.flags.writeable),
        lambda _: None,
    )


def _cupy() -> _Library:
    cupy = import_module("cupy")

    def empty(shape: Sequence[int], dtype: str, like: Any) -> Any:
        return cupy.empty(tuple(shape), _numpy_dtype(cupy, dtype))

    return _Library(
        lambda a: int(a.data.ptr), lambda a: bool(a.flags.c_contiguous), empty, cupy.copyto,
        lambda _: int(cupy.cuda.get_current_stream().ptr), lambda a: a.device, lambda a: int(a.device.id),
        lambda _: True, lambda _: None,
    )  # fmt: skip


def _torch() -> _Library:
    torch = import_module("torch")

    def empty(shape: Sequence[int], dtype: str, like: Any) -> Any:
        return torch.empty(tuple(shape), dtype=getattr(torch, dtype), device=like.device)

    def note_write(array: Any) -> None:
        """Give a tensor a new version, so that torch computes no gradients from what it was."""
        if not array.is_inference():
            torch.autograd.graph.increment_version(array)

    return _Library(
        lambda a: int(a.data_ptr()), lambda a: a.is_contiguous() and not a.is_neg(), empty,
        lambda target, source: target.copy_(source),
        lambda a: int(torch.cuda.current_stream(a.device).cuda_stream) if a.is_cuda else 0,
        lambda a: torch.cuda.device(a.device) if a.is_cuda else nullcontext(), lambda a: a.device.index or 0,
        lambda _: True, note_write,
    )  # fmt: skip


_LIBRARIES = {"numpy": lru_cache(_numpy), "cupy": lru_cache(_cupy), "torch": lru_cache(_torch)}


def _library_of(array: Any, *, is_host: bool) -> _Library:
    name = "numpy" if array is None and is_host else type(array).__module__.partition(".")[0]
    wanted = ("numpy", "torch") if is_host else ("cupy", "torch")
    if name not in wanted or (name == "torch" and (array.device.type == "cpu") != is_host):
        where = "the CPU" if is_host else "the GPU"
        raise TypeError(f"expected arrays of {' or '.join(wanted)} on {where}, got {type(array).__name__}")
    return _LIBRARIES[name]()


def _numpy_dtype(library: Any, name: str) -> Any:
    """Return a dtype, or for one that numpy lacks an unsigned integer of its size (`import ml_dtypes` adds these)."""
    try:
        return library.dtype(name)
    except TypeError:
        return library.dtype(f"uint{16 if name == 'bfloat16' else 8}")


def _check(
    inputs: Sequence[Mapping[str, Any]],
    outputs: Sequence[Mapping[str, Any]],
    arrays: Mapping[str, Any],
    out: Mapping[str, Any],
    *,
    is_host: bool,
) -> tuple[_Library, Any]:
    """Check that arrays fit; return their library, and one of them."""
    names, results_names = ([b["name"] for b in buffers] for buffers in (inputs, outputs))
    if set(arrays) != set(names):
        raise TypeError(f"expected the inputs {', '.join(names)}, got {', '.join(map(str, arrays)) or 'none'}")
    if not set(out).issubset(results_names):
        raise TypeError(f"expected outputs among {', '.join(results_names)}, got {', '.join(map(str, out))}")
    given = [(b, arrays[b["name"]]) for b in inputs] + [(b, out[b["name"]]) for b in outputs if b["name"] in out]
    like = given[0][1] if given else None
    library = _library_of(like, is_host=is_host)
    for buffer, array in given:
        if _library_of(array, is_host=is_host) is not library or getattr(array, "device", None) != getattr(like, "device", None):
            raise TypeError("expected all arrays of one library, on one device")
        _check_array(library, buffer, array)
        if not is_host and library.address(array) % buffer["alignment"]:
            raise ValueError(f"{buffer['name']}: expected an address that is a multiple of {buffer['alignment']} bytes")
    _check_outputs(library, given, out)
    return library, like


def _check_outputs(library: _Library, given: Sequence[tuple[Any, Any]], out: Mapping[str, Any]) -> None:
    """Check that arrays of `out` can be written and share no memory, but an output with its own donated input."""
    spans = [(b, library.address(array), library.address(array) + b["bytes"]) for b, array in given]
    for buffer, start, end in (span for span in spans if span[0]["role"] == "output"):
        if not library.is_writeable(out[buffer["name"]]):
            raise ValueError(f"{buffer['name']}: expected an output that can be written")
        for other, first, last in spans:
            is_own = other is buffer or (other["donated"] and other["name"] == buffer["name"] and first == start)
            if start < last and first < end and not is_own:
                raise ValueError(f"{buffer['name']} shares memory with {other['name']}; give an output of its own")


def _make_results(library: _Library, outputs: Sequence[Mapping[str, Any]], out: Mapping[str, Any], like: Any) -> dict[str, Any]:
    made = {b["name"]: library.empty(b["shape"], b["dtype"], like) for b in outputs if b["name"] not in out}
    return {b["name"]: out.get(b["name"], made.get(b["name"])) for b in outputs}


@contextmanager
def _noted_writes(library: _Library, out: Mapping[str, Any]) -> Iterator[None]:
    """Tell the library of the caller's arrays that the launch in the block may have written, also if it fails."""
    try:
        yield
    finally:
        for array in out.values():
            library.note_write(array)


def _check_array(library: _Library, buffer: Mapping[str, Any], array: Any) -> None:
    given, expected = (list(array.shape), str(array.dtype).removeprefix("torch.")), (buffer["shape"], buffer["dtype"])
    raw = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}.get(buffer["dtype"])
    if given not in (expected, (buffer["shape"], raw)):
        raise ValueError(f"{buffer['name']}: expected {expected[1]}{expected[0]}, got {given[1]}{given[0]}")
    if not library.is_dense(array):
        raise ValueError(f"{buffer['name']}: expected a dense, row-major array")


def torch_operator(kernel: Kernel) -> Any:
    """Register the kernel as `torch.ops.roller.NAME`, which takes the inputs in order and returns the outputs."""
    torch = import_module("torch")
    inputs, outputs = kernel.inputs, kernel.outputs
    results = ", ".join(["Tensor"] * len(outputs))
    schema = f"({', '.join(f'Tensor x{i}' for i in range(len(inputs)))}) -> {results if len(outputs) == 1 else f'({results})'}"
    name = f"roller::{kernel.name}"

    def returned(tensors: list[Any]) -> Any:
        return tensors[0] if len(tensors) == 1 else tuple(tensors)

    def run(*tensors: Any) -> Any:
        dense = [tensor.resolve_neg().contiguous() for tensor in tensors]
        aligned = [t.clone() if t.data_ptr() % b["alignment"] else t for b, t in zip(inputs, dense, strict=True)]
        named = {b["name"]: tensor for b, tensor in zip(inputs, aligned, strict=True)}
        results = kernel.run(named)
        return returned([results[b["name"]] for b in outputs])

    def fake(*tensors: Any) -> Any:
        return returned([tensors[0].new_empty(b["shape"], dtype=getattr(torch, b["dtype"])) for b in outputs])

    torch.library.define(name, schema)
    torch.library.impl(name, "cpu" if kernel.is_host else "cuda", run)
    torch.library.register_fake(name, fake)
    return getattr(torch.ops.roller, kernel.name)
