"""Random numbers in a pipeline.

What user code draws outside the stages (samplers, augmentation, noise in the step) must be the same on every rank, or the ranks
would train on different data; and it should be what one device draws for the whole batch. So all ranks start with the same
generator states and stay in lock step. Where the step's code runs for each microbatch (``runtime.step_tail``), the first
draws for the whole batch, and the others take their part of it (:class:`BatchDraws`). Numbers without a batch dimension
(mixup's lambda) are the same for all microbatches.

With one microbatch the generators' states travel with the boundary tensors from stage to stage, so that dropout, too, is that
of one device, and so is what a module draws by ``random`` or numpy (scheduled sampling). With several, stages work on different
microbatches at once, and each draws numbers of its own, seeded by the run's seed, the batch, the microbatch and the stage: two
stages do not repeat each other, and a resumed run repeats itself.
"""

from __future__ import annotations

import hashlib
import inspect
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from lightning_fxpipe._compat.torch import SYMBOLIC_TYPES, tree_map
from lightning_fxpipe.pytree.shapes import batch_dim_of
from lightning_fxpipe.pytree.sizes import SymbolicSize, as_size
from lightning_fxpipe.rng import HOST_STATE_BYTES, host_state, isolated_rng, set_host_state


def seed_generators(*key: int | str) -> None:
    """Seeds the default generators from ``key``."""
    seed = int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "little") >> 1
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed(seed)


def generator_state(device: torch.device) -> Tensor:
    """State of the default generators, the device's, Python's and numpy's, in memory of the host, as bytes."""
    own = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
    return torch.cat([own, torch.frombuffer(bytearray(host_state()), dtype=torch.uint8)])


def set_generator_state(state: Tensor, device: torch.device) -> None:
    """Inverse of :func:`generator_state`. Where a state has come over the device, the host waits for it."""
    own, others = state.cpu().tensor_split([len(state) - HOST_STATE_BYTES])
    set_host_state(others.numpy().tobytes())
    if device.type == "cuda":
        torch.cuda.set_rng_state(own, device)
    else:
        torch.set_rng_state(own)


def sent_state(state: Tensor, device: torch.device) -> Tensor:
    """A state where messages between devices take it from; the host does not wait for the copy."""
    return state.to(device, non_blocking=True)


@contextmanager
def continued_random_numbers(state: Tensor | None, device: torch.device) -> Iterator[None]:
    """Runs the block with the default generators at ``state``, or where they are for None."""
    with isolated_rng():
        if state is not None:
            set_generator_state(state, device)
        yield


@dataclass(frozen=True, kw_only=True)
class LikeTensor:
    """A tensor of which a draw uses only shape, dtype and device; sizes may be symbolic."""

    shape: tuple[Any, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, kw_only=True)
class Draw:
    """A random tensor that the region's own Python draws.

    With several microbatches, every rank draws the numbers behind it before the region, so that the generators stay in lock
    step and the first microbatch can draw for all. What the function makes of them and of tensors that only a stage has, the
    stage computes.

    Attributes:
        function: One that :func:`can_be_drawn_ahead`.
        args, kwargs: Its arguments, with :class:`LikeTensor` for tensors and symbolic sizes.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @classmethod
    def of(cls, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Draw:
        """A call with fakes: sizes stay symbolic, of tensors the shape, dtype and device are kept."""

        def described(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                return LikeTensor(shape=tuple(as_size(size) for size in leaf.shape), dtype=leaf.dtype, device=leaf.device)
            return as_size(leaf) if isinstance(leaf, SYMBOLIC_TYPES) else leaf

        listed = tuple(tuple(arg) if isinstance(arg, torch.Size) else arg for arg in args)
        return cls(function=function, args=tree_map(described, listed), kwargs=tree_map(described, dict(kwargs)))

    def make(self, draws: BatchDraws, sizes: Mapping[Any, int]) -> Tensor | None:
        """Draws its numbers for given values of the symbols; None where the stage must draw them."""

        def concrete(leaf: Any) -> Any:
            if isinstance(leaf, LikeTensor):
                return torch.empty(tree_map(concrete, leaf.shape), dtype=leaf.dtype, device=leaf.device)
            return leaf.value(sizes) if isinstance(leaf, SymbolicSize) else leaf

        return draws.ahead(self.function, tree_map(concrete, self.args), tree_map(concrete, dict(self.kwargs)))


def can_be_drawn_ahead(function: Callable[..., Any]) -> bool:
    """Returns True if the random numbers behind a function's result follow from sizes and the generator alone."""
    kind = _RANDOM.get(function)
    return kind is not None and kind.whole is not None


def shape_drawn_ahead(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Arguments) -> Shape:
    """Shape of the random numbers behind a function's result."""
    return _RANDOM[function].shape(args, kwargs)


@cache
def drawn_now_or_ahead(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` with one more argument in front: the numbers that were drawn before, or None to draw them here and now."""
    kind = _RANDOM[function]

    def drawn(ahead: Tensor | None, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if ahead is None else kind.finish(ahead, args, kwargs)

    drawn.__name__ = f"drawn_{function.__name__}"
    return drawn


Function = Callable[..., Any]
Shape = tuple[int, ...]
Args = tuple[Any, ...]
Arguments = Mapping[str, Any]


@dataclass(frozen=True)
class _Kind:
    """How a random function can be made to draw for a whole batch.

    Attributes:
        shape: Shape of its result, from its arguments.
        whole: Draws a tensor of another shape in its way; None, or gives None, where that cannot be done.
        finish: Makes its result from its part of the draw and its arguments.
    """

    shape: Callable[[Args, Arguments], Shape]
    whole: Callable[[Function, Shape, Args, Arguments], Tensor | None] | None = None
    finish: Callable[[Tensor, Args, Arguments], Tensor] = lambda part, args, kwargs: part


class BatchDraws:
    """Draws random tensors for a whole batch, and gives each microbatch its part.

    Args:
        batch_size: Samples in the batch.
        batch_dim: Dimension of the batch in its tensors.

    Attributes:
        own: Functions that have drawn for a microbatch, and so other numbers than for the batch.
    """

    def __init__(self, batch_size: int, batch_dim: int = 0) -> None:
        self._batch_size = batch_size
        self._batch_dim = batch_dim
        # The function, what it drew, and the dimension in which that has an entry for each sample.
        self._made: list[tuple[Callable[..., Any], Tensor | None, int | None]] = []
        self._position = self._start = 0
        self._size = batch_size
        self.own: set[str] = set()

    def begin_microbatch(self, start: int, size: int) -> None:
        """Later draws belong to the samples ``start`` to ``start + size``, in the order of those before."""
        self._position, self._start, self._size = 0, start, size

    def call(self, function: Function, args: Args, kwargs: Arguments) -> Any:
        """``function(*args, **kwargs)``; a random one draws for the whole batch."""
        kind = _RANDOM.get(function)
        if kind is None or self._size == self._batch_size or "out" in kwargs:
            return function(*args, **kwargs)
        part = self._part(kind, function, args, kwargs)
        return function(*args, **kwargs) if part is None else kind.finish(part, args, kwargs)

    def ahead(self, function: Function, args: Args, kwargs: Arguments) -> Tensor | None:
        """The numbers behind ``function(*args, **kwargs)``, of whose tensors only the shapes count; None where the call itself
        must draw them.
        """
        kind = _RANDOM[function]
        if self._size == self._batch_size:
            assert kind.whole is not None
            return kind.whole(function, kind.shape(args, kwargs), args, kwargs)
        return self._part(kind, function, args, kwargs)

    def _part(self, kind: _Kind, function: Function, args: Args, kwargs: Arguments) -> Tensor | None:
        """The running microbatch's part of what is drawn for the whole batch; None where it must make its own."""
        position, self._position = self._position, self._position + 1
        if position == len(self._made):
            self._made.append((function, *self._draw(kind, function, args, kwargs)))
        known, drawn, dim = self._made[position]
        if known is function and drawn is not None:
            part = drawn if dim is None else drawn.narrow(dim, self._start, min(self._size, drawn.shape[dim] - self._start))
            if tuple(part.shape) == kind.shape(args, kwargs):
                return part.clone()
        self.own.add(function.__name__)
        return None

    def _draw(self, kind: _Kind, function: Function, args: Args, kwargs: Arguments) -> tuple[Tensor | None, int | None]:
        """The draw for the whole batch, None where each microbatch must make its own; and the dimension that is the batch."""
        shape = kind.shape(args, kwargs)
        dim = batch_dim_of(shape, self._size, self._batch_dim)
        if dim is not None:
            shape = (*shape[:dim], self._batch_size, *shape[dim + 1 :])
        if kind.whole is not None:
            return kind.whole(function, shape, args, kwargs), dim
        return function(*args, **kwargs) if dim is None else None, dim  # all microbatches share what has nothing of the batch


def _factory_shape(args: Args, kwargs: Arguments) -> Shape:
    """Shape of a factory that takes its size as numbers or as one sequence."""
    size: Any = kwargs.get("size", args[0] if len(args) == 1 else args)
    return tuple(size) if isinstance(size, (tuple, list)) else (size,)


def _last_shape(args: Args, kwargs: Arguments) -> Shape:
    """Shape of a factory that takes its size as a sequence after other arguments."""
    return tuple(kwargs.get("size", args[-1] if args else ()))


def _other_size(function: Function, shape: Shape, args: Args, kwargs: Arguments) -> Any:
    """A factory with another size."""
    others = [arg for arg in args if not isinstance(arg, (tuple, list))] if function in (torch.randint, torch.normal) else []
    return function(*others, size=shape, **{key: value for key, value in kwargs.items() if key != "size"})


def _like_other(function: Function, shape: Shape, args: Args, kwargs: Arguments) -> Any:
    """A ``*_like`` function of a tensor of another size."""
    return function(args[0].new_empty(shape), *args[1:], **kwargs)


def _first_shape(args: Args, kwargs: Arguments) -> Shape:
    return tuple(args[0].shape) if args and isinstance(args[0], Tensor) else ()


def _write(part: Tensor, args: Args, kwargs: Arguments) -> Any:
    with torch.no_grad():
        return args[0].copy_(part)


def _mean_and_std(args: Args, kwargs: Arguments) -> tuple[Any, Any]:
    return args[0] if args else kwargs.get("mean", 0.0), args[1] if len(args) > 1 else kwargs.get("std", 1.0)


def _normal_shape(args: Args, kwargs: Arguments) -> Shape:
    shapes = [value.shape for value in _mean_and_std(args, kwargs) if isinstance(value, Tensor)]
    if shapes:
        return tuple(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]
    return _last_shape(args, kwargs)


def _normal_whole(function: Function, shape: Shape, args: Args, kwargs: Arguments) -> Any:
    """Draws as torch does: standard normal numbers first, then the tensors that scale and shift them."""
    tensor = next((value for value in _mean_and_std(args, kwargs) if isinstance(value, Tensor)), None)
    if tensor is None:
        return _other_size(function, shape, args, kwargs)
    return tensor.new_empty(shape).normal_(generator=kwargs.get("generator"))


def _normal_finish(part: Tensor, args: Args, kwargs: Arguments) -> Any:
    mean, std = _mean_and_std(args, kwargs)
    if not isinstance(mean, Tensor) and not isinstance(std, Tensor):
        return part
    return part * std + mean  # not in place: a part may be used again


def _bernoulli_whole(function: Function, shape: Shape, args: Args, kwargs: Arguments) -> Any:
    """Draws as torch does for a tensor of probabilities: compares each with a uniform number."""
    if len(args) > 1 or "p" in kwargs:
        return _like_other(function, shape, args, kwargs)
    return args[0].new_empty(shape).uniform_(generator=kwargs.get("generator"))


def _bernoulli_finish(part: Tensor, args: Args, kwargs: Arguments) -> Any:
    return part if len(args) > 1 or "p" in kwargs else (part < args[0]).to(part.dtype)


def _multinomial_whole(function: Function, shape: Shape, args: Args, kwargs: Arguments) -> Any:
    """Draws as torch does for one sample or without replacement: divides the weights by exponential numbers."""
    num_samples, replacement = _multinomial_arguments(args, kwargs)
    if num_samples > 1 and replacement:
        return None
    return args[0].new_empty(shape).exponential_(generator=kwargs.get("generator"))


def _multinomial_finish(part: Tensor, args: Args, kwargs: Arguments) -> Any:
    num_samples, _ = _multinomial_arguments(args, kwargs)
    quotients = args[0] / part
    return quotients.argmax(dim=-1, keepdim=True) if num_samples == 1 else quotients.topk(num_samples, dim=-1).indices


def _multinomial_arguments(args: Args, kwargs: Arguments) -> tuple[int, bool]:
    num_samples = args[1] if len(args) > 1 else kwargs["num_samples"]
    return int(num_samples), bool(args[2] if len(args) > 2 else kwargs.get("replacement", False))


def _gumbel_arguments(args: Args, kwargs: Arguments) -> dict[str, Any]:
    bound = inspect.signature(functional.gumbel_softmax).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def _gumbel_shape(args: Args, kwargs: Arguments) -> Shape:
    return tuple(_gumbel_arguments(args, kwargs)["logits"].shape)


def _gumbel_whole(function: Function, shape: Shape, args: Args, kwargs: Arguments) -> Any:
    return _gumbel_arguments(args, kwargs)["logits"].new_empty(shape).exponential_()


def _gumbel_finish(part: Tensor, args: Args, kwargs: Arguments) -> Any:
    """Computes the result that torch makes of its exponential numbers, which it draws inside one operator."""
    given = _gumbel_arguments(args, kwargs)
    soft = ((given["logits"] - part.log()) / given["tau"]).softmax(given["dim"])
    if not given["hard"]:
        return soft
    index = soft.max(given["dim"], keepdim=True)[1]
    return torch.zeros_like(soft).scatter_(given["dim"], index, 1.0) - soft.detach() + soft


_UNDIVIDED = _Kind(_first_shape)
_IN_PLACE = (
    *(Tensor.normal_, Tensor.uniform_, Tensor.random_, Tensor.exponential_),
    *(Tensor.log_normal_, Tensor.cauchy_, Tensor.geometric_),
)

# Functions that draw. Those that are missing here draw for each microbatch, from its own numbers.
_RANDOM: dict[Callable[..., Any], _Kind] = {
    **dict.fromkeys((torch.rand, torch.randn), _Kind(_factory_shape, _other_size)),
    torch.randint: _Kind(_last_shape, _other_size),
    torch.normal: _Kind(_normal_shape, _normal_whole, _normal_finish),
    **dict.fromkeys((torch.rand_like, torch.randn_like, torch.randint_like), _Kind(_first_shape, _like_other)),
    **dict.fromkeys(_IN_PLACE, _Kind(_first_shape, _like_other, _write)),
    torch.bernoulli: _Kind(_first_shape, _bernoulli_whole, _bernoulli_finish),
    **dict.fromkeys((torch.multinomial, Tensor.multinomial), _Kind(_first_shape, _multinomial_whole, _multinomial_finish)),
    functional.gumbel_softmax: _Kind(_gumbel_shape, _gumbel_whole, _gumbel_finish),
    torch.poisson: _UNDIVIDED,
    torch.randperm: _Kind(lambda args, kwargs: (int(args[0]),)),
    **{
        function: _UNDIVIDED
        for name in ("_standard_gamma", "_sample_dirichlet")  # what torch.distributions calls for Gamma and Beta
        if (function := getattr(torch, name, None)) is not None
    },
}
