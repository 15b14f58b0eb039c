"""roller model: compile, estimate, run, plan and profile whole models."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from roller_svc import hardware
from roller_svc.cli import format as show
from roller_svc.cli import options as common
from roller_svc.cli import remote, stepping
from roller_svc.cli.page_file import MODEL, write_page
from roller_svc.cli.progress import report_stages
from roller_svc.client.schemas import GraphOptions
from roller_svc.errors import ArgumentError, InvariantError, WrongAnswerError
from roller_svc.frontend.lang.input_types import tensor_types
from roller_svc.graph.choose import EAGER, PLANS
from roller_svc.graph.compile import GPU_PLANS
from roller_svc.graph.devices.plan import ACROSS, MERGED
from roller_svc.graph.inputs import Sample, random_arrays
from roller_svc.graph.interpret import interpret
from roller_svc.graph.load import load_graph
from roller_svc.graph.lowerings.programs import Program
from roller_svc.graph.states import pair_states
from roller_svc.graph.weights import Weights
from roller_svc.graph.wiring.kernels import TuneOptions, Tuning
from roller_svc.graph.wiring.tree import find_variables
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.options import HOST_LAUNCHERS, NamedOptions
from roller_svc.model import Model, compile_model, estimate_model, load_model
from roller_svc.modes.mixed import DATAFLOW, ORDERS
from roller_svc.runtime.cuda.arrays import copy_into_device, copy_to_device, copy_to_host, synchronize
from roller_svc.runtime.cuda.module import device_present

RUNS = 20  # of a timed model
TIMED_S = 2.0
TOLERANCE = 1e-4  # of the largest value of an output; docs/models.md
SHOWN_OPERATORS = 15


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="kind", metavar="WHAT", required=True)
    compiled = kinds.add_parser("compile", help="compile an ONNX file or a JSON graph", allow_abbrev=False)
    _add_model(compiled)
    compiled.add_argument("--save", metavar="DIR", help="write the shared object, header and weights to DIR")
    launchers = f"with --save: write what calls the model by some of {','.join(HOST_LAUNCHERS)}"
    common.offer_values(compiled.add_argument("--launcher", metavar="NAMES", help=launchers), HOST_LAUNCHERS)
    tuned = kinds.add_parser(
        "tune", help="compile a model whose kernels are chosen by trials of all of it on this machine", allow_abbrev=False
    )
    _add_model(tuned)
    tuned.add_argument("--save", metavar="DIR", help="write the shared object, header and weights to DIR")
    trials = TuneOptions().budget_trials
    help_ = "trials at most, before whole calls are compared (default: %(default)s)"
    tuned.add_argument("--trials", type=int, default=trials, metavar="N", help=help_)
    tuned.add_argument("--budget", type=_seconds, metavar="30s", help="seconds after which no trial begins (default: no limit)")
    tuned.add_argument("--exact", action="store_true", help="choose only kernels whose results have the same bits")
    run = kinds.add_parser("run", help="run a model, or the folder of a saved one, and time it", allow_abbrev=False)
    _add_model(run)
    _add_arrays(run)
    run.add_argument("--emulate", action="store_true", help="run a GPU's model in the emulator on the CPU, and do not time it")
    run.add_argument("--check", action="store_true", help="compare the results with the reference interpreter's")
    stepping.add_arguments(run)
    planned = kinds.add_parser("plan", help="show kernels, steps and memory of a model", allow_abbrev=False)
    _add_model(planned)
    _add_html(planned)
    _add_model(
        kinds.add_parser("estimate", help="estimate a call by the performance model, without a compiler", allow_abbrev=False)
    )
    profile = kinds.add_parser("profile", help="show which operators a call's time goes to", allow_abbrev=False)
    _add_model(profile)
    _add_arrays(profile)
    profile.add_argument("--trace", metavar="FILE", help="write the steps in Chrome's trace format to FILE")
    _add_html(profile)


def _add_html(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--html", metavar="FILE", help="write the page of the model to FILE, which needs no service")


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", help="an ONNX file, a JSON graph, or the folder of a saved model")
    common.add_target(parser, "local")
    common.add_calibration(parser)
    add_graph_options(parser)
    common.add_server(parser)
    parser.add_argument("--json", action="store_true", help="write JSON to stdout")


def _add_devices(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device",
        action="append",
        default=[],
        metavar="NODE=ID",
        help="device of a node, or of those that a pattern with * names: an id, cpu, gpu, or python:NAME (default: the target)",
    )
    across = parser.add_argument("--across", default=MERGED, metavar="HOW", help="with several devices: merged or split")
    common.offer_values(across, ACROSS)
    order = parser.add_argument("--order", default=DATAFLOW, metavar="HOW", help="dataflow, or serial: a fixed order")
    common.offer_values(order, ORDERS)


def add_graph_options(parser: argparse.ArgumentParser, **defaults: str) -> None:
    """Add the options of compile_model. `graph_options` reads them."""
    parser.add_argument("--threads", type=int, metavar="N", help="threads of the model (default: the device's cores)")
    parser.add_argument(
        "--dim",
        action="append",
        default=[],
        metavar="batch=4[,8]",
        help="extent of a symbolic dimension; several make a bucket for each",
    )
    parser.add_argument(
        "--shape",
        action="append",
        default=[],
        dest="input_types",
        metavar="x=float32[1,3,224,224]",
        help="type of an input that the file leaves open",
    )
    parser.add_argument(
        "--constant",
        action="append",
        default=[],
        metavar="sr=16000",
        help="value of an input: a number, true, false, [1,2], or @FILE.npy; the model no longer has the input",
    )
    parser.add_argument(
        "--state",
        action="append",
        default=[],
        metavar="past_*=present_*",
        help="input that calls update in place, and the output that is its new value; * stands for any text",
    )
    plan = parser.add_argument(
        "--plan",
        default="auto",
        metavar="KIND",
        help="auto, serial, parallel, rammer or eager; of GPUs auto, launches, graph, waves, persistent or eager "
        "(default: %(default)s)",
    )
    common.offer_values(plan, dict.fromkeys((*PLANS, *GPU_PLANS, EAGER)))
    _add_devices(parser)
    common.add_options(parser, NamedOptions, **defaults)


def _add_arrays(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--input", action="append", default=[], metavar="x=@x.npy", help="value of an input (default: random values)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the random inputs (default: %(default)s)")


def execute(options: argparse.Namespace) -> int:
    options.context.flags["inputs"] = "--shape"
    _check_options(options)
    if options.kind == "estimate":
        show.print_result(options, *_estimated(options))
        return 0
    model = _model(options)
    match options.kind:
        case "compile":
            facts, text = _compiled(model, options)
        case "tune":
            facts, text = _tuned(model, options)
        case "run":
            facts, text = _run(model, options)
        case "plan":
            facts, text = model.plan, _plan_text(model)
            if options.html is not None:
                write_page(options.html, MODEL, model.story)
        case _:
            facts, text = _profile(model, options)
            if options.html is not None:
                write_page(options.html, MODEL, model.story | {"profile": facts["steps"]})
    show.print_result(options, facts, text)
    return 0


def _check_options(options: argparse.Namespace) -> None:
    """Refuse before anything is compiled what could not be done afterwards, or would be ignored."""
    if options.kind == "compile" and options.launcher and not options.save:
        raise ArgumentError("--launcher needs --save", code="invalid-option", hint="name the folder: --save DIR")
    is_checked = options.kind == "run" and options.check
    if options.kind == "run":
        stepping.check_options(options, is_saved=_is_saved(options))
    if options.kind == "tune" and _is_saved(options):
        raise ArgumentError(
            "tune measures kernels that it compiles, and was given a saved model",
            code="cannot-measure",
            hint="give it the source of the model",
        )
    has_html = options.kind in ("plan", "profile") and options.html
    if has_html and (_is_saved(options) or options.device or common.server_url(options)):
        raise ArgumentError(
            "--html is for the source of a model for one device, which is compiled here",
            code="no-story",
            hint="a service shows its models at /m/DIGEST",
        )
    if _is_saved(options):
        flags = {
            "--device": options.device,
            "--dim": options.dim, "--shape": options.input_types, "--constant": options.constant, "--state": options.state,
            "--check": is_checked,
        }  # fmt: skip
        for flag in (flag for flag, given in flags.items() if given):
            raise ArgumentError(
                f"{flag} is for the source of a model, and {options.file} is a saved one",
                code="invalid-option",
                hint="arrays choose the bucket of a saved model: --input x=@x.npy",
            )
    if is_checked and any(isinstance(extent, list | str) for extent in (_dims(options) or {}).values()):
        raise ArgumentError(
            "--check takes one extent for each --dim",
            code="invalid-option",
            hint="check the buckets one after the other: --dim batch=4",
        )


def _is_saved(options: argparse.Namespace) -> bool:
    return (Path(options.file) / "metadata.json").is_file()


def _model(options: argparse.Namespace) -> Model:
    """Load a saved model, or compile the file."""
    path = Path(options.file)
    runtime = _runtime(options)
    if _is_saved(options):
        return load_model(path, runtime)
    if server := common.server_url(options):
        tuning = {"tune": "now", "tune_options": _tune_options(options)} if options.kind == "tune" else {}
        bundle = remote.model_bundle(options, server, graph_options(options, **tuning))
        with tempfile.TemporaryDirectory(prefix="roller-") as folder:
            remote.unpack(bundle, Path(folder))
            return load_model(folder, runtime)
    common.set_calibration(options)
    with report_stages() as progress:
        return compile_model(
            path,
            options.target,
            options.threads,
            _types(options) or None,
            plan=options.plan,
            tune="now" if options.kind == "tune" else "off",
            tune_options=_tune_options(options) if options.kind == "tune" else None,
            runtime=runtime,
            dims=_dims(options),
            constants=_constants(options) or None,
            states=_states(options),
            devices=_devices(options),
            across=options.across,
            order=options.order,
            progress=progress,
            **common.option_values(options, NamedOptions),
        )


def _tune_options(options: argparse.Namespace) -> dict[str, object]:
    budget = {} if options.budget is None else {"budget_s": options.budget}
    return {"budget_trials": options.trials, "exact": options.exact, **budget}


def _seconds(text: str) -> float:
    """Return the seconds of a text such as 30s or 2.5."""
    return float(text.removesuffix("s"))


def _runtime(options: argparse.Namespace) -> str:
    return "emulator" if getattr(options, "emulate", False) else "auto"


def _estimated(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    if _is_saved(options):
        raise ArgumentError(f"estimate is for the source of a model, and {options.file} is a saved one", code="invalid-option")
    if server := common.server_url(options):
        facts = remote.model_estimate(options, server, graph_options(options))
    else:
        common.set_calibration(options)
        facts = estimate_model(
            Path(options.file),
            options.target,
            options.threads,
            _types(options) or None,
            plan=options.plan,
            dims=_dims(options),
            constants=_constants(options) or None,
            states=_states(options),
            devices=_devices(options),
            across=options.across,
            **common.option_values(options, NamedOptions),
        )
    rows = [(each["uses"], show.format_seconds(each["seconds"]), each["expression"][:90]) for each in facts["kernels"]]
    by_plan = f" with plan {facts['plan']}" if facts["plan"] else ""
    bucket = f" (the first of {facts['buckets']} buckets)" if facts["buckets"] > 1 else ""
    call = f"{show.format_seconds(facts['seconds'])} a call{_extents(facts['dims'])}{bucket}"
    text = f"{call} on {facts['target']}{by_plan}, by the performance model"
    return facts, f"{text}\n\n{show.format_table(('uses', 'estimate', 'program'), rows)}"


def graph_options(options: argparse.Namespace, **more: object) -> GraphOptions:
    """Return the options of the request to a service, with more fields. Raises ArgumentError."""
    types = {name: {"dtype": dtype, "shape": shape} for name, (dtype, shape) in _types(options).items()}
    constants = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in _constants(options).items()}
    fields = {
        "threads": options.threads, "plan": options.plan, "dims": _dims(options) or {}, "inputs": types,
        "constants": constants, "states": _states(options), "devices": _devices(options), "across": options.across,
        "order": options.order, **common.option_values(options, NamedOptions), **more,
    }  # fmt: skip
    return remote.validate_body(GraphOptions, fields)


def _types(options: argparse.Namespace) -> dict[str, tuple[str, list[int]]]:
    return common.parse_inputs(argparse.Namespace(input=options.input_types))


def _dims(options: argparse.Namespace) -> dict[str, int | str | list[int]] | None:
    """Parse --dim: batch=4 → {"batch": 4}; batch=1,8 → {"batch": [1, 8]}; batch=1..8 → {"batch": "1..8"}."""
    dims: dict[str, int | str | list[int]] = {}
    for text in options.dim:
        name, _, value = text.partition("=")
        if ".." in value:
            dims[name] = value
            continue
        try:
            extents = [int(part) for part in value.split(",")]
        except ValueError as failure:
            raise ArgumentError(
                f"--dim {text}: expected NAME=EXTENT[,EXTENT], or NAME=FIRST..LAST", code="invalid-option"
            ) from failure
        dims[name] = extents[0] if len(extents) == 1 else extents
    return dims or None


def _constants(options: argparse.Namespace) -> dict[str, Any]:
    """Parse --constant: sr=16000 → {"sr": 16000}; k=@k.npy → the array of the file."""
    constants: dict[str, Any] = {}
    for text in options.constant:
        name, _, value = text.partition("=")
        if value.startswith("@"):
            constants[name] = _read_array("--constant", text)[1]
            continue
        try:
            constants[name] = json.loads(value)
        except (ValueError, RecursionError) as failure:
            raise ArgumentError(
                f"--constant {text[:80]}: expected NAME=NUMBER, NAME=[NUMBER,...] or NAME=@FILE.npy", code="invalid-option"
            ) from failure
    return constants


def _states(options: argparse.Namespace) -> dict[str, str]:
    """Parse --state: past_*=present_* → {"past_*": "present_*"}."""
    states: dict[str, str] = {}
    for text in options.state:
        name, separator, result = text.partition("=")
        if not (name and separator and result):
            raise ArgumentError(f"--state {text[:80]}: expected INPUT=OUTPUT", code="invalid-option")
        states[name] = result
    return states


def _devices(options: argparse.Namespace) -> dict[str, str]:
    """Parse --device: conv1=cpu → {"conv1": "cpu"}."""
    devices: dict[str, str] = {}
    for text in options.device:
        name, separator, device = text.rpartition("=")
        if not (name and separator and device):
            raise ArgumentError(f"--device {text[:80]}: expected NODE=ID", code="invalid-option")
        devices[name] = device
    return devices


def _arrays(model: Model, options: argparse.Namespace) -> dict[str, Any]:
    """Return the given arrays of inputs and states, and random ones for the others: small numbers where they are integers."""
    tensors = (*model.inputs, *model.states)
    arrays = random_arrays(tensors, options.seed)
    for name, value in (_read_array("--input", text) for text in options.input):
        if name not in arrays:
            known = ", ".join(info.name for info in tensors)
            raise ArgumentError(f"--input {name}: the model's inputs are {known}", code="unknown-argument")
        arrays[name] = value
    return arrays


def _read_array(option: str, text: str) -> tuple[str, Any]:
    name, _, file = text.partition("=@")
    if not file:
        raise ArgumentError(f"{option} {text}: expected NAME=@FILE.npy", code="invalid-inputs")
    try:
        return name, np.load(file, allow_pickle=False)
    except stepping.UNREADABLE as failure:
        raise ArgumentError(f"{option} {text}: cannot read {file}: {failure}", code="unreadable-file") from failure


def _tuned(model: Model, options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    facts, text = _compiled(model, options)
    if common.server_url(options):
        facts["tuning"] = known = model.report["tuning"]
        return facts, f"{text}\ntuned on the service: {known['trials']} trials, {known['gain']:.2f} times as fast"
    tuning = model.tuning
    if not isinstance(tuning, Tuning):
        raise InvariantError("a model was tuned before it was returned, and does not say how")
    facts["tuning"] = tuning.to_document()
    changed = sum(tuning.chosen.get(each.name) != each.choices[each.default] for each in find_variables(tuning.root))
    variables = len(tuning.chosen)
    line = f"tuned: {changed} of {variables} kernels replaced in {tuning.trials} trials, {tuning.gain:.2f} times as fast"
    return facts, f"{text}\n{line}"


def _compiled(model: Model, options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    facts = _facts(model)
    if options.save:
        launchers = common.parse_names(options.launcher) if getattr(options, "launcher", None) else ()
        facts["saved"] = str(model.save(options.save, launchers))
    lines = [_summary(model)]
    if "saved" in facts:
        exported = f"all that it exports begins with {model.name}"
        has_header = (Path(facts["saved"]) / "model.h").is_file()  # of a CPU's model
        lines.append(f"saved to {facts['saved']}{': ' + exported if has_header else ''}")
    return facts, "\n".join(lines)


def _facts(model: Model) -> dict[str, Any]:
    arena = model.plan.get("arena")
    return {
        "digest": model.digest,
        "name": model.name,
        "target": model.target,
        "inputs": [each._asdict() for each in model.inputs],
        "outputs": [each._asdict() for each in model.outputs],
        "states": [each._asdict() for each in model.states],
        "kernels": [{"digest": each.digest, "uses": each.uses, "expression": each.expression} for each in model.kernels],
        "estimate": {"seconds": model.estimate.seconds},
        "arena": arena,
        "report": model.report,
    }


def _summary(model: Model) -> str:
    report = model.report
    passes = report.get("passes") or [{"nodes_before": 0, "nodes_after": 0}]
    seconds = ", ".join(f"{stage} {show.format_seconds(value)}" for stage, value in report.get("seconds", {}).items())
    cache = report.get("cache", {})
    lines = [
        model.digest,
        *(f"input  {each.name}: {each.dtype}{list(each.shape)}" for each in model.inputs),
        *(f"output {each.name}: {each.dtype}{list(each.shape)}" for each in model.outputs),
        *(f"state  {each.name}: {each.dtype}{list(each.shape)}" for each in model.states),
        f"{passes[0]['nodes_before']} operators in {passes[-1]['nodes_after']} nodes, {len(model.kernels)} kernels "
        f"({cache.get('hits', 0)} from the cache), for {model.target}{_threads(report)}",
        f"built in: {seconds}",
        f"estimate: {show.format_seconds(model.estimate.seconds)} a call",
        *_lowering_lines(model),
    ]  # fmt: skip
    if "arena" in model.plan:
        arena = model.plan["arena"]
        lines.append(
            f"memory: {show.format_bytes(arena['bytes'])} of workspace for {show.format_bytes(arena['tensor_bytes'])} of tensors"
        )
    return "\n".join(lines)


def _threads(report: Mapping[str, Any]) -> str:
    return f" with {report['threads']} threads" if report.get("threads") else ""


def _lowering_lines(model: Model) -> list[str]:
    """Return a line for each kind of plans of a GPU, with a star at the one that runs; with buckets for each of them."""
    buckets = model.plan.get("buckets") or [model.plan]
    results = [each["lowerings"] for each in model.report.get("buckets", ())] or [model.report.get("lowerings", {})]
    return [
        f"plan {kind}{'*' if kind == plan.get('lowering') else ''}{_extents(plan.get('dims', {}))}: {_lowering(each)}"
        for plan, lowerings in zip(buckets, results, strict=True)
        for kind, each in lowerings.items()
    ]


def _extents(dims: Mapping[str, int]) -> str:
    return f" for {', '.join(f'{name}={extent}' for name, extent in dims.items())}" if dims else ""


def _lowering(result: Mapping[str, Any]) -> str:
    if "refused" in result:
        return f"refused: {result['refused']}"
    return f"{show.format_seconds(result['seconds'])} a call, {result['launches']} launches"


def _run(model: Model, options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    arrays = _arrays(model, options)
    if options.step:
        sample = _sample(model, arrays)
        return stepping.run_steps(model, sample.inputs, sample.states, options, TOLERANCE)
    on_device = device_present() and model.takes_device_arrays
    sample = _sample(model, arrays, on_device=on_device)
    results = {**model.run(sample.inputs, states=sample.states), **sample.states}
    outputs = copy_to_host(results) if on_device else {name: array.copy() for name, array in results.items()}
    facts: dict[str, Any] = {"digest": model.digest}
    if not options.emulate:
        facts |= _timed(model, sample, synchronize if on_device else None)
    facts["outputs"] = [
        {"name": name, "dtype": str(value.dtype), "shape": list(value.shape), "max_abs": _largest(value)}
        for name, value in outputs.items()
    ]
    if options.check:
        facts["max_abs_error"] = _check(outputs, arrays, options, hardware.load(model.target))
    lines = [
        *(f"{each['name']}: {each['dtype']}{each['shape']}, largest value {each['max_abs']:.6g}"
          for each in facts["outputs"]),
        "one call in the emulator, which is not timed" if options.emulate else
        f"{show.format_seconds(facts['min_s'])} a call (median {show.format_seconds(facts['median_s'])}, "
        f"{facts['runs']} calls)",
    ]  # fmt: skip
    if buckets := model.plan.get("buckets"):
        shapes = ", ".join(f"{name}{list(array.shape)}" for name, array in arrays.items())
        lines.append(f"one call of {shapes}; the model has {len(buckets)} buckets, and --input x=@x.npy chooses another")
    if options.check:
        lines.append(f"agrees with the interpreter: largest difference {facts['max_abs_error']:.3g}")
    return facts, "\n".join(lines)


def _largest(value: Any) -> float:
    return float(np.abs(value.astype(np.float64)).max()) if value.size else 0.0


def _sample(model: Model, arrays: Mapping[str, Any], *, on_device: bool = False) -> Sample:
    """Return the arrays of calls: copies, in the memory of the model."""
    given = dict(copy_to_device(arrays) if on_device else {name: array.copy() for name, array in arrays.items()})
    states = {info.name: given.pop(info.name) for info in model.states}
    return Sample(given, states, arrays, copy_into_device if on_device else np.copyto)


def _timed(model: Model, sample: Sample, wait: Callable[[], None] | None) -> dict[str, Any]:
    """Time calls, each to its end: `wait` waits for the work of a device."""
    samples: list[float] = []
    begin = time.perf_counter()
    while len(samples) < RUNS or time.perf_counter() - begin < TIMED_S / 4:
        states = sample.restore()
        if wait is not None and states:  # their copies end before the call begins
            wait()
        start = time.perf_counter()
        model.run(sample.inputs, states=states)
        if wait is not None:
            wait()
        samples.append(time.perf_counter() - start)
        if time.perf_counter() - begin > TIMED_S and len(samples) > 2:
            break
    return {"min_s": min(samples), "median_s": median(samples), "runs": len(samples)}


def _check(outputs: Mapping[str, Any], arrays: Mapping[str, Any], options: argparse.Namespace, spec: HardwareSpec) -> float:
    """Return the largest difference from the interpreter's results. Raises WrongAnswerError beyond the tolerance."""
    weights, dims = Weights(), _dims(options)
    path = Path(options.file)
    given = {} if path.suffix == ".json" else {name: (value.dtype.name, value.shape) for name, value in arrays.items()}
    extents = {name: extent for name, extent in (dims or {}).items() if isinstance(extent, int)}
    types = dict(tensor_types(given, least=0))  # a JSON graph has its own types
    constants = _constants(options) or None
    graph = load_graph(path, weights, types, extents, constants, byte_group=spec.byte_group)
    graph = pair_states(graph, _states(options))
    worst = 0.0
    for name, want in interpret(graph, weights, arrays).items():
        scale = max(1e-30, _largest(want))
        difference = _largest(outputs[name].astype(np.float64) - want.astype(np.float64))
        worst = max(worst, difference)
        if not difference <= TOLERANCE * scale:
            raise WrongAnswerError(
                f"output {name} differs from the interpreter's by {difference:.3g}, with values up to {scale:.3g}"
            )
    return worst


def _plan_text(model: Model) -> str:
    seconds = {stage.name: stage.seconds for stage in model.estimate.stages}
    rows = [
        (each.uses, show.format_seconds(seconds[each.digest]), each.digest[7:19], each.expression[:90])
        for each in model.kernels
        if each.digest in seconds
    ]
    parts = [_summary(model), show.format_table(("uses", "estimate", "kernel", "program"), rows)]
    if subgraphs := model.plan.get("subgraphs"):
        parts.append(_subgraph_text(subgraphs, model.plan["copies"]))
    if programs := [*_program_rows(model.plan["steps"]), *_event_rows(model.programs())]:
        parts.append(_program_table(programs))
    return "\n\n".join(parts)


def _program_table(rows: Sequence[tuple[object, ...]]) -> str:
    return f"prog[vEU][order]\n{show.format_table(('vEU', 'order', 'executes', 'rTasks'), rows)}"


def _subgraph_text(subgraphs: Sequence[Mapping[str, Any]], copies: Sequence[Mapping[str, Any]]) -> str:
    """Return the subgraphs of a model over several devices, and the copies between them with their reasons."""
    rows = [(each["device"], show.format_seconds(each["seconds"]), ", ".join(each["nodes"])[:90]) for each in subgraphs]
    listed = [
        (
            each["tensor"],
            each["from"],
            each["to"],
            show.format_bytes(each["bytes"]),
            show.format_seconds(each["seconds"]),
            each["reason"],
        )
        for each in copies
    ]
    tables = [show.format_table(("device", "estimate", "nodes"), rows)]
    tables += [show.format_table(("copy", "from", "to", "size", "estimate", "reason"), listed)] if listed else []
    return "\n\n".join(tables)


def _program_rows(steps: Sequence[Mapping[str, Any]]) -> list[tuple[object, ...]]:
    """Return what each vEU of a virtual device executes, in order, and what it waits for."""
    rows: list[tuple[object, ...]] = []
    for step in steps:
        rows += _program_rows(step.get("body", ()))
        for veu, program in enumerate(step.get("vdevice", {}).get("programs", ())):
            for order, instruction in enumerate(program):
                if "wait" in instruction:
                    waits = ", ".join(f"vEU {other} at {until}" for other, until in instruction["wait"])
                    rows.append((veu, order, f"wait for {waits}", ""))
                else:
                    operator, first, count = instruction["execute"]
                    node = step["steps"][step["operators"][operator]["step"]]["node"]
                    rows.append((veu, order, node, f"{first}..{first + count - 1}"))
    return rows


def _event_rows(launches: Sequence[Sequence[Program]]) -> list[tuple[object, ...]]:
    """Return what each vEU of a GPU executes, launch by launch, and which nodes it waits for."""
    rows: list[tuple[object, ...]] = []
    for number, programs in enumerate(launches):
        for veu, program in enumerate(programs):
            name = veu if len(launches) == 1 else f"{veu} of launch {number}"
            for order, instruction in enumerate(program):
                if "wait" in instruction:
                    rows.append((name, order, f"wait for {instruction['wait'][0]}", ""))
                else:
                    node, first, count = instruction["execute"]
                    rows.append((name, order, node[:90], f"{first}..{first + count - 1}"))
    return rows


def _profile(model: Model, options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    if (programs := model.programs()) and not options.trace:
        text = f"times are not measured: {model.target} is a GPU, and profiles are of CPUs"
        return {"programs": programs, "steps": []}, f"{text}\n\n{_program_table(_event_rows(programs))}"
    sample = _sample(model, _arrays(model, options))
    calls = (model.profile(sample.inputs, sample.restore()) for _ in range(RUNS))
    profile = min(calls, key=lambda steps: max((step.end_s for step in steps), default=0.0))
    total = sum(step.end_s - step.start_s for step in profile)
    by_operator = profile.seconds_by_operator()
    facts: dict[str, Any] = {
        "steps": [step._asdict() for step in profile],
        "seconds_by_operator": by_operator,
        "seconds": total,
    }
    rows = [
        (show.format_seconds(seconds), show.percent(seconds / total if total else None), name[:100])
        for name, seconds in list(by_operator.items())[:SHOWN_OPERATORS]
    ]
    lines = [show.format_table(("time", "share", "operator"), rows),
             f"{len(by_operator)} operators, {len(profile)} steps, {show.format_seconds(total)}"]  # fmt: skip
    if options.trace:
        facts["trace"] = str(profile.save_trace(options.trace))
        lines.append(f"trace written to {facts['trace']}")
    return facts, "\n".join(lines)
