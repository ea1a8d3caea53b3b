"""Whether an optimizer's step makes one parameter's update depend on another's gradient, found out by trying it.

A rank's optimizer holds one stage's parameters. A step that treats each by itself is that of one device; a norm over
all of them, as in LAMB's clipping, SAM or Prodigy, would be one stage's.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fxpipe._compat import tree_leaves

_NUM_STEPS = 12  # adaptive step sizes begin to depend on the gradients after a few
_NUM_GROUPS = 16
_MAX_ELEMENTS = 1024  # of a tensor that an optimizer keeps and that may be copied


class CannotTryError(Exception):
    """The optimizer does not run on other parameters than its own."""


def couples_parameters(optimizer: Optimizer) -> bool:
    """Whether the step uses several parameters' gradients together. The optimizer stays as it is.

    Raises:
        CannotTryError: It cannot be tried on other parameters.
    """
    if type(optimizer).__module__.partition(".")[0] == "torch":
        return False  # all of torch's own, LBFGS aside, treat each parameter by itself
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        try:
            first, again, other = (_trial(optimizer, factor) for factor in (1.0, 1.0, -37.0))
        except Exception as error:
            raise CannotTryError(f"{type(error).__name__}: {error}") from error
    if not _equal(first, again):
        raise CannotTryError("two equal trials differ")
    return not _equal(first, other)


def _equal(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(left, right, strict=True))


def _trial(optimizer: Optimizer, factor: float) -> list[Tensor]:
    """The first parameter of each group after some steps in which the second's gradient is multiplied by a factor."""
    torch.manual_seed(0)
    held = [parameter for group in optimizer.param_groups for parameter in group["params"] if not parameter.is_meta]
    device = held[0].device if held else torch.device("cpu")
    groups, pairs = [], []
    for group in optimizer.param_groups[:_NUM_GROUPS]:
        pair = [nn.Parameter(torch.randn(2, 2, dtype=torch.float64).to(device)) for _ in range(2)]
        options = {key: _copied(value) for key, value in group.items() if key != "params"}
        if "lr" in options and not options["lr"]:  # a warmup begins
            options["lr"] = group.get("initial_lr") or optimizer.defaults.get("lr") or 1e-2
        groups.append({**options, "params": list(pair)})
        pairs.append(pair)
    gradients = [[torch.rand(2, 2, dtype=torch.float64).to(device) * scale for scale in (1.0, factor)] for _ in pairs]

    def closure() -> Any:
        for pair, values in zip(pairs, gradients, strict=True):
            for parameter, value in zip(pair, values, strict=True):
                parameter.grad = value.clone()
        return torch.zeros((), device=device)

    twin = _twin(optimizer, groups)
    for _ in range(_NUM_STEPS):
        closure()
        type(optimizer).step(twin, closure)
    return [pair[0].detach() for pair in pairs]


def _twin(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """A copy that holds other parameters, has no state and calls no hooks; optimizers inside it are copied, too."""
    twin: Optimizer = type(optimizer).__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if name == "param_groups":
            twin.param_groups = groups
        elif name == "state":
            twin.state = defaultdict(dict)
        elif name.startswith("_optimizer_") and name.endswith("hooks"):
            setattr(twin, name, OrderedDict())
        elif isinstance(value, Optimizer):
            setattr(twin, name, _twin(value, groups))
        elif name != "step":  # that a scheduler has wrapped
            setattr(twin, name, _copied(value))
    return twin


def _copied(value: Any) -> Any:
    """A copy of options and counters. Of an object that is none of these, the object itself."""
    leaves = tree_leaves(value)
    if any(isinstance(leaf, (nn.Module, nn.Parameter, Optimizer)) for leaf in leaves):
        raise CannotTryError("it refers to the model in an attribute")
    if any(isinstance(leaf, Tensor) and leaf.numel() > _MAX_ELEMENTS for leaf in leaves):
        raise CannotTryError("it keeps large tensors in an attribute")
    plain = all(isinstance(leaf, (int, float, complex, str, bytes, Tensor, type(None))) for leaf in leaves)
    return copy.deepcopy(value) if plain else value
