"""Gradients of the batch before, which nobody looks at any more when a training step comes to the model.

Lightning sets them to zero between a step and its backward pass. Kept until then they are there beside all activations, and
with 1F1B beside the new gradients.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_fxpipe._compat.lightning import zeroes_gradients
from lightning_fxpipe._compat.torch import hooks_of
from lightning_fxpipe.hooks.hook_code import zero_gradients
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
    """

    def __init__(self, trainer: Any, module: Any) -> None:
        self._trainer = trainer
        self._may_go = not (zero_gradients(trainer, module) or _are_named_in_submodules(module))

    def parameters(self) -> list[nn.Parameter]:
        """This rank's parameters, of whose gradients the running training step leaves nothing, whatever it returns."""
        if not self._may_go or not zeroes_gradients(self._trainer):
            return []
        optimizer = self._trainer.optimizers[0]  # there is only one in automatic optimization
        # One that sets them to zeros, or keeps them in a buffer of its own, has a method of its own.
        if inspect.unwrap(optimizer.zero_grad) is not inspect.unwrap(Optimizer.zero_grad):
            return []
        return [parameter for group in optimizer.param_groups for parameter in group["params"] if not parameter.is_meta]


def _are_named_in_submodules(module: nn.Module) -> bool:
    """Whether code that runs within a forward names a gradient: that of layers of user code, or a hook around one."""
    kinds = {base for each in module.modules() if each is not module for base in type(each).__mro__}
    functions: list[Any] = [f for kind in kinds if is_followed(kind.__module__) for f in functions_of(kind)]
    functions += [hook for each in module.modules() for hook in hooks_of(each)]
    codes = [code for function in functions if (code := code_of(function)) is not None]
    return any("grad" in (*inner.co_names, *inner.co_consts) for code in codes for inner in codes_in(code))
