"""The user's optimizer over one stage: its state goes out and comes back under the names of the whole model."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import nn

from lightning_fxpipe import UnsupportedError
from lightning_fxpipe.optim.optimizers import StageOptimizer


def module_of_stage() -> nn.Sequential:
    """Of three layers this rank has the second."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2), nn.Linear(2, 2))
    for index in (0, 2):
        module[index].to("meta")
    return module


def trained(module: nn.Module) -> StageOptimizer:
    """After a step."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    mine = StageOptimizer(module, optimizer)
    for parameter in module.parameters():
        if not parameter.is_meta:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return mine


def test_states_are_saved_by_the_names_of_the_whole_model() -> None:
    saved = trained(module_of_stage()).state_dict()
    assert saved["state"].keys() == {"1.weight", "1.bias"}
    assert [group["params"] for group in saved["param_groups"]] == [
        [f"{i}.{name}" for i in range(3) for name in ("weight", "bias")]
    ]


def test_a_state_that_was_saved_comes_back() -> None:
    before = trained(module_of_stage())
    module = module_of_stage()
    after = StageOptimizer(module, torch.optim.AdamW(module.parameters(), lr=0.5))
    after.load(before.state_dict())
    assert after.optimizer.param_groups[0]["lr"] == 0.1
    moment = after.optimizer.state[module[1].weight]["exp_avg"]
    torch.testing.assert_close(moment, before.state_dict()["state"]["1.weight"]["exp_avg"])


OTHER: dict[str, Any] = {
    "another number of groups": lambda saved: {**saved, "param_groups": saved["param_groups"] * 2},
    "a group of another size": lambda saved: {
        **saved,
        "param_groups": [{**group, "params": group["params"][:-1]} for group in saved["param_groups"]],
    },
}


@pytest.mark.parametrize("what", OTHER)
def test_a_state_of_other_groups_is_refused(what: str) -> None:
    mine = trained(module_of_stage())
    with pytest.raises(ValueError, match="parameter group"):
        mine.load(OTHER[what](mine.state_dict()))


def test_a_parameter_of_no_module_is_refused() -> None:
    optimizer = torch.optim.SGD([*module_of_stage()[1].parameters(), nn.Parameter(torch.ones(7))], lr=0.1)
    module = module_of_stage()
    with pytest.raises(UnsupportedError, match="a parameter that the LightningModule does not have"):
        StageOptimizer(module, optimizer)


def test_a_loaded_state_is_a_copy_where_the_file_is_mapped() -> None:
    mine = trained(module_of_stage())
    saved = mine.state_dict()
    moment = saved["state"]["1.weight"]["exp_avg"]
    module = module_of_stage()
    for copies in (True, False):
        after = StageOptimizer(module, torch.optim.AdamW(module.parameters()))
        after.load(saved, copies=copies)
        loaded = after.optimizer.state[module[1].weight]["exp_avg"]
        assert (loaded.data_ptr() != moment.data_ptr()) or not copies


def test_a_loaded_state_lies_in_memory_as_its_parameter() -> None:
    """Fused steps go through both as they lie there."""
    module = module_of_stage()
    module[1].weight = nn.Parameter(module[1].weight.detach().t().contiguous().t())
    mine = StageOptimizer(module, torch.optim.AdamW(module.parameters()))
    mine.load(trained(module_of_stage()).state_dict())
    assert mine.optimizer.state[module[1].weight]["exp_avg"].stride() == module[1].weight.stride()


def test_a_counter_of_steps_stays_where_torch_has_it() -> None:
    """On a device, each step would wait for it."""
    mine = trained(module_of_stage())
    mine._move_states(torch.device("meta"))
    state = next(iter(mine.optimizer.state.values()))
    assert state["exp_avg"].is_meta
    assert state["step"].device.type == "cpu"


def test_a_group_shows_the_whole_model_and_hides_it_again_and_again() -> None:
    """What a group has is looked up once, and anew where somebody has changed it."""
    module = module_of_stage()
    mine = StageOptimizer(module, torch.optim.AdamW(module.named_parameters(), lr=0.1))
    group, whole = mine.optimizer.param_groups[0], list(module.parameters())
    here, names = [module[1].weight, module[1].bias], ["1.weight", "1.bias"]
    own = group["params"]
    for _ in range(2):
        for _ in range(2):
            mine.show_others()
            assert all(map(operator.is_, group["params"], whole))
            assert group["param_names"] == [name for name, _ in module.named_parameters()]
            mine.hide_others()
            assert group["params"] is own, "so that what has not changed looks so"
            assert group["param_names"] == names
        mine.begin_run({})  # the others are hidden already
    own.pop()
    mine.show_others()
    mine.hide_others()
    assert [id(parameter) for parameter in group["params"]] == [id(here[0])], "what user code has taken out stays out"


def test_a_state_that_a_hook_makes_for_another_stage_is_taken_out() -> None:
    module = module_of_stage()
    mine = trained(module)
    for _ in range(2):
        mine.show_others()
        mine.optimizer.state[module[0].weight] = {"step": 1}
        assert mine.hide_others() == {"0.weight": {"step": 1}}
        assert mine.optimizer.state.keys() == {module[1].weight, module[1].bias}
