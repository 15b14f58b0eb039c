"""Times of torch modules: eager, torch.compile by default (Inductor) and with this backend, whole models. Prints JSON.

Each module runs without gradients, with a second batch, with dynamic shapes, and with gradients (forward). All ways take
turns in short blocks with pauses in between; minimum and median of all calls are reported.

    python -m roller_bench.torch_modules --threads 1 --blocks 10
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import roller_svc
from roller_svc import torch_backend

Json = dict[str, Any]
BLOCK_S, PAUSE_S = 0.05, 0.05
MIN_CALLS = 5  # of a block


class TransformerBlock(nn.Module):
    """Multi-head attention and an MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class ResNetBlock(nn.Module):
    """Two 3 x 3 convolutions with normalisation, and the sum with the input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(x + self.norm2(self.second(functional.relu(self.norm1(self.first(x))))))


class LlamaBlock(nn.Module):
    """RMSNorm, rotary grouped-query attention and a gated MLP."""

    def __init__(self, width: int, heads: int, groups: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, groups * self.size, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)

    def rotated(self, x: torch.Tensor) -> torch.Tensor:
        half = self.size // 2
        frequencies = 10000.0 ** (-torch.arange(half) / half)
        angles = torch.arange(x.shape[2])[:, None] * frequencies
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        y = self.norm1(x)
        q = self.rotated(self.q(y).view(batch, length, self.heads, self.size).transpose(1, 2))
        k = self.rotated(self.k(y).view(batch, length, self.groups, self.size).transpose(1, 2))
        v = self.v(y).view(batch, length, self.groups, self.size).transpose(1, 2)
        k, v = (t.repeat_interleave(self.heads // self.groups, 1) for t in (k, v))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(attended.transpose(1, 2).reshape(batch, length, -1))
        y = self.norm2(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class UNet(nn.Module):
    """Two levels, with a transposed convolution and a skip connection."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.down, self.deep = nn.Conv2d(3, channels, 3, padding=1), nn.Conv2d(channels, 2 * channels, 3, padding=1)
        self.up = nn.ConvTranspose2d(2 * channels, channels, 2, stride=2)
        self.join, self.head = nn.Conv2d(2 * channels, channels, 3, padding=1), nn.Conv2d(channels, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = functional.relu(self.down(x))
        deep = functional.relu(self.deep(functional.max_pool2d(skip, 2)))
        return self.head(functional.relu(self.join(torch.cat([skip, self.up(deep)], 1))))


class SwinBlock(nn.Module):
    """Attention in shifted windows, and an MLP."""

    def __init__(self, width: int, heads: int, window: int, shift: int) -> None:
        super().__init__()
        self.heads, self.window, self.shift = heads, window, shift
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, height, width, channels = x.shape
        w = self.window
        y = torch.roll(self.norm1(x), (-self.shift, -self.shift), (1, 2))
        y = y.view(batch, height // w, w, width // w, w, channels).permute(0, 1, 3, 2, 4, 5).reshape(-1, w * w, channels)
        q, k, v = self.qkv(y).reshape(-1, w * w, 3, self.heads, channels // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        y = self.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(-1, w * w, channels))
        y = y.view(batch, height // w, width // w, w, w, channels).permute(0, 1, 3, 2, 4, 5).reshape(batch, height, width, channels)
        x = x + torch.roll(y, (self.shift, self.shift), (1, 2))
        return x + self.mlp(self.norm2(x))


# Module and the shape of one example, without the batch.
MODULES: Mapping[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "transformer": (lambda: TransformerBlock(128, 4), (16, 128)),
    "resnet": (lambda: ResNetBlock(32), (32, 28, 28)),
    "lstm": (lambda: nn.LSTM(8, 8, num_layers=2, batch_first=True), (4, 8)),
    "llama": (lambda: LlamaBlock(256, 8, 2, 688), (32, 256)),
    "unet": (lambda: UNet(16), (3, 32, 32)),
    "swin": (lambda: nn.Sequential(SwinBlock(96, 3, 7, 0), SwinBlock(96, 3, 7, 3)), (28, 28, 96)),
}
BATCHES = {"lstm": 1}
USES = ("no_grad", "second_batch", "dynamic", "gradients")


def time_interleaved(ways: Sequence[Callable[[], object]], blocks: int) -> list[tuple[float, float]]:
    """Return minimum and median of the seconds of a call of each."""
    times: list[list[float]] = [[] for _ in ways]
    for _ in range(blocks):
        for taken, way in zip(times, ways, strict=True):
            way()
            end, calls = time.perf_counter() + BLOCK_S, 0
            while calls < MIN_CALLS or time.perf_counter() < end:
                start = time.perf_counter()
                way()
                taken.append(time.perf_counter() - start)
                calls += 1
        time.sleep(PAUSE_S)
    return [(min(taken), statistics.median(taken)) for taken in times]


def measure(name: str, use: str, blocks: int, options: Mapping[str, object]) -> Json:
    """Return the times of one module in one use, and what stays with torch."""
    make, shape = MODULES[name]
    torch.manual_seed(0)
    torch._dynamo.reset()
    torch_backend.reset()
    module, batch = make().eval(), BATCHES.get(name, 2)
    examples = [torch.randn(batch, *shape)]
    if use in ("second_batch", "dynamic"):
        examples.append(torch.randn(batch + 1, *shape))
    dynamic = True if use == "dynamic" else None
    with nullcontext() if use == "gradients" else torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # Inductor first: the other backend turns on recurrent layers, which it runs slower than without
        ways: dict[str, Callable[[torch.Tensor], object]] = {
            "eager": module,
            "inductor": torch.compile(module, dynamic=dynamic),
            "roller": torch.compile(module, backend="roller", options=dict(options), dynamic=dynamic),
        }
        first_s = {}
        for who, way in ways.items():
            start = time.perf_counter()
            for x in examples:
                way(x)
            first_s[who] = time.perf_counter() - start
        x = examples[-1]
        times = time_interleaved([partial(way, x) for way in ways.values()], blocks)
    left = [str(each.message) for each in caught if issubclass(each.category, torch_backend.LeftToTorchWarning)]
    return {"module": name, "use": use, "first_s": first_s, "left_to_torch": left} | _microseconds(ways, times)


def _microseconds(ways: Iterable[str], times: Sequence[tuple[float, float]]) -> Json:
    return {
        f"{who}_{what}_us": seconds * 1e6
        for who, pair in zip(ways, times, strict=True)
        for what, seconds in zip(("min", "median"), pair, strict=True)
    }


def measure_model(name: str, blocks: int, options: Mapping[str, Any], threads: int) -> Json:
    """Return the times of a whole model, called on tensors."""
    make, shape = MODULES[name]
    torch.manual_seed(0)
    module, x = make().eval(), torch.randn(BATCHES.get(name, 2), *shape)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.export's
        model = roller_svc.compile_model((module, (x,)), threads=threads, **options)
        arrays = {model.inputs[0].name: x}
        times = time_interleaved([lambda: module(x), lambda: model.run(arrays)], blocks)
    return {"module": name, "use": "compile_model"} | _microseconds(("eager", "roller"), times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--blocks", type=int, default=10)
    parser.add_argument("--only", action="append", choices=[*MODULES], help="a module; may be repeated")
    parser.add_argument("--use", action="append", choices=[*USES, "compile_model"], help="a use; may be repeated")
    parser.add_argument("--select", choices=["measure", "model"], default="measure")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    options: dict[str, Any] = {"select": arguments.select} | ({"top_k": 1} if arguments.select == "model" else {})
    for name in arguments.only or MODULES:
        for use in arguments.use or (*USES, "compile_model"):
            if use == "compile_model":
                row = measure_model(name, arguments.blocks, options, arguments.threads)
            else:
                row = measure(name, use, arguments.blocks, options)
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
