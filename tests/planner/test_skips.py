"""Which tensors go past stages, and that every stage still gets what it uses."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fxpipe.planner.skips import Skip, find_skips

# A tensor: its name, the stage that computes it, those that use it, and whether it trains.
Tensor = tuple[str, int, tuple[int, ...], bool]


def crossing_of(tensors: list[Tensor], num_stages: int) -> list[list[Any]]:
    return [
        [name for name, made, users, _ in tensors if made <= boundary < max(users, default=made)]
        for boundary in range(num_stages - 1)
    ]


def skips_of(tensors: list[Tensor], num_stages: int) -> tuple[Skip, ...]:
    uses: list[set[Any]] = [{name for name, _, users, _ in tensors if stage in users} for stage in range(num_stages)]
    trained = {name for name, *_, trains in tensors if trains}
    return find_skips(crossing_of(tensors, num_stages), uses, lambda node: str(node) in trained)


HIDDEN: list[Tensor] = [(f"h{stage}", stage, (stage + 1,), True) for stage in range(3)]


def test_tensor_goes_to_the_stage_that_uses_it() -> None:
    (skip,) = skips_of([*HIDDEN, ("skip", 0, (3,), True)], 4)
    assert (skip.number, skip.node, skip.source, skip.destination) == (0, "skip", 0, 3)
    assert [skip.passes(boundary) for boundary in range(3)] == [True, True, True]


def test_stage_that_uses_a_tensor_sends_it_on() -> None:
    hidden: list[Tensor] = [(f"h{stage}", stage, (stage + 1,), True) for stage in range(6)]
    found = skips_of([*hidden, ("skip", 0, (1, 4, 6), True)], 7)
    assert [(skip.source, skip.destination) for skip in found] == [(1, 4), (4, 6)]


def test_what_the_next_stage_uses_goes_from_stage_to_stage() -> None:
    assert skips_of([*HIDDEN, ("table", 0, (1, 2, 3), False)], 4) == ()


def test_boundary_keeps_a_tensor_that_trains_where_one_goes_past_it() -> None:
    """Two towers, of which the second begins in the stage after the first: nothing else crosses the boundary between."""
    tower: Tensor = ("tower", 0, (2,), True)
    assert skips_of([tower, ("other", 1, (2,), True)], 3) == ()
    # Neither does a mask tell the stage before that a gradient is to come.
    assert skips_of([tower, ("mask", 0, (1,), False), ("other", 1, (2,), True)], 3) == ()
    # But something that does not train may go past it.
    found = skips_of([("index", 0, (2,), False), ("mask", 0, (1,), False), ("other", 1, (2,), True)], 3)
    assert [skip.node for skip in found] == ["index"]


@st.composite
def chains(draw: st.DrawFn) -> tuple[list[Tensor], int]:
    num_stages = draw(st.integers(2, 7))
    tensors = []
    for index in range(draw(st.integers(1, 8))):
        made = draw(st.integers(0, num_stages - 2))
        users = draw(st.sets(st.integers(made + 1, num_stages - 1), min_size=1))
        tensors.append((f"t{index}", made, tuple(sorted(users)), draw(st.booleans())))
    return tensors, num_stages


@settings(max_examples=400, deadline=None)
@given(chains())
def test_every_stage_has_what_it_uses_and_sends_what_it_has(case: tuple[list[Tensor], int]) -> None:
    tensors, num_stages = case
    crossing, skips = crossing_of(tensors, num_stages), skips_of(tensors, num_stages)
    assert [skip.number for skip in skips] == [*range(len(skips))]
    staying = [
        [node for node in nodes if not any(skip.node == node and skip.passes(boundary) for skip in skips)]
        for boundary, nodes in enumerate(crossing)
    ]
    num_messages = 0
    for name, made, users, trains in tensors:
        has = {made}
        for stage in range(made, num_stages):
            targets = [skip.destination for skip in skips if (skip.node, skip.source) == (name, stage)]
            targets += [stage + 1] if stage < num_stages - 1 and name in staying[stage] else []
            assert len(targets) <= 1  # so its gradient comes from one stage
            assert not targets or stage in has
            assert not targets or targets[0] in users or targets == [stage + 1]
            has |= {*targets}
            num_messages += len(targets)
        assert has >= {*users}
        for boundary in range(num_stages - 1):
            if name in crossing[boundary] and name not in staying[boundary]:
                assert any(other_trains >= trains for other, *_, other_trains in tensors if other in staying[boundary])
    assert num_messages <= sum(map(len, crossing))
