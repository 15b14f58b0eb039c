"""torch.compile(backend="roller"): results, what stays with torch, constants that change."""

from __future__ import annotations

import gc
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import entry_points
from threading import Barrier

import numpy as np
import pytest

pytest.importorskip("torch")
import torch
from torch import nn
from torch.nn import functional as F

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of torch's own modules
    from roller_svc import torch_backend
    from roller_svc.torch_backend import graphs, part

import roller_svc
from roller_svc.errors import ArgumentError, UnsupportedModelError

OPTIONS = {"select": "model", "top_k": 1}


@pytest.fixture(autouse=True)
def _fresh(tmp_path, monkeypatch):
    monkeypatch.setenv("ROLLER_CACHE", str(tmp_path))
    torch._dynamo.reset()
    torch_backend.reset()
    torch.manual_seed(3)
    set_times(monkeypatch, compiled_s=1e-6, torch_s=2e-6)


def set_times(monkeypatch, compiled_s, torch_s):
    """Replace comparisons with torch: these modules are too small to be faster."""
    for module in (graphs, part):
        monkeypatch.setattr(module, "time_interleaved", lambda *_: (compiled_s, torch_s))


def compiled(module, **options):
    return torch.compile(module, backend=torch_backend.compile_graph, options=OPTIONS, **options)


def check(module, *inputs):
    module = module.eval() if isinstance(module, nn.Module) else module
    with torch.no_grad():
        expected = module(*inputs)
        results = compiled(module)(*inputs)
    for result, tensor in zip(torch.utils._pytree.tree_leaves(results), torch.utils._pytree.tree_leaves(expected), strict=True):
        assert (result.shape, result.dtype, result.stride()) == (tensor.shape, tensor.dtype, tensor.stride())
        torch.testing.assert_close(result, tensor, rtol=1e-5, atol=1e-5)
    return torch_backend.report()


def test_the_backend_is_registered_with_torch():
    (entry,) = entry_points(group="torch_dynamo_backends", name="roller")
    assert entry.load() is torch_backend.compile_graph


def test_the_backend_is_an_attribute_of_the_package():
    assert roller_svc.__getattr__("torch_backend") is torch_backend  # as before the first import of the module


def test_a_network_is_one_model():
    module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 3), nn.Softmax(-1))
    (report,) = check(module, torch.randn(2, 4))
    (part,) = report.parts
    assert (part.constants, part.failure, report.eager) == (6, None, ())


def test_convolutions_and_attention_are_compiled():
    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)

        def forward(self, x):
            y = F.relu(self.norm(self.conv(x))).flatten(2).transpose(1, 2)[:, None]
            return F.scaled_dot_product_attention(y, y, y).mean(2)

    (report,) = check(Network(), torch.randn(1, 3, 4, 4))
    assert report.eager == ()
    assert len(report.parts) == 1


def test_what_is_not_supported_stays_with_torch_and_is_reported():
    with pytest.warns(torch_backend.LeftToTorchWarning, match=r"4 of 5 nodes compiled; left to torch: aten\.lgamma"):
        (report,) = check(lambda x: torch.relu(torch.lgamma(torch.relu(x) + 1) * 2), torch.randn(4, 4))
    assert len(report.parts) == 2
    assert [(node.operator, node.name) for node in report.eager] == [("aten.lgamma.default", "lgamma")]
    assert "aten.lgamma.default 'lgamma': the operator is not supported" in str(report)


def test_a_graph_of_which_nothing_is_compiled_is_named():
    with pytest.warns(torch_backend.LeftToTorchWarning, match=r"aten\.lgamma\.default: the operator is not supported"):
        (report,) = check(torch.lgamma, torch.rand(4) + 1)
    assert report.parts == ()


def test_views_alone_stay_with_torch():
    (report,) = check(lambda x: x.reshape(2, 8).t()[1:], torch.randn(4, 4))
    assert report.parts == ()
    assert {node.reason for node in report.eager} == {"a view, which copies nothing"}


def test_results_have_the_strides_that_torch_expects():
    check(lambda x: ((x + 1).t(), (x * 2).permute(1, 0).relu()), torch.randn(3, 4))


def test_inputs_that_are_written_in_place_are_updated():
    def function(x, y):
        x.add_(y)
        return x * 2

    x, y = torch.ones(3), torch.full((3,), 2.0)
    result = compiled(function)(x, y)
    assert x.tolist() == [3, 3, 3]
    assert result.tolist() == [6, 6, 6]


def test_parameters_that_change_are_noticed():
    module = nn.Linear(4, 3).eval()
    fast, x = compiled(module), torch.randn(2, 4)
    with torch.no_grad():
        for _ in range(6):  # more often than a model is built again
            torch.testing.assert_close(fast(x), module(x), rtol=1e-5, atol=1e-5)
            module.weight.mul_(0.5)
            torch.testing.assert_close(fast(x), module(x), rtol=1e-5, atol=1e-5)
    (report,) = torch_backend.report()
    assert report.parts[0].constants == 0


def test_gradients_are_those_of_torch():
    module, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), torch.randn(5, 4)
    with pytest.warns(torch_backend.LeftToTorchWarning, match=r"gradients are not compiled; call below torch\.no_grad\(\)"):
        compiled(module)(x).sum().backward()
    gradients = [parameter.grad.clone() for parameter in module.parameters()]
    module.zero_grad()
    module(x).sum().backward()
    for gradient, parameter in zip(gradients, module.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad)
    assert [node.reason for report in torch_backend.report() for node in report.eager] == [graphs.GRADIENTS]


def test_a_module_that_turns_gradients_off_is_compiled():
    class Module(nn.Linear):
        def forward(self, x):
            with torch.no_grad():
                return torch.relu(super().forward(x))

    module, x = Module(4, 3), torch.randn(2, 4)
    torch.testing.assert_close(compiled(module)(x), module(x))
    (report,) = torch_backend.report()
    assert report.eager == ()
    assert report.parts[0].constants == 2


@pytest.mark.parametrize(("dynamic", "shapes"), [(None, 2), (True, 3)])  # None: the first set has a graph of its own
def test_each_set_of_shapes_is_compiled(dynamic, shapes, monkeypatch):
    monkeypatch.setattr(graphs, "MAX_SHAPES", shapes)
    module = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3)).eval()  # its eps is a tensor of a dynamic graph
    fast = compiled(module, dynamic=dynamic)
    with torch.no_grad():
        for rows in (2, 3, 5, 3):
            x = torch.randn(rows, 4)
            torch.testing.assert_close(fast(x), module(x))
        reports = torch_backend.report()
        assert len(reports) == 3
        assert all(report.eager == () and report.parts[0].constants == 4 for report in reports)
        x = torch.randn(9, 4)
        with pytest.warns(torch_backend.LeftToTorchWarning, match=f"compiled for {shapes} sets of shapes"):
            result = fast(x)
        torch.testing.assert_close(result, module(x))
        x = torch.randn(11, 4)
        torch.testing.assert_close(fast(x), module(x))
    assert len(torch_backend.report()) == 3


def test_shapes_copy_constants_up_to_a_limit(monkeypatch):
    monkeypatch.setattr(graphs, "MAX_COPIED_BYTES", 100)
    module = nn.Linear(4, 3).eval()  # 60 bytes
    fast = compiled(module, dynamic=True)
    with torch.no_grad():
        for rows in (2, 3, 5):
            x = torch.randn(rows, 4)
            torch.testing.assert_close(fast(x), module(x))
    assert [report.parts[0].constants for report in torch_backend.report()] == [2, 0, 0]


def test_symbolic_numbers_are_those_of_the_call():
    fast = compiled(lambda x: (x.sum(0) / x.shape[0], x.reshape(-1, 2) * x.shape[0]), dynamic=True)
    for rows in (2, 6):
        x = torch.randn(rows, 3)
        mean, scaled = fast(x)
        torch.testing.assert_close(mean, x.mean(0))
        torch.testing.assert_close(scaled, x.reshape(-1, 2) * rows)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_are_one_node(kind):
    (report,) = check(kind(3, 4, num_layers=2, bidirectional=True, batch_first=True), torch.randn(2, 3, 3))
    assert report.eager == ()
    assert report.parts[0].constants == 16


def test_recurrent_layers_are_captured_in_every_thread():
    module, x = nn.GRU(3, 4).eval(), torch.randn(2, 1, 3)
    with torch.no_grad(), ThreadPoolExecutor(1) as pool:
        torch.testing.assert_close(pool.submit(torch.no_grad()(compiled(module)), x).result(), module(x))
    assert torch_backend.report()[0].parts[0].failure is None


def test_recurrent_layers_train_as_with_torch():
    module, x = nn.LSTM(3, 4), torch.randn(2, 1, 3)
    with pytest.warns(torch_backend.LeftToTorchWarning, match="gradients"):
        compiled(module)(x)[0].sum().backward()
    assert module.weight_ih_l0.grad is not None


def test_what_is_slower_than_torch_is_left_to_it(monkeypatch):
    set_times(monkeypatch, compiled_s=3e-6, torch_s=2e-6)
    with pytest.warns(torch_backend.LeftToTorchWarning, match=r"runs with torch: it takes 3\.0 µs compiled, 2\.0 µs with torch"):
        (report,) = check(lambda x: torch.relu(x) + 1, torch.randn(3))
    assert (report.parts[0].seconds, report.parts[0].torch_seconds) == (3e-6, 2e-6)
    assert "which run with torch: it takes" in str(report)


def test_a_graph_that_is_slower_than_torch_is_left_to_it(monkeypatch):
    monkeypatch.setattr(graphs, "time_interleaved", lambda *_: (3e-6, 2e-6))
    with pytest.warns(torch_backend.LeftToTorchWarning, match="a graph runs with torch"):
        (report,) = check(lambda x: torch.relu(x) + 1, torch.randn(3))
    assert "it takes 3.0 µs" in report.parts[0].failure


def test_comparisons_run_both_in_turns(monkeypatch):
    monkeypatch.undo()
    calls = []
    part.time_interleaved(lambda: calls.append("compiled"), lambda: calls.append("torch"))
    assert calls == ["compiled", "torch"] * (len(calls) // 2)
    assert part.MIN_ROUNDS < len(calls) // 2 <= part.MAX_ROUNDS


@pytest.mark.parametrize("function", [torch.lgamma, lambda x: torch.relu(torch.lgamma(x))])
def test_strict_refuses_what_is_left_to_torch(function):
    fast = torch.compile(function, backend=torch_backend.compile_graph, options=OPTIONS | {"strict": True})
    with torch.no_grad(), pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        fast(torch.rand(4))
    assert isinstance(caught.value.inner_exception, UnsupportedModelError)
    assert "aten.lgamma.default" in str(caught.value)


def test_strict_refuses_gradients_and_failures(monkeypatch):
    fast = torch.compile(nn.Linear(3, 2), backend=torch_backend.compile_graph, options=OPTIONS | {"strict": True})
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="gradients are not compiled"):
        fast(torch.rand(2, 3))
    monkeypatch.setattr(part, "build", fail)
    with torch.no_grad(), pytest.raises(ArgumentError, match="no compiler"):
        fast(torch.rand(2, 3))


def fail(*_):
    raise ArgumentError("no compiler", code="invalid-option")


def test_narrow_floats_and_inference_mode():
    module = nn.Linear(8, 3).to(torch.bfloat16).eval()
    fast = compiled(module)
    with torch.inference_mode():
        x = torch.randn(4, 8, dtype=torch.bfloat16)
        torch.testing.assert_close(fast(x), module(x), rtol=2e-2, atol=2e-2)


def test_a_part_that_cannot_be_built_runs_with_torch(monkeypatch):
    monkeypatch.setattr(part, "build", fail)
    with pytest.warns(torch_backend.LeftToTorchWarning, match="no compiler"):
        (report,) = check(lambda x: torch.relu(x) + 1, torch.randn(3))
    assert report.parts[0].failure == "no compiler"
    assert "which run with torch: no compiler" in str(report)


def test_options_are_checked():
    for wrong, message in (({"threads": 2}, "'threads'"), ({"select": "best"}, "select"), ({"top_k": 0}, "top_k")):
        with pytest.raises(ArgumentError, match=message):
            torch_backend.compile_graph(None, [], options=wrong)
    with pytest.raises(ArgumentError, match="max-autotune"):
        torch_backend.compile_graph(None, [], mode="max-autotune")


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_steps_of_fused_optimizers_are_noticed(optimizer):
    module = nn.Linear(4, 3).eval()
    fast, x = compiled(module), torch.randn(2, 4)
    with torch.no_grad():
        before = fast(x)
    steps = optimizer(module.parameters(), lr=0.1, fused=True)
    module(x).sum().backward()
    steps.step()
    with torch.no_grad():
        torch.testing.assert_close(fast(x), module(x))
        assert not torch.equal(fast(x), before)


def test_running_statistics_that_training_writes_are_noticed():
    module = nn.Sequential(nn.Conv1d(2, 3, 1), nn.BatchNorm1d(3)).eval()
    fast, x = compiled(module), torch.randn(4, 2, 5)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), module(x), rtol=1e-5, atol=1e-5)
        module.train()(x)
        module.eval()
        torch.testing.assert_close(fast(x), module(x), rtol=1e-5, atol=1e-5)


def test_the_memory_of_constants_is_not_reused_while_they_are_compiled():
    module = nn.Linear(3, 3, bias=False).eval()
    fast, x, memory = compiled(module), torch.eye(3), np.ones((3, 3), np.float32)
    freed = weakref.ref(memory)
    module.weight = nn.Parameter(torch.from_numpy(memory))
    del memory
    with torch.no_grad():
        fast(x)
        module.weight = nn.Parameter(torch.full((3, 3), 2.0))
        gc.collect()
        assert freed() is not None
        assert (fast(x) == 2).all()
    gc.collect()
    assert freed() is None


def test_threads_that_meet_changed_constants_build_once(monkeypatch):
    build, builds, together = part.build, [], Barrier(4)
    monkeypatch.setattr(part, "build", lambda *given: builds.append(given) or build(*given))
    module, x = nn.Linear(4, 3).eval(), torch.randn(2, 4)
    fast = compiled(module)

    @torch.no_grad()
    def call(_):
        together.wait()
        return fast(x)

    with torch.no_grad(), ThreadPoolExecutor(4) as pool:
        fast(x)
        module.weight.mul_(0.5)
        for result in pool.map(call, range(4)):
            torch.testing.assert_close(result, module(x))
    assert len(builds) == 2
    assert torch_backend.report()[0].parts[0].constants == 2


def test_reports_do_not_keep_models(monkeypatch):
    build, models = part.build, []

    def build_and_watch(*given):
        models.append(weakref.ref(model := build(*given)))
        return model

    monkeypatch.setattr(part, "build", build_and_watch)
    module, x = nn.Linear(4, 3).eval(), torch.randn(2, 4)
    with torch.no_grad():
        compiled(module)(x)
    weight = weakref.ref(module.weight)
    del module
    torch._dynamo.reset()
    gc.collect()
    assert weight() is None
    assert [model() for model in models] == [None]
    assert torch_backend.report()[0].parts[0].constants == 2


@pytest.mark.parametrize("shape", [(4, 3), (1, 3)])
def test_results_with_repeated_elements_are_those_of_torch(shape):
    check(lambda x: (torch.relu(x) * 2).sum(1, keepdim=True).expand_as(x), torch.randn(shape))


def test_views_of_negated_numbers_are_read_as_such():
    negated = torch._neg_view(torch.randn(3, 4))
    assert negated.is_contiguous()
    check(lambda x: torch.relu(x) + 1, negated)


def test_comparisons_of_slow_calls_end_early(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(part, "COMPARISON_S", -1e-9)
    monkeypatch.setattr(part, "LONGEST_COMPARISON_S", 0.0)
    calls = []
    part.time_interleaved(lambda: calls.append("compiled"), lambda: calls.append("torch"))
    assert calls == ["compiled", "torch"]


def test_indices_out_of_range_raise_as_with_torch():
    module = nn.Embedding(5, 3).eval()
    fast = compiled(module)
    with torch.no_grad():
        assert torch.equal(fast(torch.tensor([1, 4])), module(torch.tensor([1, 4])))
        for lookup in (module, fast):
            with pytest.raises(IndexError):
                lookup(torch.tensor([1, 9]))
