"""Which device runs each node: labels of the model, then those of the caller."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from roller_svc import hardware
from roller_svc.errors import ArgumentError
from roller_svc.frontend.lang.input_types import short_repr
from roller_svc.graph.python_ops import PREFIX, make_host_node
from roller_svc.ir.graph import Graph, HostNode, Node
from roller_svc.ir.hardware import HardwareSpec, TargetKind

CPU, GPU, LOCAL = "cpu", "gpu", "local"


@dataclass(frozen=True, slots=True)
class Placed:
    """A graph whose nodes have devices. Labels that name functions of Python are nodes of these."""

    graph: Graph
    devices: Mapping[str, str]  # id of the device, or python:NAME, by the node's name
    specs: Mapping[str, HardwareSpec]  # by id


def check_labels(devices: object) -> dict[str, str]:
    """Return the caller's labels. Raises ArgumentError if they are not a mapping of names to devices."""
    if devices is None:
        return {}
    if not isinstance(devices, Mapping) or not all(isinstance(each, str) for pair in devices.items() for each in pair):
        raise ArgumentError(
            f"devices must map names of nodes to devices, got {short_repr(devices)}",
            code="invalid-option",
            hint='devices={"conv*": "nvidia-h200-sxm", "post": "python:nms"}',
        )
    return dict(devices)


def place_nodes(graph: Graph, labels: Mapping[str, str], target: HardwareSpec) -> Placed | None:
    """Return the graph with a device for each node; None if all of them are the target.

    Args:
        graph: the graph, with the labels of its source.
        labels: devices by a node's name, or else by a pattern with `*`. Later ones count, and count more than the graph's.
        target: the device of nodes without a label.

    Raises ArgumentError for a pattern without a node, or a device that there is not.
    """
    chosen = dict(graph.devices)
    names = [node.name for node in graph.nodes]
    for pattern, device in labels.items():
        matching = [pattern] if pattern in names else [name for name in names if fnmatchcase(name, pattern)]
        if not matching:
            raise ArgumentError(
                f"devices: no node is called {pattern!r:.80}; the first are {', '.join(names[:10])}", code="unknown-argument"
            )
        chosen |= dict.fromkeys(matching, device)
    specs = {target.id: target}
    devices: dict[str, str] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        label = chosen.get(node.name, node.operator if isinstance(node, HostNode) else target.id)
        placed = node
        if label.startswith(PREFIX):
            if not isinstance(node, HostNode):
                placed = make_host_node(node.name, label.removeprefix(PREFIX), node.inputs, node.outputs, node.input_types)
                if placed.output_types != node.output_types:
                    raise ArgumentError(f"node {node.name!r}: {label} has results of other types", code="shape-mismatch")
            devices[node.name] = label
        elif isinstance(node, HostNode):
            raise ArgumentError(f"node {node.name!r} is {node.operator}, which no device runs: {label}", code="invalid-option")
        else:
            spec = find_device(label, target)
            specs[spec.id] = spec
            devices[node.name] = spec.id
        nodes.append(placed)
    if set(devices.values()) <= {target.id}:
        return None
    return Placed(replace(graph, nodes=tuple(nodes), devices={}), devices, specs)


def find_device(label: str, target: HardwareSpec) -> HardwareSpec:
    """Return the device of a label that does not name a function of Python. Raises InputError if there is none."""
    is_cpu = target.family is TargetKind.CPU
    if label in (CPU, GPU) and is_cpu == (label == CPU):
        return target
    if label == GPU:
        raise ArgumentError(
            f"the device {GPU!r} is the target, which is {target.id}, a CPU", code="unknown-device", hint="name the GPU's id"
        )
    spec = hardware.load(LOCAL if label == CPU else label)
    return target if spec.id == target.id else spec
