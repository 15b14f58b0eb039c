"""Arguments of Python in a message → flags of the command line, or fields of a request to the service.

Messages name options as callers in Python give them. The edges show them in their own words.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from roller_svc.ir.options import KernelOptions, Option, options_of

_OPTIONS = options_of(KernelOptions)
# Other arguments, with their flags.
_FLAGS = {"dims": "--dim", "inputs": "--input", "outputs": "--output", "target": "--target", "threads": "--threads"}
# An argument as Python has it. What users gave, such as paths and arguments of flags, looks otherwise.
_ARGUMENT = re.compile(
    rf"(?<![\w/.-])({'|'.join([*_FLAGS, *_OPTIONS])})=(\{{.*?\}}|\[.*?\]|\"[^\"]*\"|'[^']*'|(?:True|False|None|\d+)\b)"
)
_FIELD_TYPE = re.compile(r'\{"dtype": "([^"]*)", "shape": \[([^\[\]]*)\]\}')
_OPTION_FIELD = re.compile(rf'"options": \{{"({"|".join(_OPTIONS)})": (\{{[^{{}}]*\}}|[^{{}}]*)\}}')
_FIELD = re.compile(rf'"({"|".join(_FLAGS)})": (\{{.*?\}}|\[.*?\]|"[^"]*"|\w+)')
_ENTRY = re.compile(r'"([^"]*)": (\("[^"]*", \([^()]*\)\)|\[[^\]]*\]|[^,]+)')  # of a mapping
_TYPE = re.compile(r'\("([^"]*)", \(([^()]*)\)\)')


def show_as_flags(text: str, flags: Mapping[str, str] | None = None) -> str:
    """Return a message with flags in place of arguments. `flags` are those that differ for a command.

    A message that has flags is of the command line, and stays as it is.
    """
    if "--" in text:
        return text

    def replace(match: re.Match[str]) -> str:
        name, value = match[1], match[2]
        flag = (flags or {}).get(name) or _FLAGS.get(name) or _flag(_OPTIONS[name])
        return " ".join(f"{flag} {each}".rstrip() for each in _flag_values(name, value)) or match[0]

    return _ARGUMENT.sub(replace, _show_as_arguments(text))


def _show_as_arguments(text: str) -> str:
    """Return a message of the service with arguments in place of fields: the inverse of show_as_fields."""
    text = _FIELD_TYPE.sub(lambda m: f'("{m[1]}", ({m[2]}))', text)
    text = _OPTION_FIELD.sub(lambda m: f"{m[1]}={'True' if m[2] == 'true' else m[2]}", text)
    return _FIELD.sub(r"\1=\2", text)


def show_as_fields(text: str) -> str:
    """Return a message with fields of a JSON body in place of arguments."""

    def replace(match: re.Match[str]) -> str:
        value = _TYPE.sub(lambda m: f'{{"dtype": "{m[1]}", "shape": [{m[2].rstrip(",")}]}}', match[2].replace("'", '"'))
        value = {"True": "true", "False": "false", "None": "null"}.get(value, value)
        field = f'"{match[1]}": {value}'
        return f'"options": {{{field}}}' if match[1] in _OPTIONS else field

    return _ARGUMENT.sub(replace, text)


def _flag(option: Option) -> str:
    return option.flags[0] if option.flags else f"--{option.name.replace('_', '-')}"


def _flag_values(name: str, value: str) -> Iterator[str]:
    """Yield what follows each use of a flag."""
    if value.startswith("{"):
        for key, entry in _ENTRY.findall(value[1:-1]):
            yield f"{key}={_flag_value(entry)}"
    elif value.startswith("["):
        yield from (each.strip(" \"'") for each in value[1:-1].split(",") if each.strip())
    else:
        is_switch = value == "True" or (name in _OPTIONS and _OPTIONS[name].switch is not None)
        yield "" if is_switch else value.strip("\"'")


def _flag_value(entry: str) -> str:
    given = _TYPE.fullmatch(entry)
    return re.sub(r"[\[\]\s\"']", "", entry) if given is None else f"{given[1]}[{given[2].replace(' ', '').rstrip(',')}]"
