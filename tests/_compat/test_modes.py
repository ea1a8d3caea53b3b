"""The stack of function modes does what the package takes it for."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from lightning_fxpipe._compat.modes import (
    TorchDispatchMode,
    function_mode_removed,
    has_function_mode,
    is_watched,
    makes_fakes,
    unwatched_torch,
    without_modes,
)


class Watching(TorchFunctionMode):
    """Lists the torch functions that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_a_mode_can_be_taken_off_for_a_while_wherever_it_lies() -> None:
    x = torch.ones(2)
    with Watching() as mode:
        torch.sin(x)
        with function_mode_removed(mode):
            torch.cos(x)
        torch.tan(x)
        with Watching() as above, function_mode_removed(mode):
            torch.exp(x)
        torch.tan(x)
    assert mode.seen == [torch.sin, torch.tan, torch.tan]
    assert above.seen == [torch.exp]


def test_it_is_known_whether_somebody_watches() -> None:
    assert not has_function_mode()
    with Watching():
        assert has_function_mode()
        with unwatched_torch(), Watching():
            pass
    assert not has_function_mode()


def test_those_who_watch_operators_count_as_well() -> None:
    class Below(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    assert not is_watched()
    with Watching():
        assert is_watched()
    with Below():
        assert is_watched()
        assert not has_function_mode()
    assert not is_watched()


def test_no_mode_sees_what_is_unwatched() -> None:
    x = torch.ones(2)
    with Watching() as mode:
        with unwatched_torch():
            torch.sin(x)
        torch.cos(x)
    assert mode.seen == [torch.cos]


def test_fakes_are_made_where_a_mode_of_theirs_is_on() -> None:
    assert not makes_fakes()
    with Watching():
        assert not makes_fakes()
        with FakeTensorMode():
            assert makes_fakes()
    assert not makes_fakes()


def test_tensors_have_data_where_no_mode_is_on() -> None:
    with torch.device("meta"), FakeTensorMode(), without_modes():
        assert torch.ones(2).tolist() == [1, 1]
