"""Which module has made which tensor."""

from __future__ import annotations

import torch

from lightning_fxpipe.tracing.made_tensors import MadeTensors


def test_a_tensor_is_known_by_the_last_who_made_it_until_it_is_forgotten() -> None:
    made, one, other = MadeTensors(), torch.ones(2), torch.ones(2)
    made.add(one, "first")
    made.add(one, "second")
    assert (made.maker(one), made.maker(other)) == ("second", None)
    made.forget(one)
    made.forget(other)
    assert made.maker(one) is None


def test_a_tensor_with_the_id_of_one_that_is_gone_is_another_one() -> None:
    made, numbers = MadeTensors(), set()
    for _ in range(50):
        tensor = torch.ones(1)
        made.add(tensor, "gone")
        numbers.add(id(tensor))
        del tensor
    later = [torch.ones(1) for _ in range(50)]
    assert any(id(tensor) in numbers for tensor in later)
    assert [made.maker(tensor) for tensor in later] == [None] * len(later)
