"""A Llama-like model: a prompt, then one token a call. Both models update one cache of keys and values in place.

The models come from the torch module, whose buffers are states, and from ONNX files, whose past and present caches are.
"""

import math
import pathlib
import tempfile
import warnings

import torch
from torch import nn

import roller_svc


class Norm(nn.Module):
    """RMS norm of operators that torch.onnx exports without further packages."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * self.weight


class Layer(nn.Module):
    """RMS norm, rotary embedding, grouped queries over a cache, gated MLP."""

    def __init__(self, width, heads, shared, hidden, keys):
        super().__init__()
        self.heads, self.shared, self.features = heads, shared, width // heads
        self.qkv = nn.Linear(width, (heads + 2 * shared) * self.features, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up, self.down = (nn.Linear(*ends, bias=False) for ends in 2 * [(width, hidden)] + [(hidden, width)])
        self.first_norm, self.second_norm = (Norm(width) for _ in range(2))
        for name in ("keys", "values"):  # written at the tokens' positions: states of the compiled models
            self.register_buffer(name, torch.zeros(shared, keys, self.features))

    def forward(self, x, positions, rotate, visible):
        rows = self.qkv(self.first_norm(x)).view(len(x), -1, self.features).transpose(0, 1)
        q, k, v = rows.split([self.heads, self.shared, self.shared])
        self.keys[:, positions] = rotate(k)
        self.values[:, positions] = v
        q = rotate(q).reshape(self.shared, -1, self.features)  # queries of a group have one key head
        scores = (q @ self.keys.transpose(1, 2)).view(self.heads, len(x), -1) / math.sqrt(self.features)
        weights = scores.masked_fill(~visible, -math.inf).softmax(-1)
        mixed = (weights.view(self.shared, -1, weights.shape[-1]) @ self.values).view(self.heads, len(x), self.features)
        x = x + self.out(mixed.transpose(0, 1).reshape(len(x), -1))
        y = self.second_norm(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self, layers, width, heads, shared, hidden, keys, words):
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Layer(width, heads, shared, hidden, keys) for _ in range(layers))
        self.norm, self.head = Norm(width), nn.Linear(width, words, bias=False)
        half = width // heads // 2
        self.register_buffer("frequencies", 10000.0 ** (-torch.arange(half) / half))
        self.register_buffer("places", torch.arange(keys))

    def forward(self, tokens, positions):
        angles = positions[:, None] * self.frequencies
        cos, sin = (function(angles).repeat(1, 2).to(self.norm.weight.dtype) for function in (torch.cos, torch.sin))

        def rotate(x):
            first, second = x.chunk(2, -1)
            return x * cos + torch.cat([-second, first], -1) * sin

        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, positions, rotate, self.places <= positions[:, None])
        return self.head(self.norm(x[-1:])).argmax(-1)


class WithCaches(nn.Module):
    """The module with its caches as arguments and results."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, tokens, positions, *past):
        for layer, keys, values in zip(self.module.layers, past[::2], past[1::2], strict=True):
            layer.keys, layer.values = keys.clone(), values.clone()
        token = self.module(tokens, positions)
        return token, *(cache for layer in self.module.layers for cache in (layer.keys, layer.values))


def example_inputs(count):
    return torch.zeros(count, dtype=torch.int64), torch.arange(count)


def compile_step(module, count, **options):
    """Return the model that takes `count` tokens at their positions, and returns the next one."""
    return roller_svc.compile_model((module, example_inputs(count)), **options)


def compile_onnx_step(module, count, **options):
    """Return the same of an ONNX file that is exported here. Its states are past and present caches of equal shapes."""
    names = [f"{name}.{number}" for number in range(len(module.layers)) for name in ("keys", "values")]
    caches = [cache.clone() for layer in module.layers for cache in (layer.keys, layer.values)]
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter announces another one, which needs more packages
        torch.onnx.export(
            WithCaches(module),
            (*example_inputs(count), *caches),
            path := str(pathlib.Path(folder) / "step.onnx"),
            input_names=["tokens", "positions", *(f"past_{name}" for name in names)],
            output_names=["token", *(f"present_{name}" for name in names)],
            dynamo=False,
        )
        return roller_svc.compile_model(path, states={"past_*": "present_*"}, **options)


def with_states(model, states):
    """Return a function that calls a model, which updates the states."""

    def call(tokens, positions):
        (token,) = model.run({"tokens": tokens, "positions": positions}, states=states).values()
        return torch.as_tensor(token)

    return call


def generate(prompt, count, prefill, step):
    """Return the tokens that follow a prompt."""
    tokens = [prefill(prompt, torch.arange(len(prompt)))]
    while len(tokens) < count:
        tokens.append(step(tokens[-1], torch.tensor([len(prompt) + len(tokens) - 1])))
    return torch.cat(tokens).tolist()


torch.manual_seed(0)
prompt = torch.tensor([3, 14, 15, 92, 65])
for source, dtype in (("torch", torch.float32), ("torch", torch.bfloat16), ("ONNX", torch.float32)):
    module = Llama(layers=2, width=64, heads=4, shared=2, hidden=96, keys=32, words=128).eval().to(dtype)
    compile_source = compile_onnx_step if source == "ONNX" else compile_step
    with torch.no_grad():
        wanted = generate(prompt, 12, module, module)
        prefill, step = (compile_source(module, count, select="model", top_k=1) for count in (len(prompt), 1))
    states = {info.name: torch.zeros(info.shape, dtype=dtype) for info in step.states}
    tokens = generate(prompt, 12, with_states(prefill, states), with_states(step, states))
    equal = sum(got == want for got, want in zip(tokens, wanted, strict=True))
    assert equal == len(wanted) or dtype is not torch.float32
    copied = sum(record["node"].startswith("state ") for record in step.plan["steps"])
    print(f"{source}, {dtype}: {equal} of {len(wanted)} tokens are torch's; {copied} of {len(states)} states are copied in a call")
