"""The user's optimizer, over this rank's parameters, with a state that is keyed by the whole model's FQNs.

``configure_optimizers`` sees, and groups, all parameters; those of other stages are placeholders. They are
dropped afterwards, and the FQNs of the complete groups are kept for checkpoints. Its state goes out through the optimizer's own
``state_dict`` and comes back through its ``load_state_dict``, with the hooks and conversions that these have.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import is_
from typing import Any

import torch
import torch.distributed.distributed_c10d as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fxpipe._compat.modes import unwatched_torch
from lightning_fxpipe._compat.torch import tree_map
from lightning_fxpipe.distributed.agreement import digest, gather_values
from lightning_fxpipe.distributed.topology import Topology
from lightning_fxpipe.errors import UnsupportedError
from lightning_fxpipe.optim.shards import Shards
from lightning_fxpipe.pytree.containers import leaves_with_path

STATE, GROUPS = "state", "param_groups"
_CPU = torch.device("cpu")


class StageOptimizer:
    """An optimizer whose groups hold this rank's parameters, and those of the whole model where user code looks at them.

    Args:
        module: The module, with placeholders for the parameters of other stages.
        optimizer: The optimizer, over the parameters of the whole module; those of other stages are dropped from it.
        dropped: What stands for parameters that the module has no more, by their identity: an optimizer that was made before
            the module was split has those.
        is_coupled: Whether it steps all parameters on every rank, so that this one has the states of others, too.
        shards: How replicas share it out; None where each has all states.

    Raises:
        UnsupportedError: A parameter is none of the module's.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        dropped: Mapping[int, Tensor] | None = None,
        *,
        is_coupled: bool = False,
        shards: Shards | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.is_coupled = is_coupled
        self._shards = shards
        self._others: dict[Tensor, Any] | None = None  # states of other ranks' parameters, by placeholder, once they are known
        self._module = module
        self._whole: list[list[Tensor]] = []
        self._left: list[list[Tensor]] = []  # what the groups have while the others are hidden
        self._own: dict[int, _Own] = {}  # what of a group is here, by its number
        self._num_states = 0  # while the others are hidden
        self._shows_others = True
        self._is_running = False
        self._names: list[list[str] | None] = []  # that the user has given the parameters
        self.group_fqns: tuple[tuple[str, ...], ...] = ()  # of the whole model's parameters in each group
        self._elsewhere: dict[str, Any] = {}  # states that other ranks may need
        self.begin_run(dropped or {})

    @property
    def is_shared_out(self) -> bool:
        """True if each replica has the states of its share only."""
        return self._shards is not None

    def belongs_to(self, module: nn.Module, dropped: Mapping[int, Tensor]) -> bool:
        """Returns True if all of its parameters are those of a module, or were before some were dropped."""
        fqns = self._fqns()
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        return self._module is module and all(id(p) in fqns or id(p) in dropped for p in parameters)

    def begin_run(self, dropped: Mapping[int, Tensor]) -> None:
        """Follows the module, which has been split; arguments and errors as the constructor's."""
        self._is_running = True
        self._others = None
        if self._shards is not None:
            self._shards.attach()
        self._elsewhere = self._take_dropped(dropped)
        self._elsewhere |= self.hide_others()

    def _take_dropped(self, dropped: Mapping[int, Tensor]) -> dict[str, Any]:
        """Puts placeholders where an optimizer from before the run has dropped parameters; returns the states of these."""
        for group in self.optimizer.param_groups:
            group["params"] = [dropped.get(id(parameter), parameter) for parameter in group["params"]]
        fqns = self._fqns()
        keys = [key for key in self.optimizer.state if isinstance(key, Tensor) and id(key) in dropped]
        return {fqns[id(dropped[id(key)])]: self.optimizer.state.pop(key) for key in keys}

    def spread_states(self, topology: Topology) -> None:
        """Gives each rank the states of its parameters that others have: those of an optimizer that has been in another run.

        There the stages may have been others, or the shares of replicas. Called by every rank.
        """
        group = topology.control_group if self._shards is None else topology.everyone
        mine = self._stated()
        there = self._states_here()
        held = {**self._elsewhere, **there}
        self._elsewhere = {}
        told = gather_values(group, (list(held), [fqn for fqn in mine if fqn not in there]))
        missing = {fqn for _, lacks in told for fqn in lacks} & {fqn for has, _ in told for fqn in has}
        if missing:
            found = _gather_states({fqn: state for fqn, state in held.items() if fqn in missing}, group)
            self.optimizer.state.update({mine[fqn]: state for fqn, state in found.items() if fqn in mine and fqn not in there})
        for fqn, parameter in self._mine().items():
            if fqn not in mine:
                self.optimizer.state.pop(parameter, None)
        self._move_states()

    def show_others(self) -> None:
        """Puts the placeholders into the groups, which then list what they list on one device."""
        if self._shards is not None:
            self._shards.pause()
        self._follow_groups()
        for group, parameters, names in zip(self.optimizer.param_groups, self._whole, self._names, strict=True):
            group["params"] = list(parameters)
            if names is not None:
                group["param_names"] = list(names)
        self._shows_others = True
        self.optimizer.state.update(self._others or {})

    def hide_others(self) -> dict[str, Any]:
        """Takes the placeholders out again, also from groups that have been added meanwhile; returns their states, by FQN."""
        if self._shards is not None:
            self._shards.pause()
        self._follow_groups()
        left = []
        for index, (group, names) in enumerate(zip(self.optimizer.param_groups, self._names, strict=True)):
            own = self._own.get(index)
            if own is None or not (self._shows_others and own.whole is self._whole[index] and _same(own.here, own.copy)):
                own = self._own[index] = _Own.of(self._whole[index] if self._shows_others else list(group["params"]), own)
            group["params"] = own.here
            if names is not None and len(names) != len(own.numbers):
                group["param_names"] = [group["param_names"][number] for number in own.numbers]
            left.append(own.copy)
        self._left = left
        self._shows_others = False
        if self._shards is not None:
            self._shards.resume()
        states = self._take_others_states()
        if self._others is not None:
            self._others = states
            return {}
        fqns = self._fqns() if states else {}
        return {fqns[id(key)]: state for key, state in states.items()}

    def _take_others_states(self) -> dict[Tensor, Any]:
        """Takes out the states of placeholders; if there are as many as before, none was added."""
        state = self.optimizer.state
        if self._others is None and len(state) == self._num_states:
            return {}
        with unwatched_torch():
            keys = [key for key in state if isinstance(key, Tensor) and key.is_meta]
        taken = {key: state.pop(key) for key in keys}
        self._num_states = len(state)
        return taken

    def _follow_groups(self) -> None:
        """Takes note of groups that have changed, or been added, wherever that was."""
        groups = self.optimizer.param_groups
        whole, names = [], []
        for index, group in enumerate(groups):
            is_left = not self._shows_others and index < len(self._left) and _same(group["params"], self._left[index])
            is_known = is_left or (index < len(self._whole) and _same(group["params"], self._whole[index]))
            whole.append(self._whole[index] if is_known else list(group["params"]))
            names.append(self._names[index] if is_left else _names(group))
        if list(map(len, whole)) != list(map(len, self._whole)) or not all(map(_same, whole, self._whole)):
            self.group_fqns = tuple(self._fqns_of(parameters) for parameters in whole)
        self._whole, self._names = whole, names

    def know_others(self, group: dist.ProcessGroup | None) -> None:
        """Brings the states of other ranks' parameters here, unless they are: for a step of all of them, or a hook that reads
        them. Called by every rank.
        """
        if self._others is not None:
            return
        placeholders = {fqn: p for fqn, p in self._module.named_parameters() if p.is_meta}
        found = _gather_states(self._states_here(), group)
        device = next((p.device for p in self._mine().values() if not p.is_meta), _CPU)
        self._others = {placeholders[fqn]: _moved(state, device) for fqn, state in found.items() if fqn in placeholders}
        if self._shows_others:
            self.optimizer.state.update(self._others)

    def forget_others(self) -> None:
        """Drops the states of other ranks' parameters, which their ranks change, unless it steps them all itself."""
        if not self.is_coupled:
            self._others = None

    def end_step(self) -> None:
        """After a step, also one that has failed: its groups have this rank's parameters, whoever steps them."""
        if self._shards is not None:
            self._shards.end_step()

    def state_dict(self) -> dict[str, Any]:
        """Returns the optimizer's own state dict, with this rank's states by FQN, and the groups of the whole model.

        Raises:
            UnsupportedError: Its own does not say which parameter a state belongs to.
        """
        self._follow_groups()
        packed = self.optimizer.state_dict()
        self._check_layout(packed)
        fqns = self._fqns()
        fqn_of = {
            number: fqns[id(parameter)]
            for saved, group in zip(packed[GROUPS], self.optimizer.param_groups, strict=True)
            for number, parameter in zip(saved["params"], group["params"], strict=True)
        }
        groups = []
        for group, whole, names in zip(packed[GROUPS], self.group_fqns, self._names, strict=True):
            groups.append({**group, "params": list(whole)} | ({} if names is None else {"param_names": list(names)}))
        state = {fqn_of.get(key, key): value for key, value in packed[STATE].items()}
        if self._shards is not None:  # a look at another replica's state makes an empty one
            state = {key: value for key, value in state.items() if not (isinstance(value, Mapping) and not value)}
        return {**packed, STATE: state, GROUPS: groups}

    def collect_shards(self, state: dict[str, Any]) -> None:
        """Adds to a :meth:`state_dict` of the first replica the states that others have. Called by every rank."""
        if self._shards is not None:
            fqns = {fqn for group in self.group_fqns for fqn in group}
            mine = {fqn: value for fqn, value in state[STATE].items() if fqn in fqns}
            state[STATE] = {**state[STATE], **self._shards.collect(mine)}

    def common_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the entries of a :meth:`state_dict` that belong to no parameter, and so must be the same on every rank."""
        fqns = {fqn for group in self.group_fqns for fqn in group}
        more = {f"{STATE}[{key!r}]": value for key, value in state[STATE].items() if key not in fqns}
        return {key: value for key, value in state.items() if key not in (STATE, GROUPS)} | more

    def end_run(self) -> None:
        """Leaves the optimizer to the user, with the whole model's parameters, and its states on the CPU, as Lightning does.

        The module may be whole again or not.
        """
        if not self._is_running:
            return
        self._is_running = False
        if self._shards is not None:
            self._shards.detach()
        self._follow_groups()
        parameters = dict(self._module.named_parameters(remove_duplicate=False))
        pairs = (zip(fqns, own, strict=True) for fqns, own in zip(self.group_fqns, self._whole, strict=True))
        # One that user code has removed from the module stays in its group.
        self._whole = [[parameters.get(fqn, placeholder) for fqn, placeholder in group] for group in pairs]
        self._others = None  # each rank has its own
        self.show_others()
        self._move_states(_CPU)

    def not_wanted(self, groups: Sequence[Mapping[str, Any]]) -> set[Hashable]:
        """Which states of a saved optimizer belong to other ranks; by what the saved groups call their parameters."""
        wanted, stated = self._wanted(groups), self._stated()
        return {key for group in groups for key in group["params"] if wanted.get(key) not in stated}

    def _wanted(self, groups: Sequence[Mapping[str, Any]]) -> dict[Hashable, str]:
        """Which parameters of a saved optimizer are this rank's.

        Args:
            groups: The saved groups, of the whole model.

        Returns:
            FQNs of this rank's parameters, by what the saved groups call them. As for torch it is the place in a group that
            counts, not the name.

        Raises:
            ValueError: The groups are others, in torch's words.
        """
        self._follow_groups()
        if len(groups) != len(self.group_fqns):
            raise ValueError("loaded state dict has a different number of parameter groups")
        if any(len(saved["params"]) != len(fqns) for saved, fqns in zip(groups, self.group_fqns, strict=True)):
            raise ValueError("loaded state dict contains a parameter group that doesn't match the size of optimizer's group")
        mine = self._mine()
        pairs = ((saved["params"], fqns) for saved, fqns in zip(groups, self.group_fqns, strict=True))
        return {key: fqn for keys, fqns in pairs for key, fqn in zip(keys, fqns, strict=True) if fqn in mine}

    def load(self, saved: Mapping[str, Any], *, copies: bool = False) -> None:
        """Takes over a saved state.

        Args:
            saved: As torch's optimizers write it, with the groups of the whole model, and the states of this rank's parameters
                at least.
            copies: Whether the optimizer gets copies of the tensors, which may be those of a file that is mapped into memory.
        """
        self._check_layout(saved)
        wanted = self._wanted(saved[GROUPS])
        known = {key for group in saved[GROUPS] for key in group["params"]}
        mine, stated = self._mine(), self._stated()
        numbers = {fqn: number for number, fqn in enumerate(mine)}
        state = {key: value for key, value in saved[STATE].items() if key not in known}
        for key, value in saved[STATE].items():
            if wanted.get(key) in stated:
                state[numbers[wanted[key]]] = tree_map(partial(_laid_out, mine[wanted[key]], copies), value)
        groups = []
        for group in saved[GROUPS]:
            places = [index for index, key in enumerate(group["params"]) if key in wanted]
            part = {**group, "params": [numbers[wanted[group["params"][index]]] for index in places]}
            if "param_names" in group:
                part["param_names"] = [group["param_names"][index] for index in places]
            groups.append(part)
        self.optimizer.load_state_dict({**saved, STATE: state, GROUPS: groups})
        self._others = None
        names = [group.get("param_names") for group in saved[GROUPS]]
        self._names = [list(new) if new is not None else old for new, old in zip(names, self._names, strict=True)]
        self._move_states()

    def _move_states(self, device: torch.device | None = None) -> None:
        """Moves the parameters' states to a device, or to each one's own; where a counter of steps has to be torch decides."""
        for parameter, state in self.optimizer.state.items():
            if isinstance(parameter, Tensor) and isinstance(state, dict):
                state.update({key: _moved(entry, device or parameter.device) for key, entry in state.items() if key != "step"})
            elif isinstance(parameter, Tensor):
                self.optimizer.state[parameter] = _moved(state, device or parameter.device)

    def _fqns(self) -> dict[int, str]:
        return {id(parameter): fqn for fqn, parameter in self._module.named_parameters()}

    def _fqns_of(self, parameters: Sequence[Tensor]) -> tuple[str, ...]:
        fqns = self._fqns()
        unknown = [parameter for parameter in parameters if id(parameter) not in fqns]
        if unknown:
            raise UnsupportedError(
                "The optimizer has a parameter that the LightningModule does not have.",
                where=type(self.optimizer).__name__,
                observed=f"a tensor of shape {tuple(unknown[0].shape)} and {len(unknown) - 1} others in one of its groups",
                expected="parameters of the LightningModule, as returned by self.parameters()",
                todo="Create the optimizer in configure_optimizers, and recreate it after parameters are replaced. Make every "
                "trained module an attribute of the LightningModule.",
            )
        return tuple(fqns[id(parameter)] for parameter in parameters)

    def _mine(self) -> dict[str, nn.Parameter]:
        """The parameters that the groups hold here, in their order."""
        fqns = self._fqns()
        return {fqns[id(parameter)]: parameter for group in self.optimizer.param_groups for parameter in group["params"]}

    def _stated(self) -> dict[str, nn.Parameter]:
        """Selects the parameters whose states are here: all, unless replicas share them out."""
        mine, shards = self._mine(), self._shards
        return mine if shards is None else {fqn: parameter for fqn, parameter in mine.items() if shards.owns(parameter)}

    def _states_here(self) -> dict[str, Any]:
        """The states of these parameters, as far as there are any."""
        return {fqn: self.optimizer.state[p] for fqn, p in self._mine().items() if p in self.optimizer.state}

    def check_savable(self) -> None:
        """Raises :class:`UnsupportedError` where :meth:`state_dict` would."""
        self._check_layout(self.optimizer.state_dict())

    def _check_layout(self, packed: Any) -> None:
        if isinstance(packed, Mapping) and isinstance(packed.get(STATE), Mapping) and isinstance(packed.get(GROUPS), list):
            return
        raise UnsupportedError(
            "The optimizer state cannot be saved or restored stage by stage.",
            where=f"{type(self.optimizer).__name__}.state_dict",
            observed=f"entries {sorted(map(str, packed))}" if isinstance(packed, Mapping) else f"a {type(packed).__name__}",
            expected="'state' by parameter and 'param_groups', as in torch's optimizers; additional entries are saved "
            "unchanged",
            todo="Change the optimizer's state_dict to this form, or disable checkpoints (enable_checkpointing=False).",
        )


def kept_through(
    optimizers: Sequence[StageOptimizer], module: nn.Module, dropped: Mapping[int, Tensor], topology: Topology
) -> list[StageOptimizer]:
    """The optimizers of an earlier run in one that does not train: checkpoints have their states. Called by every rank.

    The module has been split; ``dropped`` is what stands for parameters that were dropped then, by their identity.
    """
    kept = [optimizer for optimizer in optimizers if optimizer.belongs_to(module, dropped)]
    for optimizer in kept:
        optimizer.begin_run(dropped)
        optimizer.spread_states(topology)
    return kept


def with_inner(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizer, and those that it holds, as Lookahead does."""
    found = [optimizer]
    for part in found:
        found += [value for value in vars(part).values() if isinstance(value, Optimizer) and all(value is not f for f in found)]
    return found


@dataclass(frozen=True, kw_only=True)
class _Own:
    """This rank's part of a group's parameters.

    Attributes:
        whole: The group's parameters, with placeholders among them where they are shown.
        numbers: Which of them are here.
        here: These, as the list that the group has while the others are hidden: what has not changed looks so in each batch.
        copy: Of that list, which others may change.
    """

    whole: list[Tensor]
    numbers: list[int]
    here: list[Tensor]
    copy: list[Tensor]

    @classmethod
    def of(cls, whole: list[Tensor], before: _Own | None) -> _Own:
        with unwatched_torch():  # a mode that hooks run in would be called for each parameter
            numbers = [number for number, parameter in enumerate(whole) if not parameter.is_meta]
        here = [whole[number] for number in numbers]
        if before is not None and _same(before.here, here):
            here = before.here
        return cls(whole=whole, numbers=numbers, here=here, copy=list(here))


def _same(left: Sequence[Any], right: Sequence[Any]) -> bool:
    return left is right or (len(left) == len(right) and all(map(is_, left, right)))


def _names(group: Mapping[str, Any]) -> list[str] | None:
    names = group.get("param_names")
    return list(names) if names is not None and len(names) == len(group["params"]) else None


def _gather_states(states: Mapping[str, Any], group: dist.ProcessGroup | None) -> dict[str, Any]:
    """The states that the ranks give, on the CPU, of each the first rank's. Called by every rank."""
    sent = {fqn: _moved(state, _CPU) for fqn, state in states.items()}
    return {fqn: state for part in reversed(gather_values(group, sent)) for fqn, state in part.items()}


def _moved(value: Any, device: torch.device) -> Any:
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, value)


def _laid_out(parameter: nn.Parameter, copies: bool, value: Any) -> Any:
    """A value of a parameter's state in the parameter's layout: fused steps go through both as they lie in memory."""
    if not isinstance(value, Tensor):
        return value
    if value.shape == parameter.shape and value.stride() != parameter.stride():
        return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)
    return value.clone() if copies else value


def text_of(value: Any) -> str:
    """Equal for equal values; short."""
    leaves = leaves_with_path(value)
    return ", ".join(f"{path}={digest(leaf) if isinstance(leaf, Tensor) else repr(leaf)[:200]}" for path, leaf in leaves)[:1000]
