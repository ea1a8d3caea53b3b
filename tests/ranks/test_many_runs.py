"""A process with many runs, as a search for hyperparameters has, keeps the threads and connections of one."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning as L
import pytest

from lightning_fxpipe import FxPipeStrategy
from tests.lit import LitModel, make_loader, make_trainer
from tests.livebytes import without_garbage
from tests.ranks.pool import RankPool

Counts = tuple[int, int]


class Fails(L.Callback):
    def on_train_batch_end(self, *_: Any) -> None:
        raise ArithmeticError("in user code, on every rank")


def fit(model: str, num_stages: int, folder: Path) -> None:
    trainer = make_trainer(
        strategy=FxPipeStrategy(async_save=True),
        devices=num_stages,
        max_epochs=1,
        limit_train_batches=2,
        limit_val_batches=1,
        enable_checkpointing=True,
        default_root_dir=str(folder),
    )
    trainer.fit(LitModel(model), make_loader(model), make_loader(model))


def counts_after_fits(num: int, model: str, num_stages: int, folder: str) -> list[Counts]:
    """Threads and descriptors of this process after each run, none of which is collected as garbage."""
    found: list[Counts] = []
    with without_garbage():  # else the counts would depend on when Python last looked; no script of users asks for it
        for number in range(num):
            fit(model, num_stages, Path(folder) / str(number))
            found.append(counts_when_settled(most_of_first(found)) if found else counts_now())
    return found


def counts_now() -> Counts:
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def most_of_first(counts: list[Counts]) -> Counts:
    """The first runs load libraries, and have threads started that stay."""
    threads, files = zip(*counts[:3], strict=True)
    return max(threads), max(files)


def counts_when_settled(before: Counts, limit_seconds: float = 5.0) -> Counts:
    """The counts, as soon as they are no higher than before: a thread that has done its work needs a moment to end."""
    end = time.monotonic() + limit_seconds
    counts = counts_now()
    while any(now > then for now, then in zip(counts, before, strict=True)) and time.monotonic() < end:
        time.sleep(0.02)
        counts = counts_now()
    return counts


def groups_after_fits() -> list[bool]:
    """Whether each run had the process groups of the one before; of these the third fails."""
    groups: list[Any] = []
    for number in range(6):
        strategy = FxPipeStrategy(timeout=1800 if number < 5 else 600)
        trainer = make_trainer(
            strategy=strategy, devices=2, max_epochs=1, limit_train_batches=1, callbacks=[Fails()] if number == 2 else []
        )
        with suppress(ArithmeticError):
            trainer.fit(LitModel("mlp"), make_loader("mlp"))
        groups.append(strategy.topology.group)
    return [mine is before for before, mine in zip(groups, groups[1:], strict=False)]


def assert_flat(counts: list[Counts]) -> None:
    most = most_of_first(counts)
    assert all(now <= before for count in counts[3:] for now, before in zip(count, most, strict=True)), counts


# "gpt": two stages hold the embedding.
@pytest.mark.parametrize("num", [12, pytest.param(50, marks=pytest.mark.slow)])
def test_runs_leave_no_threads_and_connections(ranks: Callable[[int], RankPool], tmp_path: Path, num: int) -> None:
    for counts in ranks(2).run(counts_after_fits, num, "gpt", 2, str(tmp_path), timeout_seconds=280):
        assert_flat(counts)


def test_runs_on_one_device_leave_no_threads_and_connections(tmp_path: Path) -> None:
    assert_flat(counts_after_fits(6, "mlp", 1, str(tmp_path)))


def test_runs_share_their_groups_until_one_fails(ranks: Callable[[int], RankPool]) -> None:
    """Ranks that a failed run has left may have stopped at different places, with messages of theirs still on their way."""
    for shared in ranks(2).run(groups_after_fits):
        assert shared == [True, True, False, True, False]
