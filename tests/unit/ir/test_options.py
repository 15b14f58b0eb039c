"""One record of options: Python, the command line, the service and stores follow it."""

from __future__ import annotations

import argparse
import inspect
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import roller_svc
from roller_svc.cli import options as cli
from roller_svc.client.schemas import CompileOptions, EstimateRequest, GraphOptions
from roller_svc.compiler.request import build_request
from roller_svc.errors import ArgumentError
from roller_svc.ir import options
from roller_svc.ir.options import (
    CommonOptions,
    EstimateOptions,
    KernelOptions,
    NamedOptions,
    SearchOptions,
    options_json,
    options_of,
)
from roller_svc.model import estimate_model

SCHEDULE = Path(__file__).parents[2] / "data" / "copy.schedule"  # of COPY
COPY, INPUTS = "y[i] = x[i]", {"x": ("float32", (4,))}
RECORDS = [CommonOptions, EstimateOptions, SearchOptions, NamedOptions, KernelOptions]
# A value of each option other than its default: in Python, and on the command line.
GIVEN: dict[str, tuple[Any, list[str]]] = {
    "allow_tf32": (True, ["--allow-tf32"]),
    "allow_expanded_squares": (True, ["--allow-expanded-squares"]),
    "top_k": (3, ["--top-k", "3"]),
    "select": ("model", ["--select", "model"]),
    "winograd": ("never", ["--winograd", "never"]),
    "max_workspace_bytes": (4096, ["--max-workspace-bytes", "4096"]),
    "name": ("mine", ["--name", "mine"]),
    "runtime": ("emulator", ["--emulate"]),
    "family": ("mma", ["--kernel-family", "mma"]),
    "tiles": ({"split_k": 4, "stages": 2}, ["--constrain", "split_k=4,stages=2"]),
    "candidate": (2, ["--candidate", "2"]),
    "schedule": ("y: parallel i\n", ["--schedule", str(SCHEDULE)]),
    "constants": (["x"], ["--constant", "x"]),
    "donate": (["x"], ["--donate", "x"]),
    "strict": (True, ["--strict"]),
}
COMMON = {"allow_tf32": False, "allow_expanded_squares": False}
SEARCH = COMMON | {"top_k": 3, "select": "measure", "winograd": "auto", "max_workspace_bytes": None}
SIGNATURES = [
    (roller_svc.compile, SEARCH | {
        "top_k": 10, "target": "local", "outputs": None, "hardware": None, "cache": True, "name": None, "runtime": "auto",
        "family": None, "tiles": None, "candidate": 0, "schedule": None, "constants": (), "donate": (), "strict": False,
    }),
    (roller_svc.compile_model, SEARCH | {"plan": "auto", "runtime": "auto", "dims": None, "constants": None, "states": None,
                                         "name": None, "tune": None, "tune_options": None, "devices": None, "across": "merged",
                                         "order": "dataflow", "sink": "auto"}),
    (estimate_model, SEARCH | {"plan": "auto", "dims": None, "constants": None, "states": None, "name": None,
                               "devices": None, "across": "merged"}),
    (roller_svc.estimate, COMMON | {"constants": (), "winograd": "auto", "donate": (), "strict": False, "schedule": None}),
]  # fmt: skip


@pytest.mark.parametrize("record", [each for each in RECORDS if each is not KernelOptions])  # compile takes arrays too
def test_the_types_of_arguments_follow_the_record(record: type[CommonOptions]) -> None:
    arguments = getattr(options, record.__name__.replace("Options", "Arguments"))
    assert get_type_hints(arguments) == {name: each.argument_type for name, each in options_of(record).items()}


@pytest.mark.parametrize(("function", "expected"), SIGNATURES)
def test_functions_show_their_options(function: Any, expected: dict[str, Any]) -> None:
    keywords = [p for p in inspect.signature(function).parameters.values() if p.kind is inspect.Parameter.KEYWORD_ONLY]
    shown = {p.name: p.default for p in keywords if p.name != "progress"}
    assert shown == expected
    assert all(f"{name}: " in function.__doc__ for name in SEARCH.keys() & expected.keys())


@pytest.mark.parametrize("function", [roller_svc.compile, roller_svc.compile_model, roller_svc.estimate])
def test_an_unknown_option_is_named(function: Any) -> None:
    with pytest.raises(ArgumentError, match=f"unknown option of {function.__name__}: 'top_n'") as refused:
        function(COPY, top_n=1)
    assert refused.value.code == "invalid-option"


@pytest.mark.parametrize(
    ("function", "given", "meant"),
    [
        (roller_svc.compile, "targets", "target"),
        (roller_svc.estimate, "target", "targets"),
        (roller_svc.compile_model, "dim", "dims"),
    ],
)
def test_a_parameter_may_be_meant(function: Any, given: str, meant: str) -> None:
    with pytest.raises(ArgumentError) as refused:
        function(COPY, **{given: "local"})
    assert refused.value.hint == f"did you mean `{meant}`?"


def test_every_option_has_a_case() -> None:
    assert GIVEN.keys() == options_of(KernelOptions).keys()


@pytest.mark.parametrize("name", GIVEN)
def test_an_option_is_the_same_everywhere(name: str) -> None:
    value, words = GIVEN[name]
    parser = argparse.ArgumentParser()
    cli.add_options(parser, KernelOptions)
    read = cli.option_values(parser.parse_args(words), KernelOptions)
    assert read[name] == value
    assert CompileOptions(**{name: value}).model_dump()[name] == value
    target = "nvidia-t4" if name == "runtime" else "cpu-x86-avx2"
    ways = ({name: value}, read, CompileOptions(**{"select": "measure", name: value}).model_dump())
    requests = {build_request(COPY, INPUTS, target=target, **way) for way in ways}
    assert len(requests) == 1
    assert options_json(requests.pop())[name] == value


def test_defaults_are_the_same_everywhere() -> None:
    parser = argparse.ArgumentParser()
    cli.add_options(parser, KernelOptions)
    read = cli.option_values(parser.parse_args([]), KernelOptions)
    assert build_request(COPY, INPUTS, **read) == build_request(COPY, INPUTS)
    service = build_request(COPY, INPUTS, **CompileOptions().model_dump())
    assert service == build_request(COPY, INPUTS, select="model")


def test_the_service_takes_the_options_of_the_records() -> None:
    own = {"threads", "plan", "dims", "constants", "inputs", "states", "tune", "tune_options", "devices", "across", "order", "sink"}
    assert CompileOptions.model_fields.keys() == options_of(KernelOptions).keys()
    assert GraphOptions.model_fields.keys() - own == options_of(NamedOptions).keys()
    assert EstimateRequest.model_fields.keys() - {"items", "targets", "hardware", "top_k"} == options_of(EstimateOptions).keys()


@pytest.mark.parametrize("wrong", [{"top_k": 0}, {"top_k": 101}, {"select": "best"}, {"winograd": "sometimes"}])
def test_models_of_the_service_check_values(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        GraphOptions(**wrong)
