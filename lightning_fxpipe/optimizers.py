"""The user's optimizer, over this rank's parameters, with a state that is keyed by the whole model's FQNs.

``configure_optimizers`` sees, and groups, all parameters; those of other stages are placeholders. They are
dropped afterwards, and the FQNs of the complete groups are kept for checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fxpipe._compat import tree_map


class StageOptimizer:
    """An optimizer whose groups hold this rank's parameters, and those of the whole model where user code looks at them.

    Args:
        module: The module, with placeholders for the parameters of other stages.
        optimizer: The optimizer, over the parameters of the whole module; those of other stages are dropped from it.
    """

    def __init__(self, module: nn.Module, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._module = module
        self._whole: list[list[nn.Parameter]] = []
        self.group_fqns: tuple[tuple[str, ...], ...] = ()  # of the whole model's parameters in each group
        self.hide_others()

    def show_others(self) -> None:
        """Puts the placeholders into the groups, which then list what they list on one device."""
        for group, parameters in zip(self.optimizer.param_groups, self._whole, strict=True):
            group["params"] = list(parameters)

    def hide_others(self) -> None:
        """Takes the placeholders out again, also from groups that have been added meanwhile."""
        whole = [list(group["params"]) for group in self.optimizer.param_groups]
        if [list(map(id, group)) for group in whole] != [list(map(id, group)) for group in self._whole]:
            names = {id(parameter): fqn for fqn, parameter in self._module.named_parameters()}
            self.group_fqns = tuple(tuple(names[id(parameter)] for parameter in group) for group in whole)
        self._whole = whole
        for group, parameters in zip(self.optimizer.param_groups, self._whole, strict=True):
            group["params"] = [parameter for parameter in parameters if not parameter.is_meta]
        for parameter in [parameter for parameter in self.optimizer.state if parameter.is_meta]:
            del self.optimizer.state[parameter]

    def state_dict(self) -> dict[str, Any]:
        """This rank's states by FQN, and the groups of the whole model."""
        names = {id(parameter): fqn for fqn, parameter in self._module.named_parameters()}
        return {
            "state": {names[id(parameter)]: dict(state) for parameter, state in self.optimizer.state.items()},
            "param_groups": [
                {**{key: value for key, value in group.items() if key != "params"}, "params": list(fqns)}
                for group, fqns in zip(self.optimizer.param_groups, self.group_fqns, strict=True)
            ],
        }

    def end_run(self) -> None:
        """Follows the module, which is whole again, and moves the states to the CPU, as Lightning does after a run."""
        parameters = dict(self._module.named_parameters())
        self._whole = [[parameters[fqn] for fqn in fqns] for fqns in self.group_fqns]
        for state in self.optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    state[key] = value.cpu()

    def load(self, state: Mapping[str, Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]) -> None:
        """Takes the states of this rank's parameters, by FQN, and the options of the groups."""
        local = {fqn: parameter for fqn, parameter in self._module.named_parameters() if not parameter.is_meta}
        for group, saved in zip(self.optimizer.param_groups, groups, strict=True):
            # As torch does: what a scheduler has put into the groups since is not kept.
            for key in [key for key in group if key not in (*saved, *self.optimizer.defaults, "params")]:
                del group[key]
            group.update({key: value for key, value in saved.items() if key != "params"})
        self.optimizer.state.clear()  # a parameter that has no state in the checkpoint has none any more
        for fqn, values in state.items():
            if fqn in local:
                self.optimizer.state[local[fqn]] = {key: _placed(value, local[fqn]) for key, value in values.items()}

    def load_plain(self, saved: Mapping[str, Any]) -> None:
        """Takes the state of a plain optimizer, which numbers its parameters in the order of its groups.

        Raises:
            ValueError: The groups are others.
        """
        groups = saved["param_groups"]
        if len(groups) != len(self.group_fqns):
            raise ValueError("loaded state dict has a different number of parameter groups")
        if any(len(group["params"]) != len(fqns) for group, fqns in zip(groups, self.group_fqns, strict=True)):
            raise ValueError("loaded state dict contains a parameter group that doesn't match the size of optimizer's group")
        fqn_of = {
            number: fqn
            for group, fqns in zip(groups, self.group_fqns, strict=True)
            for number, fqn in zip(group["params"], fqns, strict=True)
        }
        mine = {fqn for fqn, parameter in self._module.named_parameters() if not parameter.is_meta}
        states = {fqn_of.get(number, number): value for number, value in saved["state"].items()}
        # Copies: the file may be mapped into memory, and need not outlive the run.
        self.load({fqn: tree_map(_copied, value) for fqn, value in states.items() if fqn in mine}, tree_map(_copied, groups))


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _placed(value: Any, parameter: nn.Parameter) -> Any:
    """A value of a parameter's state on its device. A 0-dim step counter stays on the CPU, where torch's optimizers keep it."""
    if not isinstance(value, Tensor) or not value.dim():
        return value
    if value.shape == parameter.shape and value.stride() != parameter.stride():
        # As torch makes it; fused steps go through both as they lie in memory.
        return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)
    return value.to(parameter.device)
