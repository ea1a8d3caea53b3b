"""``balance="auto"``: what is chosen trains as one device does, whatever it is, and a loss that forbids it is trained all the
same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fxpipe import FxPipeStrategy, PartitionPlan
from lightning_fxpipe.planner import measured_costs
from lightning_fxpipe.planner.cost import Chain
from lightning_fxpipe.planner.measured_costs import UnitSeconds
from tests.lit import fit_and_record, make_trainer
from tests.ranks.pool import RankPool

TOLERANCE = 1e-5


def compute_bound(chain: Chain, num_samples: int) -> tuple[UnitSeconds, ...]:
    return tuple(UnitSeconds(num_samples, num_samples, num_samples) for _ in chain.units)


def host_bound(chain: Chain, num_samples: int) -> tuple[UnitSeconds, ...]:
    return tuple(UnitSeconds(1e-9, 1e-9, 1e-9) for _ in chain.units)


@cache
def reference(model: str) -> dict[str, Any]:
    return fit_and_record(model)


def chosen_fit(model: str, schedule: str, times: Callable[..., Any] | None) -> dict[str, Any]:
    """Runs on every rank; with made-up times the choice is known."""
    strategy = FxPipeStrategy(balance="auto", schedule=schedule)  # type: ignore[arg-type]
    with patch.object(measured_costs, "measured_seconds", times or measured_costs.measured_seconds):
        result = fit_and_record(model, strategy=strategy, devices=2)
    chosen = strategy.plan.chosen
    assert chosen is not None
    assert strategy.plan.num_stages == strategy.topology.num_stages == 2 * chosen.stages_per_rank
    return {**result, "chosen": chosen, "counts": {each.num_microbatches for each in strategy.plan.alternatives}}


def test_the_number_of_microbatches_is_the_usual_one_where_there_is_batch_norm(ranks: Callable[[int], RankPool]) -> None:
    """It normalises over a microbatch: another number would train something else."""
    assert [result["counts"] for result in ranks(2).run(chosen_fit, "resnet", "auto", compute_bound)] == [{8}] * 2


@pytest.mark.parametrize(
    ("model", "schedule", "times"),
    [
        ("gpt", "auto", compute_bound),
        ("gpt", "auto", host_bound),
        ("mlp", "auto", None),
        ("gpt", "zbv_zero_bubble", compute_bound),
        ("unet", "gpipe", compute_bound),
        pytest.param("unet", "auto", compute_bound, marks=pytest.mark.slow),
        pytest.param("gpt", "interleaved_1f1b", compute_bound, marks=pytest.mark.slow),
    ],
)
def test_what_is_chosen_equals_one_device(
    ranks: Callable[[int], RankPool], model: str, schedule: str, times: Callable[..., Any] | None
) -> None:
    expected = reference(model)
    results = ranks(2).run(chosen_fit, model, schedule, times)
    state: dict[str, Tensor] = {}
    for result in results:
        assert result["chosen"] == results[0]["chosen"]
        assert result["losses"] == pytest.approx(expected["losses"], abs=TOLERANCE)
        assert result["metrics"] == pytest.approx(expected["metrics"], abs=TOLERANCE)
        state |= result["state"]
    assert state.keys() == expected["state"].keys()
    for fqn, value in state.items():
        torch.testing.assert_close(value, expected["state"][fqn], rtol=0, atol=TOLERANCE, msg=fqn)
    chosen = results[0]["chosen"]
    if schedule != "auto":
        assert chosen.schedule == schedule
    elif times is host_bound:
        assert chosen.num_microbatches == 1
    elif times is compute_bound:
        assert chosen.schedule != "gpipe"
        assert chosen.num_microbatches > 4


class Contrastive(L.LightningModule):
    """A loss over pairs of the batch, which microbatches do not make up."""

    def __init__(self) -> None:
        super().__init__()
        L.seed_everything(3, verbose=False)
        self.layers = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(8, 8), nn.Tanh())))

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        found = self.layers(batch[0])
        loss: Tensor = torch.logsumexp(found @ found.T, 1).mean() - found.pow(2).sum(1).mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(32, 8, generator=torch.Generator().manual_seed(0))), batch_size=16)


def state_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items() if not tensor.is_meta}


def contrastive_fit(**options: Any) -> dict[str, Tensor]:
    module = Contrastive()
    with patch.object(measured_costs, "measured_seconds", compute_bound):
        make_trainer(max_epochs=2, **options).fit(module, loader())
    return state_of(module)


def contrastive_chosen() -> dict[str, Tensor]:
    strategy = FxPipeStrategy(balance="auto", gather_after_run=True)
    state = contrastive_fit(strategy=strategy, devices=2)
    assert strategy.plan.chosen is not None
    assert strategy.plan.chosen.schedule != "gpipe"
    return state


def test_a_loss_that_forbids_the_choice_is_trained_all_the_same(ranks: Callable[[int], RankPool]) -> None:
    expected = contrastive_fit()
    for result in ranks(2).run(contrastive_chosen):
        assert result.keys() == expected.keys()
        for name, value in result.items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=TOLERANCE, msg=name)


def with_saved_plan(folder: str) -> list[Any]:
    strategy = FxPipeStrategy(balance="auto", gather_after_run=False)
    module = Contrastive()
    with patch.object(measured_costs, "measured_seconds", compute_bound):
        trainer = make_trainer(strategy=strategy, devices=2, max_epochs=1)
        trainer.fit(module, loader())
        trainer.fit(module, loader())  # in stages still
    path = Path(folder) / f"plan{trainer.global_rank}.json"
    strategy.plan.save(path)
    again = FxPipeStrategy(plan=PartitionPlan.load(path))
    other = Contrastive()
    with patch.object(measured_costs, "measured_seconds", host_bound):  # nothing is chosen anew
        make_trainer(strategy=again, devices=2, max_epochs=1).fit(other, loader())
    assert again.plan == strategy.plan
    assert again.topology is strategy.topology
    return [again.plan.chosen, again.topology.placement]


def test_a_saved_plan_brings_its_schedule_and_its_microbatches(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    (chosen, placement), other = ranks(2).run(with_saved_plan, str(tmp_path))
    assert other == [chosen, placement]
    assert placement.stages_per_rank == chosen.stages_per_rank
    assert placement.is_v == (chosen.schedule in ("zbv_zero_bubble", "v_half", "v_min"))


def deterministic_fit() -> Any:
    strategy = FxPipeStrategy(balance="auto")
    make_trainer(strategy=strategy, devices=2, max_epochs=1, deterministic=True).fit(Contrastive(), loader())
    torch.use_deterministic_algorithms(False)
    return strategy.plan.chosen, strategy.plan.num_stages


def test_nothing_is_chosen_by_a_clock_where_runs_have_to_be_the_same(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(2).run(deterministic_fit) == [(None, 2)] * 2


class ByHand(Contrastive):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        optimizer.zero_grad()  # type: ignore[union-attr]
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()  # type: ignore[union-attr]


def by_hand(**options: Any) -> dict[str, Tensor]:
    module = ByHand()
    make_trainer(max_epochs=1, **options).fit(module, loader())
    return state_of(module)


def by_hand_chosen() -> dict[str, Tensor]:
    return by_hand(strategy=FxPipeStrategy(balance="auto", gather_after_run=True), devices=2)


def test_a_step_that_every_rank_runs_is_cut_by_parameters(ranks: Callable[[int], RankPool]) -> None:
    expected = by_hand()
    for result in ranks(2).run(by_hand_chosen):
        for name, value in result.items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=TOLERANCE, msg=name)


def validated_first() -> Any:
    """Nothing is chosen for a validation; a fit after it plans anew."""

    class Validated(Contrastive):
        def validation_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
            self.log("value", self.layers(batch[0]).mean())

    module, strategy = Validated(), FxPipeStrategy(balance="auto", gather_after_run=True)
    with patch.object(measured_costs, "measured_seconds", compute_bound):
        trainer = make_trainer(strategy=strategy, devices=2, max_epochs=1)
        found = trainer.validate(module, loader(), verbose=False)
        first = strategy.plan.chosen
        trainer.fit(module, loader(), loader())
    assert strategy.plan.chosen is not None
    return first, found[0]["value"], float(trainer.callback_metrics["value"])


def test_a_validation_before_the_fit_chooses_nothing(ranks: Callable[[int], RankPool]) -> None:
    results = ranks(2).run(validated_first)
    assert results[0] == results[1]
    assert results[0][0] is None
    module = Contrastive()
    values = [module.layers(batch[0]).mean().item() for batch in loader()]
    assert results[0][1] == pytest.approx(sum(values) / len(values), abs=TOLERANCE)
