"""Arguments → a verb, and whatever ends it → an exit code."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn, Protocol

from roller_svc.cli.context import CommandContext
from roller_svc.errors import ArgumentError, InputError, LaunchError, RollerError, ToolchainMissingError
from roller_svc.version import __version__

# Verb → what it does. The verb's module has add_arguments(parser) and execute(options) -> exit code.
COMMANDS = {
    "compile": "build a kernel, show or save it",
    "run": "build a kernel, run it on random inputs, check it against the reference, time it",
    "estimate": "what the model expects, on one or more devices; builds nothing",
    "explain": "how a kernel came about: tiles, candidates, costs",
    "targets": "the devices, and what compiles for them here; check: a spec beside the device at hand",
    "calibrate": "measure the device at hand and write its spec",
    "corpus": "compile, run and judge every case of a file",
    "bench": "measure the project itself: construct, lint, model, cpu",
    "lint": "what the machine code of a program's CUDA kernels has and lacks",
    "serve": "run the HTTP service",
}

NO_DEVICE = frozenset({"no-device", "no-cupy", "wrong-device"})

DONE, FAILED, REJECTED, MISSING, INTERRUPTED = 0, 1, 2, 3, 130


class Command(Protocol):
    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def execute(self, options: argparse.Namespace) -> int: ...


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0 done, 1 the work failed, 2 the input was refused, 3 a toolchain or device is missing."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    context = CommandContext()
    as_json = "--json" in words
    try:
        command, options = _parse(words, context)
        return command.execute(options)
    except SystemExit as ended:  # argparse has shown what it was asked for
        return ended.code if isinstance(ended.code, int) else REJECTED
    except RollerError as error:
        import_module("roller_svc.cli.errors").print_error(error, context.expression, as_json=as_json)
        return exit_code(error)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # who read our output has had enough; Python must not complain about it while it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


def exit_code(error: RollerError) -> int:
    if isinstance(error, InputError):
        return REJECTED
    no_device = isinstance(error, LaunchError) and error.code in NO_DEVICE
    return MISSING if no_device or isinstance(error, ToolchainMissingError) else FAILED


class _ArgumentParser(argparse.ArgumentParser):
    """Refuses what it does not know as every input is refused."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        raise ArgumentError(message, hint=f"{self.prog} --help")


def _parse(words: list[str], context: CommandContext) -> tuple[Command, argparse.Namespace]:
    """The verb and its options. Only that verb's module is loaded: the others' start-up time is not ours."""
    parser = _ArgumentParser(prog="roller", description="Tensor expressions in, fast kernels out.")
    parser.add_argument("--version", action="version", version=f"roller {__version__}")
    subparsers = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    chosen = words[0] if words else ""
    for name, summary in COMMANDS.items():
        subparser = subparsers.add_parser(
            name, help=summary, description=summary[0].upper() + summary[1:] + ".", allow_abbrev=False
        )
        if name == chosen:
            command: Command = import_module(f"roller_svc.cli.{name}")
            command.add_arguments(subparser)
    options = parser.parse_args(words)
    options.texts = context
    return command, options
