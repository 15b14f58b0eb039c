"""Parallel regions of C kernels: loops over tasks, start of threads, barriers."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace

import numpy as np
from schedule_support import BLUR, compiled, inputs_of, judged, program

from roller_bench.model.candidate_plans import trial_plans
from roller_svc import hardware
from roller_svc.codegen.c.threads import is_single_threaded
from roller_svc.codegen.kernel import GroupLaunches, Program, emit, emit_together, tensors_in_memory
from roller_svc.compiler.lower_and_emit import emit_plan
from roller_svc.ir.kernel import KernelSource
from roller_svc.ir.schedule import Loop, LoopKind, Node, ScheduleTree
from roller_svc.runtime.cpu import CpuModule
from roller_svc.schedule import transforms as t
from roller_svc.schedule.build_tree import build_schedule_tree
from roller_svc.schedule.default import default_schedule
from roller_svc.schedule.schedule import Schedule
from roller_svc.toolchain import compile_source
from roller_svc.toolchain.gcc import c_command

TWO_CORES = replace(hardware.load("cpu-x86-avx2"), num_cores=2)
TWICE = program("P[i] = A[i] * 2.0; Q[i] = P[i] + P[95 - i]", ["P", "Q"], A="float32 96")
BATCH_NORM = program(
    "y[n, c, h, w] = b[c] + s[c] * (x[n, c, h, w] - m[c]) / (1e-5 + v[c]).call(`sqrt`)",
    x="float32 16 256 16 16",
    b="float32 256",
    s="float32 256",
    m="float32 256",
    v="float32 256",
)


def functions(source: KernelSource) -> dict[str, tuple[str, str]]:
    """Name → parameters, body."""
    found = re.findall(r"^(?:static [^\n]*)?void (\w+)\(([^\n]*)\) \{\n(.*?)^\}", source.text, re.MULTILINE | re.DOTALL)
    return {name: (parameters, body) for name, parameters, body in found}


def emitted(*schedules: Schedule) -> KernelSource:
    p = schedules[0].program
    views = (*p.inputs, *((o.tensor, p.types[o.tensor]) for o in p.outputs))
    trees = tuple(build_schedule_tree(s, f"kernel{i}") for i, s in enumerate(schedules))
    return emit("kernel", (GroupLaunches(trees, views),), tensors_in_memory(p, p.types, ()), TWO_CORES, "")


def test_a_loop_over_tasks_stands_in_a_function_whose_pointers_are_restrict() -> None:
    """Not in the region itself: there gcc knows nothing of it, and would take roots anew for every vector."""
    plan = trial_plans(BATCH_NORM, TWO_CORES, 1, 0, "")
    source = emit_plan(plan.ranked[0], BATCH_NORM, plan.groups, TWO_CORES)
    (launch,) = source.launches
    _, region = functions(source)[launch.name]
    pragma, head, call = (line.strip() for line in region.splitlines())
    assert pragma == "#pragma omp parallel for schedule(dynamic, 1) num_threads(threads_i32(2))"
    assert head.startswith("for (long task = 0; ")
    name = call.partition("(")[0]
    assert call == f"{name}({', '.join(launch.args)}, task);"
    parameters, body = functions(source)[name]
    assert parameters.count("*") == parameters.count("*restrict ") == len(launch.args) == 6
    assert "#pragma omp" not in body


def test_what_a_row_has_in_common_is_computed_once() -> None:
    """A root for all 32 vectors of a row of one channel."""
    shapes = dict.fromkeys("bsmv", "float32 256")
    p = program("y[n, c, h] = b[c] + s[c] * (x[n, c, h] - m[c]) / v[c].call(`sqrt`)", x="float32 16 256 256", **shapes)
    source = emitted(t.vectorise(t.parallel(default_schedule(p), "y", "n"), "y", "h"))
    command = [*c_command(source), "-S", "-x", "c", "-", "-o", "-"]
    made = subprocess.run(command, input=source.text, capture_output=True, text=True, check=True).stdout
    assert source.text.count("sqrtf(v[c])") == 32
    assert len(re.findall(r"^\tv?sqrt", made, re.MULTILINE)) == 1


def test_a_maximum_with_a_mask_takes_its_operand_from_a_register() -> None:
    """With an operand in memory the load would wait for the mask, thus for the maximum before."""
    p, avx512 = program("y[i] >=! x[i, j]", x="float32 256 128"), replace(hardware.load("cpu-x86-avx512"), num_cores=1)
    plan = trial_plans(p, avx512, 1, 0, "")
    source = emit_plan(plan.ranked[0], p, plan.groups, avx512)
    command = [*c_command(source), "-march=x86-64-v4", "-S", "-x", "c", "-", "-o", "-"]
    made = subprocess.run(command, input=source.text, capture_output=True, text=True, check=True).stdout
    masked = re.findall(r"^\tvmaxps\t(.*)\{%k\d\}", made, re.MULTILINE)
    assert len(masked) >= 4
    assert not any("(" in operands for operands in masked)


def test_a_region_has_no_more_threads_than_tasks() -> None:
    p = program("y[i, j] = x[i, j] * 2.0", x="float32 3 40")
    parallel = t.parallel(default_schedule(p), "y", "i")
    views = (*p.inputs, ("y", p.types["y"]))
    parts = (GroupLaunches((build_schedule_tree(parallel, "kernel0"),), views),)
    many = replace(TWO_CORES, num_cores=8)
    assert "num_threads(threads_i32(3))" in emit("kernel", parts, tensors_in_memory(p, p.types, ()), many, "").text


def test_threads_meet_between_loops_and_between_launches() -> None:
    both = t.parallel(t.parallel(default_schedule(TWICE), "P", "i"), "Q", "i")
    source = emitted(both)
    ((_, loops), (_, region)) = (functions(source)[name] for name in ("tasks_kernel0", "kernel0"))
    assert re.findall("#pragma omp (?:for|barrier)", loops) == [
        "#pragma omp for",
        "#pragma omp barrier",
        "#pragma omp for",
    ]
    assert "barrier" not in region
    two = emitted(both, both)
    assert [launch.name for launch in two.launches] == ["kernel"]
    assert functions(two)["kernel"][1].count("#pragma omp barrier") == 1
    (module,) = compiled([both])
    assert judged(TWICE, inputs_of(TWICE), module.run(inputs_of(TWICE))).ok


def test_single_threaded_launch_is_between_barriers() -> None:
    serial, parallel = default_schedule(TWICE), t.parallel(t.parallel(default_schedule(TWICE), "P", "i"), "Q", "i")
    _, region = functions(emitted(parallel, serial, parallel))["kernel"]
    lines = [line.strip().partition("(")[0] for line in region.splitlines()]
    assert lines[2:-1] == [
        "tasks_kernel0",
        "#pragma omp barrier",
        "#pragma omp single nowait",
        "kernel1",
        "#pragma omp barrier",
        "tasks_kernel2",
    ]


def test_launches_alone_have_external_linkage() -> None:
    """Kernels of a model are linked: other functions of two kernels may have one name."""
    serial, parallel = default_schedule(TWICE), t.parallel(t.parallel(default_schedule(TWICE), "P", "i"), "Q", "i")
    for source in (emitted(parallel, serial), emitted(serial, serial), emitted(parallel)):
        external = re.findall(r"^void (\w+)\(", source.text, re.MULTILINE)
        assert sorted(external) == sorted(launch.name for launch in source.launches)


def test_programs_of_one_text_share_a_region_or_not_each_for_itself() -> None:
    """The second has a launch that is partly parallel, and one in common with the first."""
    views = (*TWICE.inputs, *((o.tensor, TWICE.types[o.tensor]) for o in TWICE.outputs))
    partly = t.parallel(default_schedule(TWICE), "Q", "i")
    whole = t.parallel(partly, "P", "i")
    first, second, mixed = (build_schedule_tree(s, name) for s, name in ((whole, "a0"), (whole, "a1"), (partly, "a2")))
    firsts, seconds = (GroupLaunches(trees, views) for trees in ((first, second), (first, mixed)))
    programs = (Program("plan0_kernel", (firsts,)), Program("plan1_kernel", (seconds,)))
    source = emit_together(programs, tensors_in_memory(TWICE, TWICE.types, ()), hardware.load("local"), "")
    assert [launch.name for launch in source.launches] == ["plan0_kernel", "a0", "a2"]
    assert source.text.count("void tasks_a0(") == 1
    assert "#pragma omp parallel for" in functions(source)["a2"][1]
    built, arrays = compile_source(source), inputs_of(TWICE)
    for launches in (source.launches[:1], source.launches[1:2], source.launches[2:]):
        module = CpuModule(replace(built, source=replace(source, launches=launches)))
        assert judged(TWICE, arrays, module.run(arrays)).ok


def test_names_of_tensors_are_not_those_of_functions_that_a_region_calls() -> None:
    p = program("y[i] = tasks_kernel0[i] * 2.0", tasks_kernel0="float32 96")
    (module,) = compiled([t.parallel(default_schedule(p), "y", "i")])
    x = np.arange(96, dtype=np.float32)
    np.testing.assert_array_equal(module.run({"tasks_kernel0": x})["y"], x * 2)


def test_a_parallel_loop_among_a_task_s_work_begins_a_region_of_its_own() -> None:
    """Threads that share out one loop cannot share out another inside of it."""
    inside = t.compute_at(default_schedule(BLUR), "bx", "B", "y")
    inside = t.parallel(t.parallel(inside, "B", "y"), "B", "x")
    assert is_single_threaded(build_schedule_tree(inside, "kernel0")) is None
    assert emitted(inside).text.count("#pragma omp parallel for") == 2


def test_loops_that_run_once_are_no_parallel_loops() -> None:
    def begun(*nodes: Node) -> bool | None:
        return is_single_threaded(ScheduleTree("kernel0", nodes))

    tree = build_schedule_tree(t.parallel(default_schedule(BLUR), "B", "y"), "kernel0")
    (loop,) = tree.body
    assert isinstance(loop, Loop)
    (task,) = loop.body
    assert begun(*tree.body) is False
    assert begun(Loop("batch", 1, LoopKind.PARALLEL, tree.body)) is False
    assert begun(Loop("batch", 1, LoopKind.PARALLEL, (task,))) is True
    assert begun(Loop("batch", 1, LoopKind.PARALLEL, (loop, task))) is None
    assert begun(Loop("batch", 2, LoopKind.SERIAL, tree.body)) is None
    assert begun() is True
