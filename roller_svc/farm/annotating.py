"""Annotate the sources of kernels, in processes with a time limit: their programs are a client's text."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from roller_svc.compiler.annotate import Annotations, WrittenKernel, annotate
from roller_svc.farm.checking import MEMORY_BYTES
from roller_svc.farm.workers import JsonCodec, WorkerLimits, WorkerPool
from roller_svc.ir.canonical import from_json, to_json


class Annotator:
    """Annotates sources. Nothing is cached.

    Args:
        timeout_s: limit of one source.
        limits: of a worker process.
    """

    def __init__(self, timeout_s: float, limits: WorkerLimits = WorkerLimits()) -> None:
        codec: JsonCodec[Annotations] = JsonCodec(to_json, partial(from_json, Annotations))
        self._workers = WorkerPool(annotate, timeout_s, replace(limits, memory_bytes=MEMORY_BYTES), codec)

    def annotate(self, kernel: WrittenKernel) -> Annotations:
        """Return where the numbers and the parts of a source come from.

        Raises KernelTimeoutError, and BuildServiceError if no worker could annotate it now.
        """
        return self._workers.call(kernel)

    def close(self) -> None:
        self._workers.close(kill=True)
