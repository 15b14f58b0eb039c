"""Parse the arguments, run the subcommand, and map errors to exit codes."""

from __future__ import annotations

import argparse
import atexit
import errno
import gc
import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import NoReturn, Protocol, cast

from roller_svc.cli.context import CommandContext
from roller_svc.errors import ArgumentError, InputError, LaunchError, RollerError, ToolchainMissingError
from roller_svc.version import __version__

# Subcommands with their help. The module of a subcommand has add_arguments(parser) and execute(options) -> exit code.
COMMANDS = {
    "compile": "compile a kernel; print or save it",
    "run": "compile a kernel, run it on random inputs, check it against the reference and time it",
    "model": "compile, run, plan or profile a whole model: ONNX files, JSON graphs",
    "estimate": "estimate the time of a program on one or more devices, without compiling",
    "explain": "explain how a kernel was constructed: tiles, candidates, costs",
    "schedule": "check, show or apply a schedule by hand",
    "ops": "list the named operators, or explain one: signature, meaning, example, its statements",
    "targets": "list devices and their compilers; check: compare a spec with the local device",
    "calibrate": "measure the local device and write its spec",
    "corpus": "compile, run and check every case of a file",
    "bench": "benchmark this project: construct, lint, model, cpu, model-zoo, gpu-models",
    "lint": "lint compiled CUDA kernels (spills, missing instructions)",
    "serve": "run the HTTP service",
    "worker": "build what services have queued in their database",
    "operations": "list, show, watch and cancel the builds of a service",
    "store": "collect, verify, pin, export and import the results in a store",
    "why-miss": "say which part of a request's key differs from the nearest stored result",
    "keys": "add, list, limit and revoke the API keys of the service",
    "tuning": "list, export, import and clear the seconds of trials that choose a model's kernels",
    "warm": "build models for several targets ahead, on a service or into a store",
    "completion": "print what completes commands, options and devices in bash, zsh or fish",
    "audit": "list who made and used keys, and who asked for, cancelled and pinned what",
}

# Subcommands that are entry points of another distribution, with what installs it.
DISTRIBUTIONS = {"bench": "in a checkout: python -m pip install -e bench"}
ENTRY_POINTS = "roller_svc.commands"  # their group

NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
NO_DEVICE = frozenset({"no-device", "no-cupy", "wrong-device"})

DONE, FAILED, REJECTED, MISSING, INTERRUPTED = 0, 1, 2, 3, 130


class Command(Protocol):
    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def execute(self, options: argparse.Namespace) -> int: ...


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code: 0 done, 1 failed, 2 invalid input, 3 a toolchain or device is missing."""
    _open_closed_streams()
    _end_without_collection()
    try:
        code = _execute(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader closed the pipe
        _discard_output()
        return FAILED
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        _discard_output()
        print(
            f"error: cannot write {error.filename or 'the output'}: {error.strerror}; free space, or write elsewhere",
            file=sys.stderr,
        )
        return FAILED


def _execute(words: list[str]) -> int:
    """Run a command. Print its error where it has one."""
    context = CommandContext()
    try:
        command, options = _parse(words, context)
        return command.execute(options)
    except SystemExit as ended:  # argparse has printed the help or the version
        return ended.code if isinstance(ended.code, int) else REJECTED
    except RollerError as error:
        import_module("roller_svc.cli.errors").print_error(error, context, as_json="--json" in words)
        return exit_code(error)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def _discard_output() -> None:
    """Keep Python from writing the output again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _open_closed_streams() -> None:
    """Open the null device for each standard stream that the caller closed, in the order of their descriptors."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            null = Path(os.devnull).open(mode, encoding="utf-8")  # noqa: SIM115 - open until the process ends
            setattr(sys, name, null)


def _end_without_collection() -> None:
    """Keep Python from a last collection of garbage, which visits all objects of a process that ends."""
    atexit.unregister(gc.disable)  # once is enough
    atexit.register(gc.disable)


def exit_code(error: RollerError) -> int:
    if isinstance(error, InputError):
        return REJECTED
    no_device = isinstance(error, LaunchError) and error.code in NO_DEVICE
    return MISSING if no_device or isinstance(error, ToolchainMissingError) else FAILED


def load_command(name: str) -> Command:
    """Return the module of a subcommand. Raises ArgumentError if its distribution is not installed."""
    if name not in DISTRIBUTIONS:
        return cast(Command, import_module(f"roller_svc.cli.{name.replace('-', '_')}"))
    for entry_point in import_module("importlib.metadata").entry_points(group=ENTRY_POINTS, name=name):
        return cast(Command, entry_point.load())
    raise ArgumentError(
        f"`roller {name}` is in a distribution of its own, which is not installed",
        code="missing-package",
        hint=DISTRIBUTIONS[name],
    )


class _ArgumentParser(argparse.ArgumentParser):
    """Reports invalid arguments as ArgumentError."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        raise ArgumentError(message, hint=_explain(message) or f"{self.prog} --help")


def _explain(message: str) -> str | None:
    """Return what to do about arguments that argparse refuses: a similar word, or quotes around a program."""
    quoted = re.fullmatch(r".*invalid choice: '([^']*)' \(choose from (.*)\)", message)
    if quoted is not None:
        near = get_close_matches(quoted[1], re.findall(r"[\w-]+", quoted[2]), n=1)
        return f"did you mean {near[0]}?" if near else None
    unknown = message.removeprefix("unrecognized arguments: ")
    if unknown != message and not unknown.startswith("-") and any(sign in unknown for sign in "[]=!"):
        return "put quotes around the program, which has characters of the shell: 'C[m, n] +=! A[m, k] * B[k, n]'"
    return None


def _parse(words: list[str], context: CommandContext) -> tuple[Command, argparse.Namespace]:
    """Parse the subcommand and its options. Import only its module, which keeps start-up fast."""
    selected = words[0] if words else ""
    command = load_command(selected) if selected in COMMANDS else None
    options = make_parser({selected: command} if command else {}).parse_args(words)
    assert command is not None  # else the words were refused
    options.context = context
    return command, options


def load_commands() -> dict[str, Command]:
    """Return the modules of all subcommands whose distributions are installed."""
    commands = {name: load_command(name) for name in COMMANDS if name not in DISTRIBUTIONS}
    for name in DISTRIBUTIONS:
        with suppress(ArgumentError):
            commands[name] = load_command(name)
    return commands


def make_parser(commands: Mapping[str, Command]) -> argparse.ArgumentParser:
    """Return the parser of all subcommands, with the arguments of `commands`."""
    parser = _ArgumentParser(prog="roller", description="Tensor expressions in, fast kernels out.")
    parser.add_argument("--version", action="version", version=f"roller {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        subparser = subparsers.add_parser(
            name, help=summary, description=summary[0].upper() + summary[1:] + ".", allow_abbrev=False
        )
        if name in commands:
            commands[name].add_arguments(subparser)
    return parser
