"""Optimizers as hooks see them: groups, options and states of the whole model's parameters.

Groups list placeholders for other stages' parameters while a hook runs. Their states are brought to every rank at the first use
of any state: ``optimizer.state`` is then a property of the optimizer's class, as no mode sees a look into a dict.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fxpipe._compat.torch import patched_attributes
from lightning_fxpipe.distributed.topology import Topology
from lightning_fxpipe.errors import UnsupportedError
from lightning_fxpipe.hooks.rank_zero_changes import followed
from lightning_fxpipe.optim.optimizers import StageOptimizer

_STATE, _OPTIONS, _GROUPS, _OTHER_STATE = "state of", "options of group", "number of groups", "state without a parameter"
_OF_PARAMETERS = ("params", "param_names")


class WholeOptimizers:
    """The optimizers of a run, as hooks see them. Made by every rank.

    Args:
        module: The module, with placeholders.
        topology: This rank's place.
        read: Called at each use of a state, before it is used.
    """

    def __init__(self, module: nn.Module, topology: Topology, read: Callable[[], None]) -> None:
        self._module = module
        self._topology = topology
        self._read = read
        self._optimizers: Sequence[StageOptimizer] = ()
        self._read_states = ExitStack()

    def follow(self, optimizers: Sequence[StageOptimizer]) -> None:
        """Takes the run's optimizers."""
        self._optimizers = optimizers

    def __iter__(self) -> Iterator[StageOptimizer]:
        return iter(self._optimizers)

    @contextmanager
    def shown(self, *, whole: bool) -> Iterator[None]:
        """In the block, the optimizers have placeholders of other stages, or they do not; after it the reverse."""
        self._show(whole)
        try:
            yield
        finally:
            self._show(not whole)

    def _show(self, whole: bool) -> None:
        self._read_states.close()
        for each in self._optimizers:
            if whole:
                each.show_others()
            else:
                each.hide_others()
                each.forget_others()
        if whole and self._optimizers:
            kinds: dict[type, None] = dict.fromkeys(type(each.optimizer) for each in self._optimizers)
            state = property(self._get_state, self._set_state)
            self._read_states.enter_context(patched_attributes(*((kind, "state", state) for kind in kinds)))

    def _get_state(self, optimizer: Optimizer) -> Any:
        self._note_use(optimizer)
        if "state" not in vars(optimizer):  # Lightning's wrapper, which then asks what it wraps
            raise AttributeError("state")
        return vars(optimizer)["state"]

    def _set_state(self, optimizer: Optimizer, state: Any) -> None:
        self._note_use(optimizer)
        vars(optimizer)["state"] = state

    def _note_use(self, optimizer: Optimizer) -> None:
        used = next((each for each in self._optimizers if each.optimizer is optimizer), None)
        if used is not None and not used.is_shared_out:  # of which each replica has the states of its share, and shows these
            self._read()

    def bring_states(self) -> None:
        """Brings the states of other stages' parameters. Called by every rank."""
        for each in self._optimizers:
            if not each.is_shared_out:
                each.know_others(self._topology.control_group)

    def entries(self, *, states: bool) -> dict[Any, Any]:
        """Options, and states if they have been brought, by name: of all parameters on rank 0, else of those that are here."""
        found: dict[Any, Any] = {}
        fqns = {id(parameter): fqn for fqn, parameter in self._module.named_parameters()} if states else {}
        for index, each in enumerate(self._optimizers):
            groups = each.optimizer.param_groups
            found[_GROUPS, index] = len(groups)
            for number, group in enumerate(groups):
                found[_OPTIONS, number, index] = {key: value for key, value in group.items() if key not in _OF_PARAMETERS}
            if states and not each.is_shared_out:
                state = each.optimizer.state
                found[_OTHER_STATE, index] = {key: value for key, value in state.items() if not isinstance(key, Tensor)}
                for parameter in (p for group in groups for p in group["params"]):
                    if self._topology.is_last or each.is_coupled or not parameter.is_meta:
                        found[_STATE, fqns.get(id(parameter)), index] = state.get(parameter)
        return found

    def follow_changes(self, changes: dict[Any, Any]) -> None:
        """Takes over changed entries."""
        parameters = dict(self._module.named_parameters())
        for (kind, *name, index), value in changes.items():
            optimizer = self._optimizers[index].optimizer
            if kind == _GROUPS:
                raise _another_group()
            if kind == _OPTIONS:
                group = optimizer.param_groups[name[0]]
                group.update(followed(group, value, self._topology.device))
            elif kind == _OTHER_STATE:
                optimizer.state.update(followed(optimizer.state, value, self._topology.device))
            elif value is None:
                optimizer.state.pop(parameters[name[0]], None)
            else:
                parameter = parameters[name[0]]
                optimizer.state[parameter] = followed(optimizer.state.get(parameter), value, parameter.device)


def _another_group() -> UnsupportedError:
    return UnsupportedError(
        "A hook leaves an optimizer with a different number of parameter groups on one rank of the pipeline than on rank 0.",
        observed="add_param_group, or a change of optimizer.param_groups, on some ranks only",
        expected="the same groups on every rank",
        todo="Add the group on every rank, without a condition such as trainer.is_global_zero.",
    )
