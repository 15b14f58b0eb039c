"""Random schedules for GPUs: products, blurs, softmaxes, convolutions and narrow rows, whose extents tiles do not divide."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from schedule_support import program

from roller_svc.compiler.scheduled import build_device_launches
from roller_svc.errors import ScheduleError
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.program import TensorProgram
from roller_svc.schedule.check_steps import Problem
from roller_svc.schedule.default import default_schedule
from roller_svc.schedule.schedule import Schedule
from roller_svc.schedule.step_text import format_step, parse_steps
from roller_svc.schedule.steps import Step, apply_step
from roller_svc.schedule.suggest_step import suggest_step

PROGRAMS = ("matmul", "blur", "softmax", "convolution", "narrow")
MAX_EXTRA_STEPS = 6


@dataclass(frozen=True)
class Refusal:
    """A step that was tried and is illegal, and the legal one that is suggested instead."""

    step: Step
    rule: str
    hint: Step | None


@dataclass
class Draw:
    """A program and the legal ones of the steps that were tried."""

    program: TensorProgram
    schedule: Schedule
    steps: list[Step] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(f"{format_step(step)}\n" for step in self.steps)

    def apply(self, text: str) -> None:
        for placed in parse_steps(text):
            try:
                self.schedule = apply_step(self.schedule, placed.step)
            except ScheduleError as error:
                problem = Problem.from_error(error)
                self.refusals.append(Refusal(placed.step, problem.rule, suggest_step(self.schedule, placed.step, error.code)))
            else:
                self.steps.append(placed.step)


def draw(name: str, numbers: Random, hw: HardwareSpec) -> Draw:
    """Return a random schedule that the device can run."""
    while True:
        scheduled, steps = _TEMPLATES[name](numbers)
        drawn = Draw(scheduled, default_schedule(scheduled))
        drawn.apply(steps)
        for _ in range(numbers.randrange(MAX_EXTRA_STEPS + 1)):
            drawn.apply(_extra_step(drawn.schedule, numbers))
        try:
            build_device_launches(drawn.schedule, hw)
        except ScheduleError:
            continue
        return drawn


def _extra_step(schedule: Schedule, numbers: Random) -> str:
    """Return a step on any loop, legal or not."""
    stage = numbers.choice([s for f in schedule.functions for s in f.stages])
    function = numbers.choice(schedule.functions).name
    loops = [loop.name for loop in stage.loops] or ["none"]
    loop, other = numbers.choice(loops), numbers.choice(loops)
    tensor = numbers.choice(schedule.program.inputs)[0]
    scope = numbers.choice(("registers", "stack", "shared"))
    factor = numbers.choice((1, 2, 3, 4, 5, 16))
    return numbers.choice(
        (
            f"{stage.name}: split {loop} {factor}",
            f"{stage.name}: split {loop} {factor} tail exact",
            f"{stage.name}: reorder {' '.join(numbers.sample(loops, len(loops)))}",
            f"{stage.name}: fuse {loop} {other}",
            f"{stage.name}: vectorise {loops[-1]}",
            f"{stage.name}: unroll {loop}",
            f"{stage.name}: serial {loop}",
            f"{stage.name}: thread {loop}",
            f"{stage.name}: block {loop}",
            f"{stage.name}: rfactor {loop}",
            f"{stage.name}: accumulate_at {loop}",
            f"{function}: store_in {scope}",
            f"{function}: compute_at {stage.name} {loop}",
            f"{tensor}: cache {stage.name} {loop} {scope}",
        )
    )


def _distributed(function: str, numbers: Random, threads: int) -> str:
    """Return steps that distribute a tile of two dimensions among threads, or none."""
    few = numbers.randint(1, threads)
    return numbers.choice(
        (
            "",
            f"{function}: split d0 {min(few, 3)} as ro ri\n{function}: thread ri\n",
            f"{function}: thread d1\n",
            f"{function}: fuse d0 d1\n{function}: split d0.d1.fused {few} as co ci\n{function}: thread ci\n",
        )
    )


def _shared_among(name: str, loop: str, threads: int, site: str, numbers: Random) -> str:
    """Return steps by which threads share a reduction."""
    scope = numbers.choice(("registers", "stack"))
    steps = f"{name}: store_in {scope}\n{name}.update: split {loop} {threads} as po pi\n{name}.update: rfactor pi\n"
    steps += f"{name}.part: compute_at {site}\n{name}.part: store_in shared\n"
    if numbers.randrange(2):
        return steps + f"{name}.part: accumulate_at pi\n{name}.part: thread pi\n"
    return steps + f"{name}.part: thread pi\n{name}.part.update: reorder pi po\n{name}.part.update: thread pi\n"


def _matmul(numbers: Random) -> tuple[TensorProgram, str]:
    m, n, k = numbers.randint(9, 40), numbers.randint(9, 40), numbers.randint(5, 24)
    scheduled = program("C[m, n] +=! A[m, k] * B[k, n]", A=f"float32 {m} {k}", B=f"float32 {k} {n}")
    if numbers.randrange(4) == 0:
        threads = numbers.randint(2, 8)
        steps = f"C: add_threads t {threads}\nC: split n 4\nC: reorder m n.outer t n.inner\n"
        steps += "C: block m\nC: block n.outer\nC: accumulate_at t\n"
        return scheduled, steps + _shared_among("C.acc", "k", numbers.randint(2, threads), "C t", numbers)
    tm, tn, r = numbers.randint(2, 9), numbers.randint(2, 9), numbers.randint(1, 3)
    steps = f"C: tile m {tm} n {tn}\n"
    inner = "m.inner"
    if r > 1 and r < tm:
        steps += f"C: split m.inner {r} as mt mr\nC: reorder m.outer n.outer mt n.inner mr\n"
        inner = "mt"
    steps += f"C: block m.outer\nC: block n.outer\nC: thread {inner}\nC: thread n.inner\nC: accumulate_at n.inner\n"
    steps += f"C.acc.update: split k {numbers.randint(2, k)} as ko ki\n"
    steps += f"C.acc.update: reorder {numbers.choice(('ko ki m n', 'ko m n ki', 'm ko ki n', 'n ko m ki'))}\n"
    threads = -(-tm // r) * tn
    for tensor in numbers.sample(("A", "B"), numbers.randrange(3)):
        scope = numbers.choice(("shared", "shared", "stack", "registers"))
        steps += f"{tensor}: cache C.acc.update ko {scope}\n"
        if scope == "shared":
            steps += _distributed(f"{tensor}.cache", numbers, threads)
    return scheduled, steps


def _convolution(numbers: Random) -> tuple[TensorProgram, str]:
    f, o, c, k = numbers.randint(3, 9), numbers.randint(5, 20), numbers.randint(2, 5), numbers.randint(1, 4)
    text = f"Y[f, o] +=! X[c, o * 2 + k] * W[f, c, k] where o in {o}"
    scheduled = program(text, X=f"float32 {c} {2 * o + k}", W=f"float32 {f} {c} {k}")
    tf, to = numbers.randint(1, f), numbers.randint(1, min(o, 8))
    steps = f"Y: tile f {tf} o {to}\nY: block o.outer\nY: block f.outer\nY: thread f.inner\nY: thread o.inner\n"
    steps += f"Y: accumulate_at {numbers.choice(('o.inner', 'o.inner', 'f.inner'))}\n"
    steps += f"Y.acc.update: reorder {numbers.choice(('c k f o', 'c f o k', 'k c o f'))}\n"
    if numbers.randrange(3):
        steps += f"X: cache Y.acc.update c shared\n{_distributed('X.cache', numbers, tf * to)}"
    if numbers.randrange(2):
        steps += f"W: cache Y.acc.update c {numbers.choice(('shared', 'stack'))}\n"
    return scheduled, steps


def _blur(numbers: Random) -> tuple[TensorProgram, str]:
    y, x = numbers.randint(9, 30), numbers.randint(9, 40)
    scheduled = program(
        f"bx[y, x] = (A[y, x] + A[y, x + 1] + A[y, x + 2]) / 3.0 where y in {y + 2}, x in {x};"
        f"B[y, x] = (bx[y, x] + bx[y + 1, x] + bx[y + 2, x]) / 3.0 where y in {y}, x in {x}",
        A=f"float32 {y + 2} {x + 2}",
    )
    ty, tx = numbers.randint(1, 8), numbers.randint(2, 9)
    steps = f"B: tile y {ty} x {tx}\n"
    if numbers.randrange(3) == 0:
        steps += "B: reorder y.outer y.inner x.inner x.outer\nB: block y.outer\nB: thread y.inner\nB: thread x.inner\n"
        site = "x.outer"
    else:
        steps += "B: block y.outer\nB: block x.outer\nB: thread y.inner\nB: thread x.inner\n"
        site = "x.inner"
    scope = numbers.choice(("shared", "shared", "stack", "registers"))
    steps += f"bx: compute_root\nbx: compute_at B {site}\nbx: store_in {scope}\n"
    if scope == "shared":
        few = numbers.randint(1, ty * tx)
        steps += numbers.choice(
            ("", "bx: thread x\n", "bx: thread y\n", f"bx: fuse y x\nbx: split y.x.fused {few} as round t\nbx: thread t\n")
        )
        steps += numbers.choice(("", "A: cache bx t registers\n", f"A: cache B {site} shared\n"))
    return scheduled, steps


def _softmax(numbers: Random) -> tuple[TensorProgram, str]:
    r, c = numbers.randint(5, 20), numbers.randint(5, 40)
    scheduled = program(
        "mx[r] >=! A[r, c]; e[r, c] = exp(A[r, c] - mx[r]); s[r] +=! e[r, c]; o[r, c] = e[r, c] / s[r]", A=f"float32 {r} {c}"
    )
    rows = numbers.randint(1, min(r, 6))
    if numbers.randrange(3) == 0:
        steps = f"o: split r {rows}\no: block r.outer\no: thread r.inner\ns: compute_at o r.inner\nmx: compute_at o r.inner\n"
        return scheduled, steps + f"A: cache s.update r {numbers.choice(('stack', 'registers'))}\n"
    threads = numbers.randint(2, min(c, 8))
    steps = f"o: split c {threads} as co ci\no: split r {rows} as ro ri\n"
    mark, order = numbers.choice((("thread", "ro ri ci co"), ("serial", "ro ri ci co"), ("serial", "ro ci ri co")))
    site = "o ri" if order == "ro ci ri co" else "o ci"
    steps += f"o: reorder {order}\no: block ro\no: {mark} ri\no: thread ci\ns: compute_at {site}\nmx: compute_at {site}\n"
    for name in ("s", "mx"):
        if numbers.randrange(4):
            steps += _shared_among(name, "c", threads, site, numbers)
    return scheduled, steps


def _narrow(numbers: Random) -> tuple[TensorProgram, str]:
    """Reduce rows of narrow integers in lanes of lanes, some of which have no element."""
    r, c = numbers.randint(1, 9), numbers.randint(5, 20)
    body = numbers.choice((">=! min(A[r, c], -5)", "<=! max(A[r, c], 5)", "*=! A[r, c]", "+=! A[r, c]"))
    scheduled = program(f"s[r] {body}", A=f"{numbers.choice(('int8', 'int16'))} {r} {c}")
    few, lane = numbers.randint(2, c), numbers.choice(("a", "b"))
    rest = "b" if lane == "a" else "a"
    extent = few if rest == "b" else -(-c // few)
    steps = f"s: split r {numbers.randint(1, r)} as ro ri\ns: block ro\ns: thread ri\ns: accumulate_at ri\n"
    steps += f"s.acc.update: split c {few} as a b\ns.acc.update: rfactor {lane}\ns.acc.part: accumulate_at {lane}\n"
    if numbers.randrange(3):
        steps += f"s.acc.part.acc.update: split {rest} {numbers.randint(1, extent)} as d e\n"
        part = numbers.choice(("d", "d", "e"))
        steps += f"s.acc.part.acc.update: rfactor {part}\ns.acc.part.acc.part: accumulate_at {part}\n"
    return scheduled, steps


_TEMPLATES = {"matmul": _matmul, "blur": _blur, "softmax": _softmax, "convolution": _convolution, "narrow": _narrow}
