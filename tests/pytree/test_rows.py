"""A class that tells torch's pytree how it is opened is opened that way, whatever else it is: a TensorDict is a mapping whose
iteration gives its rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from lightning_fxpipe.microbatch.split import count_samples, plan_passes, split_batch
from lightning_fxpipe.pytree.containers import container_of, leaves_with_path


class Rows(Mapping[str, Tensor]):
    """Tensors of equal length by name."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors
        self.length = len(next(iter(tensors.values())))

    def __getitem__(self, key: str) -> Tensor:
        assert isinstance(key, str)
        return self.tensors[key]

    def __iter__(self) -> Iterator[Any]:
        return iter([{name: tensor[row] for name, tensor in self.tensors.items()} for row in range(self.length)])

    def __len__(self) -> int:
        return self.length


_pytree.register_pytree_node(
    Rows,
    lambda rows: (list(rows.tensors.values()), list(rows.tensors)),
    lambda tensors, names: Rows(dict(zip(names, tensors, strict=True))),
    flatten_with_keys_fn=lambda rows: (
        [(_pytree.MappingKey(name), tensor) for name, tensor in rows.tensors.items()],
        list(rows.tensors),
    ),
    serialized_type_name="tests.Rows",
)


def test_a_mapping_whose_iteration_gives_rows_is_cut_into_microbatches() -> None:
    rows = Rows({"x": torch.arange(6.0), "y": torch.ones(6, 2)})
    container = container_of(rows)
    assert container is not None
    assert [name for name, _ in container.entries] == ["['x']", "['y']"]
    assert count_samples(rows, 2).num_samples == 6
    first, second = split_batch(rows, plan_passes(6, 2))
    assert (first.length, second["x"].tolist()) == (3, [3.0, 4.0, 5.0])


class Unnamed:
    """Registered without names of its entries, as darts does with the inputs of its models."""

    def __init__(self, x: Tensor, rest: dict[str, Tensor], stage: str) -> None:
        self.x, self.rest, self.stage = x, rest, stage


_pytree.register_pytree_node(
    Unnamed,
    lambda value: ([value.x, value.rest], value.stage),
    lambda entries, stage: Unnamed(*entries, stage),
)


def test_entries_without_names_are_numbered() -> None:
    """torch raises ValueError where the paths to them are asked for: the run ended with its traceback."""
    value = Unnamed(torch.arange(4.0), {"y": torch.ones(4)}, "train")
    assert [path for path, _ in leaves_with_path(value, "args[0]")] == ["args[0][0]", "args[0][1]"]
    first, second = split_batch(value, plan_passes(4, 2))
    assert (second.x.tolist(), second.rest["y"].tolist(), first.stage) == ([2.0, 3.0], [1.0, 1.0], "train")
