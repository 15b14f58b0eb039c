"""Make the first calls of plans in a process of its own: kernels that crash or do not return end that process alone.

Constants of other types than integers are zeros there: they choose no address, and zeros that nobody writes take no memory.
"""

from __future__ import annotations

import os
import pickle
import resource
import selectors
import signal
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from roller_svc.errors import RollerError
from roller_svc.graph.inputs import draw_sample
from roller_svc.graph.wiring.child import NICENESS, PREPARE, start_program
from roller_svc.ir.kernel import ALIGNMENT_BYTES, KernelSource
from roller_svc.ir.model_plan import ModelPlan
from roller_svc.runtime.binding import Array
from roller_svc.runtime.graphs.switchable import SwitchableModel
from roller_svc.runtime.thread_pool import get_num_threads, limit_threads
from roller_svc.toolchain.sandbox import die_with_parent

START_S = 120.0  # in which the process imports the package and loads the program
_PROGRAM = PREPARE + "from roller_svc.graph.wiring.checking import answer_checks; answer_checks(int(sys.argv[2]))"


@dataclass(frozen=True, slots=True)
class SwitchableProgram:
    """The parts of a switchable model that another process loads."""

    name: str
    binary: bytes
    plan: ModelPlan
    kernels: tuple[KernelSource, ...]
    weights_bytes: int
    integers: Mapping[int, bytes]  # constants, by their offsets

    @classmethod
    def of(cls, model: SwitchableModel, plan: ModelPlan, kernels: Sequence[KernelSource]) -> SwitchableProgram:
        """Return the program of a model that was loaded for a plan and kernels."""
        integers = {
            each.offset_bytes: model.weights[each.offset_bytes : each.offset_bytes + each.type.bytes].tobytes()
            for each in plan.weights
            if not each.type.dtype.is_float
        }
        return cls(model.name, model.binary, plan, tuple(kernels), model.weights.nbytes, integers)

    def load(self) -> SwitchableModel:
        """Load it, with zeros as the other constants."""
        memory: Array = np.zeros(self.weights_bytes + ALIGNMENT_BYTES, np.uint8)
        weights = memory[-memory.ctypes.data % ALIGNMENT_BYTES :][: self.weights_bytes]
        for offset, content in self.integers.items():
            weights[offset : offset + len(content)] = np.frombuffer(content, np.uint8)
        return SwitchableModel(self.name, self.binary, self.plan, self.kernels, weights)


class CheckingProcess:
    """A process that makes first calls. It starts when it is first needed, and again after an end."""

    def __init__(self, program: SwitchableProgram, samples: int) -> None:
        """Prepare to start it, to call each plan with this number of random inputs."""
        self._program = program
        self._samples = samples
        self._process: subprocess.Popen[bytes] | None = None

    def find_fault(self, plan: ModelPlan, limit_s: float) -> str:
        """Return why the first calls of a plan may not be made in this process; "" if they return.

        Calls that take longer than `limit_s` count as ones that do not return. Where no process can be made, nothing is
        found: a confined worker makes none, and ends alone.
        """
        if self._process is None:
            try:
                self._process = start_program(_PROGRAM)
            except OSError:
                return ""
            weakref.finalize(self, _end, self._process, os.getpid())
            fault = self._find_answer((self._program, self._samples), START_S)
            if fault:
                return f"first calls cannot be made: {fault}"
        return self._find_answer((plan, get_num_threads(0)), limit_s)

    def _find_answer(self, question: object, limit_s: float) -> str:
        """Return the answer of the process. It ends if it gives none."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        with selectors.DefaultSelector() as selector, suppress(OSError, EOFError, pickle.UnpicklingError):
            selector.register(process.stdout, selectors.EVENT_READ)
            pickle.dump(question, process.stdin)
            process.stdin.flush()
            if not selector.select(limit_s):
                self._process = None
                _end(process, os.getpid())
                return f"a call does not return within {limit_s:.3g} s"
            return str(pickle.load(process.stdout))  # of a process of ours
        self._process = None
        code = process.wait()
        _end(process, os.getpid())
        return f"a call ends the process by {signal.Signals(-code).name}" if code < 0 else "a call ends the process"


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    if os.getpid() != owner:  # in a fork, which has the finalizers too
        return
    process.kill()
    with suppress(BrokenPipeError):
        process.communicate()


def answer_checks(parent: int) -> None:
    """Make the calls that the standard input asks for: the main function of the process."""
    die_with_parent(parent)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with os.fdopen(os.dup(1), "wb", buffering=0) as answers:
        os.dup2(2, 1)  # prints do not mix with answers
        program, number = pickle.load(sys.stdin.buffer)  # of the process that started this one
        model = program.load()
        samples = [draw_sample(program.plan, seed) for seed in range(number)]
        os.nice(NICENESS)
        pickle.dump("", answers)
        while True:
            try:
                plan, threads = pickle.load(sys.stdin.buffer)
            except EOFError:
                return
            fault = ""
            try:
                with limit_threads(threads):
                    bound = model.bind(plan)
                    for sample in samples:
                        bound.run(sample.inputs, sample.restore())
            except RollerError as error:
                fault = error.message
            pickle.dump(fault, answers)
