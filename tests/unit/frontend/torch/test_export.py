"""Import of exported programs: names, constants, effects, everything that is refused."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings

import ml_dtypes
import numpy as np
import pytest
from waiting import PATIENCE_S

pytest.importorskip("torch")
import torch
from torch import nn

from roller_svc.errors import ArgumentError, UnsupportedModelError
from roller_svc.frontend.torch.export import export_module, import_program
from roller_svc.frontend.torch.tensors import array_of, tensor_of
from roller_svc.graph.interpret import interpret
from roller_svc.graph.load import load_graph
from roller_svc.graph.passes.updates import update_states
from roller_svc.graph.weights import Weights
from roller_svc.ir.graph import LoopNode, verify
from roller_svc.semantics.interpreter import reference


class Function(nn.Module):
    def __init__(self, function, **tensors):
        super().__init__()
        self.function = function
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)

    def forward(self, *inputs, **named):
        return self.function(self, *inputs, **named)


def import_module(module, *inputs, **named):
    weights = Weights()
    return verify(import_program(export_module(module.eval(), inputs, named), weights, reference)), weights


def refused(function, *inputs, **tensors):
    with pytest.raises(UnsupportedModelError) as caught:
        import_module(Function(function, **tensors), *inputs)
    return caught.value.nodes


def operators(graph):
    return [node.operator for node in graph.nodes]


def test_layers_stay_one_node_each():
    module = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3), nn.Softmax(-1))
    graph, _ = import_module(module, torch.ones(2, 4))
    assert operators(graph) == ["linear", "gelu", "layer_norm", "linear", "softmax"]


@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec:FutureWarning")  # torch 2.13, of its own class
def test_programs_that_are_decomposed_already_read_weights_as_they_are():
    module, x = nn.Sequential(nn.Linear(128, 130), nn.LayerNorm(130)).eval(), torch.randn(2, 128)
    program = torch.export.export(module, (x,)).run_decompositions()
    weights = Weights()
    graph = verify(import_program(program, weights, reference))
    (gemm,) = [node for node in graph.nodes if node.operator == "gemm"]
    assert dict(gemm.parameters)["transpose_b"] is True
    (result,) = interpret(graph, weights, {"input": x.numpy()}).values()
    torch.testing.assert_close(torch.from_numpy(result), module(x).detach(), rtol=1e-5, atol=1e-5)


def test_convolution_networks_stay_one_node_for_each_layer():
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1))
    graph, _ = import_module(module, torch.ones(1, 3, 8, 8))
    assert operators(graph) == ["conv2d", "batch_norm", "relu", "max_pool2d", "global_avg_pool2d"]


@pytest.mark.filterwarnings("ignore:The tensor attributes:UserWarning")
def test_recurrent_layers_become_loops():
    graph, _ = import_module(nn.GRU(5, 4), torch.ones(6, 2, 5))
    (loop,) = [node for node in graph.nodes if isinstance(node, LoopNode)]
    assert loop.steps == 6
    assert "linear" in operators(loop.body)


def test_nodes_are_called_as_in_the_program():
    graph, _ = import_module(Function(lambda self, x: torch.relu(x) + 1), torch.ones(2))
    assert [node.name for node in graph.nodes] == ["relu", "add"]


def test_parameters_share_memory_and_equal_ones_are_one_constant():
    weight = nn.Parameter(torch.randn(128, 128))
    module = nn.Sequential(nn.Linear(128, 128, bias=False), nn.ReLU(), nn.Linear(128, 128, bias=False))
    module[0].weight = module[2].weight = weight
    graph, weights = import_module(module, torch.ones(2, 128))
    (constant,) = graph.constants.values()
    assert np.shares_memory(weights.array(constant), weight.detach().numpy())


def test_folded_constants_are_not_kept():
    graph, _ = import_module(Function(lambda self, x: x + torch.arange(4) * 2 + 1), torch.ones(4))
    assert len(graph.constants) == 2


@pytest.mark.parametrize("kind", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float16", "bool", "uint8"])
def test_arrays_of_every_type_share_the_bits(kind):
    tensor = torch.tensor([[0.5, -1.5], [0.0, 2.0]]).to(getattr(torch, kind))
    array = array_of(tensor)
    assert array.dtype == np.dtype(getattr(ml_dtypes, kind, kind))
    np.testing.assert_array_equal(array.astype(np.float32), tensor.float().numpy())
    assert torch.equal(tensor_of(array).float(), tensor.float())
    assert tensor_of(array).dtype is tensor.dtype


def test_inputs_are_in_order_and_outputs_have_the_keys_of_a_dictionary():
    def function(self, x, y):
        return {"total": x + y, "parts": {"first": x * 2}}

    graph, weights = import_module(Function(function), torch.ones(2), y=torch.ones(2))
    assert [name for name, _ in graph.inputs] == ["inputs_0", "y"]
    assert [name for name, _ in graph.outputs] == ["total", "parts_first"]
    results = interpret(graph, weights, {"inputs_0": np.ones(2, np.float32), "y": np.ones(2, np.float32)})
    np.testing.assert_array_equal(results["total"], [2, 2])


def test_several_outputs_are_numbered():
    graph, _ = import_module(Function(lambda self, x: (x + 1, x, x + 2)), torch.ones(2))
    assert [name for name, _ in graph.outputs] == ["output0", "output1", "output2"]


def test_inputs_that_are_no_tensors_are_constants():
    graph, _ = import_module(Function(lambda self, x, k, flag: x * k if flag is None else x), torch.ones(2), 3, None)
    assert [name for name, _ in graph.inputs] == ["inputs_0"]
    assert operators(graph) == ["mul"]


def test_blocks_without_gradients_are_part_of_the_program():
    def function(self, x):
        with torch.no_grad():
            y = x * 2
        return y + 1

    graph, _ = import_module(Function(function), torch.ones(2))
    assert operators(graph) == ["mul", "add"]


def test_every_unsupported_node_is_reported_at_once():
    nodes = refused(lambda self, x: torch.lgamma(x) + torch.special.i0e(torch.relu(torch.digamma(x))), torch.ones(2))
    assert [(node.operator, node.name) for node in nodes] == [
        ("aten.lgamma.default", "lgamma"),
        ("aten.digamma.default", "digamma"),
        ("aten.special_i0e.default", "special_i0e"),
    ]
    assert all(node.reason == "the operator is not supported" for node in nodes)


def test_arguments_without_support_are_refused_by_name():
    (node,) = refused(lambda self, x: torch.round(x, decimals=2), torch.ones(2))
    assert (node.operator, node.name, node.reason) == (
        "aten.round.decimals",
        "round_1",
        "the operator is not supported",
    )
    (node,) = refused(lambda self, x: nn.functional.avg_pool2d(x, 2, divisor_override=3), torch.ones(1, 1, 4, 4))
    assert "divisor_override=3" in node.reason

    def sample(self, x, grid):
        return nn.functional.grid_sample(x, grid, "bicubic", "border", align_corners=True)

    (node,) = refused(sample, torch.ones(1, 1, 4, 4), torch.zeros(1, 2, 2, 2))
    assert "padding_mode='border'" in node.reason


def test_results_without_support_are_refused_by_number():
    def function(self, x):
        return torch.ops.aten.native_layer_norm(x, [4], None, None, 1e-5)[1]

    (node,) = refused(function, torch.ones(2, 4))
    assert (node.operator, node.reason) == ("aten.native_layer_norm.default", "result 1 is not supported")


def test_buffers_and_inputs_that_are_written_are_states():
    def function(self, x, y):
        before = self.count * 2
        self.count.add_(1)
        y.mul_(self.fixed)
        return x + self.count, before, y

    module = Function(function, count=torch.full((1,), 3.0), fixed=torch.full((2,), 5.0))
    graph, weights = import_module(module, torch.ones(2), torch.ones(2))
    assert graph.states == ("count", "inputs_1")
    assert dict(graph.inputs).keys() == {"count", "inputs_0", "inputs_1"}
    values = {"count": np.full(1, 7, np.float32), "inputs_0": np.ones(2, np.float32), "inputs_1": np.full(2, 2, np.float32)}
    results = {name: array.tolist() for name, array in interpret(graph, weights, values).items()}
    assert results == {"output0": [9, 9], "output1": [14], "output2": [10, 10], "count": [8], "inputs_1": [10, 10]}


def test_a_cache_that_is_written_at_a_position_is_scattered_without_a_transpose():
    def function(self, x, at):
        self.cache[:, :, at] = x
        return self.cache.sum(2)

    graph, weights = import_module(Function(function, cache=torch.zeros(1, 2, 8, 4)), torch.ones(1, 2, 1, 4), torch.tensor([3]))
    assert [node.outputs for node in graph.nodes if node.operator == "scatter_nd"] == [(dict(graph.outputs)["cache"],)]
    updated = update_states(graph)
    assert [node.program.donated for node in updated.nodes if node.operator == "scatter_nd"] == [("x0",)]
    cache = np.arange(64, dtype=np.float32).reshape(1, 2, 8, 4)
    x, at = np.full((1, 2, 1, 4), -1, np.float32), np.array([-2])
    arrays = {name: array for (name, _), array in zip(graph.inputs, (cache, x, at), strict=True)}
    want = cache.copy()
    want[:, :, at] = x
    results = interpret(updated, weights, arrays)
    np.testing.assert_array_equal(results["cache"], want)
    np.testing.assert_array_equal(results["output0"], want.sum(2))


def test_a_buffer_without_elements_is_no_state():
    nodes = refused(lambda self, x: self.empty.add_(1).sum() + x, torch.ones(2), empty=torch.zeros(0))
    assert ("state", "empty", "it has no elements") in [(node.operator, node.name, node.reason) for node in nodes]


@pytest.mark.parametrize("module", [nn.Dropout(0.5), nn.BatchNorm1d(4)])
def test_what_is_for_training_says_what_to_call(module):
    module.train()
    with pytest.raises(UnsupportedModelError, match=r"it is for training: call \.eval\(\) on the module first"):
        import_program(export_module(module, (torch.ones(2, 4),)), Weights(), reference)


def test_operators_with_effects_are_named():
    nodes = refused(lambda self, x: torch.linalg.inv(x @ x.T), torch.ones(3, 3))
    assert [node.operator for node in nodes] == ["aten.linalg_inv_ex.default", "aten._linalg_check_errors.default"]


def decide(self, x):
    return x + 1 if x.sum() > 0 else x - 1


def cut(self, x):
    return x[: int(x[0])]


@pytest.mark.parametrize("function", [decide, cut])
def test_a_branch_on_data_is_refused_in_words(function):
    with pytest.raises(ArgumentError) as caught:
        import_module(Function(function), torch.tensor([2, 3, 4]))
    assert caught.value.code == "data-dependent"
    place = f"in {function.__name__} (test_export.py, line {function.__code__.co_firstlineno + 1})"
    assert place in caught.value.message
    assert "torch.where" in caught.value.hint


@pytest.mark.parametrize(
    ("module", "inputs", "words"),
    [
        (nn.Linear(4, 4), (torch.ones(3, 5),), "RuntimeError: a and b must have same reduction dim"),
        (nn.Linear(4, 4), ([1.0, 2.0],), "TypeError: linear()"),
        (nn.Linear(4, 4), (), "TypeError"),
        (Function(lambda self, x: torch.from_numpy(x.numpy() + 1)), (torch.ones(2),), "numpy()"),
        (Function(lambda self, x: x.missing), (torch.ones(2),), "AttributeError"),
    ],
)
def test_what_torch_cannot_export_is_refused_in_words(module, inputs, words):
    with pytest.raises(ArgumentError) as caught:
        import_module(module, *inputs)
    assert caught.value.code == "not-exportable"
    assert words in caught.value.message
    assert "call module(*inputs)" in caught.value.hint


@pytest.mark.parametrize(
    ("source", "words", "hint"),
    [
        ((nn.Linear(4, 4), (np.ones((3, 4), np.float32),)), "must be tensors of torch, got an array of numpy", "torch.from_numpy"),
        (nn.Linear(4, 4).state_dict(), "this is a state_dict", "load_state_dict"),
    ],
)
def test_what_is_nearly_a_torch_program_is_refused_in_words(source, words, hint):
    with pytest.raises(ArgumentError) as caught:
        load_graph(source, Weights())
    assert words in caught.value.message
    assert hint in caught.value.hint


def test_quantized_modules_are_named():
    float_ = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = torch.ao.quantization.quantize_dynamic(float_, {nn.Linear}, dtype=torch.qint8)
    with pytest.raises(UnsupportedModelError, match="it is quantized for torch") as caught:
        import_module(module, torch.ones(1, 4))
    assert [(node.operator, node.name) for node in caught.value.nodes] == [("Linear", "0"), ("Linear", "2")]
    assert "pass the module before its quantization" in caught.value.hint


def test_scripted_modules_are_refused():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = torch.jit.trace(nn.Linear(4, 4), (torch.ones(1, 4),))
    with pytest.raises(ArgumentError, match="a scripted or traced module"):
        import_module(module, torch.ones(1, 4))


def test_tensors_without_elements_are_inputs_and_outputs():
    function = Function(lambda self, past, x: (torch.cat([past, x], 1), x[:, :0]))
    graph, weights = import_module(function, torch.zeros(2, 0), torch.ones(2, 3))
    assert [(name, kind.shape) for name, kind in graph.inputs] == [("inputs_0", (2, 0)), ("inputs_1", (2, 3))]
    x = np.ones((2, 3), np.float32)
    whole, nothing = interpret(graph, weights, {"inputs_0": np.zeros((2, 0), np.float32), "inputs_1": x}).values()
    np.testing.assert_array_equal(whole, x)
    assert nothing.shape == (2, 0)


def test_batch_norm_in_training_is_refused():
    module = nn.BatchNorm2d(3).train()
    program = torch.export.export(module, (torch.ones(2, 3, 4, 4),))
    with pytest.raises(UnsupportedModelError, match=r"it is for training: call \.eval\(\)"):
        import_program(program, Weights(), reference)


def test_random_operators_are_refused():
    nodes = refused(lambda self, x: x + torch.rand(2), torch.ones(2))
    assert [node.operator for node in nodes] == ["aten.rand.default"]


def test_symbolic_extents_are_refused_with_the_input_and_dimension():
    batch = torch.export.Dim("batch", min=2, max=8)
    program = torch.export.export(nn.ReLU(), (torch.ones(4, 2),), dynamic_shapes=({0: batch},))
    with pytest.raises(ArgumentError, match="input 'input': dimension 0 is symbolic") as caught:
        import_program(program, Weights(), reference)
    assert caught.value.code == "open-shape"


def test_shapes_that_depend_on_data_are_refused():
    nodes = refused(lambda self, x: x[x > 0].sum(), torch.ones(4))
    assert any("depend" in node.reason or "symbolic" in node.reason for node in nodes)


def test_complex_numbers_are_refused():
    with pytest.raises(ArgumentError, match="complex64"):
        import_module(Function(lambda self, x: x.real), torch.ones(2, dtype=torch.complex64))


def test_the_package_does_not_import_torch():
    code = "import roller_svc, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_S)


@pytest.mark.parametrize(
    "error",
    [
        OSError("no weights"),
        FileNotFoundError(2, "no weights"),
        ImportError("no weights"),
        NameError("no weights"),
        EOFError("no weights"),
        KeyError("no weights"),
        AssertionError("no weights"),
    ],
)
def test_errors_of_the_module_are_translated(error):
    def fail(self, x):
        raise error

    with pytest.raises(ArgumentError, match=r"in fail \(test_export\.py, line \d+\): .*no weights") as caught:
        export_module(Function(fail), (torch.ones(2),))
    assert caught.value.code == "not-exportable"


def test_errors_of_classes_of_the_module_pass():
    class Busy(Exception):
        pass

    def fail(self, x):
        raise Busy

    with pytest.raises(Busy):
        export_module(Function(fail), (torch.ones(2),))


def test_the_standard_library_is_not_the_code_of_the_module():
    def fail(self, x):
        return x * json.loads("[")[0]

    with pytest.raises(ArgumentError, match=r"in fail \(test_export\.py"):
        export_module(Function(fail), (torch.ones(2),))


def test_classes_of_others_may_be_in_modules_called_quantized():
    net = type("Net", (Function,), {"__module__": "project.quantized.net"})
    graph, _ = import_module(net(lambda self, x: x + 1), torch.ones(2))
    assert operators(graph) == ["add"]
