"""Gives a rank's share of a module that was made without data its values.

What was made in ``configure_model`` or ``trainer.init_module`` has recorded how it is initialised. A module that lies on the
meta device otherwise is initialised by its own methods: ``reset_parameters`` of torch's layers, of the user's and of the
LightningModule, ``_init_weights`` and ``initialize_weights`` of models that have them. All ranks go through the initialisation
of the whole module, so that random numbers are the same for any number of stages; memory is needed for a rank's own tensors.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fxpipe._compat.torch import version_of
from lightning_fxpipe.deferred_init.construction import Construction
from lightning_fxpipe.errors import UnsupportedError
from lightning_fxpipe.user_code.exchange import named_tensors

_PLACEHOLDER = "_stands_for_another_stage"
_NOT_INITIALISED = "no module method initialises it"
_CONTAINERS = (list, dict, tuple)


class Constructions:
    """The constructions that a strategy has recorded."""

    def __init__(self) -> None:
        self._all: list[Construction] = []

    @contextmanager
    def recording(self, device: torch.device, *, draws: bool) -> Iterator[None]:
        """Makes tensors without data in the block."""
        construction = Construction(device, draws=draws)
        with construction.recording():
            yield
        self._all.append(construction)

    def changing(self, module: nn.Module) -> AbstractContextManager[None]:
        """Counts changes that the block makes to a module as part of its construction."""
        construction = self._of(module)
        return nullcontext() if construction is None else construction.recording()

    def take(self, module: nn.Module, *, draws: bool) -> Materials:
        """Ends a module's construction; returns the record from which its values are made.

        Args:
            module: With all of its tensors, whether they have data or not.
            draws: False where a checkpoint comes, so that initial values may not be needed.
        """
        construction = self._of(module)
        if construction is not None:
            self._all.remove(construction)
        return Materials(module, construction or Construction(torch.device("cpu"), draws=draws), draws=draws)

    def _of(self, module: nn.Module) -> Construction | None:
        blank = [tensor for *_, tensor in named_tensors(module) if tensor.is_meta]
        return next((one for one in self._all if any(one.has(tensor) for tensor in blank)), None)


class Materials:
    """Values for the tensors of a module that have no data. Made by every rank alike, before the module is split.

    Tensors that are plain attributes of modules get their data at once: they belong to no stage.

    Args:
        module: The module.
        construction: What was recorded of it, if anything.
        draws: False where a checkpoint comes.

    Raises:
        UnsupportedError: The values of a tensor are unknown.
    """

    def __init__(self, module: nn.Module, construction: Construction, *, draws: bool) -> None:
        check_is_whole(parameter for parameter in module.named_parameters() if hasattr(parameter[1], _PLACEHOLDER))
        self._module = module
        self._construction = construction
        self._waits = not draws
        self._pending: list[tuple[Tensor, Tensor]] = []  # tensors whose values are to come, and what stands for these
        self._faults: dict[str, str] = {}
        blank = {id(tensor): tensor for *_, tensor in named_tensors(module) if tensor.is_meta}
        # Tensors of their own: the module's get data under the same identity.
        twins = {key: tensor.detach() for key, tensor in blank.items()}
        self._twins = {fqn: twins[id(tensor)] for *_, fqn, tensor in named_tensors(module) if tensor.is_meta}
        if not blank and construction.is_empty:
            return
        self._faults = self._initialise(list(blank.values()))
        if draws:
            _raise_faults(self._faults)
            self._construction.catch_up(list(twins.values()))
        self._fill_attributes(set(blank))

    # ------------------------------------------------------------------ values

    def values(self, fqns: Sequence[str]) -> list[Tensor]:
        """Tensors with data in place of some without. Where a checkpoint comes, it is zeros that take no memory yet."""
        twins = [self._twins[fqn] for fqn in fqns]
        if not self._waits:
            return self._construction.make(twins)
        return [torch.zeros(t.shape, dtype=t.dtype, device=self._construction.device) for t in twins]

    def note_placed(self, fqn: str, tensor: Tensor) -> None:
        """Notes which tensor of the module has got the data of one without."""
        if self._waits:
            self._pending.append((tensor, self._twins[fqn]))

    def finish(self, loaded: Collection[str], *, draws: bool) -> None:
        """Initialises what a checkpoint has not brought. Called by every rank.

        Args:
            loaded: FQNs of what it has brought.
            draws: Whether the random generators go on as if the module had been initialised.

        Raises:
            UnsupportedError: The values of a tensor are unknown.
        """
        if not self._waits:
            return
        self._waits = False
        _raise_faults({fqn: fault for fqn, fault in self._faults.items() if fqn not in loaded})
        there = {id(twin) for fqn, twin in self._twins.items() if fqn in loaded}
        missing = [twin for twin in self._twins.values() if id(twin) not in there]
        if draws or self._construction.needs_draws(missing):
            self._construction.catch_up(list(self._twins.values()))
        left = [(tensor, twin) for tensor, twin in self._pending if id(twin) not in there]
        for (tensor, _), value in zip(left, self._construction.make([twin for _, twin in left]), strict=True):
            tensor.data = value.to(tensor.device)
        self._pending = []

    # ------------------------------------------------------------------ where they come from

    def _initialise(self, blank: Sequence[Tensor]) -> dict[str, str]:
        """Runs the modules' own initialisation of ``blank`` where none was recorded; returns what is wrong, by FQN."""
        known = self._construction
        faults = {
            fqn: "it was changed after construction, outside configure_model and init_module"
            for *_, fqn, tensor in named_tensors(self._module)
            if tensor.is_meta and known.has(tensor) and not known.is_unchanged(tensor)
        }
        strange = {id(t): t for t in blank if not known.has(t) or not (known.pretends(t) or known.is_written(t))}
        before = {key: version_of(tensor) for key, tensor in strange.items()}
        # Hugging Face's models leave their initialisation out where the user has asked for the meta device.
        late = {id(t): t for t in blank if not known.pretends(t)}
        if late:
            known.adopt(late.values())
            with known.recording():
                _call_own_initialisation(self._module, set(strange), set(late))
        for *_, fqn, tensor in named_tensors(self._module):
            if id(tensor) not in strange:
                continue
            if not known.is_written(tensor):
                faults[fqn] = _NOT_INITIALISED
            elif version_of(tensor) - before[id(tensor)] < before[id(tensor)]:
                faults[fqn] = "its module's constructor does more than the module's initialisation methods"
        return faults

    def _fill_attributes(self, registered: Collection[int]) -> None:
        """Gives the tensors that are plain attributes of modules, or lie in lists and dicts there, their data."""
        found: dict[int, tuple[str, Tensor]] = {}
        for path, module in self._module.named_modules():
            for name, value in _plain_attributes(module):
                for tensor in _tensors_in(value):
                    if tensor.is_meta and id(tensor) not in registered:
                        found.setdefault(id(tensor), (f"{path}.{name}" if path else name, tensor))
        _raise_faults({name: _NOT_INITIALISED for name, tensor in found.values() if not self._knows(tensor)})
        if not found:
            return
        tensors = [tensor for _, tensor in found.values()]
        self._construction.catch_up(tensors)
        made = dict(zip(found, self._construction.make(tensors), strict=True))
        for module in self._module.modules():
            for name, value in list(_plain_attributes(module)):
                replaced = _replace_tensors(value, made)
                if replaced is not value:
                    vars(module)[name] = replaced

    def _knows(self, tensor: Tensor) -> bool:
        known = self._construction
        return known.has(tensor) and known.is_unchanged(tensor) and (known.pretends(tensor) or known.is_written(tensor))


def _raise_faults(faults: Mapping[str, str]) -> None:
    if not faults:
        return
    shown = [f"{name} ({fault})" for name, fault in list(faults.items())[:6]]
    raise UnsupportedError(
        "The initial values of tensors on the meta device are unknown.",
        observed=", ".join(shown) + (f" and {len(faults) - 6} others" if len(faults) > 6 else ""),
        expected="modules created in configure_model or trainer.init_module, which are initialised as on one device; or "
        "modules whose reset_parameters initialises all of their parameters and buffers",
        todo="Create the model in LightningModule.configure_model, without torch.device('meta'); or add a method "
        "reset_parameters to the module or the LightningModule; or start from a checkpoint that contains these tensors.",
    )


def placeholder_for(tensor: Tensor) -> Tensor:
    """Stands for a tensor of another stage: without data, but with name, shape, dtype and ``requires_grad``."""
    empty = torch.empty_like(tensor, device="meta")
    made = nn.Parameter(empty, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    setattr(made, _PLACEHOLDER, True)
    return made


def put_in_place(blank: nn.Parameter, value: Tensor) -> nn.Parameter:
    """A parameter with data in place of one without; the same object, where torch allows that.

    Returns:
        The parameter that is to be registered.
    """
    made = nn.Parameter(value, requires_grad=blank.requires_grad)
    if type(blank) is not nn.Parameter:
        return made
    vars(made).update(vars(blank))
    with suppress(RuntimeError):  # other code holds it, such as a weak reference
        torch.utils.swap_tensors(blank, made)  # type: ignore[no-untyped-call]
        return blank
    return made


def check_is_whole(parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Raises :class:`UnsupportedError` if parameters have lost their data, and it cannot be restored."""
    gone = [fqn for fqn, parameter in parameters if parameter.is_meta]
    if gone:
        raise UnsupportedError(
            "The module has lost some of its parameters.",
            observed=f"no data for {gone[0]}" + (f" and {len(gone) - 1} others" if len(gone) > 1 else ""),
            expected="a module that another strategy has not split",
            todo="Use the same Trainer again, or create a new module and load a checkpoint into it. After a successful run "
            "the module has all of its parameters again, unless FxPipeStrategy(gather_after_run=False) is set or memory "
            "is short.",
        )


def _call_own_initialisation(root: nn.Module, blank: Collection[int], late: Collection[int]) -> None:
    """Calls the methods by which modules initialise themselves, children first, as constructors do.

    Args:
        root: The module.
        blank: Tensors of modules whose methods are called.
        late: Tensors of modules whose model may have put its own initialisation off.
    """
    for module in _children_first(root, set()):
        inside = {id(tensor) for *_, tensor in named_tensors(module)}
        if not inside.isdisjoint(late) and callable(getattr(module, "initialize_weights", None)):
            if getattr(module, "_is_hf_initialized", False) is not True and not _is_inside_model(root, module):
                initialise: Any = module.initialize_weights
                initialise()
            continue
        if inside.isdisjoint(blank):
            continue
        # One of them: the first may call the second, or be it (Lightning's demos give MultiheadAttention the first name, too).
        for name in ("reset_parameters", "_reset_parameters"):
            if callable(method := getattr(module, name, None)):
                method()
                break
        method = getattr(module, "_init_weights", None)
        if callable(method) and len(inspect.signature(method).parameters) == 1:
            module.apply(method)


def _children_first(module: nn.Module, seen: set[int]) -> Iterator[nn.Module]:
    if id(module) in seen:
        return
    seen.add(id(module))
    for child in module.children():
        yield from _children_first(child, seen)
    yield module


def _is_inside_model(root: nn.Module, module: nn.Module) -> bool:
    """Returns True if a model that initialises itself contains the module, and initialises it in its turn."""
    owners = (other for other in root.modules() if callable(getattr(other, "initialize_weights", None)))
    return any(owner is not module and module in set(owner.modules()) for owner in owners)


def _plain_attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    registries = ("_parameters", "_buffers", "_modules")
    return ((name, value) for name, value in vars(module).items() if name not in registries)


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif type(value) in _CONTAINERS:
        for entry in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(entry)


def _replace_tensors(value: Any, made: dict[int, Tensor]) -> Any:
    """The value with other tensors in it; the value itself where there are none, or where it can be changed in place."""
    if isinstance(value, Tensor):
        return made.get(id(value), value)
    if not any(id(tensor) in made for tensor in _tensors_in(value)):
        return value
    if isinstance(value, dict):
        value.update({key: _replace_tensors(entry, made) for key, entry in value.items()})
        return value
    entries = [_replace_tensors(entry, made) for entry in value]
    if isinstance(value, tuple):
        return tuple(entries)
    value[:] = entries
    return value
