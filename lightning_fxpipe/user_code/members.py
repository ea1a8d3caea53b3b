"""A module's submodules, parameters and buffers, listed once and listed again where one has been exchanged.

Each batch asks for them several times. To walk through a module as ``named_parameters`` does takes 4 ms where there are 5,000
submodules; to see that nothing has been exchanged takes 0.4. torch's registration hooks would be asked for nothing, but are not
told of what is deleted, put into a list of modules, or moved by ``Module.half``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter, is_, methodcaller
from typing import Any

from torch import Tensor, nn

from lightning_fxpipe._compat.modes import unwatched_torch
from lightning_fxpipe._compat.torch import registries


class Members:
    """The members of a module as they were at the last look.

    Args:
        root: The module.

    Attributes:
        modules: The submodules and the module itself, by name; each once.
        parameters, buffers: By FQN, each once. All three are other objects after members have been exchanged, and only then.
    """

    modules: Mapping[str, nn.Module]
    parameters: Mapping[str, nn.Parameter]
    buffers: Mapping[str, Tensor]
    _own: tuple[nn.Parameter, ...] | None

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._list()

    def renewed(self) -> Members:
        """Itself, after a look whether it is still right."""
        if not self._is_current():
            self._list()
        return self

    def own_parameters(self) -> Sequence[nn.Parameter]:
        """The parameters that this rank has, and no placeholders for; looked for once."""
        if self._own is None:
            self._own = tuple(parameter for parameter in self.parameters.values() if not parameter.is_meta)
        return self._own

    def flags(self) -> tuple[tuple[Any, ...], tuple[bool, ...]]:
        """Which modules train, and which parameters."""
        training = tuple(map(attrgetter("training"), self.modules.values()))
        return training, tuple(map(attrgetter("requires_grad"), self.parameters.values()))

    def of_type(self, types: tuple[type[nn.Module], ...]) -> dict[str, nn.Module]:
        """The modules of some types, by name; looked for once."""
        if types not in self._by_type:
            self._by_type[types] = {name: module for name, module in self.modules.items() if isinstance(module, types)}
        return self._by_type[types]

    def _list(self) -> None:
        with unwatched_torch():
            self.modules = dict(self._root.named_modules())
            self.parameters = dict(self._root.named_parameters())
            self.buffers = dict(self._root.named_buffers())
        self._by_type: dict[Any, dict[str, nn.Module]] = {}
        self._own = None
        self._registries = [registry for module in self.modules.values() for registry in registries(module)]
        self._sizes = list(map(len, self._registries))
        self._filled = [registry for registry in self._registries if registry]
        self._values = list(self._registered())

    def _registered(self) -> Iterator[Any]:
        return chain.from_iterable(map(methodcaller("values"), self._filled))  # TorchScript has mappings of its own

    def _is_current(self) -> bool:
        # In this order: where sizes are the same, so are the numbers of values. No loop of ours: there may be thousands.
        return list(map(len, self._registries)) == self._sizes and all(map(is_, self._registered(), self._values))
