"""Launch of a warp-specialised kernel: its blocks have one more warpgroup, which only loads."""

from __future__ import annotations

from typing import Any

from roller_svc.families.common.gpu.matrix.stream_k import stream_k_launch
from roller_svc.ir.rprogram import WARPGROUP_THREADS, RProgram
from roller_svc.perf.common import Launch
from roller_svc.perf.workload import Workload


def warpgroup_launch(p: Workload[Any], program: RProgram) -> Launch:
    launch = stream_k_launch(p, program)
    return launch._replace(threads=launch.threads * (1 + program.pipeline.pingpong) + WARPGROUP_THREADS)
