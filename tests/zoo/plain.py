"""Models in plain torch, each with something that ordinary code does and a tracer may get wrong."""

from __future__ import annotations

import dataclasses
from collections import UserDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from tests.zoo.entry import Batch, Entry

WIDTH = 8
LENGTH = 6
VOCABULARY = 23


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def vectors(size: int, seed: int) -> Batch:
    return {"x": torch.randn(size, WIDTH, generator=generator(seed))}


def sequences(size: int, seed: int) -> Batch:
    return {"x": torch.randn(size, LENGTH, WIDTH, generator=generator(seed))}


def images(size: int, seed: int) -> Batch:
    return {"x": torch.randn(size, 3, 8, 8, generator=generator(seed))}


def tokens(size: int, seed: int) -> Batch:
    return {"ids": torch.randint(0, VOCABULARY, (size, LENGTH), generator=generator(seed))}


def token_lengths(size: int, seed: int) -> Batch:
    lengths = torch.randint(2, LENGTH + 1, (size,), generator=generator(seed))
    lengths[0] = LENGTH
    return {**tokens(size, seed), "lengths": lengths}


def mixed(size: int, seed: int) -> Batch:
    mask = torch.rand(size, LENGTH, generator=generator(seed + 1)) > 0.3
    return {**tokens(size, seed), "values": vectors(size, seed)["x"].double(), "mask": mask}


def square(result: Any) -> Tensor:
    """A loss of a tensor."""
    value: Tensor = result.float().pow(2).mean()
    return value


def block(width: int = WIDTH) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))


class Stack(nn.Module):
    """Blocks one after another between two linears."""

    def __init__(self, make: Callable[[], nn.Module] = block, count: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(make() for _ in range(count))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for inner in self.blocks:
            x = self.around(inner, x)
        return self.last(x)

    def around(self, inner: nn.Module, x: Tensor) -> Tensor:
        return x + inner(x)


class DirectParameters(nn.Module):
    """A class token, a position table and a scale, used in the forward itself; a buffer that it changes."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.randn(1, LENGTH + 1, WIDTH))
        self.scale = nn.Parameter(torch.zeros(()))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.layers = nn.ModuleList(block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.positions
        for layer in self.layers:
            x = x + layer(x)
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().mean(dim=(0, 1)), alpha=0.1)
        return (x[:, 0] - self.mean) * self.scale.exp()


class TiedLanguageModel(nn.Module):
    """The head has the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.body = Stack()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.body(self.embed(ids))).transpose(1, 2), ids)


class SharedBlocks(Stack):
    """One block four times, and two names for one module."""

    def __init__(self) -> None:
        super().__init__(count=1)
        self.same = self.first

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(4):
            x = x + self.blocks[0](x)
        return self.last(self.same(x))


class Frozen(Stack):
    """Frozen parts, an unused part, and modules without parameters at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)
        self.blocks[1].requires_grad_(False)
        self.never = nn.Linear(WIDTH, WIDTH)
        self.start, self.end = nn.Tanh(), nn.Softplus()

    def forward(self, x: Tensor) -> Tensor:
        return self.end(super().forward(self.start(x)))


class Dominated(nn.Module):
    """One layer has nearly all parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(500, WIDTH)
        self.body = Stack()

    def forward(self, ids: Tensor) -> Tensor:
        return self.body(self.embed(ids))


class Recurrent(nn.Module):
    """An LSTM and a GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True, bidirectional=True)
        self.middle = nn.Linear(2 * WIDTH, WIDTH)
        self.gru = nn.GRU(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x, (hidden, _) = self.lstm(x)
        x, _ = self.gru(self.middle(x) + hidden[0][:, None])
        return self.last(x)


class PackedEncoder(nn.Module):
    """Packs by lengths, and pads again."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        padded, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=x.shape[1])
        return padded


class Packed(nn.Module):
    """Two encoders that need the lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.one, self.two = PackedEncoder(), PackedEncoder()
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        return self.head(self.two(self.one(self.embed(ids), lengths), lengths))


class Experts(nn.Module):
    """Each token goes to the expert that a gate chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero().squeeze(1)
            if len(rows):
                out.index_add_(0, rows, expert(x[rows]) * weights[rows, None])
        return out


class Halving(nn.Module):
    """Control flow that depends on data."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        while x.abs().max() > 0.5:
            x = x / 2
        return x


class ScaledTanh(torch.autograd.Function):
    """A function with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        y = torch.tanh(x)
        ctx.save_for_backward(y)
        ctx.factor = factor
        return y * factor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (y,) = ctx.saved_tensors
        return gradient * (1 - y * y) * ctx.factor * 0.5, None


class OwnBackward(Stack):
    """A custom autograd Function between blocks."""

    def around(self, inner: nn.Module, x: Tensor) -> Tensor:
        return x + ScaledTanh.apply(inner(x), 1.5)


class InPlace(Stack):
    """Operations in place, on results and on views of them."""

    def around(self, inner: nn.Module, x: Tensor) -> Tensor:
        y = inner(x)
        y += x
        y[:, 0].mul_(2)
        z = y * 2
        z.add_(1).sigmoid_()
        return F.relu_(y) + z[:, :1]


def parametrized() -> nn.Module:
    return nn.Sequential(weight_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh(), weight_norm(nn.Linear(WIDTH, WIDTH)))


def spectral() -> nn.Module:
    return spectral_norm(nn.Linear(WIDTH, WIDTH)).eval()


class SpectralStack(Stack):
    """Spectral norms that stay in evaluation mode, as in a trained critic."""

    def __init__(self) -> None:
        super().__init__(spectral)

    def train(self, mode: bool = True) -> SpectralStack:
        super().train(mode)
        for inner in self.blocks:
            inner.eval()
        return self


def hooked() -> nn.Module:
    module = block()
    module.register_forward_hook(_doubled)
    return module


def _doubled(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 2


class Checkpointed(Stack):
    """Recomputes each block's activations, at the top level of the model."""

    reentrant = False

    def around(self, inner: nn.Module, x: Tensor) -> Tensor:
        return x + checkpoint(inner, x, use_reentrant=self.reentrant)


class ReentrantCheckpointed(Checkpointed):
    reentrant = True


class CheckpointedFunction(Stack):
    """Recomputes a function of its own, with dropout in it."""

    def around(self, inner: nn.Module, x: Tensor) -> Tensor:
        def run(x: Tensor) -> Tensor:
            return F.dropout(F.relu(inner(x)) * self.first.weight.mean(), 0.3, self.training)

        return x + checkpoint(run, x, use_reentrant=False)


class LowRank(nn.Module):
    """A frozen linear with a trained correction, as PEFT wraps it."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_a = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False)})
        self.lora_b = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, bias=False)})
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_b["default"](self.lora_a["default"](self.dropout(x))) * 0.5


def low_rank() -> nn.Module:
    return nn.Sequential(LowRank(nn.Linear(WIDTH, WIDTH)), nn.ReLU(), LowRank(nn.Linear(WIDTH, WIDTH)))


class FunctionalDropout(Stack):
    """Dropout that follows the mode of the model around the blocks."""

    def around(self, inner: nn.Module, x: Tensor) -> Tensor:
        return x + F.dropout(inner(x), 0.25, training=self.training)


class ConvNet(nn.Module):
    """BatchNorm statistics, grouped convolutions, a flattening view."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, groups=4), nn.BatchNorm2d(8), nn.ReLU(inplace=True)) for _ in range(4)
        )
        self.head = nn.Linear(8 * 16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = x + layer(x)
        x = F.max_pool2d(x, 2)
        return self.head(x.view(x.size(0), -1))


class UNet(nn.Module):
    """Skips, a transposed convolution, bilinear interpolation."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 8, 3, stride=2, padding=1)
        self.middle = nn.Conv2d(8, 8, 3, stride=2, padding=1)
        self.up2, self.up1 = nn.ConvTranspose2d(8, 8, 2, stride=2), nn.Conv2d(16, 6, 3, padding=1)
        self.out = nn.Conv2d(12, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        one = F.relu(self.down1(x))
        two = F.relu(self.down2(one))
        y = torch.cat([self.up2(F.relu(self.middle(two))), two], dim=1)
        y = F.interpolate(self.up1(y), size=one.shape[-2:], mode="bilinear", align_corners=False)
        return self.out(torch.cat([y, one], dim=1))


class Translator(nn.Module):
    """torch's own Transformer with masks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.body = nn.Transformer(WIDTH, 2, 2, 2, 16, dropout=0.1, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        return self.head(self.body(self.embed(ids), self.embed(ids.flip(1)), tgt_mask=mask, tgt_is_causal=True))


@dataclasses.dataclass
class Output:
    """What a model returns."""

    loss: Tensor
    logits: Tensor
    hidden: list[Tensor]
    note: str = "x"


class State(NamedTuple):
    hidden: Tensor
    depth: int


class Carrying(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = block()

    def forward(self, state: State) -> State:
        return State(state.hidden + self.inner(state.hidden), state.depth + 1)


class DataclassOutput(nn.Module):
    """Named tuples between blocks, a dataclass as the result."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Carrying() for _ in range(4))

    def forward(self, x: Tensor) -> Output:
        state, all_hidden = State(x, 0), []
        for inner in self.blocks:
            state = inner(state)
            all_hidden.append(state.hidden)
        return Output(loss=state.hidden.pow(2).mean() * state.depth, logits=state.hidden, hidden=all_hidden)


class Memory:
    """An object that blocks write to and read from."""

    def __init__(self) -> None:
        self.kept: dict[int, Tensor] = {}


class Remembering(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.index, self.inner = index, block()

    def forward(self, x: Tensor, memory: Memory) -> Tensor:
        memory.kept[self.index] = self.inner(x)
        return x + memory.kept[self.index] + (memory.kept[0] if self.index == 3 else 0)


class ObjectBetweenBlocks(nn.Module):
    """Blocks write to an object that later blocks read from; it is part of the result."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Remembering(index) for index in range(4))

    def forward(self, x: Tensor) -> dict[str, Any]:
        memory = Memory()
        for inner in self.blocks:
            x = inner(x, memory)
        return {"loss": x.pow(2).mean() + memory.kept[2].mean(), "memory": memory}


class ObjectInput(Stack):
    """Takes a mapping that torch does not know."""

    def forward(self, x: Any) -> Tensor:
        return super().forward(x["x"] * x["scale"])


def mapped(size: int, seed: int) -> Batch:
    return {"x": UserDict(x=vectors(size, seed)["x"], scale=2.0)}


class Mixed(nn.Module):
    """Numbers, vectors of another precision, and a mask together; einsum."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.value = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.body = Stack()

    def forward(self, ids: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        x = self.body(self.embed(ids).masked_fill(~mask[..., None], 0.0))
        pooled = torch.einsum("btd,bt->bd", x, mask.float())
        return pooled, self.value(values)


class CheckedInputs(Stack):
    """Looks at its input's values at the top level."""

    def forward(self, x: Tensor) -> Tensor:
        if not torch.isfinite(x).all():
            raise ValueError("not finite")
        return super().forward(x)


class CountsItsCalls(Stack):
    """Changes an attribute of itself at the top level."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) / self.calls


def entry(
    name: str, make: Callable[[], nn.Module], batch: Callable[[int, int], Batch] = vectors, *,
    loss: Callable[[Any], Tensor] = square, **options: Any,
) -> Entry:  # fmt: skip
    return Entry(name=name, make_module=make, make_batch=batch, loss=loss, **options)


def own_loss(result: Any) -> Tensor:
    value: Tensor = result["loss"] if isinstance(result, dict) else result.loss
    return value


def both(result: Any) -> Tensor:
    return square(result[0]) + square(result[1])


ENTRIES = [
    entry("direct_parameters", DirectParameters, sequences),
    entry("tied_language_model", TiedLanguageModel, tokens),
    entry("shared_blocks", SharedBlocks),
    entry("frozen_and_unused", Frozen),
    entry("one_dominating_layer", Dominated, tokens),
    entry("lstm_gru", Recurrent, sequences),
    entry("packed_sequences", Packed, token_lengths),
    entry("mixture_of_experts", lambda: Stack(Experts)),
    entry("data_dependent_block", lambda: Stack(Halving)),
    entry("autograd_function", OwnBackward),
    entry("in_place", InPlace),
    entry("weight_norm", lambda: Stack(parametrized)),
    entry("spectral_norm", SpectralStack),
    entry("forward_hooks", lambda: Stack(hooked)),
    entry("checkpoint", Checkpointed),
    entry("checkpoint_reentrant", ReentrantCheckpointed),
    entry("checkpoint_function", CheckpointedFunction),
    entry("lora", lambda: Stack(low_rank)),
    entry("functional_dropout", FunctionalDropout),
    entry("conv_batch_norm", ConvNet, images),
    entry("unet", UNet, images),
    entry("nn_transformer", Translator, tokens),
    entry("dataclass_output", DataclassOutput, loss=own_loss),
    entry("object_between_blocks", ObjectBetweenBlocks, loss=own_loss),
    entry("object_input", ObjectInput, mapped),
    entry("mixed_inputs", Mixed, mixed, loss=both),
    entry("checked_inputs", CheckedInputs),
    entry("counts_its_calls", CountsItsCalls, refused="cannot be traced", why="its forward assigns to an attribute"),
]
