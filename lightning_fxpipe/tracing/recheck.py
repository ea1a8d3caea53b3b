"""A trace in use is recorded again from time to time, and compared: the net below all guards.

Guards compare the values that recorded code is seen to read. It can also read values out of their sight: a file, a property of
a metaclass, a module of ``sys.modules``. It would keep those of the first recording, unnoticed. So it is recorded again at the

    2nd, 8th, 32nd, 128th, 512th, ... use of a trace,

which costs little in all, and the run ends where other calls follow from it, or other constants.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from itertools import zip_longest

import torch
from torch import Tensor, fx

from lightning_fxpipe.errors import UnsupportedError
from lightning_fxpipe.tracing.confirmation import compared_calls
from lightning_fxpipe.tracing.recordable import Recordable, RegionCall
from lightning_fxpipe.tracing.trace import TracedRegion, trace_region

_logger = logging.getLogger("lightning_fxpipe")


def is_recheck_due(num_uses: int) -> bool:
    """Returns True at the uses of a trace, counted from 1, at which it is recorded again."""
    return num_uses.bit_count() == 1 and num_uses.bit_length() % 2 == 0  # 2 times a power of 4


def recheck(traced: TracedRegion, call: Recordable) -> None:
    """Records a call that a trace computes once more, and compares both.

    Args:
        traced: The trace.
        call: The call, with real tensors.

    Raises:
        UnsupportedError: The recorded code makes other calls now, or has other constants.
        TraceError: It cannot be recorded any more.
    """
    call = replace(call, varying=traced.varying, numbers=tuple(traced.numbers.places.values()))
    if isinstance(call, RegionCall):
        wanted = tuple(index in traced.wanted for index in range(traced.output_structure.num_tensors))
        call = replace(call, wanted=wanted)
    again = trace_region(traced.root, call, opened=traced.opened, device=traced.device, earlier=traced)
    if str(again.input_shapes) != str(traced.input_shapes):
        _logger.debug("The recordings of %s are not compared: their sizes are symbols in other places", call.label)
        return
    differing: list[tuple[fx.Node | None, str]] = [
        (node, f"{_words(now)} now, {_words(before)} in the trace")
        for before, now, node in zip_longest(traced.recording.calls, again.recording.calls, compared_calls(again.graph))
        if before != now
    ]
    constants = traced.held.constants
    differing += [
        (next(iter(node.users), node), f"other values in a tensor of shape {tuple(now.shape)}")
        for node in again.graph.nodes
        if (now := again.held.constants.get(str(node.target))) is not None
        and not _is_same(constants.get(str(node.target), now), now)
    ]
    for node, observed in differing:
        source = None if node is None else node.meta.get("source")
        raise _other_code(call, source or call.source(traced.root), observed)


def _is_same(before: Tensor, now: Tensor) -> bool:
    if before is now or before.is_meta or now.is_meta:
        return True
    try:
        torch.testing.assert_close(now, before, rtol=0, atol=0, equal_nan=True, check_device=False)
    except AssertionError:
        return False
    return True


def _words(recorded: tuple[str, str, str] | None) -> str:
    if recorded is None:
        return "nothing"
    _, name, arguments = recorded
    return f"{name} {arguments}"


def _other_code(call: Recordable, source: str, observed: str) -> UnsupportedError:
    return UnsupportedError(
        "Traced code computes something else than when it was traced, and no reason for it can be seen.",
        where=f"{call.label}, {source}",
        observed=observed,
        expected="code that follows from its inputs, and from attributes, global variables and the Trainer's state, all of "
        "which are compared before each batch",
        todo="Have a hook, such as on_train_batch_start, read the value (from a file, a metaclass, sys.modules) and set it as "
        "an attribute of the module. Batches since the trace was made may have been computed with the old value.",
    )
