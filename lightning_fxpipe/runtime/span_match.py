"""Does a step make the calls that a trace of several calls has? A dry run of the step's own code tells.

Its calls of the model return tensors without data, so that nothing is computed. The run ends where the last call is, or where
the step takes another path.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from torch import Tensor, nn

from lightning_fxpipe.errors import UnsupportedError
from lightning_fxpipe.microbatch.draws import BatchDraws
from lightning_fxpipe.pytree.shapes import Shapes
from lightning_fxpipe.runtime.replay import DryRunEnds, Replay
from lightning_fxpipe.stages.build import boundary_specs
from lightning_fxpipe.tracing.held_numbers import CallArgument
from lightning_fxpipe.tracing.prelude import PreludeFacts, dry_run_of_prelude
from lightning_fxpipe.tracing.region import StepCall
from lightning_fxpipe.tracing.set_between import SetBetween
from lightning_fxpipe.tracing.trace import TracedRegion
from lightning_fxpipe.user_code.iterators import StepIterators


@dataclass(frozen=True, kw_only=True)
class SpanMatch:
    """Findings of the dry run.

    Attributes:
        is_same: True if the step makes the trace's calls, with its constants and with tensors of its shapes.
        is_outdated: True if it makes these calls with such tensors, but the recorded code would read something else now.
        facts: What the code before the calls has done.
        other_numbers: Numbers that the step hands to its calls, where the trace has others as constants.
        exchanged: Tensors that the step hands to a call in place of those that the stages have.
        is_skipped: True if the step returns without the calls.
    """

    is_same: bool
    is_outdated: bool
    facts: PreludeFacts | None
    other_numbers: Sequence[CallArgument]
    exchanged: Mapping[str, Tensor]
    is_skipped: bool


def match_span(
    root: nn.Module,
    traced: TracedRegion,
    call: StepCall,
    shapes: Shapes,
    *,
    device_type: str,
    batch_dim: int,
    iterators: StepIterators,
    is_current: Callable[[], bool],
) -> SpanMatch:
    """Runs a step without its model.

    Args:
        root: The LightningModule.
        traced: The trace, which covers the shapes.
        call: The step.
        shapes: Of the tensors that the region gets.
        device_type: Of this rank's device.
        batch_dim: The batch's dimension of samples.
        iterators: Those that the step makes.
        is_current: Tells at the region's first call whether recorded code would read the same now.
    """
    sizes = traced.bind_sizes(shapes)
    assert sizes is not None
    exchanged: dict[str, Tensor] = {}
    expected = [spec.shape for spec in boundary_specs(traced.input_nodes, sizes)]
    is_same, is_outdated, is_skipped = True, False, True

    def compare(inputs: list[Tensor]) -> None:
        nonlocal is_same, is_outdated, is_skipped
        is_skipped = False
        with run.aside():
            is_same = [tuple(tensor.shape) for tensor in inputs] == expected
            is_outdated = is_same and not is_current()
        if not is_same:
            raise DryRunEnds

    trying = dry_run_of_prelude(root, call.function, call.args, call.kwargs)
    with suppress(DryRunEnds), trying as run, iterators.one_run(run.state):
        replay = Replay(
            root,
            traced,
            sizes,
            device_type=device_type,
            draws=BatchDraws(traced.batch_size, batch_dim),
            run=compare,
            exchanged=exchanged,
            between=SetBetween(root, run.state, is_step=lambda: True),
        )
        try:
            with replay.lead((run.args[0], run.args[2:])):
                call.function(*run.args, **run.kwargs)
        except UnsupportedError:
            is_same = is_outdated = False  # it takes another path
    fits = not replay.other_numbers and not replay.has_set_between and traced.holds_for(traced.numbers.now)
    return SpanMatch(
        is_same=is_same and not is_outdated and fits,
        is_outdated=is_outdated or (is_same and not fits),
        facts=run.facts,
        other_numbers=replay.other_numbers,
        exchanged=exchanged,
        is_skipped=is_skipped,
    )
