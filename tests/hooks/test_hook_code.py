"""Methods of instances are replaced on their classes."""

from __future__ import annotations

import copy
import pickle
from typing import Any

from lightning_fxpipe._compat.torch import patched_attributes
from lightning_fxpipe.hooks.hook_code import on_classes


class Owner:
    """Has a hook."""

    def hook(self) -> str:
        return "original"


def test_replaced_methods_are_not_in_the_instance() -> None:
    """There they could not be pickled, and a copy of the instance would call them for the original."""
    one, other, third = Owner(), Owner(), Owner()
    patches: list[tuple[Any, str, Any]] = [(one, "hook", lambda: "one"), (other, "hook", lambda: "other")]
    with patched_attributes(*on_classes(patches)):
        assert (one.hook(), other.hook(), third.hook()) == ("one", "other", "original")
        assert copy.deepcopy(one).hook() == "original"
        assert pickle.loads(pickle.dumps(one)).hook() == "original"
    assert one.hook() == "original"


def test_a_method_that_the_instance_has_itself_is_replaced_there() -> None:
    owner = Owner()
    vars(owner)["hook"] = lambda: "its own"
    with patched_attributes(*on_classes([(owner, "hook", lambda: "replaced")])):
        assert owner.hook() == "replaced"
    assert owner.hook() == "its own"
