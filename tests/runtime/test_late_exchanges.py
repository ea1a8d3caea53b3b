"""Values that a stage begins to leave for modules of other ranks only after its region was recorded."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_fxpipe.errors import UnsupportedError
from lightning_fxpipe.runtime.late_exchanges import ChangedPlaces, LateExchanges

FLAGS = {"is on": False}
is_on = False


class Block(nn.Module):
    is_warm = False

    def __init__(self, shared: Any, does: Callable[[Block], None]) -> None:
        super().__init__()
        self.layer, self.shared, self.does, self.num_calls = nn.Linear(4, 4), shared, does, 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        if self.num_calls > 1:
            self.does(self)
        return self.layer(x) * (self.shared.scale + len(self.shared.seen) + FLAGS["is on"] + is_on + self.is_warm)


class Model(nn.Module):
    def __init__(self, does: Callable[[Block], None]) -> None:
        super().__init__()
        shared = SimpleNamespace(scale=1.0, seen=set(), unused=0)
        self.blocks = nn.ModuleList(Block(shared, each) for each in (does, nothing))


def nothing(block: Block) -> None:
    block.own = 1


def sets_an_attribute(block: Block) -> None:
    block.shared.scale = 2.0


def adds_to_a_set(block: Block) -> None:
    block.shared.seen.add(1)


def sets_an_entry(block: Block) -> None:
    FLAGS["is on"] = True


def sets_a_global(block: Block) -> None:
    global is_on
    is_on = True


def sets_on_the_class(block: Block) -> None:
    type(block).is_warm = True


def sets_the_same_again(block: Block) -> None:
    block.shared.scale = float("1.0")  # another object


def sets_what_is_not_read(block: Block) -> None:
    block.shared.unused += 1


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FLAGS, "is on", False)
    monkeypatch.setattr(f"{__name__}.is_on", False)
    monkeypatch.setattr(Block, "is_warm", False)


def known(changed: Collection[Any], settled: Mapping[Any, Any] = MappingProxyType({})) -> ChangedPlaces:
    places = ChangedPlaces()
    places.live.update(changed)
    places.settled.update(settled)
    return places


def runs(model: Model, changed: Any = (), own: str = "blocks.0", num_runs: int = 2) -> None:
    late = LateExchanges(model, [own], known(changed))
    for _ in range(num_runs):
        late.watching(0, lambda: model.get_submodule(own)(torch.ones(1, 4)))


@pytest.mark.parametrize(
    ("does", "place"),
    [
        (sets_an_attribute, "self.blocks.0.shared.scale"),
        (adds_to_a_set, "self.blocks.0.shared.seen"),
        (sets_an_entry, f"{__name__}.FLAGS['is on']"),
        (sets_a_global, f"{__name__}.is_on"),
        (sets_on_the_class, "type(self.blocks.0).is_warm"),
    ],
)
def test_what_a_stage_begins_to_leave_for_another_rank_is_refused(does: Callable[[Block], None], place: str) -> None:
    """The recording has not seen it, and the other rank would go on with what was there before."""
    runs(Model(does), num_runs=1)
    with pytest.raises(UnsupportedError) as raised:
        runs(Model(does))
    assert str(raised.value).startswith(f"Modules exchange a value through a shared object: {place}.")
    assert "stage 0" in str(raised.value)


@pytest.mark.parametrize("does", [nothing, sets_what_is_not_read, sets_the_same_again])
def test_what_makes_no_difference_to_other_ranks_is_left_alone(does: Callable[[Block], None]) -> None:
    runs(Model(does))


def test_what_has_changed_while_it_was_recorded_is_known() -> None:
    """It has been tried there whether it makes a difference."""
    model, attribute = Model(sets_an_attribute), "attribute"
    path = ("self", (attribute, ("_modules", "blocks")), (attribute, ("_modules", "0")), (attribute, "shared"))
    runs(model, [(*path, (attribute, "scale"))])
    with pytest.raises(UnsupportedError, match="shared.scale"):
        runs(Model(sets_an_attribute), [(*path, (attribute, "another"))])


def test_another_entry_of_a_cache_is_known() -> None:
    """It was filled when another step was recorded, and a batch of another size comes later."""
    changed = known(())
    model = Model(sets_an_entry)
    late = LateExchanges(model, ["blocks.0"], changed)
    (place,) = [each.path for each in late._watched if each.owner is FLAGS]
    changed.live.add((*place, ("key", 8)))
    for _ in range(2):
        late.watching(0, lambda: model.blocks[0](torch.ones(1, 4)))
