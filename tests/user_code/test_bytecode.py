"""A canary for Python's bytecode: what the package asks of it must be answered alike in every version of Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from lightning_fxpipe.user_code.bytecode import assigned_names, changes_containers, loaded_variables, names_used, operations
from lightning_fxpipe.user_code.step_code import may_differ_between_batches, uses_arguments_after_batch


def adds(trainer: Any, outputs: Any) -> Any:
    return trainer + outputs  # one instruction for two variables since Python 3.13


def stores_then_loads(trainer: Any, outputs: Any) -> Any:
    kept = trainer()
    return outputs.item(), kept  # the same, storing one and loading the other


def may_be_unbound(trainer: Any, outputs: Any) -> Any:
    if trainer:
        del outputs
    return outputs


def in_a_comprehension(trainer: Any, outputs: Any) -> Any:
    return [value for value in outputs if value is not trainer]


def only_stores(trainer: Any, outputs: Any) -> Any:
    first, outputs = trainer, trainer  # noqa: F841
    return first


def shadows(trainer: Any, outputs: Any) -> Any:
    return [trainer for _ in trainer for outputs in trainer]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (adds, {"trainer", "outputs"}),
        (stores_then_loads, {"trainer", "outputs", "kept"}),
        (may_be_unbound, {"trainer", "outputs"}),
        (in_a_comprehension, {"trainer", "outputs"}),
        (only_stores, {"trainer", "first"}),
    ],
)
def test_every_read_of_a_local_variable_is_seen(function: Callable[..., Any], expected: set[str]) -> None:
    code = function.__code__
    # A variable of a comprehension is one of the function since Python 3.12; one that a comprehension reads was a cell before.
    assert (loaded_variables(code) & {"trainer", "outputs", "kept", "first"}) == expected - {*code.co_cellvars}


def test_a_variable_of_a_comprehension_hides_one_of_the_function_without_reading_it() -> None:
    assert "outputs" not in loaded_variables(shadows.__code__)


ACTIVE = False


def sets_by_name(holder: Any) -> None:
    global ACTIVE
    ACTIVE = True
    holder.mode = 1
    setattr(holder, "scale", 2)  # noqa: B010


def test_what_code_may_assign_is_seen() -> None:
    assert {"ACTIVE", "mode", "scale"} <= assigned_names(sets_by_name.__code__)
    assert "holder" not in assigned_names(sets_by_name.__code__)
    assert not assigned_names((lambda holder: holder.mode).__code__)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda holder: holder.append(1), True),
        (lambda holder: holder.__setitem__("a", 1), True),
        (lambda holder: [entry.update(a=1) for entry in holder], True),
        (lambda holder: holder["a"] + len(holder), False),
    ],
)
def test_code_that_may_change_a_container_is_seen(function: Callable[..., Any], expected: bool) -> None:
    def sets(holder: Any) -> None:
        holder["a"] = 1

    def extends(holder: Any) -> None:
        holder += [1]

    assert changes_containers(sets.__code__)
    assert changes_containers(extends.__code__)
    assert changes_containers(function.__code__) == expected


def test_names_are_those_of_attributes_variables_and_texts() -> None:
    assert {"mode", "key", "ACTIVE"} <= names_used((lambda holder: holder.mode + holder["key"] + ACTIVE).__code__)


def test_operations_come_in_order_with_one_argument_each() -> None:
    found = [(operation.name, operation.argument) for operation in operations(stores_then_loads.__code__)]
    named = [pair for pair in found if isinstance(pair[1], str)]
    assert named == [
        ("LOAD_FAST", "trainer"),
        ("STORE_FAST", "kept"),
        ("LOAD_FAST", "outputs"),
        ("LOAD_ATTR", "item"),
        ("LOAD_FAST", "kept"),
    ]


class Module(nn.Module):
    """Steps that use more and less of what tells one batch from another."""

    def assigns(self, batch: Any, batch_idx: int) -> None:
        self.last = batch

    def uses_index(self, batch: Any, batch_idx: int) -> Any:
        return batch * batch_idx

    def uses_trainer(self, batch: Any, batch_idx: int) -> Any:
        return batch * self.trainer.scale  # type: ignore[union-attr, operator]


def test_what_tells_one_batch_from_another_is_seen() -> None:
    module = Module()
    assert uses_arguments_after_batch(module.uses_index)
    assert not uses_arguments_after_batch(module.assigns)
    assert may_differ_between_batches(module, module.uses_trainer)
    assert not may_differ_between_batches(module, module.assigns)


def test_what_a_step_uses_after_it_was_left_does_not_count() -> None:
    class Left(Exception):
        pass

    def model() -> None:
        raise Left

    def step(module: Any, batch: Any, batch_idx: int) -> Any:
        model()
        return batch, batch_idx

    with pytest.raises(Left) as left:
        step(None, 1, 2)
    assert uses_arguments_after_batch(step)
    assert not uses_arguments_after_batch(step, left.value.__traceback__)
