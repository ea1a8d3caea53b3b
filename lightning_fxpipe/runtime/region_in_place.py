"""The region in place of the step's calls of the model, be it one call or several."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from lightning_fxpipe.microbatch.draws import BatchDraws
from lightning_fxpipe.runtime.replay import Replay, StepMode, watched_step
from lightning_fxpipe.tracing.region import replaced_region
from lightning_fxpipe.tracing.trace import TracedRegion


@contextmanager
def region_in_place(
    root: nn.Module,
    traced: TracedRegion,
    sizes: Mapping[Any, int],
    *,
    device_type: str,
    arguments: tuple[Any, Sequence[Any]],
    draws: BatchDraws,
    inputs: Callable[[tuple[Any, ...], dict[str, Any]], list[Tensor]],
    run: Callable[[list[Tensor]], list[Tensor]],
    written: set[int] | None = None,
) -> Iterator[StepMode]:
    """In the block, the step, ``run`` gives what the region's calls return.

    Args:
        root: The LightningModule.
        traced: The region.
        sizes: Values of its symbols.
        device_type: Of this rank's device.
        arguments: The step's: the batch, and those after its index.
        draws: Makes what the step draws.
        inputs: The region's inputs in the arguments of its call, where it is one call.
        run: The region's outputs for its inputs.
        written: Gets the memory into which the step's calls write.

    Yields:
        The watch over the step's calls.
    """
    if traced.record is not None:
        replay = Replay(root, traced, sizes, device_type=device_type, draws=draws, run=run, written=written)
        with replay.lead(arguments):
            yield replay
        return

    def run_region(*args: Any, **kwargs: Any) -> Any:
        found = inputs(args, kwargs)
        with mode.in_stage():
            outputs = run(found)
        return traced.result(outputs, sizes)

    path = traced.signature.path
    assert path is not None
    with watched_step(root, draws, written) as mode, replaced_region(root, path, run_region):
        yield mode
