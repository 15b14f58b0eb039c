"""The type of a converter of a node that is no single call."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from roller_svc.frontend.graph_builder import GraphBuilder
from roller_svc.frontend.onnx.tensors import Tensor
from roller_svc.frontend.onnx.use import Node

Expansion = Callable[[Node, GraphBuilder], Sequence[Tensor]]
