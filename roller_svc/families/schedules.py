"""Kernel families → schedule trees. Loaded only to emit kernels: processes that estimate do without."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from roller_svc.families.cpu.channel_window import schedule as cpu_channel_window
from roller_svc.families.cpu.contraction import schedule as cpu_contraction
from roller_svc.families.cpu.convolution import schedule as cpu_convolution
from roller_svc.families.cpu.loops import schedule as cpu_loops
from roller_svc.families.cpu.scan import schedule as cpu_scan
from roller_svc.families.cpu.transpose import schedule as cpu_transpose
from roller_svc.families.cpu.window import schedule as cpu_window
from roller_svc.families.cpu.winograd import schedule as cpu_winograd
from roller_svc.families.gpu.elementwise import schedule as gpu_elementwise
from roller_svc.families.gpu.mma_attention import schedule as gpu_mma_attention
from roller_svc.families.gpu.mma_contraction import schedule as gpu_mma_contraction
from roller_svc.families.gpu.reduction import schedule as gpu_reduction
from roller_svc.families.gpu.scan import schedule as gpu_scan
from roller_svc.families.gpu.scatter import schedule as gpu_scatter
from roller_svc.families.gpu.simt_contraction import schedule as gpu_simt_contraction
from roller_svc.families.gpu.streamed_rows import schedule as gpu_streamed_rows
from roller_svc.families.gpu.wgmma_attention import schedule as gpu_wgmma_attention
from roller_svc.families.gpu.wgmma_contraction import schedule as gpu_wgmma_contraction
from roller_svc.families.gpu.window import schedule as gpu_window
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.rprogram import RProgram
from roller_svc.ir.schedule import ScheduleTree
from roller_svc.perf.workload import Workload

Lower = Callable[[KernelGroup, RProgram, Workload[Any]], tuple[ScheduleTree, ...]]

SCHEDULES: Mapping[str, Lower] = {
    "gpu/wgmma_attention": gpu_wgmma_attention.lower,
    "gpu/mma_attention": gpu_mma_attention.lower,
    "gpu/wgmma_contraction": gpu_wgmma_contraction.lower,
    "gpu/mma_contraction": gpu_mma_contraction.lower,
    "gpu/simt_contraction": gpu_simt_contraction.lower,
    "gpu/streamed_rows": gpu_streamed_rows.lower,
    "gpu/scatter": gpu_scatter.lower,
    "gpu/scan": gpu_scan.lower,
    "gpu/elementwise": gpu_elementwise.lower,
    "gpu/window": gpu_window.lower,
    "gpu/reduction": gpu_reduction.lower,
    "cpu/winograd": cpu_winograd.lower,
    "cpu/convolution": cpu_convolution.lower,
    "cpu/contraction": cpu_contraction.lower,
    "cpu/channel_window": cpu_channel_window.lower,
    "cpu/window": cpu_window.lower,
    "cpu/transpose": cpu_transpose.lower,
    "cpu/scan": cpu_scan.lower,
    "cpu/loops": cpu_loops.lower,
}
