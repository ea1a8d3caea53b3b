"""Values that modules leave for each other in an object that both can reach."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_fxpipe.errors import FxPipeError
from lightning_fxpipe.tracing.shared_state import SharedState
from lightning_fxpipe.tracing.trace import TracedRegion, trace_region
from tests.staging import WIDTH, batch, call_of

LEFT = "Modules exchange a value through a shared object"
NUMBERS: list[float] = []
total = 0.0


class Shared:
    """What blocks know together: attributes, and containers in them."""

    number = 0

    def __init__(self) -> None:
        self.by_name: dict[str, Any] = {"n": 0}
        self.listed: list[float] = []
        self.seen: set[int] = set()
        self.mode, self.mask = "tanh", 1


class Block(nn.Module):
    calls = 0

    def __init__(self, does: Callable[[Block, Tensor], Tensor], shared: Shared) -> None:
        super().__init__()
        self.linear, self.does, self.shared = nn.Linear(WIDTH, WIDTH), does, shared
        self.own: dict[str, int] = {}
        self.known: list[nn.Module] = []
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.does(self, x))


class Blocks(nn.Module):
    def __init__(self, *does: Callable[[Block, Tensor], Tensor]) -> None:
        super().__init__()
        self.shared = Shared()
        self.blocks = nn.ModuleList(Block(each, self.shared) for each in does)
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class ReadsTheDict(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + self.shared.by_name["n"])


class GivesTheNumber(Blocks):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.shared.by_name["n"]


class Resetting(Blocks):
    """Begins anew what its blocks count in."""

    def forward(self, x: Tensor) -> Tensor:
        self.shared.by_name["n"] = 0
        return super().forward(x)


class NamesAGlobal(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + len(NUMBERS))


def counts(block: Block, x: Tensor) -> Tensor:
    block.shared.by_name["n"] += 1
    return x


def divides(block: Block, x: Tensor) -> Tensor:
    return x / (1 + block.shared.by_name["n"])


def counts_and_divides(block: Block, x: Tensor) -> Tensor:
    return divides(block, counts(block, x))


def begins_again(block: Block, x: Tensor) -> Tensor:
    block.shared.by_name["n"] = 5
    return x


def leaves_a_norm(block: Block, x: Tensor) -> Tensor:
    block.shared.number = x.norm().item()  # type: ignore[assignment]
    return x


def uses_the_norm(block: Block, x: Tensor) -> Tensor:
    return x / (1 + block.shared.number)


def leaves_a_size(block: Block, x: Tensor) -> Tensor:
    block.shared.by_name["sizes"] = tuple(x.shape)
    return x


def leaves_a_shape(block: Block, x: Tensor) -> Tensor:
    block.shared.by_name["sizes"] = x.shape
    return x


def counts_in_a_new_dict(block: Block, x: Tensor) -> Tensor:
    block.shared.by_name = {"n": block.shared.by_name["n"] + 1}
    return x


def uses_the_size(block: Block, x: Tensor) -> Tensor:
    return x / block.shared.by_name.get("sizes", (1,))[0]


def adds_to_a_list(block: Block, x: Tensor) -> Tensor:
    block.shared.listed.append(1.5)
    return x


def uses_the_list(block: Block, x: Tensor) -> Tensor:
    return x * (1 + sum(block.shared.listed))


def adds_to_a_set(block: Block, x: Tensor) -> Tensor:
    block.shared.seen.add(len(block.shared.seen))
    return x


def uses_the_set(block: Block, x: Tensor) -> Tensor:
    return x + len(block.shared.seen)


def adds_to_a_class(block: Block, x: Tensor) -> Tensor:
    Block.calls += 1
    return x


def uses_the_class(block: Block, x: Tensor) -> Tensor:
    return x + Block.calls


def adds_to_a_global(block: Block, x: Tensor) -> Tensor:
    global total
    total += 1
    return x


def uses_the_global(block: Block, x: Tensor) -> Tensor:
    return x + total


def adds_to_a_global_list(block: Block, x: Tensor) -> Tensor:
    NUMBERS.append(1.0)
    return x


def warns_once(block: Block, x: Tensor) -> Tensor:
    if "warned" not in block.shared.by_name:
        block.shared.by_name["warned"] = True
    return x


def counts_for_itself(block: Block, x: Tensor) -> Tensor:
    block.own["n"] = block.own.get("n", 0) + 1
    return x + block.own["n"]


def only_computes(block: Block, x: Tensor) -> Tensor:
    return x


def sets_a_flag(block: Block, x: Tensor) -> Tensor:
    block.shared.by_name["is on"] = True
    return x


def uses_the_flag(block: Block, x: Tensor) -> Tensor:
    return torch.sin(x) if block.shared.by_name.get("is on") else x


def sets_a_text(block: Block, x: Tensor) -> Tensor:
    block.shared.mode = "sin"
    return x


def uses_the_text(block: Block, x: Tensor) -> Tensor:
    return getattr(torch, block.shared.mode)(x)


def sets_none(block: Block, x: Tensor) -> Tensor:
    block.shared.mask = None
    return x


def uses_none(block: Block, x: Tensor) -> Tensor:
    return x if block.shared.mask is None else torch.sin(x)


def sets_once(block: Block, x: Tensor) -> Tensor:
    if not block.own:
        block.own["is called"] = 1
        block.shared.number = 3
    return x


def uses_the_threshold(block: Block, x: Tensor) -> Tensor:
    return torch.sin(x) if block.shared.by_name["n"] > 100 else x


def looks_and_counts(block: Block, x: Tensor) -> Tensor:
    block.own["size"] = len(x.detach().numpy())
    return counts(block, x)


def looks_and_divides(block: Block, x: Tensor) -> Tensor:
    block.own["size"] = len(x.detach().numpy())
    return divides(block, x)


def looks_once(block: Block, x: Tensor) -> Tensor:
    if "has looked" not in block.shared.by_name:
        block.shared.by_name["has looked"] = True
        x.detach().norm()
    return x


def fills_a_cache(block: Block, x: Tensor) -> Tensor:
    if "table" not in block.shared.by_name:
        block.shared.by_name["table"] = torch.arange(WIDTH) / WIDTH
    return x + block.shared.by_name["table"]


def leaves_a_mask(block: Block, x: Tensor) -> Tensor:
    block.shared.by_name["mask"] = torch.ones(WIDTH) * 2
    return x


def leaves_its_buffer(block: Block, x: Tensor) -> Tensor:
    block.shared.by_name["mask"] = block.scale
    return x


def uses_the_mask(block: Block, x: Tensor) -> Tensor:
    return x * block.shared.by_name.get("mask", block.scale)


def counts_on_another(block: Block, x: Tensor) -> Tensor:
    for known in block.known:
        known.count += 1
    return x


def recorded(model: nn.Module) -> TracedRegion:
    return trace_region(model, call_of(batch()), opened=())


REFUSED: dict[str, tuple[tuple[Callable[[Block, Tensor], Tensor], ...], str]] = {
    "a counter": ((counts_and_divides, counts_and_divides), "self.shared.by_name['n']"),
    "a counter that another reads": ((counts, only_computes, divides), "self.shared.by_name['n']"),
    "a counter that a module sets back": ((begins_again, counts_and_divides, counts_and_divides), "self.shared.by_name['n']"),
    "a setting that is the same in each step": ((begins_again, divides), "self.shared.by_name['n']"),
    "a threshold that is not reached yet": ((counts, uses_the_threshold), "self.shared.by_name['n']"),
    "a flag": ((sets_a_flag, uses_the_flag), "self.shared.by_name['is on']"),
    "a text": ((sets_a_text, uses_the_text), "self.shared.mode"),
    "nothing": ((sets_none, uses_none), "self.shared.mask"),
    "a setting made in the first call": ((sets_once, uses_the_norm), "self.shared.number"),
    "a number of modules that run on made-up data": ((looks_and_counts, looks_and_divides), "self.shared.by_name['n']"),
    "an attribute": ((leaves_a_norm, uses_the_norm), "self.shared.number"),
    "a size": ((leaves_a_size, uses_the_size), "self.shared.by_name['sizes']"),
    "a shape": ((leaves_a_shape, uses_the_size), "self.shared.by_name['sizes']"),
    "a new dict": ((counts_in_a_new_dict, divides), "self.shared.by_name"),
    "a list": ((adds_to_a_list, uses_the_list), "self.shared.listed"),
    "a set": ((adds_to_a_set, uses_the_set), "self.shared.seen"),
    "a class": ((adds_to_a_class, uses_the_class), r"type\(self.blocks.0\).calls"),
    "a tensor made of constants": ((leaves_a_mask, uses_the_mask), "self.shared.by_name['mask']"),
    "a buffer": ((leaves_its_buffer, uses_the_mask), "self.shared.by_name['mask']"),
    "a global variable": ((adds_to_a_global, uses_the_global), f"{__name__}.total"),
}


@pytest.mark.parametrize(("does", "name"), REFUSED.values(), ids=REFUSED)
def test_a_value_that_a_module_leaves_for_another_is_refused(does: Any, name: str) -> None:
    """Each block may be in a stage of its own, and the object that they know is another one there."""
    model = Blocks(*does)
    with pytest.raises(FxPipeError, match=f"{LEFT}: {name}".replace("[", r"\[")) as raised:
        recorded(model)
    assert "changed by " in str(raised.value)
    assert "used by blocks." in str(raised.value)
    assert not total
    assert not Block.calls
    assert vars(model.shared) == vars(Shared())


def test_a_number_that_modules_leave_for_the_code_around_them_is_refused() -> None:
    """The last stage's rank would use what is there of its own blocks."""
    for kind in (ReadsTheDict, GivesTheNumber):
        with pytest.raises(FxPipeError, match=f"{LEFT}: self.shared.by_name") as raised:
            recorded(kind(counts, only_computes))
        assert "changed by blocks.0; used by the code around them" in str(raised.value)
        with pytest.raises(FxPipeError, match=f"{LEFT}: self.shared.by_name"):
            recorded(kind(only_computes, counts))
    with pytest.raises(FxPipeError, match=f"{LEFT}: {__name__}.NUMBERS") as raised:
        recorded(NamesAGlobal(adds_to_a_global_list, only_computes))
    assert "used by the code around them" in str(raised.value)
    assert NUMBERS == []


class WithHooks(Blocks):
    """Has hooks as a LightningModule has, of which one uses a dict by a method."""

    def on_train_epoch_end(self) -> None:
        self.report()

    def report(self) -> Any:
        return self.shared.by_name


def appends(block: Block, x: Tensor) -> Tensor:
    block.shared.listed.append(1.0)
    return x


def test_values_that_modules_leave_where_hooks_read_them_are_refused_and_others_are_not() -> None:
    with pytest.raises(FxPipeError) as error:
        recorded(WithHooks(counts, appends))
    assert error.value.what == f"{LEFT}: self.shared.by_name['n']."
    assert error.value.observed == "changed by blocks.0; used by hooks, which run on every rank"
    recorded(WithHooks(appends, appends))


def test_code_that_tells_its_modules_where_they_are_is_refused() -> None:
    """It does not run on their ranks: they would find what was there before."""

    class Tells(Blocks):
        def forward(self, x: Tensor) -> Tensor:
            for number, block in enumerate(self.blocks):
                self.shared.by_name["n"] = number
                x = block(x)
            return x

    with pytest.raises(FxPipeError, match=f"{LEFT}: self.shared.by_name") as raised:
        recorded(Tells(divides, divides))
    assert "changed by the code around them" in str(raised.value)


def test_a_number_that_changes_the_result_of_a_module_on_made_up_data_is_refused() -> None:
    """There is no parameter that the result follows from."""

    class Last(Block):
        def forward(self, x: Tensor) -> Tensor:
            return self.does(self, x)

    model = Blocks(looks_and_counts, only_computes)
    model.blocks[1] = Last(looks_and_divides, model.shared)
    with pytest.raises(FxPipeError, match=f"{LEFT}: self.shared.by_name"):
        recorded(model)


def test_code_that_sets_a_flag_around_a_module_and_takes_it_back_is_refused() -> None:
    """After the recording it looked as if nothing had happened."""

    class Scopes(Blocks):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                self.shared.by_name["is on"] = block is self.blocks[1]
                x = block(x)
                del self.shared.by_name["is on"]
            return x

    with pytest.raises(FxPipeError, match=f"{LEFT}: self.shared.by_name") as raised:
        recorded(Scopes(uses_the_flag, uses_the_flag))
    assert "used by blocks.1" in str(raised.value)
    assert recorded(Scopes(only_computes, only_computes))


def test_modules_that_exchange_a_value_share_a_stage_with_the_module_around_them() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = Blocks(sets_a_flag, uses_the_flag), Blocks(only_computes, only_computes)

        def forward(self, x: Tensor) -> Tensor:
            return self.decoder(self.encoder(x))

    traced = trace_region(Model(), call_of(batch()), opened=("encoder", "decoder"))
    called = {str(node.target) for node in traced.graph.find_nodes(op="call_module")}
    assert called == {"encoder", "decoder.blocks.0", "decoder.blocks.1"}
    assert "self.encoder.shared.by_name['is on']" in traced.kept_whole["encoder"]


def test_code_that_reads_what_modules_write_and_computes_the_same_is_left_alone() -> None:
    class Reads(Blocks):
        def forward(self, x: Tensor) -> Tensor:
            if self.shared.by_name["n"] < 0:
                raise ValueError
            return super().forward(x)

    assert recorded(Reads(counts, only_computes))


def test_blocks_whose_counter_the_code_around_them_sets_back_are_refused() -> None:
    with pytest.raises(FxPipeError, match=f"{LEFT}: self.shared.by_name"):
        recorded(Resetting(counts_and_divides, counts_and_divides))
    assert recorded(Resetting(counts, only_computes))


def test_a_module_that_counts_on_one_that_it_is_no_part_of_is_refused() -> None:
    model = Blocks(counts_on_another, only_computes)
    model.blocks[0].known.append(model)
    with pytest.raises(FxPipeError, match=f"{LEFT}: self.count"):
        recorded(model)
    assert model.count == 0


def test_a_hook_knows_what_its_module_does_not() -> None:
    """It has the model, and what the model has."""

    class Scaled(Blocks):
        def __init__(self, *does: Callable[[Block, Tensor], Tensor]) -> None:
            super().__init__(*does)
            self.norms = [1.0]

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) / self.norms[-1]

    model = Scaled(only_computes, only_computes)
    model.blocks[0].register_forward_hook(lambda module, inputs, output: model.norms.append(output.norm().item()))
    with pytest.raises(FxPipeError, match=f"{LEFT}: self.norms"):
        recorded(model)
    assert model.norms == [1.0]

    class Plain(Scaled):
        forward = Blocks.forward

    model = Plain(only_computes, only_computes)
    model.blocks[0].register_forward_hook(lambda module, inputs, output: model.norms.append(2.0))
    model.blocks[1].register_forward_hook(lambda module, inputs, output: output / model.norms[-1])
    with pytest.raises(FxPipeError, match=f"{LEFT}: self.norms") as raised:
        recorded(model)
    assert "used by blocks.1" in str(raised.value)


@pytest.mark.parametrize(
    "does",
    [
        (counts, counts, only_computes),
        (adds_to_a_list, adds_to_a_list),
        (adds_to_a_class, adds_to_a_class),
        (adds_to_a_global_list, adds_to_a_global_list),
        (warns_once, warns_once, divides),
        (fills_a_cache, fills_a_cache),
        (looks_once, looks_once),
        (counts_for_itself, counts_for_itself),
        (counts_and_divides, only_computes),
    ],
    ids=["counter", "list", "class", "global list", "a flag set once", "a cache", "a first call", "its own", "one alone"],
)
def test_values_that_no_other_module_uses_are_left_alone(does: Any) -> None:
    """They are counts and notes, or the same in every run."""
    model = Blocks(*does)
    expected = [f"blocks.{index}" for index in range(len(does))]
    assert [node.target for node in recorded(model).graph.find_nodes(op="call_module", target=expected[0])] == expected[:1]
    assert vars(model.shared) == vars(Shared())


@pytest.mark.parametrize(("does", "num_recordings"), [(counts_for_itself, 2), (warns_once, 7), (counts, 7)])
def test_only_what_may_be_known_to_others_is_looked_at_again(
    does: Any, num_recordings: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph is recorded twice in any case."""
    runs = []
    plain = SharedState.of

    def noted(self: SharedState, path: str, module: nn.Module) -> Any:
        runs.append(path)
        return plain(self, path, module)

    monkeypatch.setattr(SharedState, "of", noted)
    recorded(Blocks(does, does))
    assert runs.count("blocks.0") == num_recordings
