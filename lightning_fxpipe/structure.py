"""Results of calls as a structure with holes where the tensors were."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_fxpipe._compat import TreeSpec, tree_flatten, tree_unflatten


@dataclass(frozen=True)
class Template:
    """A nested value whose tensors can be exchanged for others."""

    tensors: tuple[Tensor, ...]
    leaves: tuple[Any, ...]
    structure: TreeSpec

    @classmethod
    def of(cls, value: Any) -> Template:
        """The template of a value; :attr:`tensors` are its distinct tensors."""
        leaves, structure = tree_flatten(value)
        return cls(tuple({id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}.values()), tuple(leaves), structure)

    def fill(self, tensors: Sequence[Any]) -> Any:
        """The value with other tensors in place of :attr:`tensors`."""
        new = {id(old): tensor for old, tensor in zip(self.tensors, tensors, strict=True)}
        return tree_unflatten([new.get(id(leaf), leaf) for leaf in self.leaves], self.structure)
