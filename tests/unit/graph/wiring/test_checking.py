"""First calls of plans in a process of its own."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from gpu_models import MATMUL, constant, node, tensor
from gpu_models import graph as json_graph

from roller_svc import hardware
from roller_svc.codegen.c.model import MODEL
from roller_svc.compiler.kernel_cache import KernelCache
from roller_svc.graph import compile as graph_compile
from roller_svc.graph.compile import ModelOptions, build_model
from roller_svc.graph.load import load_graph
from roller_svc.graph.weights import Weights, place_weights
from roller_svc.graph.wiring import child
from roller_svc.graph.wiring.checking import CheckingProcess, SwitchableProgram
from roller_svc.hardware.catalog import restrict_cores
from roller_svc.ir.model_plan import Address, map_addresses
from roller_svc.ir.options import SelectionMode
from roller_svc.runtime.graphs.switchable import SwitchableModel

SOURCE = json_graph({"x": tensor(8, 64)}, {"w": constant(64, 48)}, [node("y", MATMUL, A="x", B="w")], "y")
UNMAPPED = 1 << 46  # bytes behind any array
forks: list[int] = []  # of this process, by whatever calls the handlers of pthread_atfork
_count_fork = ctypes.CFUNCTYPE(None)(lambda: forks.append(1))


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> SwitchableProgram:
    hw, cache, weights = restrict_cores(hardware.load("local"), 1), KernelCache(tmp_path_factory.mktemp("cache")), Weights()
    options = ModelOptions(hw, select=SelectionMode.MODEL, top_k=1, plan="serial")
    plan = build_model(load_graph(SOURCE, weights), weights, options, cache).plan
    sources = [kernel.source for kernel in plan.kernels]
    binary = graph_compile._link_switchable(plan, sources, cache, hw)
    return SwitchableProgram.of(SwitchableModel(MODEL, binary, plan, sources, place_weights(plan, weights)), plan, sources)


def test_a_crash_names_its_signal_and_a_new_process_checks_the_next_plan(program: SwitchableProgram) -> None:
    getattr(ctypes.CDLL(None), "__register_atfork")(_count_fork, None, None, None)
    plan = program.plan
    steps = [map_addresses(step, lambda at: Address(at.slot, at.offset_bytes + UNMAPPED)) for step in plan.steps]
    checking = CheckingProcess(program, 1)
    assert checking.find_fault(plan, 60) == ""
    process = checking._process
    assert process is not None
    assert os.getpriority(os.PRIO_PROCESS, process.pid) == child.NICENESS
    assert checking.find_fault(replace(plan, steps=tuple(steps)), 60) == "a call ends the process by SIGSEGV"
    assert checking.find_fault(plan, 60) == ""
    assert checking._process is not process
    assert "99 slots" in checking.find_fault(replace(plan, num_slots=99), 60)  # an error of the package ends no process
    assert not forks
    started = checking._process
    del checking
    assert started is None or started.poll() is not None


def test_calls_that_take_long_and_programs_that_do_not_load_are_faults(program: SwitchableProgram) -> None:
    checking = CheckingProcess(program, 1)
    assert checking.find_fault(program.plan, 60) == ""
    assert checking._process is not None
    os.kill(checking._process.pid, signal.SIGSTOP)
    assert checking.find_fault(program.plan, 0.1) == "a call does not return within 0.1 s"
    assert checking._process is None
    broken = CheckingProcess(replace(program, binary=b""), 1)
    assert broken.find_fault(program.plan, 60) == "first calls cannot be made: a call ends the process"


def test_nothing_is_found_where_no_process_can_be_made(program: SwitchableProgram, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    assert CheckingProcess(program, 1).find_fault(program.plan, 60) == ""


def test_a_program_has_the_path_of_this_one_and_not_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit(9)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "more")  # a Path
    program = child.PREPARE + "print(sys.path[0])"
    process: subprocess.Popen[bytes] = child.start_program(program)
    assert process.communicate()[0].decode() == f"{tmp_path / 'more'}\n"
    assert process.returncode == 0
