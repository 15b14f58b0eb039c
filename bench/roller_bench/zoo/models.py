"""Write models of the zoo as ONNX files, with random weights.

RAMMER's six models have the shapes of its artifact (OSDI 2020, §5). Networks of torchvision are written out here.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

OPSET = 17
SEED = 50


def conv(
    inputs: int, outputs: int, kernel: int = 3, stride: int = 1, groups: int = 1, act: type[nn.Module] | None = nn.ReLU
) -> Any:
    """Return a convolution without bias, its norm, and an activation."""
    layers = [nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False), nn.BatchNorm2d(outputs)]
    return nn.Sequential(*layers, *([] if act is None else [act()]))


class Residual(nn.Module):
    """The sum of a branch and its input, which a projection brings to its shape."""

    def __init__(self, branch: nn.Module, shortcut: nn.Module | None = None, *, act: bool = True) -> None:
        super().__init__()
        self.branch, self.shortcut, self.act = branch, shortcut or nn.Identity(), act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.branch(x) + self.shortcut(x)
        return functional.relu(y) if self.act else y


def alexnet(size: int = 227) -> Any:
    layers: list[nn.Module] = []
    channels = 3
    for outputs, kernel, stride, pad, pools in ((64, 11, 4, 2, True), (192, 5, 1, 2, True), (384, 3, 1, 1, False),
                                                (256, 3, 1, 1, False), (256, 3, 1, 1, True)):  # fmt: skip
        layers += [nn.Conv2d(channels, outputs, kernel, stride, pad), nn.ReLU(), *([nn.MaxPool2d(3, 2)] if pools else [])]
        channels = outputs
    dense = [nn.Flatten(), nn.Linear(256 * 36, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 1000)]
    return nn.Sequential(*layers, *dense), {"x": torch.randn(1, 3, size, size)}


def resnet18() -> Any:
    layers = [conv(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for outputs in (64, 128, 256, 512):
        for block in range(2):
            stride = 2 if block == 0 and outputs > 64 else 1
            branch = nn.Sequential(conv(channels, outputs, 3, stride), conv(outputs, outputs, act=None))
            layers.append(Residual(branch, conv(channels, outputs, 1, stride, act=None) if stride > 1 else None))
            channels = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000)), _image(224)


def resnext29(batch: int = 1) -> Any:
    """Return ResNeXt-29, 16 x 64d, for CIFAR."""
    layers: list[nn.Module] = [conv(3, 64)]
    channels = 64
    for stage, outputs in enumerate((256, 512, 1024)):
        width = 16 * 64 * 2**stage
        for block in range(3):
            stride = 2 if block == 0 and stage else 1
            convs = conv(channels, width, 1), conv(width, width, 3, stride, 16), conv(width, outputs, 1, act=None)
            shortcut = conv(channels, outputs, 1, stride, act=None) if block == 0 else None
            layers.append(Residual(nn.Sequential(*convs), shortcut))
            channels = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1024, 10)), _image(32, batch)


class Fire(nn.Module):
    """Two convolutions of squeezed channels, side by side."""

    def __init__(self, inputs: int, squeezed: int, expanded: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(inputs, squeezed, 1)
        self.one, self.three = nn.Conv2d(squeezed, expanded, 1), nn.Conv2d(squeezed, expanded, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.relu(self.squeeze(x))
        return torch.cat([functional.relu(self.one(y)), functional.relu(self.three(y))], 1)


def squeezenet() -> Any:
    fires = [(16, 64), (16, 64), None, (32, 128), (32, 128), None, (48, 192), (48, 192), (64, 256), (64, 256)]
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, 2), nn.ReLU(), nn.MaxPool2d(3, 2, ceil_mode=True)]
    channels = 64
    for each in fires:
        layers.append(nn.MaxPool2d(3, 2, ceil_mode=True) if each is None else Fire(channels, *each))
        channels = channels if each is None else 2 * each[1]
    return nn.Sequential(*layers, nn.Conv2d(512, 1000, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()), _image(224)


def mobilenet_v2() -> Any:
    layers = [conv(3, 32, 3, 2, act=nn.ReLU6)]
    channels = 32
    for expand, outputs, blocks, first in ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1),
                                           (6, 160, 3, 2), (6, 320, 1, 1)):  # fmt: skip
        for block in range(blocks):
            stride, hidden = first if block == 0 else 1, channels * expand
            steps = [conv(channels, hidden, 1, act=nn.ReLU6)] if expand > 1 else []
            steps += [conv(hidden, hidden, 3, stride, hidden, nn.ReLU6), conv(hidden, outputs, 1, act=None)]
            branch = nn.Sequential(*steps)
            layers.append(Residual(branch, act=False) if stride == 1 and channels == outputs else branch)
            channels = outputs
    layers += [conv(320, 1280, 1, act=nn.ReLU6), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1280, 1000)]
    return nn.Sequential(*layers), _image(224)


class Shuffle(nn.Module):
    """A unit of ShuffleNet V2: half of the channels pass, and both halves are interleaved."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        half = outputs // 2
        self.splits = stride == 1
        own = half if self.splits else inputs
        down = (conv(inputs, inputs, 3, stride, inputs, None), conv(inputs, half, 1))
        self.left = nn.Identity() if self.splits else nn.Sequential(*down)
        self.right = nn.Sequential(conv(own, half, 1), conv(half, half, 3, stride, half, None), conv(half, half, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = x.chunk(2, 1) if self.splits else (x, x)
        y = torch.cat([self.left(left), self.right(right)], 1)
        return _shuffle(y)


def _shuffle(x: torch.Tensor) -> torch.Tensor:
    batch, channels, height, width = x.shape
    return x.view(batch, 2, channels // 2, height, width).transpose(1, 2).reshape(batch, channels, height, width)


def shufflenet() -> Any:
    layers: list[nn.Module] = [conv(3, 24, 3, 2), nn.MaxPool2d(3, 2, 1)]
    channels = 24
    for outputs, blocks in ((48, 4), (96, 8), (192, 4)):
        for block in range(blocks):
            layers.append(Shuffle(channels, outputs, 2 if block == 0 else 1))
            channels = outputs
    layers += [conv(192, 1024, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1024, 1000)]
    return nn.Sequential(*layers), _image(224)


class Dense(nn.Module):
    """A layer of DenseNet, whose result is concatenated to its input."""

    def __init__(self, inputs: int, growth: int = 32) -> None:
        super().__init__()
        self.steps = nn.Sequential(nn.BatchNorm2d(inputs), nn.ReLU(), conv(inputs, 4 * growth, 1),
                                   nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False))  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, self.steps(x)], 1)


def densenet121() -> Any:
    layers: list[nn.Module] = [conv(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for number, blocks in enumerate((6, 12, 24, 16)):
        if number:
            layers += [nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, channels // 2, 1, bias=False), nn.AvgPool2d(2)]
            channels //= 2
        layers += [Dense(channels + 32 * block) for block in range(blocks)]
        channels += 32 * blocks
    layers += [nn.BatchNorm2d(channels), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000)]
    return nn.Sequential(*layers), _image(224)


class NasCell(nn.Module):
    """A normal or reduction cell of NASNet-A: separable convolutions and pools of two inputs, concatenated."""

    def __init__(self, before: int, inputs: int, width: int, stride: int, *, halves: bool) -> None:
        super().__init__()
        self.stride = stride
        self.fit = conv(before, width, 1, 2 if halves else 1, act=None)
        self.squeeze = conv(inputs, width, 1, act=None)
        kernels = (5, 3, 5, 3, 3) if stride == 1 else (5, 7, 7, 5, 3)
        self.separable = nn.ModuleList(_separable(width, kernel, stride if i < 4 else 1) for i, kernel in enumerate(kernels))
        self.average, self.most = nn.AvgPool2d(3, stride, 1), nn.MaxPool2d(3, stride, 1)

    def forward(self, before: torch.Tensor, last: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        p, h = self.fit(functional.relu(before)), self.squeeze(functional.relu(last))
        a, b, c, d, e = self.separable
        if self.stride == 1:
            parts = [a(h) + b(p), c(p) + d(p), self.average(h) + p, self.average(p) + self.average(p), e(h) + h]
            return last, torch.cat([p, *parts], 1)
        first = a(h) + b(p)
        parts = [self.most(h) + c(p), self.average(h) + d(p), e(first) + self.most(h), first]
        return last, torch.cat(parts, 1)


def _separable(width: int, kernel: int, stride: int) -> nn.Module:
    steps: list[nn.Module] = []
    for each in (stride, 1):
        steps += [
            nn.ReLU(),
            nn.Conv2d(width, width, kernel, each, kernel // 2, groups=width, bias=False),
            conv(width, width, 1, act=None),
        ]
    return nn.Sequential(*steps)


class NasNet(nn.Module):
    """NASNet-A for CIFAR: three stages of normal cells, with reduction cells between."""

    def __init__(self, cells: int = 6, width: int = 32) -> None:
        super().__init__()
        self.stem = conv(3, 3 * width, act=None)
        listed: list[nn.Module] = []
        before = inputs = 3 * width
        halves = False
        for stage in range(3):
            for number in range(cells + (stage > 0)):
                reduces = stage > 0 and number == 0
                listed.append(NasCell(before, inputs, width * 2**stage, 2 if reduces else 1, halves=halves))
                before, inputs, halves = inputs, width * 2**stage * (4 if reduces else 6), reduces
        self.cells, self.dense = nn.ModuleList(listed), nn.Linear(inputs, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = last = self.stem(x)
        for cell in self.cells:
            before, last = cell(before, last)
        return self.dense(functional.relu(last).mean((2, 3)))


class DeepSpeech2(nn.Module):
    """Two convolutions and seven recurrent layers of width 256, on 1 x 300 x 171 x 1."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.Sequential(nn.Conv2d(1, 32, (41, 11), (2, 2), (20, 5)), nn.Hardtanh(0, 20),
                                   nn.Conv2d(32, 32, (21, 11), (2, 1), (10, 5)), nn.Hardtanh(0, 20))  # fmt: skip
        self.recurrent, self.dense = nn.LSTM(32 * 43, 256, 7), nn.Linear(256, 29)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.convs(x)  # frequency before time
        return torch.log_softmax(self.dense(self.recurrent(y.flatten(1, 2).permute(2, 0, 1))[0]), -1)


class Lstm(nn.Module):
    """Layers of LSTM."""

    def __init__(self, layers: int, hidden: int) -> None:
        super().__init__()
        self.layers = nn.LSTM(hidden, hidden, layers)

    def forward(self, x: torch.Tensor) -> Any:
        return self.layers(x)[0]


class Seq2Seq(nn.Module):
    """An encoder of 8 layers and a decoder of 4, width 128."""

    def __init__(self, steps: int = 30, words: int = 1000) -> None:
        super().__init__()
        self.steps = steps
        self.encoder, self.decoder = nn.LSTM(128, 128, 8), nn.LSTM(128, 128, 4)
        self.dense = nn.Linear(128, words)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        encoded, (h, c) = self.encoder(x)
        states = h[-4:].contiguous(), c[-4:].contiguous()
        y, outputs = encoded[-1:], []
        for _ in range(self.steps):
            y, states = self.decoder(y, states)
            outputs.append(self.dense(y))
        return torch.cat(outputs)


def encoder(layers: int = 4, width: int = 256, tokens: int = 128) -> Any:
    layer = nn.TransformerEncoderLayer(width, 8, 4 * width, activation="gelu", batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False), {"x": torch.randn(1, tokens, width)}


class Vit(nn.Module):
    """ViT-Tiny: patches of 16 x 16, 12 layers of width 192."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 192, 16, 16)
        self.token, self.places = nn.Parameter(torch.randn(1, 1, 192)), nn.Parameter(torch.randn(1, 197, 192))
        layer = nn.TransformerEncoderLayer(192, 3, 768, activation="gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 12, nn.LayerNorm(192), enable_nested_tensor=False)
        self.dense = nn.Linear(192, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = torch.cat([self.token, self.patches(x).flatten(2).transpose(1, 2)], 1) + self.places
        return self.dense(self.layers(tokens)[:, 0])


def mlp(batch: int) -> Any:
    sizes = (1024, 4096, 4096, 1000)
    layers = [layer for a, b in itertools.pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1]), {"x": torch.randn(batch, 1024)}


class Towers(nn.Module):
    """Towers of two convolutions of one input, side by side."""

    def __init__(self, number: int, width: int) -> None:
        super().__init__()
        self.towers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 1), nn.ReLU())
            for _ in range(number)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([tower(x) for tower in self.towers], 1)


class OneCell(nn.Module):
    """A normal cell of NASNet-A with one input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell = NasCell(width, width, width, 1, halves=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cell(x, x)[1]


def _image(size: int, batch: int = 1) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(batch, 3, size, size)}


RAMMER = ("resnext29", "nasnet_cifar", "alexnet", "deepspeech2", "lstm", "seq2seq")
MODELS: dict[str, Callable[[], Any]] = {
    "resnext29": resnext29,
    "nasnet_cifar": lambda: (NasNet(), _image(32)),
    "alexnet": alexnet,
    "deepspeech2": lambda: (DeepSpeech2(), {"x": torch.randn(1, 1, 171, 300)}),
    "lstm": lambda: (Lstm(10, 256), {"x": torch.randn(100, 1, 256)}),
    "seq2seq": lambda: (Seq2Seq(), {"x": torch.randn(100, 1, 128)}),
    "resnet18": resnet18,
    "squeezenet": squeezenet,
    "mobilenet_v2": mobilenet_v2,
    "shufflenet": shufflenet,
    "densenet121": densenet121,
    "vit_tiny": lambda: (Vit(), _image(224)),
    "encoder": encoder,
    "mlp_b1": lambda: mlp(1),
    "mlp_b64": lambda: mlp(64),
}


SMALL: dict[str, Callable[[], Any]] = {  # whose choices can all be compared
    "lstm_4x20": lambda: (Lstm(4, 64), {"x": torch.randn(20, 1, 64)}),
    "towers_8": lambda: (Towers(8, 16), {"x": torch.randn(1, 16, 16, 16)}),
    "nasnet_cell": lambda: (OneCell(32), {"x": torch.randn(1, 32, 16, 16)}),
    "encoder_2": lambda: encoder(2, 128, 32),
}


def build(name: str) -> tuple[nn.Module, tuple[torch.Tensor, ...], list[str], list[str]]:
    """Return a module, its inputs, and their names and those of the outputs, for `roller bench model-zoo --modules`."""
    torch.manual_seed(SEED)
    module, inputs = (MODELS | SMALL)[name]()
    for each in module.parameters():
        nn.init.normal_(each, 0, 0.05)  # layers that are copies of one are not equal
    return module.eval(), tuple(inputs.values()), list(inputs), ["y"]


def export(
    module: nn.Module, inputs: tuple[torch.Tensor, ...], input_names: list[str], output_names: list[str], path: Path
) -> None:
    """Write a module as an ONNX file."""
    torch.backends.mha.set_fastpath_enabled(False)  # its operator has no ONNX form
    with torch.no_grad():
        torch.onnx.export(
            module, inputs, str(path), input_names=input_names, output_names=output_names, opset_version=OPSET, dynamo=False
        )


def write_models(folder: Path, names: Sequence[str]) -> None:
    """Write models, each as NAME.onnx."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        path = folder / f"{name}.onnx"
        export(*build(name), path)
        print(f"{path}: {path.stat().st_size} bytes", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"{', '.join([*MODELS, *SMALL])}; all of the zoo without a name")
    options = parser.parse_args()
    if unknown := set(options.models) - {*MODELS, *SMALL}:
        parser.error(f"no models {', '.join(sorted(unknown))}: --help names them")
    write_models(options.folder, options.models or list(MODELS))
