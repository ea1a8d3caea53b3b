"""A run that is killed at any moment goes on, with another number of stages, from its last finished checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.ranks.kills import Case, random_cases, run_cases

CASES = [
    Case(stages=2, resumed=1, rank=0, at=40, all_at_once=True, async_save=False, save_last=True, can_exchange=False),
    Case(stages=2, resumed=3, rank=1, at=16, all_at_once=False, async_save=True, save_last="link", can_exchange=True),
]


def check(cases: Sequence[Case]) -> None:
    wrong = []
    for number, (case, outcome) in enumerate(run_cases(cases)):
        print(number, case, outcome)
        wrong += [f"{case}: {outcome}"] if outcome.complaints else []
    assert not wrong, f"{len(wrong)} of {len(cases)} kills:\n" + "\n".join(wrong)


def test_killed_runs_go_on() -> None:
    check(CASES)


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_runs_that_are_killed_at_random_moments_go_on() -> None:
    check(random_cases(1, 30))
