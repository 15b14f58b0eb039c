"""A Llama-like model from torch: a prompt, then one token a call. Both models update one cache of keys and values in place."""

import math

import torch
from torch import nn

import roller_svc


class Layer(nn.Module):
    """RMS norm, rotary embedding, grouped queries over a cache, gated MLP."""

    def __init__(self, width, heads, shared, hidden, keys):
        super().__init__()
        self.heads, self.shared, self.features = heads, shared, width // heads
        self.qkv = nn.Linear(width, (heads + 2 * shared) * self.features, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up, self.down = (nn.Linear(*ends, bias=False) for ends in 2 * [(width, hidden)] + [(hidden, width)])
        self.norms = nn.ModuleList(nn.RMSNorm(width, 1e-5) for _ in range(2))
        for name in ("keys", "values"):  # written at the tokens' positions: states of the compiled models
            self.register_buffer(name, torch.zeros(shared, keys, self.features))

    def forward(self, x, positions, rotate, visible):
        rows = self.qkv(self.norms[0](x)).view(len(x), -1, self.features).transpose(0, 1)
        q, k, v = rows.split([self.heads, self.shared, self.shared])
        self.keys[:, positions] = rotate(k)
        self.values[:, positions] = v
        q = rotate(q).reshape(self.shared, -1, self.features)  # queries of a group have one key head
        scores = (q @ self.keys.transpose(1, 2)).view(self.heads, len(x), -1) / math.sqrt(self.features)
        weights = scores.masked_fill(~visible, -math.inf).softmax(-1)
        mixed = (weights.view(self.shared, -1, weights.shape[-1]) @ self.values).view(self.heads, len(x), self.features)
        x = x + self.out(mixed.transpose(0, 1).reshape(len(x), -1))
        y = self.norms[1](x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self, layers, width, heads, shared, hidden, keys, words):
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Layer(width, heads, shared, hidden, keys) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width, 1e-5), nn.Linear(width, words, bias=False)
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


def compile_step(module, count, **options):
    """Return the model that takes `count` tokens at their positions, and returns the next one."""
    examples = (torch.zeros(count, dtype=torch.int64), torch.arange(count))
    return roller_svc.compile_model((module, examples), **options)


def with_states(model, states):
    """Return a function that calls a model, which updates the states."""

    def call(tokens, positions):
        return model.run({"tokens": tokens, "positions": positions}, states=states)["output0"]

    return call


def generate(prompt, count, prefill, step):
    """Return the tokens that follow a prompt."""
    tokens = [prefill(prompt, torch.arange(len(prompt)))]
    while len(tokens) < count:
        tokens.append(step(tokens[-1], torch.tensor([len(prompt) + len(tokens) - 1])))
    return torch.cat(tokens).tolist()


torch.manual_seed(0)
prompt = torch.tensor([3, 14, 15, 92, 65])
for dtype in (torch.float32, torch.bfloat16):
    module = Llama(layers=2, width=64, heads=4, shared=2, hidden=96, keys=32, words=128).eval().to(dtype)
    prefill, step = (compile_step(module, count, select="model", top_k=1) for count in (len(prompt), 1))
    states = {info.name: torch.zeros(info.shape, dtype=dtype) for info in step.states}
    with torch.no_grad():
        wanted = generate(prompt, 12, module, module)
    tokens = generate(prompt, 12, with_states(prefill, states), with_states(step, states))
    equal = sum(got == want for got, want in zip(tokens, wanted, strict=True))
    assert equal == len(wanted) or dtype is not torch.float32
    copied = sum(record["node"].startswith("state ") for record in step.plan["steps"])
    print(f"{dtype}: {equal} of {len(wanted)} tokens are torch's; {copied} of {len(states)} states are copied in a call")
