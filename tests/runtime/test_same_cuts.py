"""What happens where the ranks have recorded different graphs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lightning_fxpipe.errors import TraceError
from lightning_fxpipe.runtime import same_cuts
from lightning_fxpipe.runtime.same_cuts import check_same_cuts
from lightning_fxpipe.tracing.signals import CannotFollow


def test_a_step_that_can_run_on_one_rank_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code may look at buffers, of which each rank has those of its stage: then a training step is refused, no other."""

    def differ(group: Any, value: Any, error: Exception, reasons: Any) -> None:
        raise error

    monkeypatch.setattr(same_cuts, "check_agreement", differ)
    traced = SimpleNamespace(kept_whole={}, graph=SimpleNamespace(nodes=[]))
    chain = SimpleNamespace(traced=traced, units=[])
    assignment: Any = SimpleNamespace(chain=chain, num_stages=2, boundary=lambda stage: [])
    topology: Any = SimpleNamespace(control_group=None)
    with pytest.raises(TraceError, match="The ranks recorded different graphs of the same step"):
        check_same_cuts(assignment, topology)
    with pytest.raises(CannotFollow) as stopped:
        check_same_cuts(assignment, topology, may_run_whole=True)
    assert "buffer values" in str(stopped.value.reason)
