"""What the tests of traces share: a small model, its calls and what was recorded of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from lightning_fxpipe._compat.torch import tree_leaves
from lightning_fxpipe.pytree.structure import Template
from lightning_fxpipe.tracing.recordable import Recordable, RegionCall
from lightning_fxpipe.tracing.trace import TracedRegion, trace_region
from lightning_fxpipe.user_code.objects import lasting_objects

BATCH = 4
WIDTH = 6


def call_of(*args: Any, batch_size: int | None = None, path: str = "", **kwargs: Any) -> RegionCall:
    size = next(leaf.shape[0] for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
    return RegionCall(path=path, args=args, kwargs=kwargs, batch_size=batch_size or size)


def trace(model: nn.Module, *args: Any, opened: Any = None, **kwargs: Any) -> TracedRegion:
    return trace_region(model, call_of(*args, **kwargs), opened=opened)


def covers(traced: TracedRegion, call: Recordable) -> bool:
    """True if the graph computes this call, made now."""
    with call.numbers_on(traced.root):
        is_same = traced.computes(call) and traced.is_current()
    return is_same and traced.sees_the_same(Template.of(call.example(), shared=lasting_objects(traced.root)).tensors)


def batch(size: int = BATCH, width: int = WIDTH) -> Tensor:
    return torch.randn(size, width, generator=torch.Generator().manual_seed(size))


def target_name(node: fx.Node) -> str:
    """``layer1.0.conv1``, ``add_``, ``flatten``, ``getitem``."""
    return str(node.target) if isinstance(node.target, str) else node.target.__name__


def calls(traced: TracedRegion) -> list[tuple[str, str, str]]:
    """Op, target and module path of every call."""
    return [
        (node.op, target_name(node), node.meta["module_path"])
        for node in traced.graph.nodes
        if node.op in ("call_module", "call_function", "call_method")
    ]


def names(traced: TracedRegion) -> list[str]:
    return [target for _, target, _ in calls(traced)]


def line_of(function: Callable[..., Any], text: str) -> str:
    """``file:line`` of the line of ``function`` that contains ``text``."""
    lines, first = inspect.getsourcelines(function)
    return f"{inspect.getsourcefile(function)}:{first + next(i for i, line in enumerate(lines) if text in line)}"


class TwoLayers(nn.Module):
    """``first``, whatever a subclass does in between, ``last``."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.build()

    def build(self) -> None:
        """Adds what the subclass needs."""

    def between(self, h: Tensor) -> Tensor:
        return torch.relu(h)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self.first(x)))
