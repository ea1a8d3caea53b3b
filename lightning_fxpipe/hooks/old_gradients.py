"""Gradients of the batch before, which are not read any more when a training step reaches the model.

Lightning sets them to zero between a step and its backward pass. Kept until then they are there beside all activations, and
with 1F1B beside the new gradients. The new ones need not wait elsewhere until Lightning has done so, if no code reads the old
ones before the backward pass.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_fxpipe._compat.lightning import zeroes_gradients
from lightning_fxpipe._compat.torch import hooks_of, patched_attributes
from lightning_fxpipe.hooks.hook_code import before_backward, is_own, zero_gradients
from lightning_fxpipe.user_code.bytecode import codes_in
from lightning_fxpipe.user_code.code_contents import functions_of
from lightning_fxpipe.user_code.code_names import is_followed
from lightning_fxpipe.user_code.step_code import code_of


class OldGradients:
    """Finds them. Made for each run, when its first training step comes.

    What a step itself does with a parameter's gradient is refused where it stands (``tracing.parameter_use``).

    Args:
        trainer: The Trainer.
        module: Its LightningModule.

    Attributes:
        new_may_stay: True if no code reads gradients between the training step and its backward pass. New ones that are
            there must be kept from Lightning, see :meth:`keep_new`.
    """

    def __init__(self, trainer: Any, module: Any) -> None:
        self._trainer = trainer
        self._may_go = not (zero_gradients(trainer, module) or _are_named_in_submodules(module))
        self.new_may_stay = not before_backward(trainer, module) and is_own(type(trainer.precision_plugin))
        self._keeping = ExitStack()

    def parameters(self) -> list[nn.Parameter]:
        """This rank's parameters, of whose gradients the running training step leaves nothing, whatever it returns."""
        if not self._may_go or not zeroes_gradients(self._trainer):
            return []
        optimizer = self._trainer.optimizers[0]  # there is only one in automatic optimization
        # One that sets them to zeros, or keeps them in a buffer of its own, has a method of its own.
        if inspect.unwrap(optimizer.zero_grad) is not inspect.unwrap(Optimizer.zero_grad):
            return []
        return [parameter for group in optimizer.param_groups for parameter in group["params"] if not parameter.is_meta]

    def keep_new(self, outside: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Keeps the gradients of the step that has run: Lightning sets none to zero until :meth:`release`.

        Args:
            outside: Wraps what is no user code (``Hooks.outside``). Within a joint optimizer step the ranks meet there, and
                those whose gradients are not in place yet set theirs to zero.
        """
        self.release()
        patch = (self._trainer.optimizers[0], "zero_grad", outside(_leave_gradients))
        self._keeping.enter_context(patched_attributes(patch))

    def release(self) -> None:
        """The backward pass begins, or another step."""
        self._keeping.close()


def _leave_gradients(set_to_none: bool = True) -> None:
    """In place of ``Optimizer.zero_grad`` where the gradients are new ones already."""


def _are_named_in_submodules(module: nn.Module) -> bool:
    """True if code that runs within a forward names a gradient: that of layers of user code, or a hook around one."""
    kinds = {base for each in module.modules() if each is not module for base in type(each).__mro__}
    functions: list[Any] = [f for kind in kinds if is_followed(kind.__module__) for f in functions_of(kind)]
    functions += [hook for each in module.modules() for hook in hooks_of(each)]
    codes = [code for function in functions if (code := code_of(function)) is not None]
    return any("grad" in (*inner.co_names, *inner.co_consts) for code in codes for inner in codes_in(code))
