"""Fixtures that all tests share."""

from __future__ import annotations

import os
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import pytest
import torch
import torch.distributed as dist
from xdist.scheduler import LoadScopeScheduling

from tests.ranks.pool import RankPool

pytest.register_assert_rewrite("tests.staging")
torch.set_num_threads(1)
hypothesis.settings.register_profile("any machine", deadline=None)  # how long an example takes says nothing about what it shows
hypothesis.settings.load_profile("any machine")


# These start processes. They run one after the other: more ranks than cores would only wait for each other.
_WITH_RANKS = (
    "tests/ranks/",
    "tests/lightning/test_scenarios.py::test_scenarios_in_two",
    "tests/zoo/test_steps.py",
    "tests/launch/test_launching.py",
    "tests/test_readme.py",
)

# Those among them that start processes of their own.
_WITH_OWN_RANKS = (
    "tests/ranks/test_failure.py",
    "tests/ranks/test_kills.py",
    "tests/launch/test_launching.py",
    "tests/test_readme.py",
)

# Tests with a case for each of many models, steps, orders or options, of which any few show the mechanism: the suite runs every
# n-th case, from the first on; the same every day, so that a failure is of the change. `.ci/all_tests.py` runs all.
_EVERY_NTH = {
    "tests/ranks/test_absent_gradients.py::test_gradients_that_one_device_lacks_are_none": 2,
    "tests/ranks/test_decoding.py::test_generated_tokens_are_those_of_one_device": 2,
    "tests/ranks/test_device_mesh.py::test_the_mesh_has_replicas_and_places": 2,
    "tests/ranks/test_example_input.py::test_calls_on_the_example_see_the_whole_model": 3,
    "tests/ranks/test_fitted_orders.py::test_every_rank_runs_the_order_for_the_plans_costs": 2,
    "tests/ranks/test_hook_gradients.py::test_gradients_of_a_hook_are_those_of_one_device": 2,
    "tests/ranks/test_late_calls.py::test_a_run_that_is_resumed_where_the_call_begins_is_that_of_one_device": 2,
    "tests/ranks/test_logged_loss.py::test_only_a_step_that_logs_its_loss_is_left_out": 4,
    "tests/ranks/test_logged_loss.py::test_what_the_model_changes_late_is_refused": 2,
    "tests/ranks/test_own_table.py::test_a_table_runs_word_for_word_and_equals_one_device": 3,
    "tests/ranks/test_shared_tensors.py::test_shared_state_is_that_of_one_device": 2,
    "tests/ranks/test_structure.py::test_a_change_in_the_model_has_its_effect": 3,
    "tests/planner/test_cut_rule.py::test_no_stage_is_much_heavier_than_it_has_to_be": 3,
    "tests/lightning/test_scenarios.py::test_a_scenario_is_that_of_plain_lightning": 2,
    "tests/pictures/test_figure.py::test_a_figure_of_any_number_of_ranks_is_drawn": 4,
    "tests/pictures/test_in_a_browser.py::test_timelines_and_memory_of_any_number_of_ranks_are_drawn": 3,
    "tests/planner/test_follow_plan.py::test_every_graph_of_the_model_gives_each_parameter_its_owner": 3,
    "tests/planner/test_planning.py::test_plan_has_exactly_the_stages_asked_for_and_every_parameter": 3,
    "tests/ranks/test_callbacks.py::test_a_callback_does_what_it_does_on_one_device": 6,
    "tests/ranks/test_chosen.py::test_what_is_chosen_equals_one_device": 3,
    "tests/ranks/test_first_trace.py::test_the_first_batch_is_that_of_one_device": 3,
    "tests/ranks/test_flags.py::test_an_argument_does_what_it_does_on_one_device": 6,
    "tests/ranks/test_optimizers.py::test_it_trains_as_on_one_device": 6,
    "tests/ranks/test_parity.py::test_equals_one_device": 3,
    "tests/ranks/test_recompute.py::test_dropout_is_the_same_when_a_block_runs_again": 3,
    "tests/ranks/test_recompute.py::test_equals_one_device_that_keeps_everything": 2,
    "tests/ranks/test_refusals.py::test_refused_at_a_later_batch": 6,
    "tests/ranks/test_skips.py::test_four_ranks_equal_one_device": 4,
    "tests/ranks/test_skips.py::test_stages_of_one_process_equal_one_device": 4,
    "tests/ranks/test_skips.py::test_stages_of_one_rank_give_each_other_what_they_have": 4,
    "tests/ranks/test_synchronisations.py::test_a_step_waits_once_on_the_last_stage_and_never_on_the_others": 3,
    "tests/ranks/test_training.py::test_trainer_options_give_the_same_run": 6,
    "tests/schedules/test_split_backward.py::test_gradients_are_those_of_one_device": 4,
    "tests/stages/test_build.py::test_stages_equal_the_whole_model": 6,
    "tests/stages/test_build_properties.py::test_every_mask_is_exact_however_far_it_is_from_its_uses": 4,
    "tests/strategy/test_one_device.py::test_several_stages_share_the_device": 3,
    "tests/strategy/test_set_before_call.py::test_a_number_is_recorded_twice_and_then_an_input": 3,
    "tests/strategy/test_set_before_call.py::test_a_number_handed_from_call_to_call_is_an_input": 3,
    "tests/strategy/test_set_before_call.py::test_what_a_forward_sets_for_its_submodules_counts": 3,
    "tests/strategy/test_set_before_call.py::test_what_the_step_sets_between_its_calls_counts_in_the_next": 5,
    "tests/strategy/test_set_before_call.py::test_what_the_step_sets_counts_in_its_own_call": 4,
    "tests/user_code/test_placement.py::test_the_plan_is_that_of_a_run_on_the_cpu": 4,
    "tests/user_code/test_placement.py::test_the_strategy_plans_for_its_device": 3,
    "tests/zoo/test_steps.py::test_equal_or_refused": 6,
    "tests/zoo/test_zoo.py::test_stages_equal_the_whole_model": 6,
}

# Half a minute each, and more, for what shorter tests show, too, in parts.
_LONG = (
    "tests/planner/test_layouts.py::test_replicas_that_share_out_the_optimizer_fit_where_others_do_not_and_send_half_as_much_again",
    "tests/planner/test_layouts.py::test_replicas_win_where_gradients_travel_fast_and_stages_where_they_do_not",
    "tests/planner/test_layouts.py::test_the_fastest_fits_the_memory_even_where_others_are_faster",
    "tests/planner/test_layouts.py::test_microbatches_are_those_of_the_default_where_batch_norm_normalises_over_one",
    "tests/ranks/test_chosen.py::test_the_number_of_microbatches_is_the_usual_one_where_there_is_batch_norm",
    "tests/ranks/test_failure.py::test_a_fault_ends_the_run_on_all_ranks[replicas]",
    "tests/ranks/test_materialise.py::test_a_checkpoint_gives_a_module_without_data_its_values",
    "tests/ranks/test_own_table.py::test_layers_are_timed_and_recomputed_for_a_table",
    "tests/ranks/test_recompute.py::test_where_there_is_room_nothing_is_recomputed",
    "tests/ranks/test_resume.py::test_a_checkpoint_of_several_stages_on_a_rank_goes_on_anywhere",
    "tests/gpu/test_two_devices.py::test_two_devices_equal_one_and_two_of_ddp[cpu]",
    "tests/ranks/test_after_run.py::test_a_script_of_several_runs_goes_as_on_one_device",
    "tests/ranks/test_after_run.py::test_the_module_stays_split_where_that_is_wished_or_memory_is_short",
    "tests/ranks/test_data.py::test_workers_draw_the_random_numbers_of_one_device_seeded_by_lightning_or_not",
    "tests/ranks/test_failure.py::test_a_process_that_ends_well_before_the_ranks_meet_is_not_waited_for",
    "tests/ranks/test_failure.py::test_an_error_of_a_started_process_is_told_once",
    "tests/ranks/test_failure.py::test_an_interrupt_of_the_main_process_ends_the_run_in_order",
    "tests/ranks/test_groups.py::test_a_run_that_is_over_leaves_no_threads_and_connections",
    "tests/ranks/test_held_tensors.py::test_what_a_step_takes_from_elsewhere_is_that_of_one_device",
    "tests/ranks/test_interleaved.py::test_which_batches_go_by_turns",
    "tests/ranks/test_loaders.py::test_batches_are_traced_as_they_come",
    "tests/ranks/test_many_runs.py::test_runs_leave_no_threads_and_connections",
    "tests/ranks/test_optimizer_states.py::test_states_of_all_kinds_come_back",
    "tests/ranks/test_pytorch_lightning.py::test_runs_are_those_of_one_device_under_the_other_name",
    "tests/ranks/test_recording.py::test_a_recorded_run_has_the_same_parameters_bit_by_bit",
    "tests/ranks/test_row_numbers.py::test_numbers_of_samples_are_those_of_one_device",
    "tests/ranks/test_setup.py::test_tensors_of_all_dtypes",
    "tests/ranks/test_sparing.py::test_a_rank_whose_stage_needs_no_data_does_not_load_it",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--shard``: `.ci/all_tests.py` runs every test, slow or not, one part after the other."""
    parser.addoption("--shard", metavar="I/N", help="run the I-th of N parts of all tests, slow ones too; give -m '' with it")


@pytest.hookimpl(tryfirst=True)  # before tests are left out by their markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks as slow what the suite leaves out.

    With a torch that runs one process only, tests that start ranks are skipped; with one that cannot, those of orders that go
    by turns.
    """
    if shard := config.getoption("--shard"):
        number, num_parts = map(int, shard.split("/"))
        others = [item for item in items if zlib.crc32(item.nodeid.encode()) % num_parts != number - 1]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in {*others}]
    num_cases: Counter[str] = Counter()
    for item in items:
        test = item.nodeid.partition("[")[0]
        if item.get_closest_marker("slow") is None and test in _EVERY_NTH:
            if num_cases[test] % _EVERY_NTH[test]:
                item.add_marker(pytest.mark.slow)
            num_cases[test] += 1
        if item.nodeid.startswith(_LONG):
            item.add_marker(pytest.mark.slow)


class _RanksApart(LoadScopeScheduling):
    """One worker has all tests that start ranks, the others share the rest."""

    def _split_scope(self, nodeid: str) -> str:
        is_apart = nodeid.startswith(_WITH_RANKS) and not nodeid.startswith(_WITH_OWN_RANKS)
        return "ranks" if is_apart else nodeid.partition("::")[0]


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
