"""torch programs as compiled models: kernels compute what torch does."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
import torch
from torch import nn

import roller_svc
from roller_svc.errors import ArgumentError, UnsupportedModelError


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8)
        self.layer, self.memory = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.GRU(8, 6)
        self.table, self.out = nn.Embedding(10, 6), nn.Linear(6, 4)

    def forward(self, x, ids):
        y = torch.relu(self.norm(self.conv(x))).flatten(2).transpose(1, 2)
        y = self.memory(self.layer(y).transpose(0, 1))[0][-1]
        return {"scores": self.out(y + self.table(ids).mean(1)), "best": y.argmax(1)}


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ROLLER_CACHE", str(tmp_path))


@pytest.mark.filterwarnings("ignore:The tensor attributes:UserWarning")
@pytest.mark.parametrize("plan", ["serial", "eager"])
def test_a_compiled_module_equals_torch(plan):
    torch.manual_seed(1)
    module, x, ids = Network().eval(), torch.randn(2, 3, 6, 6), torch.tensor([[1, 2, 3], [0, 9, 4]])
    with torch.no_grad():
        expected = module(x, ids)
    model = roller_svc.compile_model((module, (x, ids)), select="model", top_k=1, plan=plan)
    results = model(x=x.numpy(), ids=ids.numpy())
    assert list(results) == ["scores", "best"]
    torch.testing.assert_close(torch.from_numpy(results["scores"]), expected["scores"], rtol=1e-5, atol=1e-5)
    assert results["best"].tolist() == expected["best"].tolist()


def test_an_exported_program_is_a_source():
    program = torch.export.export(nn.Linear(4, 3), (torch.ones(2, 4),))
    model = roller_svc.compile_model(program, select="model", top_k=1)
    assert [each.name for each in model.inputs] == ["input"]
    assert [each.shape for each in model.outputs] == [(2, 3)]


def test_what_torch_has_and_we_lack_is_refused_by_name():
    with pytest.raises(UnsupportedModelError, match=r"aten\.lgamma\.default 'lgamma'"):
        roller_svc.compile_model((Lgamma(), (torch.ones(2),)))


class Lgamma(nn.Module):
    def forward(self, x):
        return torch.lgamma(x)


def test_a_tuple_without_a_module_is_refused():
    with pytest.raises(ArgumentError):
        roller_svc.compile_model((1, 2))
