"""Which hooks run user code, and what that code looks at."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.core.hooks import CheckpointHooks, ModelHooks
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_fxpipe._compat.roots import in_all_roots, of_root
from lightning_fxpipe._compat.torch import patched_attributes
from lightning_fxpipe.distributed.replica import Replica

# Those that no Hooks wrap: they run before the module is split, on one rank only, or make data.
_EARLY_HOOKS = ("setup", "configure_model", "configure_sharded_model", "on_exception")
BATCH_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
_DATA_HOOKS = ("train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader", *BATCH_HOOKS)
_NOT_WRAPPED = {*_EARLY_HOOKS, "state_dict", "load_state_dict"}
_MODULE_HOOKS = (
    *(name for kind in (ModelHooks, CheckpointHooks) for name in vars(kind) if not name.startswith("_")),
    *("configure_optimizers", "configure_gradient_clipping", "optimizer_step", "optimizer_zero_grad", "lr_scheduler_step"),
)
_CALLBACK_HOOKS = tuple(
    name for name, value in vars(Callback).items() if inspect.isfunction(value) and not name.startswith("_")
)
# An object, the name of an attribute, and its value for a while.
Patch = tuple[Any, str, Any]
_OWN_PACKAGES = ("lightning.", "pytorch_lightning.", "lightning_fxpipe.")


@contextmanager
def early_hooks(trainer: Trainer, module: LightningModule, replica: Replica) -> Iterator[None]:
    """During the block, hooks that :class:`Hooks` does not wrap see one replica: those before its time, and those of data."""
    owners: list[Any] = [owner for owner in (module, getattr(trainer, "datamodule", None)) if owner is not None]
    patches = [(owner, name, replica.computes) for owner in owners for name in _DATA_HOOKS]
    for owner in (*owners, *callbacks(trainer)):
        patches += [(owner, name, replica.acts if name == "on_exception" else replica.prepares) for name in _EARLY_HOOKS]
    found = [(owner, name, wrapped, getattr(owner, name, None)) for owner, name, wrapped in patches]
    hooks = [(o, n, wrapped(hook)) for o, n, wrapped, hook in found if hook and not is_own(hook)]
    with patched_attributes(*on_classes(hooks)):
        yield


def on_classes(patches: Iterable[Patch]) -> list[Patch]:
    """The patches with methods of instances replaced on their classes, for these instances only.

    In an instance's ``__dict__`` a replacement cannot be pickled, and a copy of the instance would call it for the original.
    """
    grouped: dict[tuple[Any, str], dict[int, tuple[Any, Any]]] = {}
    result: list[Patch] = []
    for owner, name, replacement in patches:
        if inspect.isfunction(inspect.getattr_static(type(owner), name, None)) and name not in vars(owner):
            grouped.setdefault((type(owner), name), {})[id(owner)] = owner, replacement
        else:
            result.append((owner, name, replacement))
    return result + [(kind, name, _for_instances(getattr(kind, name), found)) for (kind, name), found in grouped.items()]


def _for_instances(method: Callable[..., Any], replacements: Mapping[int, tuple[Any, Any]]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if id(self) not in replacements:
            return method(self, *args, **kwargs)
        return replacements[id(self)][1](*args, **kwargs)

    return call


def callbacks(trainer: Trainer) -> list[Callback]:
    """The Trainer's callbacks."""
    return list(getattr(trainer, "callbacks", ()))


def hooks_of_users(trainer: Trainer, module: LightningModule) -> Iterator[tuple[Any, str]]:
    """Owner and name of each hook that runs user code."""
    for name in dict.fromkeys(_MODULE_HOOKS):
        if name not in _NOT_WRAPPED and is_overridden(name, module, of_root(LightningModule, module)):
            yield module, name
    for callback in callbacks(trainer):
        for name in _CALLBACK_HOOKS:
            is_user_code = _calls_users(callback) or not is_own(getattr(callback, name))
            if name not in _EARLY_HOOKS and is_user_code and is_overridden(name, callback, of_root(Callback, callback)):
                yield callback, name


def _calls_users(callback: Callback) -> bool:
    """True if the callback's inherited hooks run user code, or compare parameters of the whole model."""
    return not is_own(type(callback)) or isinstance(callback, in_all_roots(BaseFinetuning))


def is_own(thing: Any) -> bool:
    """True if a class or function is Lightning's or ours."""
    return str(getattr(thing, "__module__", "")).startswith(_OWN_PACKAGES)


def zero_gradients(trainer: Trainer, module: LightningModule) -> bool:
    """True if a hook sets gradients to zero in place of Lightning, or sees them before that."""
    return _have_any(trainer, module, ("on_before_zero_grad", "optimizer_zero_grad"))


def before_backward(trainer: Trainer, module: LightningModule) -> bool:
    """True if user code runs after gradients have been set to zero and before the backward pass, or is that pass."""
    return _have_any(trainer, module, ("on_before_backward", "backward"))


def _have_any(trainer: Trainer, module: LightningModule, names: Sequence[str]) -> bool:
    owners: list[tuple[Any, Any]] = [(module, of_root(LightningModule, module))]
    owners += [(callback, of_root(Callback, callback)) for callback in callbacks(trainer)]
    return any(hasattr(kind, name) and is_overridden(name, owner, kind) for owner, kind in owners for name in names)
