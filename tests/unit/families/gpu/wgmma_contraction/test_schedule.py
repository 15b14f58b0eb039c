"""Schedule trees of wgmma contractions: legality, mutations that the verifier rejects, tile scheduling, NVRTC,
emulation.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
from cases_matrix import chosen, contraction, tiles, unit
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import every, examples, slow
from schedule_support import program

from roller_svc import hardware
from roller_svc.analysis.index_ranges import fold
from roller_svc.compiler.backends import load_emulated
from roller_svc.compiler.lower_and_emit import emit_plan, lower
from roller_svc.compiler.partition_cache import partition
from roller_svc.errors import ScheduleError
from roller_svc.families.common.gpu.matrix.mainloop import LANE
from roller_svc.families.common.gpu.matrix.stream_k import partial_tiles
from roller_svc.families.common.gpu.warpgroups.cluster_reduction import PARTIAL
from roller_svc.families.common.gpu.warpgroups.mainloop import WARP
from roller_svc.families.common.gpu.warpgroups.tile_scheduler import BLOCK, K_RANK, PersistentTiles, PingpongTiles
from roller_svc.families.common.view import GemmView
from roller_svc.ir.accumulation import accumulator_precision
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Const, Expr, substitute
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.index import eq, num, ref
from roller_svc.ir.kernel import CompiledKernel, KernelSource
from roller_svc.ir.program import TensorProgram
from roller_svc.ir.report import Plan
from roller_svc.ir.rprogram import PipelineOptions, RProgram
from roller_svc.ir.schedule import (
    Barrier,
    Branch,
    Compute,
    CpAsync,
    CpAsyncWaitGroup,
    Let,
    Loop,
    Node,
    RemoteShared,
    RoundFragment,
    ScheduleTree,
    Storage,
    iter_nodes,
)
from roller_svc.ir.schedule_hopper import (
    ClusterBarrier,
    FenceMbarrierInit,
    FenceProxyAsync,
    MbarrierInit,
    MbarrierWait,
    NamedBarrier,
    SetMaxNReg,
    TmaLoad,
    TmaStore,
    WarpBarrier,
    WarpgroupMma,
    WgmmaCommitGroup,
    WgmmaFence,
    WgmmaWaitGroup,
)
from roller_svc.ir.schedule_text import render
from roller_svc.schedule.legality import check
from roller_svc.semantics.compare import agrees
from roller_svc.semantics.inputs import random_inputs
from roller_svc.semantics.interpreter import evaluate
from roller_svc.toolchain import compile_source
from roller_svc.toolchain.binaries.sass import sass_functions, sass_text
from roller_svc.toolchain.nvrtc import ptxas_warnings
from tests.unit.families.gpu.mma_contraction.test_schedule import changed, without

HOPPER = hardware.load("nvidia-h200-sxm")
Nodes = tuple[Node, ...]

NT, NN = "C[m, n] +=! A[m, k] * B[n, k]", "C[m, n] +=! A[m, k] * B[k, n]"


def packed_rows(n: int, k: int, group: int) -> str:
    """A product whose weights are packed along k, with zero points of 8."""
    value = "(Q[n, k // 8] >> (k % 8 * 4)).call(`bitwise_and`, [15]) - 8"
    weights = f"W[n, k] = ({value}).cast(`float16`) * S[n, k // {group}] where n in {n}, k in {k}"
    return f"{weights}; {NT.replace('B[', 'W[')}"


def float_zeros(n: int, k: int, group: int) -> str:
    """A product whose weights are packed along k, with a zero point in float for each group."""
    value = "(Q[n, k // 8] >> (k % 8 * 4)).call(`bitwise_and`, [15]).cast(`float16`)"
    weights = f"W[n, k] = ({value} - Z[n, k // {group}]) * S[n, k // {group}] where n in {n}, k in {k}"
    return f"{weights}; {NT.replace('B[', 'W[')}"


def looked_up(n: int, k: int, group: int, scale: str = "") -> str:
    """A product whose weights are values that four bits look up."""
    value = f"T[(Q[n, k // 8] >> (k % 8 * 4)).call(`bitwise_and`, [15])] * S[n, k // {group}]{scale}"
    return f"W[n, k] = {value} where n in {n}, k in {k}; {NT.replace('B[', 'W[')}"


def packed_columns(word: str, place: str, zeros: str) -> str:
    """A product whose weights and zero points are packed, in rows along n (AWQ, GPTQ)."""
    field = "({word} >> ({place} * 4)).call(`bitwise_and`, [15]).cast(`int32`)"
    value = f"{field.format(word=word, place=place)} - {field.format(word=zeros, place='(n % 8)')}"
    return f"W[k, n] = ({value}).cast(`float16`) * S[k // 64, n] where k in 200, n in 136; {NN.replace('B[', 'W[')}"


# by hand: unit, expression, inputs, block, warpgroup, more of the rProgram
KINDS: dict[str, tuple[str, str, dict[str, str], tuple[int, int, int], tuple[int, int], dict[str, object]]] = {
    "bulk copies": (
        "wgmma_f16", NT, {"A": "float16 200 136", "B": "float16 104 136"}, (128, 64, 64), (64, 64), {"stages": 3}),
    "one consumer, one stage": (
        "wgmma_bf16", NT, {"A": "bfloat16 70 64", "B": "bfloat16 40 64"}, (64, 40, 64), (64, 40), {"stages": 1}),
    "along m and n": (
        "wgmma_f16", "C[m, n] +=! A[k, m] * B[k, n]; Y[m, n] = relu(C[m, n] + v[n])",
        {"A": "float16 72 136", "B": "float16 72 96", "v": "float16 96"}, (128, 96, 32), (64, 96), {"stages": 4}),
    "copied by threads": (
        "wgmma_f16", NN, {"A": "float16 130 74", "B": "float16 74 66"}, (128, 64, 64), (64, 64), {"stages": 4}),
    "copied by threads, two stages": (
        "wgmma_f16", NT, {"A": "float16 70 210", "B": "float16 20 210"}, (64, 24, 64), (64, 24), {"stages": 2}),
    "through registers": (
        "wgmma_f16", NT, {"A": "float16 129 77", "B": "float16 35 77"}, (128, 32, 32), (64, 32), {"stages": 3}),
    "one of them computed": (
        "wgmma_f16", "C[m, n] +=! A[m, k] * relu(B[k, n])", {"A": "float16 64 96", "B": "float16 96 128"},
        (64, 128, 32), (64, 64), {"stages": 3}),
    "tf32": (
        "wgmma_tf32", NT, {"A": "float32 100 68", "B": "float32 33 68"}, (64, 40, 32), (64, 40), {"stages": 3}),
    "tf32, turned": (
        "wgmma_tf32", NN, {"A": "float32 100 70", "B": "float32 70 48"}, (64, 48, 32), (64, 48), {"stages": 2}),
    "bytes": (
        "wgmma_s8", "C[m, n] +=! A[m, k].cast(`int32`) * B[n, k].cast(`int32`)",
        {"A": "int8 100 160", "B": "int8 48 160"}, (64, 48, 64), (64, 48), {"stages": 3}),
    "float8": (
        "wgmma_e4m3", "C[m, n] +=! A[m, k].cast(`float32`) * B[k, n].cast(`float32`)",
        {"A": "float8_e4m3fn 64 96", "B": "float8_e5m2 96 56"}, (64, 56, 32), (64, 56), {"stages": 3}),
    "persistent": (
        "wgmma_f16", "C[b, m, n] +=! A[b, m, k] * B[b, k, n]", {"A": "float16 3 200 80", "B": "float16 3 80 88"},
        (64, 32, 32), (64, 32), {"stages": 3, "persistent_blocks": 5, "raster": 3}),
    "persistent, copied by threads": (
        "wgmma_f16", NT, {"A": "float16 250 90", "B": "float16 100 90"}, (64, 32, 32), (64, 32),
        {"stages": 4, "persistent_blocks": 4}),
    "persistent, more stages than k-tiles": (
        "wgmma_f16", f"{NT}; Y[m, n] = gelu(C[m, n])", {"A": "float16 400 72", "B": "float16 200 72"}, (128, 64, 64),
        (64, 64), {"stages": 5, "persistent_blocks": 3}),
    "ping-pong": (
        "wgmma_f16", f"{NT}; Y[m, n] = gelu(C[m, n] + v[n])",
        {"A": "float16 200 136", "B": "float16 104 136", "v": "float16 104"}, (64, 32, 32), (64, 32),
        {"stages": 3, "persistent_blocks": 3, "pingpong": True}),
    "ping-pong, batch, odd tiles": (
        "wgmma_bf16", "C[b, m, n] +=! A[b, m, k] * B[b, k, n]; Y[b, m, n] = tanh(C[b, m, n])",
        {"A": "bfloat16 3 200 80", "B": "bfloat16 3 80 88"}, (128, 32, 32), (128, 32),
        {"stages": 2, "persistent_blocks": 5, "raster": 2, "pingpong": True}),
    "ping-pong, one tile": (
        "wgmma_f16", NT, {"A": "float16 60 72", "B": "float16 24 72"}, (64, 32, 32), (64, 32),
        {"stages": 3, "persistent_blocks": 2, "pingpong": True}),
    "ping-pong, copied by threads, one stage": (
        "wgmma_f16", NT, {"A": "float16 250 90", "B": "float16 100 90"}, (64, 32, 32), (64, 32),
        {"stages": 1, "persistent_blocks": 2, "pingpong": True}),
    "ping-pong, float32 by rows": (
        "wgmma_f16", "C[m, n] +=! A[m, k].cast(`float32`) * B[n, k].cast(`float32`); Y[m, n] = gelu(C[m, n])",
        {"A": "float16 131 77", "B": "float16 67 77"}, (64, 24, 32), (64, 24),
        {"stages": 3, "persistent_blocks": 2, "pingpong": True}),
    "ping-pong, shared along m": (
        "wgmma_f16", NT, {"A": "float16 300 136", "B": "float16 360 136"}, (64, 64, 64), (64, 64),
        {"stages": 3, "cluster": (2, 1), "persistent_blocks": 4, "raster": 2, "pingpong": True}),
    "ping-pong, widest, shared along m": (
        "wgmma_f16", f"{NT}; Y[m, n] = gelu(C[m, n])", {"A": "float16 500 72", "B": "float16 360 72"}, (128, 176, 64),
        (128, 176), {"stages": 5, "cluster": (2, 1), "persistent_blocks": 2, "pingpong": True}),
    "ping-pong, promoted": (
        "wgmma_e4m3", "C[m, n] +=! A[m, k].cast(`float32`) * B[n, k].cast(`float32`)",
        {"A": "float8_e4m3fn 200 160", "B": "float8_e4m3fn 56 160"}, (64, 24, 32), (64, 24),
        {"stages": 3, "persistent_blocks": 3, "pingpong": True}),
    "streamed": (
        "wgmma_f16", NT, {"A": "float16 130 328", "B": "float16 72 328"}, (64, 64, 32), (64, 64),
        {"stages": 3, "stream_k_blocks": 5}),
    "streamed, copied by threads": (
        "wgmma_f16", NT, {"A": "float16 130 330", "B": "float16 72 330"}, (64, 64, 32), (64, 64),
        {"stages": 4, "stream_k_blocks": 5}),
    "shared along m": (
        "wgmma_f16", NT, {"A": "float16 300 136", "B": "float16 104 136"}, (64, 64, 64), (64, 64),
        {"stages": 3, "cluster": (2, 1)}),
    "shared along n, persistent": (
        "wgmma_f16", NN, {"A": "float16 300 136", "B": "float16 136 360"}, (64, 64, 64), (64, 64),
        {"stages": 3, "cluster": (1, 2), "persistent_blocks": 4, "raster": 2}),
    "shared along both": (
        "wgmma_f16", "C[m, n] +=! A[k, m] * B[k, n]", {"A": "float16 136 304", "B": "float16 136 360"}, (128, 128, 32),
        (64, 128), {"stages": 2, "cluster": (2, 2)}),
    "k split": (
        "wgmma_f16", f"{NT}; Y[m, n] = relu(C[m, n] + v[n])",
        {"A": "float16 200 328", "B": "float16 104 328", "v": "float16 104"}, (128, 64, 64), (64, 64),
        {"stages": 3, "cluster_k": 4}),
    "k split, copied by threads": (
        "wgmma_f16", NT, {"A": "float16 70 330", "B": "float16 77 330"}, (64, 64, 32), (64, 64),
        {"stages": 4, "cluster_k": 2}),
    "k split in eight, through registers": (
        "wgmma_bf16", "C[b, m, n] +=! A[b, m, k] * B[b, n, k]; Y[b, m, n] = C[b, m, n] * 0.5 + R[b, m, n]",
        {"A": "bfloat16 2 17 533", "B": "bfloat16 2 35 533", "R": "bfloat16 2 17 35"}, (64, 40, 64), (64, 40),
        {"stages": 2, "cluster_k": 8}),
    "k split, shared along m": (
        "wgmma_f16", NT, {"A": "float16 300 328", "B": "float16 104 328"}, (64, 64, 64), (64, 64),
        {"stages": 3, "cluster": (2, 1), "cluster_k": 4}),
    "k split, shared along both": (
        "wgmma_f16", "C[m, n] +=! A[k, m] * B[k, n]", {"A": "float16 168 304", "B": "float16 168 360"}, (128, 128, 32),
        (64, 128), {"stages": 5, "cluster": (2, 2), "cluster_k": 2}),
    "k split, bytes": (
        "wgmma_s8", "C[m, n] +=! A[m, k].cast(`int32`) * B[n, k].cast(`int32`)",
        {"A": "int8 100 416", "B": "int8 48 416"}, (64, 48, 64), (64, 48), {"stages": 3, "cluster_k": 4}),
    "k split, float8": (
        "wgmma_e4m3", "C[m, n] +=! A[m, k].cast(`float32`) * B[k, n].cast(`float32`)",
        {"A": "float8_e4m3fn 64 160", "B": "float8_e5m2 160 56"}, (64, 56, 32), (64, 56),
        {"stages": 5, "cluster_k": 2}),
    "k split, tf32": (
        "wgmma_tf32", NT, {"A": "float32 100 132", "B": "float32 33 132"}, (64, 40, 32), (64, 40),
        {"stages": 3, "cluster_k": 2}),
    "packed": (
        "wgmma_f16", packed_rows(72, 264, 24),
        {"A": "float16 70 264", "Q": "int32 72 33", "S": "float16 72 11"}, (64, 40, 64), (64, 40), {"stages": 3}),
    "packed, one k-tile": (
        "wgmma_f16", packed_rows(256, 64, 64),
        {"A": "float16 40 64", "Q": "int32 256 8", "S": "float16 256 1"}, (64, 256, 64), (64, 256), {"stages": 1}),
    "packed, streamed": (
        "wgmma_f16", packed_rows(136, 512, 128),
        {"A": "float16 130 512", "Q": "int32 136 64", "S": "float16 136 4"}, (64, 64, 64), (64, 64),
        {"stages": 3, "stream_k_blocks": 4}),
    "packed, persistent": (
        "wgmma_f16", packed_rows(200, 320, 32),
        {"A": "float16 200 320", "Q": "int32 200 40", "S": "float16 200 10"}, (128, 64, 64), (64, 64),
        {"stages": 4, "persistent_blocks": 2}),
    "packed, three consumers": (
        "wgmma_f16", packed_rows(136, 320, 64), {"A": "float16 200 320", "Q": "int32 136 40", "S": "float16 136 5"},
        (192, 136, 64), (64, 136), {"stages": 3}),
    "looked up, k split": (
        "wgmma_f16", looked_up(72, 264, 24),
        {"A": "float16 70 264", "Q": "int32 72 33", "T": "float16 16", "S": "float16 72 11"}, (64, 40, 64), (64, 40),
        {"stages": 4, "cluster_k": 2}),
    "looked up, two scales, persistent": (
        "wgmma_f16", looked_up(200, 320, 32, ".cast(`float16`) * R[n]"),
        {"A": "float16 200 320", "Q": "int32 200 40", "T": "float16 16", "S": "float8_e4m3fn 200 10",
         "R": "float16 200"}, (128, 64, 64), (64, 64), {"stages": 4, "persistent_blocks": 2}),
    "packed, zero points in float": (
        "wgmma_f16", float_zeros(72, 264, 24),
        {"A": "float16 70 264", "Q": "int32 72 33", "S": "float16 72 11", "Z": "float16 72 11"}, (64, 40, 64),
        (64, 40), {"stages": 3}),
    "packed bytes, k split": (
        "wgmma_f16", "W[n, k] = Q[n, k].cast(`float16`) * S[n]; C[m, n] +=! A[m, k] * W[n, k] where n in 72, k in 712",
        {"A": "float16 70 712", "Q": "int8 72 712", "S": "float16 72"}, (64, 72, 64), (64, 72),
        {"stages": 3, "cluster_k": 4}),
    "ping-pong, packed": (
        "wgmma_f16", packed_rows(200, 320, 32), {"A": "float16 200 320", "Q": "int32 200 40", "S": "float16 200 10"},
        (64, 64, 64), (64, 64), {"stages": 4, "persistent_blocks": 2, "pingpong": True}),
    "packed in bytes, k split": (
        "wgmma_f16", "W[n, k] = ((Q[n, k // 2].cast(`int32`) >> (k % 2 * 4)).call(`bitwise_and`, [15]) - 8)"
        f".cast(`float16`) * S[n, k // 32] where n in 72, k in 264; {NT.replace('B[', 'W[')}",
        {"A": "float16 70 264", "Q": "uint8 72 132", "S": "float16 72 9"}, (64, 40, 64), (64, 40),
        {"stages": 4, "cluster_k": 2}),
    "float8 weights": (
        "wgmma_f16", "W[n, k] = Q[n, k].cast(`float16`) * S[n, k // 32]; C[m, n] +=! A[m, k] * W[n, k] where n in 72",
        {"A": "float16 70 264", "Q": "float8_e4m3fn 72 264", "S": "float16 72 9"}, (64, 40, 64), (64, 40),
        {"stages": 3}),
    "float8 converted, k split": (
        "wgmma_f16", "W[k, n] = Q[k, n].cast(`float16`); C[m, n] +=! A[m, k] * W[k, n]",
        {"A": "float16 70 264", "Q": "float8_e5m2 264 72"}, (64, 64, 64), (64, 64), {"stages": 3, "cluster_k": 2}),
    "float8 converted, fewer rows than k": (
        "wgmma_f16", "W[k, n] = (Q[k, n].cast(`float16`)).when([k < 72], 0.0) where k in 88; "
        "C[m, n] +=! A[m, k] * W[k, n]",
        {"A": "float16 70 88", "Q": "float8_e5m2 72 72"}, (64, 64, 32), (64, 64), {"stages": 3}),
    "float8 converted, rows shorter than k": (
        "wgmma_f16", "W[n, k] = (Q[n, k].cast(`float16`)).when([k < 72], 0.0) where k in 88; "
        "C[m, n] +=! A[m, k] * W[n, k]",
        {"A": "float16 70 88", "Q": "float8_e5m2 40 72"}, (64, 40, 32), (64, 40), {"stages": 3}),
    "packed columns (AWQ)": (
        "wgmma_f16", packed_columns("Q[k, n // 8]", "(n % 2 * 4 + n % 8 // 2)", "Z[k // 64, n // 8]"),
        {"A": "float16 70 200", "Q": "int32 200 17", "Z": "int32 4 17", "S": "float16 4 136"}, (64, 96, 32), (64, 96),
        {"stages": 3}),
    "packed columns (GPTQ), k split": (
        "wgmma_f16", packed_columns("Q[k // 8, n]", "(k % 8)", "Z[k // 64, n // 8]"),
        {"A": "float16 70 200", "Q": "int32 25 136", "Z": "int32 4 17", "S": "float16 4 136"}, (64, 64, 64), (64, 64),
        {"stages": 4, "cluster_k": 2}),
    "packed on both sides": (
        "wgmma_f16", "V[m, k] = P[m, k].cast(`float16`) * T[m]; W[n, k] = Q[n, k].cast(`float16`) * S[n]; "
        "C[m, n] +=! V[m, k] * W[n, k] where m in 70, n in 40, k in 136",
        {"P": "int8 70 136", "T": "float16 70", "Q": "int8 40 136", "S": "float16 40"}, (64, 40, 64), (64, 40),
        {"stages": 2}),
    "results of two tensors": (
        "wgmma_bf16", f"{NT}; Y[m, n] = C[m, n] * 0.5 + R[m, n]; Z[m, n] = tanh(Y[m, n])",
        {"A": "bfloat16 100 64", "B": "bfloat16 72 64", "R": "bfloat16 100 72"}, (128, 80, 32), (64, 80),
        {"stages": 3}),
    "results turned": (
        "wgmma_f16", f"{NT}; Y[n, m] = C[m, n] + v[m]", {"A": "float16 88 64", "B": "float16 72 64", "v": "float16 88"},
        (64, 96, 64), (64, 96), {"stages": 2}),
    "results permuted, rows beyond the end": (
        "wgmma_f16", "C[b, h, i, n] +=! A[b, h, i, k] * B[b, n, k]; Y[b, i, h, n] = relu(C[b, h, i, n])",
        {"A": "float16 3 5 16 64", "B": "float16 3 64 64"}, (64, 64, 64), (64, 64), {"stages": 2}),
    "results permuted, columns beyond the end": (
        "wgmma_f16", "C[b, m, h, e] +=! A[b, m, k] * B[b, h, e, k]; Y[b, h, m, e] = relu(C[b, m, h, e])",
        {"A": "float16 3 64 64", "B": "float16 3 5 32 64"}, (64, 128, 64), (64, 128), {"stages": 2}),
    "a bias of rows": (
        "wgmma_bf16", f"{NT}; Y[m, n] = sigmoid(C[m, n] + v[m])",
        {"A": "bfloat16 88 64", "B": "bfloat16 72 64", "v": "bfloat16 88"}, (64, 48, 64), (64, 48),
        {"persistent_blocks": 3}),
    "two fragments": (
        "wgmma_f16", NN, {"A": "float16 260 80", "B": "float16 80 64"}, (256, 32, 32), (128, 32), {"stages": 3}),
    "streamed, a window with padded steps": (
        "wgmma_f16", "Y[b, y, x, f] +=! X[b, y + r, x + s, c] * W[f, r, s, c] where r in 3, s in 3, y in 8, x in 8",
        {"X": "float16 2 10 10 24", "W": "float16 32 3 3 24"}, (64, 32, 16), (64, 32),
        {"stages": 3, "stream_k_blocks": 3}),
    "a window": (
        "wgmma_f16", "Y[b, y, x, f] +=! X[b, y + r, x + s, c] * W[r, s, c, f] where r in 3, s in 3, y in 10, x in 12",
        {"X": "float16 2 12 14 32", "W": "float16 3 3 32 48"}, (64, 48, 32), (64, 48), {"stages": 3}),
}  # fmt: skip


def trees(kind: str) -> tuple[ScheduleTree, ...]:
    _, text, inputs, *_ = KINDS[kind]
    found = contraction(text, HOPPER, **inputs)
    by_hand = made(found, kind)
    if by_hand.pipeline.stream_k_blocks:
        found = replace(found, stored=(*found.stored, partial_tiles(found.name, by_hand)))
    return lower(found, by_hand, HOPPER)


def made(group: KernelGroup, kind: str) -> RProgram:
    """The tiles of a kind."""
    name, _, _, block, part, more = KINDS[kind]
    return tiles(group, unit(HOPPER, name), block, part, reduce_threads=128, **more)


def source(kind: str) -> tuple[TensorProgram, KernelSource]:
    _, text, inputs, *_ = KINDS[kind]
    found = program(text, **inputs)
    groups = partition(found, HOPPER)
    return found, emit_plan(Plan((chosen(made(groups[0], kind)),)), found, groups, HOPPER)


# rules ---------------------------------------------------------------------------------------------------------------
def first_only(kind: type) -> Callable[[Node], Nodes | None]:
    """Under a condition that one lane of a warp meets."""
    return lambda node: (Branch(eq(ref(LANE), num(0)), (node,)),) if isinstance(node, kind) else None


def of_a_warp(kind: type) -> Callable[[Node], Nodes | None]:
    """Under a condition that one warp of a warpgroup meets."""
    return lambda node: (Branch(eq(ref(WARP), num(0)), (node,)),) if isinstance(node, kind) else None


def elected_below_a_lane(node: Node) -> Nodes | None:
    return (Branch(eq(ref(LANE), num(0)), (node,)),) if isinstance(node, Branch) and node.elect else None


def meeting_left_out(node: Node) -> Nodes | None:
    return () if isinstance(node, Barrier | ClusterBarrier) else None


def parts_not_stored(node: Node) -> Nodes | None:
    return () if isinstance(node, Compute) and node.tensor == PARTIAL else None


def remote_parts_written(node: Node) -> Nodes | None:
    if not isinstance(node, RemoteShared):
        return None
    return (replace(node, body=(Compute(node.remote, (num(0), num(0)), Const(0.0, DType.FLOAT32)), *node.body)),)


def parts_over_buffers_in_use(node: Node) -> Nodes | None:
    if not isinstance(node, Storage) or node.tensor != PARTIAL:
        return None
    return (replace(node, overlays=(*node.overlays, PARTIAL)),)


@pytest.mark.parametrize("kind", KINDS)
def test_trees_are_legal(kind: str) -> None:
    for tree in trees(kind):
        check(tree.body)
        assert render(tree.body)
    nodes = list(iter_nodes(trees(kind)[0].body))
    assert any(isinstance(node, WarpgroupMma) for node in nodes)
    assert any(isinstance(node, TmaLoad | TmaStore) for node in nodes) == bool(trees(kind)[0].tensor_maps)
    assert any(isinstance(node, CpAsync) for node in nodes) == ("copied by threads" in kind)
    assert any(isinstance(node, RemoteShared) for node in nodes) == ("k split" in kind)
    shared = any(isinstance(node, TmaLoad) and node.multicast_mask is not None for node in nodes)
    assert shared == ("shared along" in kind)


@pytest.mark.parametrize(
    ("kind", "change", "code"),
    [
        *[(k, without(MbarrierInit), "schedule-order") for k in ("bulk copies", "copied by threads", "shared along m")],
        *[(k, without(FenceMbarrierInit), "schedule-order") for k in ("bulk copies", "through registers")],
        *[(k, meeting_left_out, "schedule-order") for k in ("bulk copies", "shared along both", "streamed")],
        *[(k, without(MbarrierWait), "schedule-order") for k in ("bulk copies", "copied by threads")],
        *[(k, without(CpAsyncWaitGroup), "schedule-order") for k in ("copied by threads", "streamed, copied by threads")],
        *[(k, without(FenceProxyAsync), "schedule-order") for k in ("copied by threads", "tf32, turned")],
        *[(k, without(WgmmaWaitGroup), "schedule-order") for k in ("bulk copies", "one consumer, one stage")],
        *[(k, without(WgmmaCommitGroup), "schedule-order") for k in ("bulk copies", "persistent")],
        ("bulk copies", without(WgmmaFence), "schedule-order"),
        ("bulk copies", without(TmaLoad), "schedule-order"),
        ("bulk copies", first_only(WarpgroupMma), "schedule-barrier"),
        ("bulk copies", of_a_warp(WarpgroupMma), "schedule-barrier"),
        ("bulk copies", of_a_warp(WgmmaCommitGroup), "schedule-barrier"),
        ("bulk copies", of_a_warp(SetMaxNReg), "schedule-barrier"),
        ("bulk copies", first_only(WarpBarrier), "schedule-barrier"),
        ("bulk copies", elected_below_a_lane, "schedule-barrier"),
        ("shared along m", of_a_warp(ClusterBarrier), "schedule-barrier"),
        ("k split", first_only(ClusterBarrier), "schedule-barrier"),
        ("k split", first_only(NamedBarrier), "schedule-barrier"),
        ("k split", parts_not_stored, "schedule-order"),
        ("k split", remote_parts_written, "schedule-dependence"),
        ("k split", parts_over_buffers_in_use, "schedule-scope"),
    ],
)
def test_broken_tree_is_rejected(kind: str, change: Callable[[Node], Nodes | None], code: str) -> None:
    with pytest.raises(ScheduleError) as refused:
        check(changed(trees(kind)[0].body, change))
    assert refused.value.code == code


def test_warp_collectives_may_depend_on_the_warp() -> None:
    """Nodes that need all lanes are rejected below a choice of lanes; rounding to tf32 needs none."""
    tree = trees("bulk copies")[0]
    check(changed(tree.body, of_a_warp(WarpBarrier)))
    check(changed(trees("tf32, turned")[0].body, first_only(RoundFragment)))


# tiles ---------------------------------------------------------------------------------------------------------------
def value(expr: Expr, known: dict[str, int]) -> int:
    found = fold(substitute(expr, {name: num(number) for name, number in known.items()}), {})
    assert isinstance(found, Const), found
    return int(found.value)


def tiles_of_block(scheduler: PersistentTiles, block: int) -> list[tuple[int, int, int, int, int]]:
    """(batch, tile along m, along n, steps before, steps) of each tile of a block, found by running its loops."""
    found: list[tuple[int, int, int, int, int]] = []

    def run(nodes: Nodes, known: dict[str, int]) -> None:
        for node in nodes:
            match node:
                case Let(var=var, value=expr, body=body):
                    run(body, known | {var: value(expr, known)})
                case Loop(var=var, extent=extent, body=body, stop=limit):
                    for i in range(extent if limit is None else min(extent, value(limit, known))):
                        run(body, known | {var: i})
                case _:
                    steps = (value(scheduler.k_tiles_before, known), value(scheduler.k_tiles.count, known))
                    found.append((known["b"], known["m.block"], known["n.block"], *steps))

    run(scheduler.bind_block(scheduler.for_each_tile((Barrier(),))), {BLOCK: block})
    return found


@given(
    st.integers(2, 3),
    st.integers(1, 9),
    st.integers(1, 7),
    st.integers(0, 12),
    st.integers(1, 10),
    st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2), (4, 1)]),
)
@settings(max_examples=examples(80))
def test_every_tile_has_one_block(
    batches: int, rows: int, columns: int, clusters: int, raster: int, cluster: tuple[int, int]
) -> None:
    """Any number of blocks in any order; the blocks of a cluster are adjacent and compute the same tiles."""
    shape = f"float16 {batches} 64 64"
    group = contraction("C[b, m, n] +=! A[b, m, k] * B[b, k, n]", HOPPER, A=shape, B=shape)
    view = GemmView.of(group, tiles(group, unit(HOPPER, "wgmma_f16"), (64, 64, 64), (64, 64), reduce_threads=128).space)
    size = cluster[0] * cluster[1]
    pipeline = PipelineOptions(raster=raster, persistent_blocks=clusters * size, cluster=cluster)
    scheduler = PersistentTiles(view, (rows, columns), 5, pipeline)
    assert scheduler.blocks % size == 0
    by_block = [tiles_of_block(scheduler, block) for block in range(scheduler.blocks)]
    for block, each in enumerate(by_block):
        assert value(scheduler.total_k_tiles, {BLOCK: block}) == 5 * len(each)
    tiles_found = [tile[:3] for each in by_block for tile in each]
    assert len(set(tiles_found)) == len(tiles_found)
    inside = {tile for tile in tiles_found if tile[1] < rows and tile[2] < columns}
    assert inside == set(itertools.product(range(batches), range(rows), range(columns)))
    for each in by_block:
        assert [tile[3:] for tile in each] == [(5 * i, 5) for i in range(len(each))]
    for first in range(0, scheduler.blocks, size):
        for rank in range(size):
            row, column = divmod(rank, cluster[1])
            corner = by_block[first]
            assert [(t[1] - row, t[2] - column) for t in by_block[first + rank]] == [(t[1], t[2]) for t in corner]


@pytest.mark.parametrize(("clusters", "cluster"), [(1, (1, 1)), (3, (1, 1)), (2, (2, 1)), (40, (1, 1))])
def test_two_consumers_compute_alternate_tiles(clusters: int, cluster: tuple[int, int]) -> None:
    """Also with fewer tiles than consumers. K-tiles of the block are counted over both."""
    group = contraction("C[b, m, n] +=! A[b, m, k] * B[b, k, n]", HOPPER, A="float16 2 64 64", B="float16 2 64 64")
    view = GemmView.of(group, tiles(group, unit(HOPPER, "wgmma_f16"), (64, 64, 64), (64, 64), reduce_threads=128).space)
    blocks = clusters * cluster[0] * cluster[1]
    described = (view, (3, 5), 5, PipelineOptions(raster=2, persistent_blocks=blocks, cluster=cluster))
    scheduler = PersistentTiles(*described)
    for block in range(scheduler.blocks):
        both = [tiles_of_block(PingpongTiles(*described, num(consumer)), block) for consumer in range(2)]
        every_tile = tiles_of_block(scheduler, block)
        assert both == [every_tile[::2], every_tile[1::2]]


@given(st.integers(1, 40), st.sampled_from([1, 2, 4, 8]), st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2)]))
@settings(max_examples=examples(40))
def test_parts_of_a_tile_cover_its_k_tiles(steps: int, parts: int, cluster: tuple[int, int]) -> None:
    """Adjacent, in the order of ranks, even up to one k-tile; blocks that share operands have the same part."""
    parts = min(parts, steps)
    group = contraction("C[b, m, n] +=! A[b, m, k] * B[b, k, n]", HOPPER, A="float16 2 64 64", B="float16 2 64 64")
    view = GemmView.of(group, tiles(group, unit(HOPPER, "wgmma_f16"), (64, 64, 64), (64, 64), reduce_threads=128).space)
    scheduler = PersistentTiles(view, (3, 2), steps, PipelineOptions(cluster=cluster, cluster_k=parts))
    size = cluster[0] * cluster[1]
    by_tile: dict[tuple[int, int, int], list[tuple[int, int]]] = {}

    def run(nodes: Nodes, known: dict[str, int]) -> None:
        for node in nodes:
            if isinstance(node, Let):
                run(node.body, known | {node.var: value(node.value, known)})
            else:
                first, count = (value(expr, known) for expr in (scheduler.k_tiles.first, scheduler.k_tiles.count))
                assert count == value(scheduler.total_k_tiles, known) <= scheduler.k_tiles.max_count
                by_tile.setdefault((known["b"], known["m.block"], known["n.block"]), []).append((first, count))
                assert known.get(K_RANK, 0) == known[BLOCK] // size % parts

    for block in range(scheduler.blocks):
        run(scheduler.bind_block(scheduler.for_each_tile((Barrier(),))), {BLOCK: block})
    assert len(by_tile) * parts == scheduler.blocks
    for ranges in by_tile.values():
        assert [first for first, _ in ranges] == [sum(n for _, n in ranges[:i]) for i in range(parts)]
        counts = [count for _, count in ranges]
        assert sum(counts) == steps
        assert max(counts) - min(counts) <= 1 <= min(counts)


def test_sixteen_bit_outputs_are_stored_by_tma() -> None:
    by_boxes = {kind for kind in KINDS if any(isinstance(node, TmaStore) for node in iter_nodes(trees(kind)[0].body))}
    assert {"bulk copies", "along m and n", "shared along both", "a bias of rows", "a window"} <= by_boxes
    assert {"results permuted, rows beyond the end", "results permuted, columns beyond the end"} <= by_boxes
    assert not by_boxes.intersection(SPLIT)
    others = {"through registers", "tf32", "bytes", "results of two tensors", "results turned", "copied by threads"}
    assert not others & by_boxes  # of 32 bits, of two tensors, columns, rows of 66 elements


# numbers -------------------------------------------------------------------------------------------------------------
SPLIT = tuple(kind for kind in KINDS if kind.startswith("k split"))
RACED = (*SPLIT, "results permuted, rows beyond the end", "results permuted, columns beyond the end",
         "bulk copies", "copied by threads", "persistent", "streamed, copied by threads", "shared along both",
         "packed", "packed, streamed", "ping-pong, packed",
         "ping-pong", "ping-pong, float32 by rows", "ping-pong, shared along m")  # fmt: skip


@pytest.mark.emulator
@pytest.mark.parametrize("kind", every(2, KINDS))
def test_emulated(kind: str) -> None:
    found, text = source(kind)
    for seed in range(2):
        arrays = random_inputs(found, seed)
        result = load_emulated(CompiledKernel(text, b"", "", ()), seed, races=kind in RACED).run(arrays)
        sums = accumulator_precision(unit(HOPPER, KINDS[kind][0]), HOPPER.arch)
        verdict = agrees(found, result, evaluate(found, arrays, allow_tf32="tf32" in kind, accumulation=sums))
        assert verdict.ok, verdict


# machine code --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["bulk copies", "shared along m", slow("shared along both"), slow("persistent")])
def test_tma_is_issued_without_loops_over_lanes(kind: str) -> None:
    kernel = compile_source(source(kind)[1])
    code = sass_text(kernel.binary)
    assert "UTMALDG" in code
    assert "BRA.U.ANY" not in code
    assert code.count("UTMACCTL.PF") == len(kernel.source.launches[0].tensor_maps)


@pytest.mark.slow
@pytest.mark.parametrize("step", [3, slow(1)])
def test_compiled_without_spills_or_serialised_products(step: int) -> None:
    kernels = {kind: compile_source(source(kind)[1]) for kind in list(KINDS)[::step]}
    found = sass_functions([kernel.binary for kernel in kernels.values()], HOPPER.arch)
    for (kind, kernel), functions in zip(kernels.items(), found, strict=True):
        assert [one.spill_bytes for one in kernel.resources] == [0] * len(kernel.resources), kind
        assert not ptxas_warnings(kernel.log), kind
        code = functions[kernel.source.launches[0].name]
        assert code.count("HGMMA", "IGMMA", "QGMMA"), kind
        assert (code.count("UTMALDG", "UTMASTG") > 0) == bool(kernel.source.launches[0].tensor_maps), kind
        assert (code.count("LDGSTS") > 0) == ("copied by threads" in kind), kind
