"""Models that are served by the performance model's choice, while another process builds other kernels."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gpu_models import MATMUL, constant, node, tensor
from gpu_models import graph as json_graph
from waiting import PATIENCE_S

import roller_svc
from roller_svc.codegen.c.model import kernel_unit
from roller_svc.compiler.kernel_cache import KernelCache
from roller_svc.errors import ArgumentError, BuildServiceError
from roller_svc.graph.compile import ModelOptions, may_tune
from roller_svc.graph.objects import object_key
from roller_svc.graph.wiring import building, kernels, online
from roller_svc.graph.wiring.building import BuildingProcess
from roller_svc.graph.wiring.kernels import TuneOptions, build_here
from roller_svc.graph.wiring.online import OnlineTuning
from roller_svc.hardware import load
from roller_svc.ir.dtype import DType
from roller_svc.ir.options import SelectionMode
from roller_svc.ir.program import TensorType
from roller_svc.ir.report import BuildRequest
from roller_svc.model import Model
from roller_svc.runtime import thread_pool
from roller_svc.runtime.cpu import CpuModule
from roller_svc.runtime.saved.serialization import KernelBundle
from roller_svc.settings import read_settings, use

SOURCE = json_graph({"x": tensor(8, 64)}, {"w": constant(64, 48)}, [node("y", MATMUL, A="x", B="w")], "y")
X = np.random.default_rng(1).standard_normal((8, 64)).astype(np.float32)
INPUTS = tuple((name, TensorType(DType.FLOAT32, (8, 8))) for name in ("A", "B"))
REQUEST = BuildRequest(MATMUL, INPUTS, "local", top_k=2)
ENDED = "the process that builds other kernels was ended"


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Path]:
    use(read_settings(cache=tmp_path))
    yield tmp_path
    use(read_settings())


def compiled(**options: Any) -> Model:
    return roller_svc.compile_model(SOURCE, **{"threads": 1, "top_k": 3} | options)


def tuning_of(model: Model) -> OnlineTuning:
    assert isinstance(model.tuning, OnlineTuning)
    return model.tuning


class Times:
    """Seconds as a test says them: of kernels and calls, others than the first are faster. Builds wait for `may_build`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.first: list[str] = []
        self.may_build = threading.Event()
        monkeypatch.setattr(kernels, "MAX_RATIO", float("inf"))
        monkeypatch.setattr(online.BuildingProcess, "build", self.build)
        monkeypatch.setattr(online, "sum_kernels", self.of_kernels)
        monkeypatch.setattr(online.CallTimer, "time_calls", lambda _, models: [2.0, *[1.0] * (len(models) - 1)])

    def build(self, requests: Sequence[BuildRequest], cache: KernelCache) -> Iterator[list[KernelBundle]]:
        assert self.may_build.wait(PATIENCE_S)
        return build_here(requests, cache)

    def of_kernels(self, model: Any, _: object) -> list[float]:
        keys = [kernel.source.key for kernel in model.plan.kernels]
        self.first = self.first or keys
        return [1.0 if key in self.first else 0.5 for key in keys]


def test_the_models_choice_is_served_and_then_replaced_also_without_calls(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = Times(monkeypatch)
    plain = compiled(select="model")
    model = compiled(tune="background", tune_options={"exact": False})
    tuning, expected = tuning_of(model), plain(x=X)["y"]
    assert (tuning.state, model.digest, model.report["select"]) == ("exploring", plain.digest, "model")
    np.testing.assert_array_equal(model(x=X)["y"], expected)
    times.may_build.set()
    assert tuning.wait(PATIENCE_S)  # no further call
    assert (tuning.state, tuning.notes) == ("committed", [])
    assert [kernel.digest for kernel in model.kernels] == [tuning.chosen["kernel:0"]] != [plain.kernels[0].digest]
    np.testing.assert_allclose(model(x=X)["y"], expected, atol=1e-5)
    again = compiled(tune="background")
    assert again.digest == plain.digest
    assert tuning_of(again).wait(PATIENCE_S)
    assert (tuning_of(again).trials, again.digest) == (0, model.digest)


def test_exact_leaves_out_kernels_with_other_bits(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Times(monkeypatch).may_build.set()
    first: list[bytes] = []

    def run_once(model: Any, sample: Any) -> dict[str, Any]:
        """Return what the first model gives, and the next numbers for others."""
        key = model.plan.kernels[0].source.key.encode()
        first.append(key) if not first else None
        y = np.ones((8, 48), np.float32)
        return {"y": y if key == first[0] else np.nextafter(y, np.inf, dtype=np.float32)}

    monkeypatch.setattr(kernels, "_run_once", run_once)
    model = compiled(tune="background", tune_options={"exact": True})
    digest = model.digest
    assert tuning_of(model).wait(PATIENCE_S)
    assert set(tuning_of(model).tree["removed"]["kernel:0"].values()) == {"results have other bits"}
    assert model.digest == digest


def test_the_classes_that_make_most_of_a_call_are_explored() -> None:
    def leading(*seconds: float) -> list[int]:
        plan: Any = SimpleNamespace(kernels=[SimpleNamespace(estimate_s=value, uses=1) for value in seconds])
        return kernels._leading_classes(plan)

    assert leading(1, 60, 19, 20) == [1, 3]
    assert leading(1, 60, 20, 19) == [1, 2]
    assert leading(1, 59, 20, 20) == [1, 2, 3]
    assert leading() == []


@pytest.mark.parametrize(("top_k", "built"), [(10, 3), (2, 2)])
def test_few_candidates_are_built_in_the_background(top_k: int, built: int) -> None:
    request = replace(REQUEST, top_k=top_k, select=SelectionMode.MODEL)
    wanted = TuneOptions(kind="background").request_alternatives(request)
    assert (wanted.top_k, wanted.select) == (built, SelectionMode.MEASURE)
    assert TuneOptions(kind="online").request_alternatives(request).top_k == top_k


def run_program(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    monkeypatch.setattr(building, "_PROGRAM", program)


def test_a_process_that_is_stopped_or_killed_leaves_the_model_as_it_was(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_program(monkeypatch, "import time; time.sleep(600)")
    model = compiled(tune="background")
    tuning, digest, expected = tuning_of(model), model.digest, model(x=X)["y"].copy()
    while tuning.building._process is None:
        threading.Event().wait(0.01)
    process = tuning.building._process
    process.kill()
    assert tuning.wait(PATIENCE_S)
    assert (tuning.state, tuning.notes, model.digest) == ("stopped", [ENDED], digest)
    np.testing.assert_array_equal(model(x=X)["y"], expected)
    tuning.reopen()
    tuning.stop()
    assert tuning.wait(PATIENCE_S)
    assert (tuning.state, model.digest) == ("stopped", digest)
    np.testing.assert_array_equal(model(x=X)["y"], expected)
    assert process.poll() is not None


def test_a_full_disk_leaves_the_model_as_it_was(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(_: BuildingProcess, requests: Sequence[BuildRequest], cache: KernelCache) -> Iterator[list[KernelBundle]]:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(online.BuildingProcess, "build", build)
    model = compiled(tune="background")
    expected = model(x=X)["y"].copy()
    assert tuning_of(model).wait(PATIENCE_S)
    assert (tuning_of(model).state, tuning_of(model).notes) == ("stopped", [f"cannot build other kernels: {os.strerror(28)}"])
    np.testing.assert_array_equal(model(x=X)["y"], expected)


def test_any_end_of_the_thread_has_a_note(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(_: BuildingProcess, requests: Sequence[BuildRequest], cache: KernelCache) -> Iterator[list[KernelBundle]]:
        assert begin.wait(60)
        raise TypeError("unexpected")

    begin, raised = threading.Event(), list[Any]()
    monkeypatch.setattr(online.BuildingProcess, "build", build)
    monkeypatch.setattr(threading, "excepthook", raised.append)
    model = compiled(tune="background")
    model(x=X)
    thread = tuning_of(model)._thread
    assert thread is not None
    begin.set()
    thread.join(60)
    assert [each.exc_type for each in raised] == [TypeError]
    assert tuning_of(model).wait(0)
    assert (tuning_of(model).state, tuning_of(model).notes) == ("stopped", [online.UNEXPECTED])


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # which is what is tested
def test_a_fork_serves_the_model_as_it_is_and_leaves_the_process_alone(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_program(monkeypatch, "import time; time.sleep(600)")
    model = compiled(tune="background")
    tuning, expected = tuning_of(model), model(x=X)["y"].copy()
    while tuning.building._process is None:
        threading.Event().wait(0.01)
    held, leave = threading.Event(), threading.Event()

    def hold() -> None:
        """Be a thread that is loading and binding when the process forks."""
        with model._variants[0]._lock, tuning._condition, tuning._wirer._condition, thread_pool._shared.lock:
            held.set()
            leave.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(60)
    fork = os.fork()
    if fork == 0:
        status = 1
        signal.alarm(60)
        try:
            with building._one_at_a_time:
                assert thread_pool.get_num_threads(0) > 0
            assert np.array_equal(model(x=X)["y"], expected)
            assert tuning.wait(0)
            tuning.commit()
            tuning.stop()
            finalize: Any = weakref.finalize
            finalize._exitfunc()  # as at an exit of Python
            status = 0 if (tuning.state, tuning.notes) == ("stopped", [online.FORKED]) else 2
        finally:
            os._exit(status)
    leave.set()
    holder.join()
    assert os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]) == 0
    assert tuning.state == "exploring"
    assert tuning.building._process.poll() is None
    assert list(Path(tempfile.gettempdir()).glob("roller-build-*"))
    tuning.stop()
    assert tuning.wait(PATIENCE_S)


def test_a_stop_by_the_thread_that_starts_the_process_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = BuildingProcess()
    start = building.start_program

    def stop_meanwhile(*arguments: Any) -> Any:
        process.stop()
        return start(*arguments)

    monkeypatch.setattr(building, "start_program", stop_meanwhile)
    with pytest.raises(BuildServiceError, match=ENDED):
        next(process.build([REQUEST], KernelCache(tmp_path)))


def test_no_process_starts_after_a_stop(tmp_path: Path) -> None:
    process = BuildingProcess()
    process.stop()
    with pytest.raises(BuildServiceError, match=ENDED):
        next(process.build([REQUEST], KernelCache(tmp_path)))
    assert process._process is None


def test_a_process_that_ends_before_it_has_answered_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_program(monkeypatch, "import pickle, sys; pickle.load(sys.stdin.buffer); pickle.dump([], sys.stdout.buffer)")
    answers = BuildingProcess().build([REQUEST, REQUEST], KernelCache(tmp_path))
    assert next(answers) == []
    with pytest.raises(BuildServiceError, match=ENDED):
        next(answers)


def test_the_default_begins_by_the_model_where_nothing_is_asked(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = Times(monkeypatch)
    use(read_settings(cache=cache, tune="background"))
    model = compiled()
    assert tuning_of(model).state == "exploring"
    times.may_build.set()
    assert tuning_of(model).wait(PATIENCE_S)
    for options in ({"select": "model"}, {"select": "measure"}, {"tune": "off"}, {"plan": "eager"}):
        assert compiled(top_k=1, **options).tuning is None
    assert not may_tune(ModelOptions(load("nvidia-h200-sxm")))
    assert not may_tune(ModelOptions(load("local"), plan={}))
    use(read_settings(cache=cache))
    with pytest.raises(ArgumentError, match="begins with select"):
        compiled(tune="background", select="measure")
    assert compiled(top_k=1).report["select"] == "measure"


@pytest.mark.slow
def test_the_process_builds_kernels_and_ends_with_the_program(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path / "objects")
    (found,) = BuildingProcess().build([BuildRequest(MATMUL, INPUTS, "local", hardware=load("local"), top_k=2)], cache)
    assert all(cache.load_object(object_key(each.compiled.source, kernel_unit(each.compiled.source))) for each in found)
    a, b = (np.random.default_rng(seed).standard_normal((8, 8)).astype(np.float32) for seed in range(2))
    assert found
    for bundle in found:
        np.testing.assert_allclose(CpuModule(bundle.compiled).run({"A": a, "B": b})["C"], a @ b, rtol=1e-4, atol=1e-5)
    source = tmp_path / "source.py"
    source.write_text(
        "import sys, numpy, roller_svc\n"
        f"model = roller_svc.compile_model({SOURCE!r}, tune='background', threads=1)\n"
        "model(x=numpy.ones((8, 64), numpy.float32))\n"
        "while model.tuning.building._process is None: pass\n"
        "print(model.tuning.building._process.pid)\n"
    )
    environment = os.environ | {"ROLLER_CACHE": str(tmp_path / "cache"), "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, source], env=environment, capture_output=True, text=True, check=True, timeout=PATIENCE_S)
    assert done.stderr == ""
    assert not Path(f"/proc/{int(done.stdout)}").exists()
    assert list(tmp_path.glob("roller-*")) == []


def test_a_folder_is_gone_after_an_exit_that_stops_the_thread_in_the_midst_of_removing_it(tmp_path: Path) -> None:
    source = tmp_path / "source.py"
    source.write_text(
        "import shutil, sys, threading\n"
        "from roller_svc.compiler.kernel_cache import KernelCache\n"
        "from roller_svc.graph.wiring import building\n"
        "removes, remove = threading.Event(), shutil.rmtree\n"
        "def stop_here(*arguments, **options):\n"
        "    if threading.current_thread() is not threading.main_thread():\n"
        "        removes.set()\n"
        "        threading.Event().wait()\n"
        "    remove(*arguments, **options)\n"
        "shutil.rmtree, building._PROGRAM = stop_here, ''\n"
        "process = building.BuildingProcess()\n"
        "build = lambda: list(process.build([None], KernelCache(sys.argv[1])))\n"
        "threading.Thread(target=build, daemon=True).start()\n"
        "removes.wait()\n"
    )
    command = [sys.executable, source, tmp_path / "cache"]
    subprocess.run(command, env=os.environ | {"TMPDIR": str(tmp_path)}, check=True, timeout=PATIENCE_S)
    assert list(tmp_path.glob("roller-*")) == []


def test_a_folder_is_removed_while_a_compiler_that_was_killed_still_writes_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    remove, writes = shutil.rmtree, iter(range(3))

    def write_meanwhile(*arguments: Any, **options: Any) -> None:
        if next(writes, None) is not None:
            (folder / "object.o").touch()
        else:
            remove(*arguments, **options)

    monkeypatch.setattr(shutil, "rmtree", write_meanwhile)
    building._remove(folder)
    assert not folder.exists()
