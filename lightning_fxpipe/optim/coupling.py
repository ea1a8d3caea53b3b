"""Trial that shows if an optimizer trains a part of the parameters as it trains them among all others.

A rank's optimizer holds one stage's parameters. A step that treats each by itself is that of one device; a norm over all of
them, as in LAMB's clipping, SAM or Prodigy, would be one stage's, and so is what goes by a parameter's place in the groups. A
copy of the optimizer trains small parameters, all together and in parts, each with a loss of its own: they must not differ.
"""

from __future__ import annotations

import copy
import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fxpipe._compat.step_hooks import wrapped_step_hooks
from lightning_fxpipe._compat.torch import tree_leaves
from lightning_fxpipe.distributed.replica import replaced_everywhere
from lightning_fxpipe.errors import UnsupportedError, text_of
from lightning_fxpipe.optim.optimizers import StageOptimizer, with_inner
from lightning_fxpipe.optim.twins import CannotTryError, own_step, twin_of
from lightning_fxpipe.pytree.containers import leaves_with_path

_logger = logging.getLogger("lightning_fxpipe")

_NUM_STEPS = 12  # adaptive step sizes begin to depend on the gradients after a few
_MAX_STEPS = 64  # where the optimizer does something every so many steps
_NUM_PARAMETERS = 64  # that are tried, where there are more at least two of each group
_MAX_DIFFERENCE = {torch.float64: 1e-6, torch.float32: 1e-3}  # relative to a step's way
# Of the gradients, by step: what is clipped must exceed the limit now and then, and fall short of it.
_SCALES = (1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.01, 30.0, 1.0, 1e4, 1.0, 1e-4)
_COLLECTIVES = (
    *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all", "all_to_all_single", "barrier"),
    *("broadcast", "broadcast_object_list", "reduce", "reduce_scatter", "reduce_scatter_tensor", "gather", "scatter"),
    *("send", "recv", "isend", "irecv"),
)
_NUMBERS = re.compile(r"\d+")

Path = list[list[Tensor | None]]


@dataclass(frozen=True, kw_only=True)
class _Outcome:
    """State of an optimizer after the trial.

    Attributes:
        path: Its parameters after each step; None for those that it does not have.
        common: The numbers that it keeps for several parameters, by their names.
        saved: What it saves; None where it does not save.
    """

    path: Path
    common: dict[str, float]
    saved: dict[str, Any] | None


def couples_parameters(optimizer: Optimizer) -> bool:
    """Returns True if the step of a parameter depends on which others the optimizer has. The optimizer stays as it is.

    Raises:
        CannotTryError: It cannot be tried on other parameters.
    """
    if type(optimizer).__module__.startswith("torch.optim.") and own_step(optimizer) is None:
        return False  # all of torch's own, LBFGS aside, treat each parameter by itself
    failure: Exception | None = None
    for dtype in (torch.float64, torch.float32):  # some kernels have no float64
        try:
            with torch.random.fork_rng(devices=[]), torch.enable_grad(), replaced_everywhere(_COLLECTIVES, _refused):
                return _Trial(optimizer, dtype).differs()
        except CannotTryError:
            raise
        except Exception as error:
            failure = error if failure is None else failure
    assert failure is not None
    raise CannotTryError(f"{type(failure).__name__}: {text_of(failure)}") from failure


class _Trial:
    """Trains copies of an optimizer, over parameters of a dtype."""

    def __init__(self, optimizer: Optimizer, dtype: torch.dtype) -> None:
        self._optimizer = optimizer
        self._dtype = dtype
        self._parameters = list(_choose(optimizer))
        real = [parameter for parameter in self._parameters if not parameter.is_meta]
        self._device = real[0].device if real else torch.device("cpu")
        self._num_steps = _num_steps(optimizer)

    def differs(self) -> bool:
        """Returns True if parameters go other ways in parts than all together."""
        count = len(self._parameters)
        parts = [part for part in (range(count // 2), range(1, count, 2)) if 0 < len(part) < count]
        whole = self._run(range(count))
        if self._differ(whole, self._run(range(count))):
            raise CannotTryError("two identical trials differ")
        if any(self._differ(whole, self._run(part)) for part in parts):
            return True
        if whole.saved is None:
            return False
        try:
            resumed = self._run(range(count), whole.saved)
        except Exception:  # nor can it be on one device
            _logger.debug("The state_dict of %s cannot be loaded", type(self._optimizer).__name__, exc_info=True)
            return False
        return any(self._differ(resumed, self._run(part, whole.saved)) for part in parts)

    def _run(self, held: Sequence[int], saved: dict[str, Any] | None = None) -> _Outcome:
        """Trains with those parameters; the optimizer has placeholders for the others, and what a stage's has."""
        torch.manual_seed(0)
        values = [torch.randn(_small(p.shape), dtype=self._dtype_of(p)).to(self._device) for p in self._parameters]
        stand_ins = [
            nn.Parameter(value if index in held else value.to("meta"), requires_grad=parameter.requires_grad)
            for index, (value, parameter) in enumerate(zip(values, self._parameters, strict=True))
        ]
        module = nn.ParameterList(stand_ins)
        twin = twin_of(self._optimizer, {id(p): new for p, new in zip(self._parameters, module, strict=True)})
        stage = StageOptimizer(module, twin)
        if saved is not None:
            stage.load(copy.deepcopy(saved), copies=True)
        torch.manual_seed(1)
        path = list(self._steps(twin, list(module)))
        with suppress(UnsupportedError):
            return _Outcome(path=path, common=_common(twin, module), saved=copy.deepcopy(stage.state_dict()))
        return _Outcome(path=path, common=_common(twin, module), saved=None)

    def _steps(self, twin: Optimizer, parameters: Sequence[nn.Parameter]) -> Iterator[list[Tensor | None]]:
        train: Any = getattr(twin, "train", None)  # schedule-free optimizers have two modes
        if callable(train):
            train()
        yield _values(parameters)
        for closure in _closures(parameters, self._num_steps):
            closure()
            with wrapped_step_hooks(twin, lambda hook: lambda *args: None):  # the user's, and not for a trial
                twin.step(closure=closure)
            yield _values(parameters)

    def _dtype_of(self, parameter: Tensor) -> torch.dtype:
        return torch.complex128 if parameter.is_complex() else self._dtype

    def _differ(self, whole: _Outcome, part: _Outcome) -> bool:
        """Returns True if training the part alone differs from training it with the rest, now or, by its numbers, later."""
        largest = _MAX_DIFFERENCE[self._dtype]
        for name, value in part.common.items():
            if not math.isclose(value, whole.common.get(name, value), rel_tol=largest) and not math.isnan(value):
                return True
        for before, after, mine_before, mine_after in zip(whole.path, whole.path[1:], part.path, part.path[1:], strict=False):
            for start, end, my_start, my_end in zip(before, after, mine_before, mine_after, strict=True):
                if start is None or end is None or my_start is None or my_end is None or not start.numel():
                    continue
                way, my_way = (end - start).nan_to_num(), (my_end - my_start).nan_to_num()
                allowed = largest * way.abs().max() + torch.finfo(self._dtype).eps * 64 * start.nan_to_num().abs().max()
                if not bool(((way - my_way).abs() <= allowed).all()):
                    return True
        return False


def _closures(parameters: Sequence[nn.Parameter], num_steps: int) -> list[Callable[[], Any]]:
    """For each step a closure as Lightning gives to it, of a loss that is that of all stages, whatever this optimizer holds.

    It sets the parameters' gradients: each depends on its parameter's value, and on nothing of the others. They have a
    direction, as those of a loss that is far from its minimum: estimates of step sizes grow with it only.
    """

    def drawn() -> list[Tensor]:
        devices = ["cpu" if parameter.is_meta else parameter.device for parameter in parameters]
        return [torch.randn(p.shape, dtype=p.dtype).to(device) for p, device in zip(parameters, devices, strict=True)]

    def closure(step: int, noises: Sequence[Tensor], calls: Iterator[int]) -> Tensor:
        for parameter, direction, noise in zip(parameters, directions, noises, strict=True):
            if parameter.requires_grad and not parameter.is_meta:
                slope = 0.3 * torch.sin(parameter.detach() + direction) + direction + 0.1 * noise
                parameter.grad = (slope * _SCALES[step % len(_SCALES)]).to(parameter.dtype)
        return torch.tensor(1.0 + 1.0 / (step + next(calls)))

    directions = drawn()
    return [partial(closure, step, drawn(), count(1)) for step in range(num_steps)]


def _choose(optimizer: Optimizer) -> Iterator[Tensor]:
    """The parameters that are tried: all, or the first and others of each group."""
    seen: set[int] = set()
    total = sum(len(group["params"]) for group in optimizer.param_groups)
    for group in optimizer.param_groups:
        parameters = group["params"]
        share = max(2, _NUM_PARAMETERS * len(parameters) // max(total, 1))
        for parameter in parameters[:: max(1, -(-len(parameters) // share))]:
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield parameter


def _num_steps(optimizer: Optimizer) -> int:
    """Enough to see what is done every few steps, twice."""
    options: list[Any] = [
        {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups[:8]
    ]
    for part in with_inner(optimizer):
        options += [value for name, value in vars(part).items() if name not in ("param_groups", "state")]
    periods = [leaf for leaf in tree_leaves(options) if type(leaf) is int and 2 <= 2 * leaf + 2 <= _MAX_STEPS]
    return max([_NUM_STEPS, *(2 * period + 2 for period in periods)])


def _small(shape: Iterable[int]) -> tuple[int, ...]:
    """A shape of as many dimensions."""
    return tuple(min(size, most) for size, most in zip(shape, (3, *[2] * 10), strict=False))


def _common(optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> dict[str, float]:
    """The numbers beside the states of single parameters; those of groups without parameters do not count.

    Nor do those under a parameter's identity, which is that of another one in the next run.
    """
    found: dict[str, float] = {}
    identities = {str(id(parameter)) for parameter in parameters}
    for place, part in enumerate(with_inner(optimizer)):
        held = {f"{place}.{name}": value for name, value in vars(part).items() if name not in ("param_groups", "state")}
        for index, group in enumerate(part.param_groups):
            if group["params"]:
                held |= {f"{place}.{index}.{name}": value for name, value in group.items() if not name.startswith("param")}
        for path, leaf in leaves_with_path(held):
            if not identities.isdisjoint(_NUMBERS.findall(path)):
                continue
            if isinstance(leaf, (int, float)) or (isinstance(leaf, Tensor) and leaf.numel() == 1 and not leaf.is_meta):
                found[path] = float(leaf)
    return found


def _values(parameters: Iterable[nn.Parameter]) -> list[Tensor | None]:
    return [None if parameter.is_meta else parameter.detach().clone() for parameter in parameters]


def _refused(function: Callable[..., Any]) -> Callable[..., Any]:
    """In place of a collective, ends the trial: in a pipeline each rank would send another stage's tensors."""

    def call(*args: Any, **kwargs: Any) -> Any:
        raise CannotTryError(f"it calls torch.distributed.{function.__name__}, but the ranks hold different parameters")

    return call
