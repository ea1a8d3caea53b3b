"""The models of partition_quality.py in their published sizes, with the list of layers that other packages would cut.

Those of transformers have the sizes that their configurations have by default, or are given here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Work:
    """A model to cut.

    Attributes:
        title: Its name in the table.
        make: Makes it.
        batch: Makes its arguments.
        layers: Paths of its layers in order; several that are one layer have a plus between them, and a path that ends with a
            star stands for the entries of a list of blocks.
    """

    title: str
    make: Callable[[], nn.Module]
    batch: Callable[[], dict[str, Tensor]]
    layers: tuple[str, ...]


def make_gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(use_cache=False))


def make_llama() -> Any:
    """1.2 billion parameters, with keys and values shared by four heads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=24,
        num_attention_heads=32,
        num_key_value_heads=8,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def make_t5() -> Any:
    """t5-base."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(d_model=768, d_kv=64, d_ff=3072, num_layers=12, num_heads=12, use_cache=False)
    return T5ForConditionalGeneration(config)


def make_vit() -> Any:
    """ViT-B/16."""
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(num_labels=1000))


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions around a skip."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            *(nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)),
        )
        self.skip = nn.Sequential()
        if inputs != 4 * width:
            self.skip = nn.Sequential(nn.Conv2d(inputs, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.convolutions(x) + self.skip(x))


class ResNet50(nn.Module):
    """For images of 224 x 224 pixels and a thousand classes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        blocks, inputs = [], 64
        for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            for index in range(count):
                blocks.append(Bottleneck(inputs, width, 1 if index else stride))
                inputs = 4 * width
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inputs, 1000)

    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = self.head(self.blocks(self.stem(images)).mean((2, 3)))
        return found


def two_convolutions(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()),
        *(nn.Conv2d(outputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()),
    )


class Up(nn.Module):
    """Doubles the size, and joins what the way down had there."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.larger = nn.ConvTranspose2d(inputs, outputs, 2, stride=2)
        self.convolutions = two_convolutions(2 * outputs, outputs)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        found: Tensor = self.convolutions(torch.cat((self.larger(x), skip), dim=1))
        return found


class UNet(nn.Module):
    """That of arXiv 1505.04597: five levels, from 64 to 1024 channels."""

    def __init__(self) -> None:
        super().__init__()
        widths = (64, 128, 256, 512, 1024)
        self.down = nn.ModuleList(two_convolutions(*pair) for pair in zip((3, *widths), widths, strict=False))
        self.up = nn.ModuleList(Up(2 * width, width) for width in reversed(widths[:-1]))
        self.head = nn.Conv2d(64, 2, 1)

    def forward(self, images: Tensor) -> Tensor:
        x, skips = self.down[0](images), []
        for level in [*self.down][1:]:
            skips.append(x)
            x = level(nn.functional.max_pool2d(x, 2))
        for level in self.up:
            x = level(x, skips.pop())
        found: Tensor = self.head(x)
        return found


def tokens(*names: str) -> dict[str, Tensor]:
    return {name: torch.zeros(8, 32, dtype=torch.long) for name in names}


def images(name: str) -> dict[str, Tensor]:
    return {name: torch.zeros(8, 3, 224, 224)}


MODELS = {
    "gpt2": Work(
        title="GPT-2",
        make=make_gpt2,
        batch=lambda: tokens("input_ids"),
        layers=("transformer.wte+transformer.wpe", "transformer.h.*", "transformer.ln_f", "lm_head"),
    ),
    "llama": Work(
        title="Llama 1.2B",
        make=make_llama,
        batch=lambda: tokens("input_ids"),
        layers=("model.embed_tokens", "model.layers.*", "model.norm", "lm_head"),
    ),
    "t5": Work(
        title="T5 base",
        make=make_t5,
        batch=lambda: tokens("input_ids", "decoder_input_ids"),
        layers=(
            *("shared", "encoder.block.*", "encoder.final_layer_norm"),
            *("decoder.embed_tokens", "decoder.block.*", "decoder.final_layer_norm", "lm_head"),
        ),
    ),
    "vit": Work(
        title="ViT-B/16",
        make=make_vit,
        batch=lambda: images("pixel_values"),
        layers=("vit.embeddings", "vit.layers.*", "vit.layernorm", "classifier"),
    ),
    "resnet": Work(title="ResNet-50", make=ResNet50, batch=lambda: images("images"), layers=("stem", "blocks.*", "head")),
    "unet": Work(title="U-Net", make=UNet, batch=lambda: images("images"), layers=("down.*", "up.*", "head")),
}
