"""Which models may run on padded inputs, decided by what each statement reads."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
import torch
from torch import nn

from roller_svc.graph.load import load_graph
from roller_svc.graph.padding import PaddingError, padded_axes
from roller_svc.graph.weights import Weights

pytestmark = pytest.mark.filterwarnings("ignore:The tensor attributes:UserWarning")  # torch.export's, of recurrent modules


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


def axes_of(module, *shapes):
    """Return the padded axes where None in a shape is the dimension."""
    module = module.eval() if isinstance(module, nn.Module) else Function(module)
    weights, graphs = Weights(), []
    for extent in (4, 7):
        inputs = tuple(torch.zeros([extent if each is None else each for each in shape]) for shape in shapes)
        graphs.append(load_graph((module, inputs), weights))
    found = padded_axes(*graphs, (4, 7), weights)
    return {name: axis for name, axis in found.items() if name.startswith("output")}


@pytest.mark.parametrize(
    ("module", "shapes", "axes"),
    [
        (nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Softmax(-1)), [(None, 4)], {"output0": 0}),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.MaxPool2d(2), nn.Flatten()), [(None, 3, 8, 8)], {"output0": 0}),
        (nn.LSTM(3, 4), [(5, None, 3)], {"output0": 1, "output1": 1, "output2": 1}),
        (lambda x, y: x @ y, [(None, 6, 3), (None, 3, 2)], {"output0": 0}),
        (lambda x: x.reshape(-1), [(None, 5)], {"output0": 0}),
        (lambda x: x.reshape(-1, 2, 3).transpose(1, 2).reshape(-1) * 2, [(None, 6)], {"output0": 0}),
        (lambda x: x.transpose(0, 1).reshape(5, -1, 8), [(None, 5, 16)], {"output0": 1}),
        (lambda x: x + torch.arange(x.shape[0])[:, None], [(None, 6)], {"output0": 0}),
        (lambda x: x[0], [(None, 5)], {}),
        (lambda x: x.argmax(1), [(None, 6)], {"output0": 0}),
    ],
)
def test_rows_that_depend_on_their_own_inputs_may_be_padded(module, shapes, axes):
    assert axes_of(module, *shapes) == axes


@pytest.mark.parametrize(
    ("module", "shapes", "reason"),
    [
        (lambda x: x.mean(0), [(None, 5)], "reduces over"),
        (nn.Softmax(0), [(None, 5)], "reduces over"),
        (lambda x: x.cumsum(0), [(None, 5)], "reduces over"),
        (lambda x: x.sort(0)[0], [(None, 6)], "other extents"),
        (lambda x: x.flip(0), [(None, 5)], "for other extents"),
        (lambda x: x[-1], [(None, 5)], "for other extents"),
        (lambda x: torch.cat([x, x]), [(None, 5)], "for other extents"),
        (lambda x: x[1], [(None, 5)], "of one size depends on all"),
        (lambda x: x * x.shape[0], [(None, 5)], "a number in the model"),
        (lambda x: x @ x.t(), [(None, 6)], "no multiple"),
        (lambda x: x.t().reshape(-1) * 2, [(None, 6)], "inside of another one"),
        (nn.LSTM(3, 4), [(None, 2, 3)], "number of steps"),
    ],
)
def test_what_depends_on_other_rows_is_refused_with_its_node(module, shapes, reason):
    with pytest.raises(PaddingError, match=f"node '.*{reason}"):
        axes_of(module, *shapes)
