"""roller completion SHELL: print what completes commands, options, their values, devices and files in a shell."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module

from roller_svc import hardware
from roller_svc.cli.options import offered_values
from roller_svc.ir.options import KernelOptions, options_of

_TARGETS = ("target", "targets")  # arguments whose values are devices
_FILES = ("FILE", "DIR", "MODEL")  # what begins the names of values that are paths


@dataclass(frozen=True, slots=True)
class Argument:
    """An option with its flags, or a positional argument, which has none."""

    flags: tuple[str, ...]
    help: str
    takes_value: bool
    values: tuple[str, ...]
    is_path: bool


@dataclass(frozen=True, slots=True)
class Place:
    """A command or subcommand, by the words that lead there."""

    words: tuple[str, ...]
    arguments: tuple[Argument, ...]
    subcommands: tuple[tuple[str, str], ...]  # (name, help)

    @property
    def name(self) -> str:
        return " ".join(self.words)

    @property
    def flags(self) -> tuple[str, ...]:
        return tuple(flag for argument in self.arguments for flag in argument.flags)

    @property
    def values(self) -> tuple[str, ...]:
        """Words that may stand there, apart from options."""
        positional = (value for argument in self.arguments if not argument.flags for value in argument.values)
        return (*(name for name, _ in self.subcommands), *positional)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=list(_SHELLS), metavar="SHELL", help=f"one of {', '.join(_SHELLS)}")


def execute(options: argparse.Namespace) -> int:
    command = import_module("roller_svc.cli.command")  # which loads this module
    parser: argparse.ArgumentParser = command.make_parser(command.load_commands())
    print(_SHELLS[options.shell](tuple(find_places(parser, ("roller",)))))
    return 0


def find_places(parser: argparse.ArgumentParser, words: tuple[str, ...]) -> Iterator[Place]:
    """Yield the place of a parser, then those of its subcommands."""
    groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    arguments = tuple(_describe(parser, action) for action in parser._actions if action not in groups)
    subcommands = tuple((each.dest, each.help or "") for group in groups for each in group._choices_actions)
    yield Place(words, arguments, subcommands)
    for group in groups:
        for name, child in group.choices.items():
            yield from find_places(child, (*words, name))


def _describe(parser: argparse.ArgumentParser, action: argparse.Action) -> Argument:
    enumeration = options_of(KernelOptions).get(action.dest)
    values = tuple(map(str, action.choices or (enumeration.choices if enumeration else offered_values(action))))
    text = parser._get_formatter()._expand_help(action) if action.help else ""
    if action.dest in _TARGETS:
        values = hardware.ids()
    takes_value = action.nargs != 0
    is_path = takes_value and str(action.metavar or action.dest.upper()).startswith(_FILES)
    return Argument(tuple(action.option_strings), text, takes_value, values, is_path)


def _bash(places: Sequence[Place]) -> str:
    """Return the script for bash. Without words, bash completes files."""
    lines = [
        "_roller() {",
        '  local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" place=roller words="" i',
        '  local flag=""',
        "  COMPREPLY=()",
        # bash makes three words of --flag=value, zsh one
        '  case "$word" in',
        '    "=") word="" ;;',
        '    --*=*) before="${word%%=*}" flag="${word%%=*}=" word="${word#*=}" ;;',
        '    *) if [[ "$before" == "=" ]]; then before="${COMP_WORDS[COMP_CWORD-2]}"; fi ;;',
        "  esac",
        "  for ((i = 1; i < COMP_CWORD; i++)); do",
        '    case "$place ${COMP_WORDS[i]}" in',
        f'      {_names(places, "|")}) place="$place ${{COMP_WORDS[i]}}" ;;',
        "    esac",
        "  done",
        '  case "$place $before" in',
    ]
    for place in places:
        for argument in place.arguments:
            if argument.flags and argument.takes_value:
                pattern = "|".join(shlex.quote(f"{place.name} {flag}") for flag in argument.flags)
                lines.append(f"    {pattern}) words={shlex.quote(' '.join(argument.values))} ;;")
    lines += ["    *)", '      case "$place:$word" in']
    for place in places:
        lines.append(f"        {shlex.quote(f'{place.name}:-')}*) words={shlex.quote(' '.join(place.flags))} ;;")
        lines.append(f"        {shlex.quote(f'{place.name}:')}*) words={shlex.quote(' '.join(place.values))} ;;")
    lines += ["      esac ;;", "  esac", '  COMPREPLY=($(compgen -P "$flag" -W "$words" -- "$word"))', "}"]
    return "\n".join([*lines, "complete -o default -F _roller roller"])


def _zsh(places: Sequence[Place]) -> str:
    """Return the script for zsh, which completes by functions of bash. It starts completion where that is off."""
    start = "(( ${+functions[compdef]} )) || { autoload -U +X compinit && compinit; }"
    return f"{start}\nautoload -U +X bashcompinit && bashcompinit\n{_bash(places)}"


def _fish(places: Sequence[Place]) -> str:
    """Return the script for fish, which shows the help of each word."""
    lines = [
        "function __roller_at",
        "  set -l place roller",
        "  for word in (commandline -opc)[2..]",
        '    switch "$place $word"',
        f"      case {_names(places, ' ')}",
        '        set place "$place $word"',
        "    end",
        "  end",
        '  test "$place" = "$argv"',
        "end",
        "complete -c roller -f",
    ]
    for place in places:
        at = f"complete -c roller -n {shlex.quote(f'__roller_at {place.name}')}"
        lines += [f"{at} -a {name} -d {_quote_fish(text)}" for name, text in place.subcommands]
        lines += [" ".join([at, *_fish_words(each)]) for each in place.arguments if each.flags or each.values or each.is_path]
    return "\n".join(lines)


def _fish_words(argument: Argument) -> Iterator[str]:
    for flag in argument.flags:
        yield f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}"
    if argument.flags:
        yield f"-d {_quote_fish(argument.help)}"
    if argument.flags and argument.takes_value:
        yield "-r" if argument.is_path else "-x"
    if argument.is_path:
        yield "-F"
    if argument.values:
        yield f"-a {_quote_fish(' '.join(argument.values))}"


def _names(places: Sequence[Place], separator: str) -> str:
    return separator.join(shlex.quote(place.name) for place in places[1:])


def _quote_fish(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


_SHELLS: dict[str, Callable[[Sequence[Place]], str]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
