"""Routes the calls of modules, autograd functions and checkpoints through a recorder; distributions check no arguments."""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction

from lightning_fxpipe._compat.fake_sizes import decided_comparisons, symbolic_math
from lightning_fxpipe._compat.torch import FakeTensor, checkpoints_replaced, patched_attributes
from lightning_fxpipe.tracing.distributions import unvalidated_distributions
from lightning_fxpipe.tracing.record import Recorder
from lightning_fxpipe.user_code.calls import calls_through


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Runs the block under ``recorder``, with all calls routed through it."""
    original_len = builtins.len

    def marked(options: dict[str, Any]) -> AbstractContextManager[None] | None:
        return None if recorder.is_paused else recorder.under_checkpoint(options)

    def length(value: Any) -> Any:
        # ``len(tensor)`` must be an int, which would fix the batch size for good.
        return value.shape[0] if isinstance(value, FakeTensor) else original_len(value)

    with calls_through(recorder), unvalidated_distributions(), patched_attributes(*symbolic_math(), *decided_comparisons()):
        original_apply = vars(torch.autograd.Function)["apply"]

        def apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
            if cls is not CheckpointFunction or recorder.is_paused:
                return original_apply.__get__(None, cls)(*args, **kwargs)
            function, preserve, *rest = args
            # The reentrant kind trains nothing where no argument needs a gradient.
            trains = torch.is_grad_enabled() and any(isinstance(arg, Tensor) and arg.requires_grad for arg in rest)
            with recorder.under_checkpoint({"preserve_rng_state": preserve}), torch.set_grad_enabled(trains):
                return function(*rest)

        with patched_attributes(
            (torch.autograd.Function, "apply", classmethod(apply)),
            (builtins, "len", length),
            checkpoints_replaced(marked),
        ):
            yield
