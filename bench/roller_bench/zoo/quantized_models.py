"""Write small models as quantized ONNX files, with random weights: python -m roller_bench.zoo.quantized_models FOLDER.

Each has what others lack: kinds of convolutions, attention, tables of functions, pools, concatenations, or recurrence.
Their order is that of the table in docs/models.md.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from roller_bench.zoo.models import Dense, Residual, Shuffle, conv, export
from roller_bench.zoo.quantize import FORMATS, QDQ, quantize

SEED = 0


# blocks --------------------------------------------------------------------------------------------------------------


class Mean(nn.Module):
    """The mean over some axes."""

    def __init__(self, *axes: int) -> None:
        super().__init__()
        self.axes = axes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(self.axes)


class Patches(nn.Module):
    """The patches of an image as tokens."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.project = nn.Conv2d(3, width, size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.project(x).flatten(2).transpose(1, 2)


class Encoder(nn.Module):
    """A layer of attention and of two products.

    Packed, one product gives queries, keys and values, and scores are multiplied, as timm has it. Otherwise three
    products give them, and scores are divided, as BERT has it.
    """

    def __init__(self, width: int, heads: int, *, packed: bool) -> None:
        super().__init__()
        self.heads, self.packed, self.scale = heads, packed, (width // heads) ** 0.5
        sizes = [3 * width] if packed else [width] * 3
        self.projections = nn.ModuleList(nn.Linear(width, size) for size in sizes)
        self.output, self.dense = nn.Linear(width, width), _dense(width, 4 * width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self._project(self.norms[0](x))
        scores = query @ key.transpose(2, 3)
        scores = scores * (1 / self.scale) if self.packed else scores / self.scale
        heads = torch.softmax(scores, -1) @ value
        x = x + self.output(heads.transpose(1, 2).reshape(x.shape))
        return x + self.dense(self.norms[1](x))

    def _project(self, x: torch.Tensor) -> Any:
        batch, tokens, width = x.shape
        sizes = batch, tokens, self.heads, width // self.heads
        if self.packed:
            return self.projections[0](x).reshape(batch, tokens, 3, *sizes[2:]).permute(2, 0, 3, 1, 4).unbind(0)
        return [project(x).view(sizes).transpose(1, 2) for project in self.projections]


def _dense(width: int, hidden: int) -> Any:
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))


class SqueezeExcite(nn.Module):
    """Channels that are scaled by a function of their means."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.squeeze, self.excite = nn.Conv2d(channels, channels // 4, 1), nn.Conv2d(channels // 4, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.relu(self.squeeze(functional.adaptive_avg_pool2d(x, 1)))
        return x * functional.hardsigmoid(self.excite(y))


def _inverted(
    inputs: int,
    hidden: int,
    outputs: int,
    stride: int,
    kernel: int = 3,
    act: type[nn.Module] = nn.ReLU,
    *,
    excites: bool = False,
) -> nn.Module:
    """Return an inverted residual: a depthwise convolution of more channels than it has inputs."""
    wide = [conv(inputs, hidden, 1, act=act), conv(hidden, hidden, kernel, stride, hidden, act)]
    branch = nn.Sequential(*wide, *([SqueezeExcite(hidden)] if excites else []), conv(hidden, outputs, 1, act=None))
    return Residual(branch, act=False) if stride == 1 and inputs == outputs else branch


def _residual(inputs: int, outputs: int, stride: int, *branch: nn.Module) -> nn.Module:
    shortcut = conv(inputs, outputs, 1, stride, act=None) if stride > 1 or inputs != outputs else None
    return Residual(nn.Sequential(*branch), shortcut)


def _classify(channels: int, classes: int = 100) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]


# models --------------------------------------------------------------------------------------------------------------


def attention() -> Any:
    return nn.Sequential(*(Encoder(256, 4, packed=False) for _ in range(3))), torch.randn(1, 96, 256)


class Mixing(nn.Module):
    """A layer of MLP-Mixer: products over the tokens, then over the channels."""

    def __init__(self, width: int, tokens: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.over_tokens, self.over_channels = _dense(tokens, 2 * tokens), _dense(width, 3 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.over_tokens(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        return x + self.over_channels(self.norms[1](x))


def mixer() -> Any:
    layers = (Mixing(192, 64) for _ in range(3))
    return nn.Sequential(Patches(192, 14), *layers, Mean(1), nn.Linear(192, 50)), _image(112)


class Dilated(nn.Module):
    """Gated convolutions over time, whose dilations double."""

    def __init__(self, inputs: int, channels: int, outputs: int, layers: int) -> None:
        super().__init__()
        self.first, self.last = nn.Conv1d(inputs, channels, 1), nn.Conv1d(channels, outputs, 1)
        dilations = [2**i for i in range(layers)]
        self.gated = nn.ModuleList(nn.Conv1d(channels, 2 * channels, 3, padding=d, dilation=d) for d in dilations)
        self.mixed = nn.ModuleList(nn.Conv1d(channels, channels, 1) for _ in dilations)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for gated, mixed in zip(self.gated, self.mixed, strict=True):
            signal, gate = gated(x).chunk(2, 1)
            x = x + mixed(torch.tanh(signal) * torch.sigmoid(gate))
        return self.last(x)


def inverted() -> Any:
    sizes = ((16, 24, 2), (24, 24, 1), (24, 40, 2), (40, 40, 1), (40, 80, 2), (80, 80, 1))
    blocks = [_inverted(inputs, 4 * inputs, outputs, stride) for inputs, outputs, stride in sizes]
    return nn.Sequential(conv(3, 16, 3, 2), *blocks, conv(80, 320, 1), *_classify(320)), _image(128)


def residual() -> Any:
    layers = [conv(3, 32, 7, 2), nn.MaxPool2d(3, 2, 1)]
    for inputs, outputs, stride in ((32, 32, 1), (32, 64, 2), (64, 128, 2), (128, 256, 2)):
        steps = conv(inputs, outputs, 3, stride), conv(outputs, outputs, act=None)
        layers.append(_residual(inputs, outputs, stride, *steps))
    return nn.Sequential(*layers, *_classify(256)), _image(112)


def grouped() -> Any:
    layers = [conv(3, 32, 7, 2), nn.MaxPool2d(3, 2, 1)]
    for inputs, width, outputs, stride in ((32, 64, 128, 1), (128, 128, 256, 2), (256, 256, 512, 2)):
        steps = conv(inputs, width, 1), conv(width, width, 3, stride, 16), conv(width, outputs, 1, act=None)
        layers.append(_residual(inputs, outputs, stride, *steps))
    return nn.Sequential(*layers, *_classify(512)), _image(112)


class Detector(nn.Module):
    """Boxes and classes at two scales, with a pyramid of pools above the lower one."""

    def __init__(self) -> None:
        super().__init__()
        stem = nn.ZeroPad2d((0, 1, 0, 1)), nn.Conv2d(3, 24, 5, 2, 1), nn.PReLU(24), conv(24, 48, 3, 2, act=nn.SiLU)
        self.fine = nn.Sequential(*stem, Shuffle(48, 48, 1), Shuffle(48, 48, 1))
        self.coarse = nn.Sequential(conv(48, 96, 3, 2, act=nn.SiLU), Shuffle(96, 96, 1), Shuffle(96, 96, 1))
        self.pool, self.joined = nn.MaxPool2d(5, 1, 2), nn.Conv2d(3 * 96, 96, 1)
        self.heads = nn.ModuleList(nn.Conv2d(channels, 14, 1) for channels in (48, 96))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fine = self.fine(x)
        coarse = self.coarse(fine)
        pooled = self.pool(coarse)
        coarse = functional.silu(self.joined(torch.cat([coarse, pooled, self.pool(pooled)], 1)))
        pairs = zip(self.heads, (fine, coarse), strict=True)
        return torch.cat([torch.sigmoid(head(y)).flatten(2) for head, y in pairs], 2)


class Vit(nn.Module):
    """Patches of 16 x 16 of a small image, and four layers."""

    def __init__(self, width: int = 192, tokens: int = 64) -> None:
        super().__init__()
        self.patches = Patches(width, 16)
        self.token = nn.Parameter(torch.randn(1, 1, width))
        self.places = nn.Parameter(torch.randn(1, 1 + tokens, width) * 0.1)
        self.layers = nn.Sequential(*(Encoder(width, 3, packed=True) for _ in range(4)), nn.LayerNorm(width))
        self.classify = nn.Linear(width, 100)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        patches = self.patches(x)
        tokens = torch.cat([self.token.expand(x.shape[0], -1, -1), patches], 1) + self.places
        return self.classify(self.layers(tokens)[:, 0])


def mobilenet_v3() -> Any:
    swish, relu = nn.Hardswish, nn.ReLU
    rows = ((16, 48, 24, 2, 3, relu, True), (24, 72, 24, 1, 3, relu, False), (24, 96, 40, 2, 5, swish, True),
            (40, 160, 40, 1, 5, swish, True), (40, 240, 80, 2, 5, swish, True), (80, 320, 80, 1, 5, swish, True))  # fmt: skip
    blocks = [_inverted(*row, excites=excites) for *row, excites in rows]
    last = [conv(80, 320, 1, act=swish), *_classify(320, 256), swish(), nn.Linear(256, 100)]
    return nn.Sequential(conv(3, 16, 3, 2, act=swish), *blocks, *last), _image(128)


def densenet(growth: int = 16) -> Any:
    layers: list[nn.Module] = [conv(3, 32, 7, 2), nn.MaxPool2d(3, 2, 1)]
    channels = 32
    for blocks in (3, 4, 4):
        layers += [Dense(channels + growth * block, growth) for block in range(blocks)]
        channels += growth * blocks
        layers += [nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, channels // 2, 1, bias=False), nn.AvgPool2d(2)]
        channels //= 2
    return nn.Sequential(*layers, Mean(2, 3), nn.Linear(channels, 100)), _image(128)


class UNet(nn.Module):
    """Two scales down and up again, one by a transposed convolution and one by a resize."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Sequential(conv(a, b), conv(b, b)) for a, b in ((3, 24), (24, 48), (48, 96)))
        self.pool, self.transposed = nn.MaxPool2d(2), nn.ConvTranspose2d(96, 48, 2, 2)
        self.up, self.last = nn.ModuleList([conv(96, 48), conv(72, 24)]), nn.Conv2d(24, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.down[0](x)
        second = self.down[1](self.pool(first))
        third = self.down[2](self.pool(second))
        y = self.up[0](torch.cat([self.transposed(third), second], 1))
        y = functional.interpolate(y, scale_factor=2, mode="nearest")
        return self.last(self.up[1](torch.cat([y, first], 1)))


class Recurrent(nn.Module):
    """Two convolutions over time, an LSTM, and two products."""

    def __init__(self) -> None:
        super().__init__()
        first = nn.Conv1d(40, 96, 5, 2, 2), nn.ReLU()
        self.convs = nn.Sequential(*first, nn.Conv1d(96, 96, 3, 1, 1), nn.BatchNorm1d(96), nn.ReLU())
        self.lstm = nn.LSTM(96, 96, batch_first=True)
        self.dense = nn.Sequential(nn.Linear(96, 256), nn.ReLU(), nn.Linear(256, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dense(self.lstm(self.convs(x).transpose(1, 2))[0])


def separable(channels: int = 128) -> Any:
    layers = [nn.Conv1d(64, channels, 11, 2, 5, bias=False), nn.BatchNorm1d(channels), nn.ReLU()]
    for taps in (13, 15, 17):
        branch = [*_over_time(channels, taps), nn.ReLU(), *_over_time(channels, taps)]
        shortcut = nn.Sequential(nn.Conv1d(channels, channels, 1), nn.BatchNorm1d(channels))
        layers.append(Residual(nn.Sequential(*branch), shortcut))
    return nn.Sequential(*layers, nn.Conv1d(channels, 256, 1), nn.ReLU(), nn.Conv1d(256, 29, 1)), torch.randn(1, 64, 300)


def _over_time(channels: int, taps: int) -> list[nn.Module]:
    """Return a convolution of each channel and one of all, without biases, and the norm."""
    depthwise = nn.Conv1d(channels, channels, taps, 1, taps // 2, groups=channels, bias=False)
    return [depthwise, nn.Conv1d(channels, channels, 1, bias=False), nn.BatchNorm1d(channels)]


def _image(size: int) -> torch.Tensor:
    return torch.randn(1, 3, size, size)


MODELS: dict[str, Callable[[], Any]] = {
    "attention": attention,
    "mixer": mixer,
    "dilated": lambda: (Dilated(40, 80, 20, 4), torch.randn(1, 40, 400)),
    "inverted": inverted,
    "residual": residual,
    "grouped": grouped,
    "detector": lambda: (Detector(), _image(128)),
    "vit": lambda: (Vit(), _image(128)),
    "mobilenet_v3": mobilenet_v3,
    "densenet": densenet,
    "unet": lambda: (UNet(), _image(64)),
    "recurrent": lambda: (Recurrent(), torch.randn(1, 40, 128)),
    "separable": separable,
}


def build(name: str) -> tuple[nn.Module, torch.Tensor]:
    """Return a module and its input. Its norms have statistics, as after training."""
    torch.manual_seed(SEED)
    module, x = MODELS[name]()
    for each in module.modules():
        if isinstance(each, (nn.BatchNorm1d, nn.BatchNorm2d)):
            each.running_mean.normal_(0, 0.1)
            each.running_var.uniform_(0.5, 1.5)
    return module.eval(), x


def write_quantized(folder: Path, names: Sequence[str], form: str) -> None:
    """Write quantized models in a form of FORMATS, each as NAME.onnx."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        module, x = build(name)
        target = folder / f"{name}.onnx"
        with tempfile.TemporaryDirectory(prefix="roller-quantize-") as exported:
            floats = Path(exported) / target.name
            export(module, (x,), ["x"], ["y"], floats)
            quantize(str(floats), str(target), form)
        print(f"{target}: {target.stat().st_size} bytes", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the models that are named, or all."""
    parser = argparse.ArgumentParser(prog="python -m roller_bench.zoo.quantized_models", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"{', '.join(MODELS)}; all without a name")
    parser.add_argument(
        "--format", choices=FORMATS, default=QDQ, help="how the file has quantized operators (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    if unknown := set(options.models) - set(MODELS):
        parser.error(f"no models {', '.join(sorted(unknown))}: --help names them")
    write_quantized(options.folder, options.models or list(MODELS), options.format)


if __name__ == "__main__":
    main()
