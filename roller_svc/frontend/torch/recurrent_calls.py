"""Recurrent layers as single nodes: torch's tracers would unroll them, or lower them to a library's layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

# Function of torch → its overload without packed sequences, which the library roller repeats as an opaque operator.
_WHOLE = {
    torch.lstm: torch.ops.aten.lstm.input,
    torch.gru: torch.ops.aten.gru.input,
    torch.rnn_tanh: torch.ops.aten.rnn_tanh.input,
    torch.rnn_relu: torch.ops.aten.rnn_relu.input,
}
_LIBRARY = torch.library.Library("roller_recurrent", "DEF")


def _define(overload: Any) -> Any:
    """Return an operator of the same signature and results, which tracers keep."""
    schema, name = str(overload._schema), overload._schema.name.removeprefix("aten::")
    _LIBRARY.define(name + schema[schema.index("(") :])
    _LIBRARY.impl(name, overload, "CompositeExplicitAutograd")
    torch.library.register_fake(f"roller_recurrent::{name}", overload, lib=_LIBRARY)
    return getattr(torch.ops.roller_recurrent, name).default


_OPAQUE = {function: _define(overload) for function, overload in _WHOLE.items()}
_FUNCTIONS = {opaque: function for function, opaque in _OPAQUE.items()}


@contextmanager
def preserve_recurrent_calls(module: fx.GraphModule) -> Iterator[None]:
    """Make the module call an opaque operator for each recurrent layer meanwhile. It gives no gradients."""
    calls = [node for name in _WHOLE for node in module.graph.find_nodes(op="call_function", target=name) if not _is_packed(node)]
    _retarget(module, [(node, _OPAQUE[node.target]) for node in calls])
    try:
        yield
    finally:
        _retarget(module, [(node, _FUNCTIONS[node.target]) for node in calls])


def _retarget(module: fx.GraphModule, targets: Sequence[tuple[fx.Node, Any]]) -> None:
    for node, target in targets:
        node.target = target
    if targets:
        module.recompile()


def _is_packed(node: fx.Node) -> bool:
    """Return whether a call takes a packed sequence: batch sizes come then before states and parameters."""
    return isinstance(node.args[3], list | tuple)


def capture_recurrent_modules() -> None:
    """Make torch capture recurrent modules, in every thread: a setting made in the usual way is of one thread."""
    torch._dynamo.config._config["allow_rnn"].default = True
