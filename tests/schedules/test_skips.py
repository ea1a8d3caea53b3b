"""Messages of skips, without any: what is asked for and sent, when, and who waits for what."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_fxpipe.distributed import commands
from lightning_fxpipe.recording import alignment
from lightning_fxpipe.schedules import skips
from lightning_fxpipe.schedules.places import Place, SkipEnd
from lightning_fxpipe.schedules.skips import SkipGradients, SkipMessages, around
from lightning_fxpipe.stages.build import TensorSpec

TAG = 1 << 16
SPEC = TensorSpec(shape=(2,), dtype=torch.float32, requires_grad=True)
HERE, THERE = SkipEnd(number=0, rank=None, spec=SPEC), SkipEnd(number=1, rank=3, spec=SPEC)
Said = list[tuple[str, int]]


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Said:
    """What is asked for, sent and waited for, by tag; a message brings its tag."""
    found: Said = []

    class Work:
        def __init__(self, tag: int) -> None:
            self.tag = tag

        def wait(self) -> None:
            found.append(("wait", self.tag))

    def irecv(buffer: Tensor, *, group: Any, group_src: int, tag: int) -> Work:
        assert group_src == 3
        found.append(("ask", tag))
        buffer.fill_(tag)
        return Work(tag)

    def isend(tensor: Tensor, *, group: Any, group_dst: int, tag: int) -> Work:
        assert group_dst == 3
        found.append(("send", tag))
        return Work(tag)

    monkeypatch.setattr(skips.dist, "irecv", irecv)
    monkeypatch.setattr(skips.dist, "isend", isend)
    return found


def messages(**options: Any) -> SkipMessages:
    return SkipMessages(num_microbatches=4, device=torch.device("cpu"), group=None, **options)


def test_stage_of_the_same_rank_is_given_the_tensor(said: Said) -> None:
    channel, tensor = messages(), torch.ones(2)
    channel.send([HERE], 1, [tensor])
    assert channel.receive([HERE], 1)[0] is tensor
    assert said == []


def test_each_message_has_a_tag_of_its_own_and_the_next_is_asked_for_ahead(said: Said) -> None:
    channel = messages()
    other = SkipEnd(number=0, rank=3, spec=SPEC)
    channel.ask([THERE], 0)
    found = [channel.receive([other, THERE], index) for index in range(4)]
    tags = [[int(tensor[0]) - TAG for tensor in tensors] for tensors in found]
    assert tags == [[0, 4], [1, 5], [2, 6], [3, 7]]
    asked = [tag - TAG for what, tag in said if what == "ask"]
    assert sorted(asked) == [*range(8)]  # each once
    assert said.index(("ask", TAG + 5)) < said.index(("wait", TAG + 4))


def test_nothing_is_asked_for_twice_in_whatever_order_microbatches_come(said: Said) -> None:
    """What is asked for and not received would be taken from the next pass, which then waits for ever."""
    channel = messages()
    for _ in range(2):
        said.clear()
        channel.ask([THERE], 0)
        assert [int(channel.receive([THERE], index)[0][0]) - TAG for index in (0, 3, 1, 2)] == [4, 7, 5, 6]
        assert sorted(tag - TAG for what, tag in said if what == "ask") == [4, 5, 6, 7]
        channel.finish()


def test_no_other_message_has_such_a_tag() -> None:
    """A rank waits all the time for the next command, from any that may say one: what it gets is none of a skip's."""
    others = [module._TAG for module in (commands, alignment)]
    assert all(0 < tag < TAG for tag in others)
    assert len({*others}) == 2


def test_what_was_sent_is_waited_for_at_the_end_or_when_too_much_is_on_its_way(said: Said) -> None:
    for channel, first_wait in ((messages(), 4), (messages(num_kept=2), 2)):
        said.clear()
        for index in range(4):
            channel.send([THERE], index, [torch.zeros(2)])
        channel.finish()
        assert said.index(("wait", TAG + 4)) == first_wait
        assert [tag - TAG for what, tag in said if what == "wait"] == [4, 5, 6, 7]
        channel.finish()
        assert len(said) == 8


def test_a_pass_that_goes_one_way_knows_nothing_of_them(said: Said) -> None:
    """What comes by skips comes first; what leaves by them is not given to the next place."""
    place = Place(stage=2, index=2, received=(SPEC,), sent=(SPEC,), skips_in=(THERE,), skips_out=(HERE,))
    channel, seen = messages(), []

    def run(stage: int, index: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        seen.append([int(tensor[0]) % TAG for tensor in received])
        return torch.full((2,), 10.0), torch.full((2,), 20.0)

    (given,) = around(run, {2: place}, channel)(2, 3, (torch.full((2,), 9.0),))
    assert seen == [[7, 9]]
    assert int(given[0]) == 20
    assert int(channel.receive([HERE], 3)[0][0]) == 10


def test_what_torch_differentiates_has_the_skips_in_it(said: Said) -> None:
    fixed = SkipEnd(number=2, rank=3, spec=TensorSpec(shape=(2,), dtype=torch.float32, requires_grad=False))
    place = Place(stage=1, index=1, received=(SPEC,), sent=(SPEC,), skips_in=(THERE, fixed), skips_out=(HERE, fixed))
    onward, back = messages(), messages()
    of_place = SkipGradients(place, onward, back)
    leaf, without = of_place.receive(0)
    assert (leaf.is_leaf, leaf.requires_grad, without.requires_grad) == (True, True, False)
    known, sent = torch.ones(2, requires_grad=True), 3 * leaf
    of_place.send(0, [sent, torch.zeros(2)])
    assert not onward.receive([HERE], 0)[0].requires_grad
    back.send([HERE], 0, [torch.full((2,), 5.0)])
    arguments = {"stage_output": (known * 2,), "output_grads": (torch.ones(2),), "input_values": [known]}
    found = of_place.extended(0, arguments)
    assert len(arguments["input_values"]) == 1  # torch's own are as they were
    torch.autograd.backward(found["stage_output"], found["output_grads"])
    assert [tensor.grad.tolist() for tensor in found["input_values"]] == [[2, 2], [15, 15]]
    said.clear()
    of_place.send_back(0, [found["input_values"][1].grad])
    assert said == [("send", TAG + 4)]


def test_gradient_that_nobody_has_computed_is_sent_as_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(stage=1, index=1, received=(SPEC,), sent=(SPEC,), skips_in=(HERE,))
    onward, back = messages(), messages()
    of_place = SkipGradients(place, onward, back)
    onward.send([HERE], 2, [torch.ones(2)])
    of_place.receive(2)
    of_place.send_back(2, [None])
    assert back.receive([HERE], 2)[0].tolist() == [0, 0]
