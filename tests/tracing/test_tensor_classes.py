"""Inputs of a class of their own: which models are refused, and what copies of such tensors know."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_fxpipe.errors import UnsupportedError
from lightning_fxpipe.tracing.tensor_classes import check_tensor_classes
from lightning_fxpipe.user_code.objects import keep_attributes
from lightning_fxpipe.user_code.writes import Writes, WritesOfCalls


class Labelled(Tensor):
    """Its columns have names, which torch's functions lose."""

    labels: Any

    @classmethod
    def of(cls, tensor: Tensor, labels: Any) -> Labelled:
        found = tensor.as_subclass(cls)
        found.labels = labels
        return found

    def extract(self, label: str) -> Tensor:
        return self.as_subclass(Tensor)[:, self.labels.index(label)]


class Layer(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class Extracts(nn.Module):
    def forward(self, x: Any) -> Any:
        return x.extract("a")


class AsksForClass(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if isinstance(x, Labelled) else x


class AsksForAttribute(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if hasattr(x, "labels") else x


@pytest.mark.parametrize("layer", [Extracts, AsksForClass, AsksForAttribute])
def test_a_model_that_names_what_a_class_has_is_refused(layer: type[nn.Module]) -> None:
    """A stage has plain tensors, for which the code takes another path, or fails."""
    root = nn.Sequential(Layer(), layer())
    check_tensor_classes(root, [torch.ones(2, 2)])
    with pytest.raises(UnsupportedError, match="Code in the model uses members of its inputs' tensor class Labelled") as raised:
        check_tensor_classes(root, {"x": Labelled.of(torch.ones(2, 2), ["a", "b"])})
    assert "test_tensor_classes.py:" in str(raised.value.where)
    assert "as_subclass(torch.Tensor)" in str(raised.value)


def test_a_model_that_computes_only_gets_plain_tensors() -> None:
    check_tensor_classes(nn.Sequential(Layer(), nn.Linear(2, 2)), [Labelled.of(torch.ones(2, 2), ["a", "b"])])


class Step(nn.Module):
    """Its step asks for the class of a result, which on one device is that of the input."""

    def training_step(self, batch: Any) -> Any:
        return isinstance(batch, Labelled)


def test_a_step_that_asks_for_the_class_of_results_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="Code in the model uses members of its inputs' tensor class Labelled"):
        check_tensor_classes(Step(), [Labelled.of(torch.ones(2, 2), ["a", "b"])])


def test_copies_keep_what_a_class_has() -> None:
    """The step is tried on copies of its batch."""
    original = Labelled.of(torch.tensor([[1.0, 2.0]]), ["a", "b"])
    copy: Any = keep_attributes(original.clone(), original)
    assert copy.extract("b").tolist() == [2]
    assert type(keep_attributes(torch.ones(1), torch.zeros(1))) is Tensor


class MadeFromTensor(Tensor):
    """Made by ``torch.Tensor.__new__``, as PINA's tensors are."""

    @staticmethod
    def __new__(cls, tensor: Tensor) -> Any:
        return Tensor.__new__(cls, tensor)  # type: ignore[call-arg]


def test_a_tensor_of_a_class_can_be_made_while_writes_are_watched() -> None:
    """Under a dispatch mode torch refuses it, so the first batch is loaded under one of calls."""
    watched = torch.zeros(2)
    writes = Writes([watched])
    with WritesOfCalls(writes, [watched]):
        assert type(MadeFromTensor(torch.ones(2))) is MadeFromTensor
        watched.add_(1)
    writes.undo()
    assert watched.tolist() == [0, 0]
