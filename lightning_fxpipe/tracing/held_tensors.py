"""Tensors that recorded code has from elsewhere than a region's inputs and the parameters: buffers, plain attributes, a global
variable, an entry of a list, an item of an iterator.

A graph refers to them as they were when it was recorded. User code changes them in place, which a stage sees, or puts others
there (``self.hidden = hidden.detach()``, ``self.noise = schedule[epoch]``), which it would not. So before each batch they are
looked up where they were found, and the stages are given those of today, if they are of the same kind; else the graph is of no
use any more.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, fx, nn

from lightning_fxpipe._compat.torch import version_of
from lightning_fxpipe.tracing.graph_writer import CONSTANT_PREFIX
from lightning_fxpipe.tracing.structure_guards import submodule_at
from lightning_fxpipe.user_code.paths import Path, at_path
from lightning_fxpipe.user_code.snapshot import roots_of, user_state


class HeldTensors:
    """Tensors of one graph of a module.

    Args:
        root: The module.
        graph: The graph.
        constants: The tensors that have no FQN, by their names in the graph.
        places: Where these are; by default where they are found now.
    """

    def __init__(
        self, root: nn.Module, graph: fx.Graph, constants: Mapping[str, Tensor], places: Mapping[str, Path] | None = None
    ) -> None:
        self._root, self._graph = root, graph
        self._now = dict(constants)  # what the stages have
        self._places: dict[str, Path] = dict(places or {})
        if constants and places is None:
            state = user_state(root)
            found = {name: state.place_of(tensor) for name, tensor in constants.items()}
            self._places = {name: place for name, place in found.items() if place is not None}
        parameters = dict(root.named_parameters(remove_duplicate=False))
        fqns = dict.fromkeys(str(node.target) for node in graph.nodes if node.op == "get_attr")
        self._fqns = [fqn for fqn in fqns if not fqn.startswith(CONSTANT_PREFIX) and fqn not in parameters]
        self._now |= {fqn: attribute(root, fqn) for fqn in self._fqns}
        self._stages: WeakKeyDictionary[nn.Module, dict[str, str]] = WeakKeyDictionary()

    def renewed(self) -> HeldTensors:
        """Returns the same for the buffers that the module has now; it has no stages yet."""
        return HeldTensors(self._root, self._graph, self.constants, self._places)

    @property
    def constants(self) -> Mapping[str, Tensor]:
        """Tensors without an FQN, by name, as the stages have them."""
        return {name: tensor for name, tensor in self._now.items() if name.startswith(CONSTANT_PREFIX)}

    def add_stage(self, module: fx.GraphModule, names: Mapping[str, str]) -> None:
        """Tells of a stage of the graph, and under which of its own names it has which of the tensors."""
        self._stages[module] = {target: name for target, name in names.items() if name in self._now}

    def have_changed(self) -> bool:
        """Returns True if another tensor is where one of these was."""
        return any(found is not self._now[name] for name, found in self._find().items())

    def versions(self) -> dict[str, int]:
        """Returns how often each was written to in place, by name."""
        return {n: version_of(t) for n, t in self._now.items() if isinstance(t, Tensor) and not t.is_inference()}

    def refresh(self) -> bool:
        """Gives the stages what is there now. False where that is of another kind."""
        return self.take({name: found for name, found in self._find().items() if found is not self._now[name]})

    def has(self, name: str, tensor: Any) -> bool:
        """Returns True if the stages have this tensor under a name; for a parameter, whether it is the one with this FQN."""
        return tensor is (self._now[name] if name in self._now else attribute(self._root, name))

    def is_known(self, name: str) -> bool:
        """Returns True if a stage has, or could have, a tensor of this name; a call that is no part of the graph may have
        others.
        """
        return name in self._now or not name.startswith(CONSTANT_PREFIX)

    def take_where_other(self, tensors: Mapping[str, Tensor]) -> bool:
        """:meth:`take` for those that are not there already."""
        return self.take({name: tensor for name, tensor in tensors.items() if not self.has(name, tensor)})

    def are_unseen(self, tensors: Mapping[str, Tensor]) -> bool:
        """Returns True if one is not there already, and :meth:`have_changed` would not tell: it is made anew each time."""
        return any(n.startswith(CONSTANT_PREFIX) and n not in self._places and not self.has(n, t) for n, t in tensors.items())

    def take(self, others: Mapping[str, Any]) -> bool:
        """Gives the stages other tensors for some. False, and nothing is changed, where one is of another kind."""
        if not all(name in self._now and _is_alike(tensor, self._now[name]) for name, tensor in others.items()):
            return False
        self._now.update(others)
        for module, names in self._stages.items():
            for target, name in names.items():
                if name in others:
                    path, _, last = target.rpartition(".")
                    setattr(module.get_submodule(path), last, others[name])
        return True

    def _find(self) -> dict[str, Any]:
        found = {fqn: attribute(self._root, fqn) for fqn in self._fqns}
        if self._places:
            roots = roots_of(self._root)[0]
            found |= {name: _at(roots, place) for name, place in self._places.items()}
        return found


def attribute(root: nn.Module, fqn: str) -> Any:
    """A tensor of a module, by its FQN; None where there is none."""
    path, _, name = fqn.rpartition(".")
    return getattr(submodule_at(root, path), name, None)


def _at(roots: Mapping[str, Any], place: Path) -> Any:
    try:
        return at_path(roots, place)
    except (KeyError, IndexError, AttributeError):
        return None


def _is_alike(tensor: Any, other: Tensor) -> bool:
    if not isinstance(tensor, Tensor) or _kind(tensor) != _kind(other):
        return False
    # What another rank's stage holds is a placeholder here, and no reason for this rank alone to record anew.
    return tensor.is_meta or other.is_meta or tensor.device == other.device


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return type(tensor), tensor.shape, tensor.dtype, tensor.layout, tensor.requires_grad
