"""Whether batches go forward and backward by turns: asked for, or worth it, and only where the loss allows it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_fxpipe import UnsupportedError
from lightning_fxpipe.distributed.topology import Placement, Topology
from lightning_fxpipe.microbatch.loss_weights import Finding, LossOptions, LossReduction, Verdict
from lightning_fxpipe.runtime import schedule_choice
from lightning_fxpipe.runtime.schedule_choice import Interleaving
from lightning_fxpipe.schedules.by_name import SCHEDULES, ScheduleName

ALONE = Topology(group=None, control_group=None, rank=0, placement=Placement(num_ranks=1), device=torch.device("cpu"))
SETUP: Any = SimpleNamespace(num_microbatches=4)
FITS = Finding(verdict=Verdict.FITS, reduction=LossReduction.SUM)
DIFFERS = Finding(verdict=Verdict.DIFFERS, observed="3 for the whole batch")
UNCLEAR = Finding(verdict=Verdict.UNCLEAR)


class Decision:
    """One rank's, with what it has said."""

    def __init__(self, schedule: ScheduleName, options: LossOptions | None = None, **more: Any) -> None:
        self.said: list[str] = []
        self.warned: list[str] = []
        self.undone_together: list[bool] = []
        log: Any = SimpleNamespace(inform=self.said.append, warn=self.warned.append)
        self.made = Interleaving(
            schedule=SCHEDULES[schedule], options=options or LossOptions(), topology=ALONE, log=log, **more
        )

    def by(self, finding: Finding, *, saved_bytes: int = 0, parameters: list[nn.Parameter] | None = None) -> Interleaving:
        def compare(*_: Any, undoes_together: bool) -> Finding:
            self.undone_together.append(undoes_together)
            return finding

        tail: Any = SimpleNamespace(compare=compare, microbatches=[], sizes=[1])
        self.made.decide(SETUP, saved_bytes, parameters or [], tail, ())
        return self.made


@pytest.fixture(autouse=True)
def thousand_bytes_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule_choice, "memory_for_rank", lambda device, num_ranks: 1000)


def test_gpipe_never_does() -> None:
    assert not Decision("gpipe").made.may_be


@pytest.mark.parametrize("schedule", ["auto", "1f1b"])
def test_nothing_is_decided_before_a_batch_is_looked_at(schedule: ScheduleName) -> None:
    made = Decision(schedule).made
    assert made.may_be
    assert not made.is_on


def test_who_asks_for_it_gets_it_whatever_memory_there_is() -> None:
    decision = Decision("1f1b")
    assert decision.by(FITS).is_on
    assert decision.said == decision.warned == []


def test_only_what_has_changed_nothing_is_undone_together() -> None:
    decision = Decision("1f1b")
    for finding in (replace(FITS, changes_nothing=True), FITS, FITS):
        decision.by(finding)
    assert decision.undone_together == [False, True, False]


def test_auto_does_not_look_again_where_memory_does() -> None:
    decision = Decision("auto")
    assert not decision.by(FITS, saved_bytes=125).may_be  # four microbatches, and a half of what is left
    assert decision.said == []


def test_auto_takes_it_where_activations_take_much_of_what_is_left() -> None:
    decision = Decision("auto")
    assert decision.by(FITS, saved_bytes=126).is_on
    assert 'selected "1f1b"' in decision.said[0]


def test_gradients_and_optimizer_states_are_still_to_come() -> None:
    parameters = [nn.Parameter(torch.zeros(25))]  # 100 bytes
    assert not Decision("auto").by(FITS, saved_bytes=87, parameters=parameters).may_be
    assert Decision("auto").by(FITS, saved_bytes=88, parameters=parameters).is_on
    parameters[0].grad = torch.zeros(25)
    assert not Decision("auto").by(FITS, saved_bytes=88, parameters=parameters).may_be


def test_a_replicas_share_of_the_optimizer_states_is_less() -> None:
    parameters = [nn.Parameter(torch.zeros(25))]
    shared = {"optimizer_bytes_per_byte": 0.5}
    assert not Decision("auto", **shared).by(FITS, saved_bytes=106, parameters=parameters).may_be
    assert Decision("auto", **shared).by(FITS, saved_bytes=107, parameters=parameters).is_on


def test_where_nobody_knows_the_memory_auto_is_gpipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule_choice, "memory_for_rank", lambda device, num_ranks: None)
    assert not Decision("auto").by(FITS, saved_bytes=2**60).may_be


def test_once_it_is_on_a_smaller_trace_does_not_end_it() -> None:
    decision = Decision("auto")
    decision.by(FITS, saved_bytes=126)
    assert decision.by(FITS, saved_bytes=1).is_on
    assert not decision.by(DIFFERS, saved_bytes=1).may_be


def test_auto_warns_of_a_loss_that_does_not_allow_it() -> None:
    decision = Decision("auto")
    assert not decision.by(DIFFERS, saved_bytes=126).may_be
    assert "3 for the whole batch" in decision.warned[0]


@pytest.mark.parametrize("schedule", ["auto", "1f1b"])
def test_a_batch_that_tells_nothing_leaves_it_open(schedule: ScheduleName) -> None:
    decision = Decision(schedule)
    made = decision.by(UNCLEAR, saved_bytes=126)
    assert made.may_be
    assert not made.is_on
    assert decision.by(FITS, saved_bytes=126).is_on


def test_who_asks_for_it_gets_an_error_with_the_numbers() -> None:
    with pytest.raises(UnsupportedError, match=r"(?s)3 for the whole batch.*schedule=\"gpipe\""):
        Decision("1f1b").by(DIFFERS)


def test_a_wrong_loss_reduction_is_named() -> None:
    decision = Decision("1f1b", LossOptions(reduction=LossReduction.MEAN))
    differs = Finding(verdict=Verdict.DIFFERS, reduction=LossReduction.SUM, observed="3")
    with pytest.raises(UnsupportedError, match="loss_reduction='sum'"):
        decision.by(differs)


def test_a_later_batch_that_tells_nothing_changes_nothing() -> None:
    decision = Decision("1f1b")
    assert decision.by(FITS).is_on
    assert decision.by(UNCLEAR).is_on


def test_a_step_that_only_logs_its_loss_is_looked_at_again() -> None:
    made = Decision("1f1b").by(replace(FITS, only_logs_loss=True))
    looks = [made.must_look() for _ in range(schedule_choice._BATCHES_BETWEEN_LOOKS + 1)]
    assert looks == [False] * schedule_choice._BATCHES_BETWEEN_LOOKS + [True]
