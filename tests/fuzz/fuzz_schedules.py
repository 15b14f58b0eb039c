"""Run random schedules by hand for GPUs in the emulator with its detector of races.

    PYTHONPATH=tests/support python tests/fuzz/fuzz_schedules.py --schedules 200
    PYTHONPATH=tests/support python tests/fuzz/fuzz_schedules.py --schedules 50 --target amd-mi250x --program matmul

Each schedule has blocks, threads, tiles and tails of its own (tests/support/gpu_schedules.py). Prints each one whose
values are wrong or that has a race, and for each program the legal schedules, the steps that were refused on the way,
and how many of these had a legal step as their hint. Exits 1 if a schedule is wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from random import Random

from emulator_support import module
from gpu_schedules import PROGRAMS, draw
from schedule_support import inputs_of, judged

from roller_svc import hardware
from roller_svc.compiler.scheduled import emit_schedule
from roller_svc.errors import WrongAnswerError

TARGETS = ("nvidia-a100-sxm-80gb", "nvidia-h200-sxm")


def run_program(name: str, count: int, seed: int, target: str) -> int:
    """Run schedules of a program, print what was found, and return how many are wrong."""
    numbers, hw = Random(f"{name} {seed}"), hardware.load(target)
    wrong = barriers = hinted = 0
    rules: Counter[str] = Counter()
    for number in range(count):
        drawn = draw(name, numbers, hw)
        source = emit_schedule(drawn.schedule, hw)
        inputs = inputs_of(drawn.program)
        barriers += "__syncthreads" in source.text
        rules.update(refusal.rule for refusal in drawn.refusals)
        hinted += sum(refusal.hint is not None for refusal in drawn.refusals)
        try:
            verdict = judged(drawn.program, inputs, module(source, number, races=True).run(inputs))
            fault = "" if verdict.ok else verdict.detail
        except WrongAnswerError as error:
            fault = str(error)
        if fault:
            wrong += 1
            _say(f"WRONG {name} on {target}, number {number}: {fault}\n{drawn.text}")
    refused = rules.total()
    by_rule = ", ".join(f"{rule} {times}" for rule, times in rules.most_common())
    _say(
        f"{name} on {target}: {count} schedules, {barriers} with barriers, {wrong} wrong; "
        f"{refused} steps refused ({by_rule}), {hinted} of them with a legal hint"
    )
    return wrong


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", type=int, default=200, help="of each program and target")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--target", action="append", help=f"default: {', '.join(TARGETS)}")
    parser.add_argument("--program", action="append", choices=PROGRAMS, help="default: all")
    options = parser.parse_args()
    runs = [(name, target) for target in options.target or TARGETS for name in options.program or PROGRAMS]
    return 1 if sum(run_program(name, options.schedules, options.seed, target) for name, target in runs) else 0


if __name__ == "__main__":
    sys.exit(main())
