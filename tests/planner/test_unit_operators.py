"""Operators and kept bytes of units, against the published formulas for a GPT block and against autograd on real tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from lightning_fxpipe._compat.torch import storage_key
from lightning_fxpipe.errors import TraceError
from lightning_fxpipe.planner.cost import Chain, build_chain
from lightning_fxpipe.planner.unit_operators import UnitOperators, unit_operators
from tests.models import make_model, make_samples
from tests.traces import trace

TOKENS, BATCH, HIDDEN, HEADS = 64, 2, 128, 4  # s, b, h and a of the papers


class GPTBlock(nn.Module):
    """The block of figure 2 in Reducing Activation Recomputation (arXiv 2205.05198): dropout, attention by single operators."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.projection = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before_attention(x))
        result: Tensor = x + self.dropout(self.down(F.gelu(self.up(self.before_mlp(x)))))
        return result

    def attention(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).chunk(3, -1)
        q, k, v = (part.view(BATCH, TOKENS, HEADS, -1).transpose(1, 2) for part in parts)
        weights = self.dropout(((q @ k.transpose(-1, -2)) * (HIDDEN // HEADS) ** -0.5).softmax(-1))
        result: Tensor = self.dropout(self.projection((weights @ v).transpose(1, 2).reshape(x.shape)))
        return result


class Checkpointed(GPTBlock):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return result


class GPT(nn.Module):
    def __init__(self, block: type[GPTBlock]) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, HIDDEN), nn.Linear(HIDDEN, 50)
        self.blocks = nn.ModuleList(block() for _ in range(3))

    def forward(self, ids: Tensor) -> Any:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def costs_of_blocks(block: type[GPTBlock]) -> list[UnitOperators]:
    chain = build_chain(trace(GPT(block).half(), torch.zeros(BATCH, TOKENS, dtype=torch.long), opened=()))
    found = zip(chain.units, unit_operators(chain), strict=True)
    return [costs for unit, costs in found if str(unit.nodes[0].target).startswith("blocks.")]


def test_a_gpt_block_keeps_what_the_formula_says() -> None:
    # sbh(34 + 5as/h), and each norm's mean and deviation in 16 bits, which the formula leaves out.
    sbh = TOKENS * BATCH * HIDDEN
    expected = sbh * (34 + 5 * HEADS * TOKENS / HIDDEN) + 2 * 2 * 2 * TOKENS * BATCH
    assert [costs.kept_bytes for costs in costs_of_blocks(GPTBlock)] == [expected] * 3


def test_a_checkpointed_block_keeps_its_input() -> None:
    # 2 sbh, and the state of the CPU's generator for its dropout.
    state = torch.get_rng_state().nbytes
    sbh = TOKENS * BATCH * HIDDEN
    assert all(2 * sbh <= costs.kept_bytes <= 2 * sbh + state for costs in costs_of_blocks(Checkpointed))


def test_a_gpt_block_computes_what_the_formula_says() -> None:
    forward = 24 * BATCH * TOKENS * HIDDEN**2 + 4 * BATCH * TOKENS**2 * HIDDEN
    for costs in costs_of_blocks(GPTBlock):
        parts = (costs.forward, costs.input_backward, costs.weight_backward)
        flops = [sum(operator.flops for operator in part) for part in parts]
        products = 24 * BATCH * TOKENS * HIDDEN**2
        assert flops == [forward, forward + 4 * BATCH * TOKENS**2 * HIDDEN, products]
        assert costs.flops == 3 * forward


def chain_of(name: str) -> tuple[nn.Module, Tensor, Chain]:
    torch.manual_seed(0)
    model, (inputs, _) = make_model(name), make_samples(name, 4)
    return model, inputs, build_chain(trace(model, inputs))


@pytest.mark.parametrize("name", ["mlp", "gpt", "resnet", "unet"])
def test_what_units_keep_together_is_what_autograd_keeps(name: str) -> None:
    model, inputs, chain = chain_of(name)
    fixed = {storage_key(tensor) for tensor in (*model.parameters(), *model.buffers(), inputs)}
    kept: dict[int, int] = {}
    alive: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        alive.append(tensor)
        if storage_key(tensor) not in fixed:
            kept[storage_key(tensor)] = int(tensor.untyped_storage().nbytes())
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        model(inputs)
    found = sum(costs.kept_bytes for costs in unit_operators(chain))
    # A norm that is an operator of its own may keep its statistics elsewhere than the operators that it stands for.
    assert found == pytest.approx(sum(kept.values()), rel=0.003)


class Mixed(nn.Module):
    """Blocks of two kinds; the second keeps what the first has kept, and the first what the second has made and not kept."""

    def __init__(self) -> None:
        super().__init__()
        kinds = [nn.Sequential(nn.Linear(8, 8), nn.GELU()), nn.Sequential(nn.LayerNorm(8), nn.Tanh())]
        self.blocks = nn.ModuleList(nn.Sequential(*kinds[index % 5 == 3]) for index in range(12))

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x) + x
        return x


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (GPT(GPTBlock), torch.zeros(BATCH, TOKENS, dtype=torch.long)),
        (GPT(Checkpointed), torch.zeros(BATCH, TOKENS, dtype=torch.long)),
        (nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(6))), torch.randn(4, 8)),
        (nn.Sequential(*(nn.Sequential(nn.Tanh()) for _ in range(6)), nn.Linear(8, 8)), torch.randn(4, 8, requires_grad=True)),
        (Mixed(), torch.randn(4, 8)),
    ],
    ids=["gpt", "checkpointed gpt", "blocks that keep results", "no parameters", "two kinds"],
)
def test_units_that_are_alike_take_what_they_would_if_each_ran(model: nn.Module, inputs: Tensor) -> None:
    if isinstance(model, GPT) and len(model.blocks) == 3:
        model.blocks.extend(type(model.blocks[0])() for _ in range(3))
    chain = build_chain(trace(model, inputs, opened=()))
    found = unit_operators(chain)
    alike = [node for node in chain.traced.graph.nodes if node.meta.pop("alike", None) is not None]
    assert alike
    assert found == unit_operators(chain)


def test_a_unit_that_looks_at_values_is_named() -> None:
    class Looking(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (2 if x.sum().item() > 0 else 1)

    chain = build_chain(trace(nn.Sequential(nn.Linear(4, 4), Looking(4, 4)), torch.randn(2, 4)))
    with pytest.raises(TraceError, match="cannot be estimated on tensors without data") as refused:
        unit_operators(chain)
    assert str(refused.value.where).startswith("1 (")


@pytest.mark.parametrize("name", ["gpt", "resnet"])
def test_measuring_leaves_nothing_behind(name: str) -> None:
    model, inputs, chain = chain_of(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state = torch.get_rng_state()
    unit_operators(chain)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    model(inputs).sum().backward()
