"""Fixtures that all tests share."""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from xdist.scheduler import LoadScopeScheduling

from tests.ranks.pool import RankPool

pytest.register_assert_rewrite("tests.staging")
torch.set_num_threads(1)


# These start processes. They run one after the other: more ranks than cores would only wait for each other.
_WITH_RANKS = (
    "tests/ranks/",
    "tests/lightning/test_scenarios.py::test_scenarios_in_two",
    "tests/zoo/test_steps.py",
    "tests/launch/test_launching.py",
    "tests/test_readme.py",
)

# Stages of one process whose microbatches go forward and backward by turns (support.check_order).
_BY_TURNS = ("tests/schedules/test_split_backward.py", "tests/_compat/test_pipelining.py")


# Tests with a case for each of many models, steps or options, of which any few show the mechanism. The suite runs a fixed part
# of their cases, the same every day, so that a failure is of the change; `.ci/all_tests.py` runs all.
_FAMILY_PARTS = 6
_FAMILIES = (
    "tests/zoo/test_steps.py::test_equal_or_refused",
    "tests/zoo/test_zoo.py::test_stages_equal_the_whole_model",
    "tests/stages/test_build.py::test_stages_equal_the_whole_model",
    "tests/ranks/test_callbacks.py::test_a_callback_does_what_it_does_on_one_device",
    "tests/ranks/test_flags.py::test_an_argument_does_what_it_does_on_one_device",
    "tests/ranks/test_optimizers.py::test_it_trains_as_on_one_device",
    "tests/ranks/test_training.py::test_trainer_options_give_the_same_run",
    "tests/ranks/test_refusals.py::test_refused_at_a_later_batch",
    # Half a minute each, for what shorter tests show, too, in parts.
    "tests/ranks/test_after_run.py::test_a_script_of_several_runs_goes_as_on_one_device",
    "tests/ranks/test_coupled_optimizers.py::test_it_trains_as_on_one_device",
    "tests/ranks/test_data.py::test_workers_draw_the_random_numbers_of_one_device_seeded_by_lightning_or_not",
    "tests/ranks/test_failure.py::test_a_process_that_ends_well_before_the_ranks_meet_is_not_waited_for",
    "tests/ranks/test_failure.py::test_an_error_of_a_started_process_is_told_once",
    "tests/ranks/test_failure.py::test_an_interrupt_of_the_main_process_ends_the_run_in_order",
    "tests/ranks/test_first_batch.py::test_the_data_of_a_run_is_that_of_one_device",
    "tests/ranks/test_groups.py::test_a_run_that_is_over_leaves_no_threads_and_connections",
    "tests/ranks/test_held_tensors.py::test_what_a_step_takes_from_elsewhere_is_that_of_one_device",
    "tests/ranks/test_hooks.py::test_traces_of_every_hook_are_the_same_on_every_rank",
    "tests/ranks/test_interleaved.py::test_which_batches_go_by_turns",
    "tests/ranks/test_kept_state.py::test_its_statistics_go_where_they_are_used",
    "tests/ranks/test_loaders.py::test_batches_are_traced_as_they_come",
    "tests/ranks/test_materialise.py::test_a_module_without_data_gets_the_values_of_one_device",
    "tests/ranks/test_optimizer_states.py::test_states_of_all_kinds_come_back",
    "tests/ranks/test_pytorch_lightning.py::test_runs_are_those_of_one_device_under_the_other_name",
    "tests/ranks/test_resume.py::test_every_checkpoint_goes_on_everywhere",
    "tests/ranks/test_after_run.py::test_the_module_stays_split_where_that_is_wished_or_memory_is_short",
    "tests/ranks/test_setup.py::test_tensors_of_all_dtypes",
    "tests/ranks/test_setup.py::test_late_layers",
    "tests/ranks/test_row_numbers.py::test_numbers_of_samples_are_those_of_one_device",
    "tests/ranks/test_sparing.py::test_a_rank_whose_stage_needs_no_data_does_not_load_it",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--shard``: `.ci/all_tests.py` runs every test, slow or not, one part after the other."""
    parser.addoption("--shard", metavar="I/N", help="run the I-th of N parts of all tests, slow ones too; give -m '' with it")


@pytest.hookimpl(tryfirst=True)  # before tests are left out by their markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks as slow the cases of the families that the suite leaves out.

    With a torch that runs one process only, tests that start ranks are skipped; with one that cannot, those of orders that go
    by turns.
    """
    if shard := config.getoption("--shard"):
        number, num_parts = map(int, shard.split("/"))
        others = [item for item in items if not _is_in_part(item, num_parts, number)]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in {*others}]
    for item in items:
        if item.nodeid.startswith(_FAMILIES) and not _is_in_part(item, _FAMILY_PARTS):
            item.add_marker(pytest.mark.slow)
    if torch.__version__ < (2, 13):
        for item in items:
            if item.nodeid.startswith(_WITH_RANKS):
                item.add_marker(pytest.mark.skip(reason=f"torch {torch.__version__} runs one process"))
            elif torch.__version__ < (2, 12) and item.nodeid.startswith(_BY_TURNS):
                item.add_marker(pytest.mark.skip(reason=f"torch {torch.__version__} runs stages of one device one way"))


def _is_in_part(item: pytest.Item, num_parts: int, number: int = 1) -> bool:
    return zlib.crc32(item.nodeid.encode()) % num_parts == number - 1


class _RanksApart(LoadScopeScheduling):
    """One worker has all tests that start ranks, the others share the rest."""

    def _split_scope(self, nodeid: str) -> str:
        return "ranks" if nodeid.startswith(_WITH_RANKS) else nodeid.partition("::")[0]


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """Which worker runs which test."""
    return _RanksApart(config, log)


@pytest.fixture(autouse=True)
def same_excepthook() -> Iterator[None]:
    """Each start of a process group, and each refusal, puts a function of its own around the one that prints errors."""
    before = sys.excepthook
    yield
    sys.excepthook = before


@pytest.fixture(autouse=True)
def no_run_left() -> Iterator[None]:
    """A run in this process leaves its process group, and the rendezvous' port in the environment, for runs that follow.

    The next test may make a group of its own, and a script that it starts would take the port for that of its ranks.
    """
    before, had_group = dict(os.environ), dist.is_initialized()
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)
    if dist.is_initialized() and not had_group:
        dist.destroy_process_group()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """``ranks(world_size)``: the session's processes, started when first asked for, anew after a failure."""
    pools: dict[int, RankPool] = {}

    def get(world_size: int) -> RankPool:
        pool = pools.get(world_size)
        if pool is None or not pool.is_alive:
            pool = pools[world_size] = RankPool(world_size)
        return pool

    yield get
    for pool in pools.values():
        pool.kill()
