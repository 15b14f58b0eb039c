"""Write the C program that runs a saved model on an NVIDIA device by the CUDA driver alone.

`model_host.c` has the launches as tables, and code that is the same for every model (model_host_code.c). `plan.bin` has
the steps, so the text does not grow with the depth of a model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from roller_svc.analysis.step_order import find_early_starts, find_predecessors
from roller_svc.errors import require
from roller_svc.ir.event_state import EVENT_WORDS
from roller_svc.ir.kernel import CompiledKernel, LaunchSpec, Resources
from roller_svc.ir.model_plan import FIRST_INPUT, CopyStep, KernelStep, ModelPlan, unroll_steps
from roller_svc.ir.program import TensorType
from roller_svc.ir.quoting import quote_comment, quote_string, require_identifier
from roller_svc.ir.tensor_map import MapMode, Swizzle, TensorMap
from roller_svc.runtime.saved.launch import LAST_DRIVER_TO_FIX, MAX_DEFAULT_SHARED_BYTES, SMALL_BYTES
from roller_svc.runtime.saved.metadata import data_type

COPY = -1
MAX_RANK = 5  # of a tensor map
_CODE = Path(__file__).with_name("model_host_code.c")
_SWIZZLES = {Swizzle.NONE: "NONE", Swizzle.B32: "32B", Swizzle.B64: "64B", Swizzle.B128: "128B"}
Rows = list[tuple[int, ...]]
Place = tuple[int, int]  # kernel, launch


@dataclass(frozen=True, slots=True)
class HostFiles:
    """The names of a variant's files in the folder of a model."""

    weights: str
    plan: str
    header: str
    kernels: Sequence[str]  # the binary of each kernel of the plan


@dataclass(frozen=True, slots=True)
class HostProgram:
    """The contents of the files that a C program needs."""

    header: bytes
    code: bytes
    plan: bytes


@dataclass(slots=True)
class _Tables:
    """Rows of plan.bin, and the launches that they use."""

    plan: ModelPlan
    launches: dict[Place, int] = field(default_factory=dict)  # their rows in the text
    rows: dict[tuple[object, ...], Place] = field(default_factory=dict)  # what a row depends on → the first such launch
    addresses: Rows = field(default_factory=list)
    zeros: Rows = field(default_factory=list)
    before: Rows = field(default_factory=list)

    def add(self, steps: Sequence[KernelStep | CopyStep]) -> Rows:
        """Return the rows of steps, with the steps that each one comes after."""
        predecessors = find_predecessors(self.plan, steps)
        early = find_early_starts(self.plan, steps, predecessors)
        rows = (self._row(step, before) for step, before in zip(steps, predecessors, strict=True))
        return [(*row, int(is_early)) for row, is_early in zip(rows, early, strict=True)]

    def _row(self, step: KernelStep | CopyStep, before: Sequence[int]) -> tuple[int, ...]:
        first = len(self.addresses), len(self.zeros), len(self.before)
        self.before += [(each,) for each in before]
        if isinstance(step, CopyStep):
            launch, size = COPY, step.bytes
            self.addresses += [(each.slot, each.offset_bytes) for each in (step.target, step.source)]
        else:
            launch, size = self._launch_row(step.kernel, step.launch), 0
            used = [require(each, f"address of an argument of {step.node}") for each in step.arguments]
            self.addresses += [(each.slot, each.offset_bytes) for each in used]
            self.zeros += [(each.slot, each.offset_bytes, size_bytes) for each, size_bytes in step.zeroed]
        ends = len(self.addresses), len(self.zeros), len(self.before)
        parts = [number for start, end in zip(first, ends, strict=True) for number in (start, end - start)]
        return launch, size, *parts

    def _launch_row(self, kernel: int, number: int) -> int:
        """Return the row of a launch. Launches of one function that differ in their arguments alone share it."""
        place = kernel, number
        if place not in self.launches:
            launch = _launch(self.plan, place)
            maps = tuple((view, launch.operands.index(view.buffer)) for view in launch.tensor_maps)
            like = (kernel, launch.name, launch.grid, launch.block, launch.shared_bytes, launch.cooperative, len(launch.args))
            first = self.rows.setdefault((*like, maps), place)
            self.launches[place] = self.launches.get(first, len(self.rows) - 1)
        return self.launches[place]


def host_program(
    plan: ModelPlan, compiled: Sequence[CompiledKernel], name: str, files: HostFiles, *, is_graph: bool
) -> HostProgram:
    """Return the C program of a model's plan.

    Args:
        plan: the plan.
        compiled: its kernels.
        name: begins the names of the program's functions.
        files: what the program reads, and its header.
        is_graph: whether a call launches a CUDA graph of the steps. That of the fallback always does.
    """
    require_identifier(name)
    tables = _Tables(plan)
    listed = [tables.add(tuple(unroll_steps(steps))) for steps in (plan.prepack, plan.steps, plan.fallback)]
    data = _plan_bin(plan, listed, tables)
    places = list(tables.rows.values())
    modules = list(dict.fromkeys(kernel for kernel, _ in places))
    launches, maps = _launch_rows(plan, compiled, places, modules)
    operands = max((len(_launch(plan, each).operands) for each in places), default=0)
    views = max((len(_launch(plan, each).tensor_maps) for each in places), default=0)
    constants = {
        "SLOTS": FIRST_INPUT + len(plan.tensors), "MODULES": len(modules), "LAUNCHES": len(places),
        "MAX_OPERANDS": max(operands, 1), "MAX_MAPS": max(views, 1), "PLAN_WORDS": len(data), "STATE_WORDS": EVENT_WORDS,
        "IS_GRAPH": int(is_graph), "LAST_DRIVER_TO_FIX": LAST_DRIVER_TO_FIX,
    }  # fmt: skip
    text = "\n".join(
        [
            f"#include {quote_string(files.header)}",
            "#include <stdio.h>",
            "#include <stdlib.h>",
            "#include <string.h>",
            "",
            "typedef long long roller_word;",
            f"enum {{ {', '.join(f'{key} = {value}' for key, value in constants.items())} }};",
            f"static const char *const WEIGHTS_FILE = {quote_string(files.weights)};",
            f"static const char *const PLAN_FILE = {quote_string(files.plan)};",
            f"static const unsigned long long PLAN_HASH = {_hash_words(data):#x}ull;",
            _DECLARATIONS,
            _array("char *const", "module_files", [quote_string(files.kernels[each]) for each in modules] or ["NULL"]),
            _array("struct roller_launch", "launches", launches or [_NO_LAUNCH]),
            _array("struct roller_map", "maps", maps or [_NO_MAP]),
            "",
            _CODE.read_text(encoding="utf-8").replace("MODEL", name),
        ]
    )
    return HostProgram(_header(plan, name, modules, len(places), files).encode(), text.encode(), data.tobytes())


def _plan_bin(plan: ModelPlan, listed: Sequence[Rows], tables: _Tables) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    parts = [*listed, tables.addresses, tables.zeros, tables.before]
    sizes = [plan.weights_bytes, plan.read_weights_bytes, plan.packed_bytes, plan.arena_bytes]
    words = [value for rows in parts for row in rows for value in row]
    return np.array([*sizes, *map(len, parts), *words], "<i8")


def _hash_words(words: np.ndarray[tuple[int], np.dtype[np.int64]]) -> int:
    """Return the hash that ties the text to plan.bin: FNV-1a of words, with the high bits mixed into the low ones.

    Each step is a bijection of the hash for a word, and of the word for a hash: one changed word changes the result.
    """
    found = 0xCBF29CE484222325
    for word in words.astype(np.uint64).tolist():
        found = (found ^ word) * 0x100000001B3 % (1 << 64)
        found ^= found >> 32
    return found


def _launch(plan: ModelPlan, place: Place) -> LaunchSpec:
    kernel, number = place
    return plan.kernels[kernel].source.launches[number]


def _launch_rows(
    plan: ModelPlan, compiled: Sequence[CompiledKernel], places: Iterable[Place], modules: Sequence[int]
) -> tuple[list[str], list[str]]:
    """Return the rows of launches and of their tensor maps."""
    rows: list[str] = []
    maps: list[str] = []
    for kernel, number in places:
        launch, used = _launch(plan, (kernel, number)), compiled[kernel].resources[number]
        rows.append(_launch_row(launch, used, modules.index(kernel), len(maps)))
        maps += [_map_row(view, launch.operands.index(view.buffer)) for view in launch.tensor_maps]
    return rows, maps


def _launch_row(launch: LaunchSpec, used: Resources, module: int, first_map: int) -> str:
    asks_for_shared = bool(launch.shared_bytes) and used.shared_bytes > MAX_DEFAULT_SHARED_BYTES
    numbers = (launch.shared_bytes, int(launch.cooperative), int(asks_for_shared), len(launch.args), first_map)
    extents = f"{{{', '.join(map(str, launch.grid))}}}, {{{', '.join(map(str, launch.block))}}}"
    return f"{{{module}, {quote_string(launch.name)}, {extents}, {', '.join(map(str, (*numbers, len(launch.tensor_maps))))}}}"


def _map_row(view: TensorMap, operand: int) -> str:
    def padded(values: Sequence[int]) -> str:
        return f"{{{', '.join(map(str, (*values, *[0] * (MAX_RANK - len(values)))))}}}"

    is_im2col, is_small = view.mode is MapMode.IM2COL, view.end_bytes - view.offset_bytes < SMALL_BYTES
    fields = (
        operand, view.offset_bytes, int(is_im2col), int(is_small), f"CU_TENSOR_MAP_DATA_TYPE_{data_type(view)}", view.rank,
        padded(view.extents), padded(view.strides_bytes), padded(view.box), padded(view.element_strides), padded(view.lower),
        padded(view.upper), f"CU_TENSOR_MAP_SWIZZLE_{_SWIZZLES[view.swizzle]}",
    )  # fmt: skip
    return f"{{{', '.join(map(str, fields))}}}"


def _array(type_: str, name: str, items: Iterable[str]) -> str:
    return f"static const {type_} {name}[] = {{\n" + "".join(f"    {item},\n" for item in items) + "};"


_DECLARATIONS = f"""struct roller_launch {{
  int module;
  const char *entry;
  unsigned int grid[3], block[3], shared_bytes;
  int is_cooperative, asks_for_shared, args, first_map, maps;
}};
struct roller_map {{ /* a tensor map: of the operand of a launch with this number */
  int operand;
  roller_word offset;
  int is_im2col, is_small;
  CUtensorMapDataType type;
  cuuint32_t rank;
  cuuint64_t extents[{MAX_RANK}], strides[{MAX_RANK}];
  cuuint32_t box[{MAX_RANK}], steps[{MAX_RANK}];
  int lower[{MAX_RANK}], upper[{MAX_RANK}];
  CUtensorMapSwizzle swizzle;
}};"""
_NO_LAUNCH = '{0, "", {0, 0, 0}, {0, 0, 0}, 0, 0, 0, 0, 0, 0}'  # arrays without elements are not ISO C
_NO_MAP = "{0, 0, 0, 0, CU_TENSOR_MAP_DATA_TYPE_UINT8, 0, {0}, {0}, {0}, {0}, {0}, {0}, CU_TENSOR_MAP_SWIZZLE_NONE}"


def _header(plan: ModelPlan, name: str, modules: Sequence[int], num_launches: int, files: HostFiles) -> str:
    """Return the declarations for C and C++ callers."""
    listed = [(f"inputs[{i}]", each) for i, each in enumerate(plan.inputs)]
    listed += [(f"outputs[{i}]", each) for i, each in enumerate(plan.outputs)]
    listed += [(f"outputs[{i}], updated in place", each) for i, each in enumerate(plan.states, len(plan.outputs))]
    about = (
        f"Model {plan.name} for {plan.target}. Compile model_host.c with it, and link with -lcuda.\n"
        "Arrays are dense and row-major, on the device, at multiples of 64 bytes.\n"
        f"{name}_open loads the model of a folder with a current context. {name}_call starts a call on a stream; a call with a\n"
        "cooperative launch returns when it is done, with CUDA_ERROR_LAUNCH_TIMEOUT if a wait in it reached its deadline.\n"
        "A model has memory of its own for one call at a time. Every function returns the status of the driver. Of\n"
        f"{name}_open, CUDA_ERROR_FILE_NOT_FOUND: a file is missing; CUDA_ERROR_INVALID_IMAGE: {files.plan} is not the one that\n"
        f"was saved with this program, {files.weights} has another size, or a binary is not one of the device."
    )
    about += "".join(f"\n{place}: {tensor}, {_shown(type_)}" for place, (tensor, type_) in listed)
    guard = f"{name}_MODEL_H"
    slots = FIRST_INPUT + len(plan.tensors)
    return "\n".join(
        [
            quote_comment(about) + f"#ifndef {guard}",
            f"#define {guard}",
            "#include <cuda.h>",
            "#ifdef __cplusplus",
            'extern "C" {',
            "#endif",
            f"enum {{ {name}_INPUTS = {len(plan.inputs)}, {name}_OUTPUTS = {len(plan.outputs) + len(plan.states)} }};",
            f"struct {name} {{ /* private */",
            f"  CUmodule modules[{max(len(modules), 1)}];",
            f"  CUfunction functions[{max(num_launches, 1)}];",
            "  CUdeviceptr weights, packed, arena;",
            f"  CUdeviceptr slots[{slots}];",
            "  CUgraphExec graph;",
            "  void *plan;",
            "  int uses_fallback; /* the device holds too few blocks at once: a call is a CUDA graph of separate kernels */",
            "};",
            f"CUresult {name}_open(struct {name} *model, const char *folder);",
            f"CUresult {name}_call(struct {name} *model, const CUdeviceptr *inputs, const CUdeviceptr *outputs, CUstream stream);",
            f"void {name}_close(struct {name} *model);",
            "#ifdef __cplusplus",
            "}",
            "#endif",
            "#endif",
            "",
        ]
    )


def _shown(type_: TensorType) -> str:
    return f"{type_.dtype.value}{list(type_.shape)}"
