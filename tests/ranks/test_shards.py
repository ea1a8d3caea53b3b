"""Replicas that share out their optimizers, against Lightning's DDP: all that replicas show, and who has which states."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

import lightning_fxpipe.runtime.schedule_choice
import lightning_fxpipe.strategy.run_plan
from lightning_fxpipe import FxPipeStrategy, PartitionError, compare_layouts
from lightning_fxpipe.distributed.topology import Placement, Replicas, make_topology
from lightning_fxpipe.optim.shards import Shards
from lightning_fxpipe.planner.layouts import Layout
from lightning_fxpipe.planner.planning import plan_regions
from lightning_fxpipe.reporting.table import human_bytes
from lightning_fxpipe.simulation.devices import Device
from lightning_fxpipe.strategy import search_space
from tests.lit import LitModel, Recorder, make_loader, make_trainer
from tests.ranks.pool import RankPool
from tests.ranks.runs import Net, assert_same
from tests.ranks.test_interleaved import Passes
from tests.ranks.test_replica_checkpoints import Look, merged, resume, save, save_in_background, strategy_of
from tests.ranks.test_replica_checkpoints import check as check_equal
from tests.ranks.test_replicas import CASES, Case, Manual, check_all, run

Ranks = Callable[[int], RankPool]

# ------------------------------------------------------------------ optimizers that look at more than one step of torch's


class OverAdam(torch.optim.Adam):
    """Calls its base's step, around which torch has hooks as well, and goes on by the states that it has."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.sub_(self.state[parameter]["exp_avg"], alpha=0.001)
        return loss


class Clamps(Net):
    """Hooks of the optimizer: one clamps weights, one notes them, as soon as they are stepped."""

    def configure_optimizers(self) -> Any:
        optimizer = OverAdam(self.parameters(), lr=0.02)
        optimizer.register_step_post_hook(self.clamp)
        optimizer.register_step_post_hook(self.follow)
        return optimizer

    def clamp(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        with torch.no_grad():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.clamp_(-0.5, 0.5)

    def follow(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        norms = [p.detach().norm() for group in optimizer.param_groups for p in group["params"]]
        self.told = [*getattr(self, "told", []), [round(float(norm), 4) for norm in norms]]


class Counts(Net):
    """A hook before the step sees the parameters of all replicas in the groups."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.02)
        optimizer.register_step_pre_hook(self.count)
        return optimizer

    def count(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.told = [*getattr(self, "told", []), [len(group["params"]) for group in optimizer.param_groups]]


class Lookahead(Optimizer):
    """Steps another optimizer, and goes back half of the way every second time."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner
        super().__init__([p for group in inner.param_groups for p in group["params"]], {})
        self.param_groups = inner.param_groups
        self.count = 0

    def step(self, closure: Any = None) -> Any:
        loss = self.inner.step(closure)
        self.count += 1
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    slow = self.state[parameter].setdefault("slow", parameter.detach().clone())
                    if self.count % 2 == 0:
                        slow.lerp_(parameter, 0.5)
                        parameter.copy_(slow)
        return loss


class LooksAhead(Net):
    def configure_optimizers(self) -> Any:
        return Lookahead(torch.optim.AdamW(self.parameters(), lr=0.02))


class Groups(Net):
    def configure_optimizers(self) -> Any:
        groups = [{"params": self.backbone.parameters(), "lr": 0.05}, {"params": self.head.parameters(), "weight_decay": 0.1}]
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class RawSteps(Manual):
    """Steps torch's optimizers, not Lightning's."""

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        return super().optimizers(use_pl_optimizer=False)


class ThawLate(BaseFinetuning):
    """Adds parameters to the optimizer in the second epoch."""

    def freeze_before_training(self, pl_module: L.LightningModule) -> None:
        self.freeze(pl_module.backbone)  # type: ignore[arg-type]

    def finetune_function(self, pl_module: L.LightningModule, epoch: int, optimizer: Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.backbone, optimizer, lr=0.01)  # type: ignore[arg-type]


class Adam(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam((p for p in self.parameters() if p.requires_grad), lr=0.02)


class Quasi(Net):
    """Its optimizer calls the step several times, and needs all parameters together."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


OWN = {
    "clamps": Case(module=Clamps),
    "counts": Case(module=Counts),
    "looks ahead": Case(module=LooksAhead),
    "groups": Case(module=Groups, options={"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"}),
    "raw steps": Case(module=RawSteps, ddp={"find_unused_parameters": True}),
}
ALL = {**CASES, **OWN}
# DDP does not average what is thawed after it has begun; and what LBFGS does hangs on rounding.
BESIDE_WHOLE = {"thaws late": Case(module=Adam, callbacks=lambda: [ThawLate()]), "quasi": Case(module=Quasi)}


def with_shards(case: Case) -> Case:
    changed = copy.copy(case)
    object.__setattr__(changed, "strategy", {**case.strategy, "shard_optimizer_state": True})
    return changed


def run_all(names: Sequence[str], devices: int, num_stages: int | None) -> list[Any]:
    """Runs on every rank."""
    return [run(ALL[name] if num_stages is None else with_shards(ALL[name]), devices, num_stages) for name in names]


@pytest.mark.parametrize(
    ("stages", "names"),
    [
        (2, ["accumulated and clipped", "manual", "fp16", *OWN]),
        pytest.param(
            2, [name for name in CASES if name not in ("accumulated and clipped", "manual", "fp16")], marks=pytest.mark.slow
        ),
        pytest.param(1, [*ALL], marks=pytest.mark.slow),
    ],
)
def test_equals_ddp(ranks: Ranks, stages: int, names: list[str]) -> None:
    expected = ranks(2).run(run_all, names, 2, None, timeout_seconds=300)
    results = ranks(2 * stages).run(run_all, names, 2 * stages, stages, timeout_seconds=600)
    check_all(names, expected, results)


class FullySharded(Adam):
    """Spreads its parameters over the ranks of Lightning's ModelParallelStrategy."""

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]  # type: ignore[index]
        for module in (*self.backbone, self.head, self):
            fully_shard(module, mesh=mesh)


class WholeState(L.Callback):
    """Puts together what ranks have of the parameters and of Adam's states."""

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        (optimizer,) = trainer.optimizers
        self.state: dict[str, Tensor] = {}
        for name, parameter in pl_module.named_parameters():
            if parameter.is_meta:
                continue
            kept = optimizer.state.get(parameter, {})
            values = {"": parameter, **{f" {key}": value for key, value in kept.items() if key.startswith("exp")}}
            for key, value in values.items():
                self.state[name + key] = (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def run_by_fsdp(num_stages: int | None, accumulates: int) -> dict[str, Any]:
    """Runs on every rank; without stages by Lightning's FSDP2."""
    L.seed_everything(3, verbose=False)
    recorder, whole = Recorder(), WholeState()
    devices, strategy, module = 2, ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1), FullySharded()
    if num_stages is not None:
        devices, module = 2 * num_stages, Adam()  # type: ignore[assignment]
        strategy = FxPipeStrategy(num_stages=num_stages, num_microbatches=2, shard_optimizer_state=True)  # type: ignore[assignment]
    options = {"max_epochs": 5, "accumulate_grad_batches": accumulates, "callbacks": [recorder, whole]}
    trainer = make_trainer(strategy=strategy, devices=devices, **options)
    trainer.fit(module)
    logged = {key: float(value) for key, value in sorted(trainer.callback_metrics.items())}
    return {"losses": recorder.losses, "state": whole.state, "metrics": logged, "steps": trainer.global_step}


@pytest.mark.parametrize("accumulates", [1, 2])
@pytest.mark.parametrize("stages", [1, 2])
def test_equals_fully_sharded_modules(ranks: Ranks, stages: int, accumulates: int) -> None:
    """At least ten steps of two replicas against FSDP2 on two devices. Each replica has the states of its share."""
    expected = ranks(2).run(run_by_fsdp, None, accumulates)
    results = ranks(2 * stages).run(run_by_fsdp, stages, accumulates)
    state: dict[str, Tensor] = {}
    for index, result in enumerate(results):
        reference = expected[index // stages]
        for key in ("losses", "metrics", "steps"):
            assert_same(result[key], reference[key], key)
        state |= result["state"]
    assert expected[0]["steps"] >= 10
    assert_same(dict(sorted(state.items())), dict(sorted(expected[0]["state"].items())), "state")


class Fails(Net):
    """Its optimizer fails once, and the step goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        self.optimizer = FailsOnce(self.parameters(), lr=0.02)
        return self.optimizer

    def on_train_start(self) -> None:
        self.optimizer.fails_at = 2  # not where it is tried before the run

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(nn.functional.cross_entropy(self(batch[0]), batch[1]))
        with suppress(ArithmeticError):
            optimizer.step()
        optimizer.zero_grad()


class FailsOnce(torch.optim.SGD):
    num_steps = fails_at = 0

    def step(self, closure: Any = None) -> Any:
        self.num_steps += 1
        if self.fails_at == self.num_steps:
            raise ArithmeticError
        return super().step(closure)


BESIDE_WHOLE["fails"] = Case(module=Fails)


def run_both(num_stages: int) -> list[tuple[Any, Any]]:
    """Runs on every rank."""
    cases = BESIDE_WHOLE.values()
    return [(run(case, 2 * num_stages, num_stages), run(with_shards(case), 2 * num_stages, num_stages)) for case in cases]


@pytest.mark.parametrize("stages", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_equals_replicas_that_share_nothing_out(ranks: Ranks, stages: int) -> None:
    for result in ranks(2 * stages).run(run_both, stages):
        for name, (whole, shared) in zip(BESIDE_WHOLE, result, strict=True):
            assert_same(shared, whole, name)


# ------------------------------------------------------------------ who has what


class States(L.Callback):
    """Notes the bytes of the states that the optimizer has, and those that it would have by itself."""

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        (optimizer,) = trainer.optimizers
        here = [p for group in optimizer.param_groups for p in group["params"] if not p.is_meta]
        self.mine = {name: p.numel() for name, p in pl_module.named_parameters() if optimizer.state.get(p)}
        self.all = {name: p.numel() for name, p in pl_module.named_parameters() if any(p is one for one in here)}
        self.steps = {float(optimizer.state[p]["step"]) for p in here if optimizer.state.get(p)}


def who_has_what() -> Any:
    """Runs on every rank."""
    states = States()
    strategy = FxPipeStrategy(num_stages=2, num_microbatches=2, shard_optimizer_state=True)
    trainer = make_trainer(max_epochs=1, strategy=strategy, devices=4, callbacks=[states])
    trainer.fit(LitModel("gpt"), make_loader("gpt"))
    return states.mine, states.all, states.steps


def test_each_replica_has_the_states_of_its_share(ranks: Ranks) -> None:
    results = ranks(4).run(who_has_what)
    for stage in range(2):
        (one, parameters, steps), (other, same_parameters, same_steps) = results[stage], results[2 + stage]
        assert parameters == same_parameters == {**one, **other}
        assert not one.keys() & other.keys()
        assert steps == same_steps
        assert len(steps) == 1
        # As even as whole parameters allow.
        assert abs(sum(one.values()) - sum(other.values())) <= max(parameters.values())


def test_the_largest_are_shared_out_first() -> None:
    """What does not train, and so has no state, counts after all that does."""
    sizes = (1, 1, 1, 4, 3, 8, 6)
    parameters = [nn.Parameter(torch.zeros(size), requires_grad=size != 8) for size in sizes]
    groups = [{"params": parameters[:3]}, {"params": parameters[3:]}]
    shards = [Shards(torch.optim.Adam(groups), Replicas(count=2, index=index)) for index in range(2)]
    owned = [[size for size, p in zip(sizes, parameters, strict=True) if one.owns(p)] for one in shards]
    trained = [sum(size for size in each if size != 8) for each in owned]
    assert sorted(owned[0] + owned[1]) == sorted(sizes)
    assert trained == [8, 8]


# ------------------------------------------------------------------ memory limits


class Layers(L.LightningModule):
    """Equal layers, which two stages and two replicas share out evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())


def layout_of(shards: bool) -> Layout:
    """What the table of layouts says of two stages on four devices."""
    found = compare_layouts(
        Layers(),
        [torch.randn(16, 64)],
        num_devices=4,
        device=Device(flops_per_second=1e9, bytes_per_second=1e9),
        schedules=["gpipe"],
        num_microbatches=2,
        shard_optimizer_state=shards,
    )
    return next(one for one in found.layouts if one.num_ranks == 2)


def fit_layers(options: dict[str, Any]) -> L.Trainer:
    """Two steps of two replicas of two stages."""
    strategy = FxPipeStrategy(num_stages=2, num_microbatches=2, **options)
    trainer = make_trainer(max_epochs=1, strategy=strategy, devices=4)
    trainer.fit(Layers(), DataLoader(TensorDataset(torch.randn(64, 64)), batch_size=16))
    return trainer


def moments_within(limit: float, options: dict[str, Any]) -> int | str:
    """Runs on every rank: bytes of the moments that it keeps of its parameters, or why there is no cut."""
    try:
        trainer = fit_layers({"device_memory_gib": limit / 2**30, **options})
    except PartitionError as error:
        return str(error)
    (optimizer,) = trainer.optimizers
    states = [value for state in optimizer.state.values() for value in state.values()]
    return sum(value.nbytes for value in states if value.numel() > 1)


def moments_within_each(limits: Sequence[tuple[float, dict[str, Any]]]) -> list[int | str]:
    """Runs on every rank."""
    return [moments_within(limit, options) for limit, options in limits]


def test_a_memory_limit_counts_a_replicas_share_of_the_states(ranks: Ranks) -> None:
    whole, shared = layout_of(shards=False).chosen.peak_bytes, layout_of(shards=True).chosen.peak_bytes
    # The last stage decides: the first has buffers for what it sends, and does not keep its input.
    of_stage = 4 * 64 * 64 * 4
    replicate, shard = {"shard_optimizer_state": False}, {"shard_optimizer_state": True}
    limits: list[tuple[float, dict[str, Any]]] = [
        (shared, replicate),
        (whole - 1, replicate),
        (whole, replicate),
        (shared - 1, shard),
        (shared, shard),
        (shared, {**shard, "balance": "memory"}),
        (shared, {**replicate, "balance": "memory"}),
    ]
    for refused, narrowly, fits, too_little, fits_shared, balanced, refused_too in ranks(4).run(moments_within_each, limits):
        for text, peak in ((refused, whole), (narrowly, whole), (too_little, shared), (refused_too, whole)):
            assert "No partition into 2 stages fits in the devices' memory" in str(text)
            assert f"{human_bytes(peak)} for the stages" in str(text)
        assert ("0.5 of Adam's states" in str(too_little), "0.5 of Adam's states" in str(refused)) == (True, False)
        # The ranks have what was counted.
        assert fits == 2 * of_stage
        assert fits_shared == balanced == of_stage
        assert fits - fits_shared == whole - shared


def passes_and_rules(free_bytes: int, shards: bool) -> tuple[tuple[int, int], list[float]]:
    """Runs on every rank: how batches go where so much memory is left, and what each of some plans counts for the optimizer."""
    rules: list[float] = []

    def noting(root: Any, calls: Any, *, rule: Any, device: Any) -> Any:
        rules.append(rule.optimizer_bytes_per_byte)
        return plan_regions(root, calls, rule=rule, device=device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lightning_fxpipe.runtime.schedule_choice, "memory_for_rank", lambda device, num_ranks: free_bytes)
        patch.setattr(lightning_fxpipe.strategy.run_plan, "plan_regions", noting)
        with Passes() as passes:
            fit_layers({"shard_optimizer_state": shards})
        for options in ({"balance": "auto"}, {"activation_checkpointing": "auto", "device_memory_gib": 1}):
            fit_layers({"shard_optimizer_state": shards, **options})
    return (passes.by_turns, passes.forward), rules


def test_what_is_chosen_by_itself_counts_a_replicas_share_of_the_states(ranks: Ranks) -> None:
    of_stage = 4 * 64 * 64 * 4
    # Gradients and all states leave nothing of it; gradients and half of the states as much as a stage has parameters.
    for shards, passes, kept in ((False, (2, 0), 2.0), (True, (0, 2), 1.0)):
        for found, rules in ranks(4).run(passes_and_rules, 3 * of_stage, shards):
            assert found == passes
            assert len(rules) == 3
            assert {*rules} == {kept}


def memory_where_one_has_less() -> list[tuple[int, ...]]:
    """Runs on every rank: what ranks have left, by several placements, and where one does not know."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        free = [700, 400, 500, 900][dist.get_rank()]
        patch.setattr(search_space, "memory_for_rank", lambda device, num_ranks: 10 * free // num_ranks)
        for placement in (Placement(num_ranks=2), Placement(num_ranks=2, stages_per_rank=2, is_v=True), Placement(num_ranks=4)):
            topology = make_topology(torch.device("cpu"), placement=placement)
            found.append(search_space.memory_left(topology, 10))
        patch.setattr(search_space, "memory_for_rank", lambda device, num_ranks: None if dist.get_rank() == 3 else 1)
        found.append(search_space.memory_left(topology, 10))
    return found


def test_the_memory_that_is_left_is_the_least_of_all_replicas(ranks: Ranks) -> None:
    """By global rank: what the ranks 0 and 1 have, or 2 and 3 if that is less."""
    for found in ranks(4).run(memory_where_one_has_less):
        assert found == [(450, 360), (450, 360), (630, 360, 450, 810), ()]


# ------------------------------------------------------------------ checkpoints


@pytest.mark.parametrize("as_folder", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_any_number_of_stages_and_replicas_goes_on_from_shards(ranks: Ranks, tmp_path: Path, as_folder: bool) -> None:
    path = str(tmp_path / "shards.ckpt")
    expected = merged(ranks(4).run(save, path, 4, 2, as_folder, True))
    for devices, stages, shards in ((4, 2, False), (4, 1, True), (2, 2, True), (2, 1, True)):
        check_equal(merged(ranks(devices).run(resume, path, devices, stages, shards)), expected)
    check_equal(resume(path, 1, 1), expected)


def resume_and_count(path: str) -> tuple[set[str], set[str]]:
    """Runs on every rank: names of the parameters, and of those with states, once they are read."""
    states = States()
    states.on_train_start = states.on_train_end  # type: ignore[method-assign]
    states.on_train_end = lambda *_: None  # type: ignore[method-assign]
    trainer = make_trainer(max_epochs=2, callbacks=[states], strategy=strategy_of(1, shards=True), devices=2)
    trainer.fit(LitModel("gpt"), make_loader("gpt"), ckpt_path=path)
    return set(states.all), set(states.mine)


def test_a_replica_reads_the_states_of_its_share(ranks: Ranks, tmp_path: Path) -> None:
    path = str(tmp_path / "whole.ckpt")
    ranks(2).run(save, path, 2, 1, True)
    (names, one), (same_names, other) = ranks(2).run(resume_and_count, path)
    assert names == same_names == one | other
    assert not one & other


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "stages", "shards"), [(4, 2, False), (2, 2, False), (4, 1, True)])
def test_shards_go_on_from_any_number_of_stages_and_replicas(
    ranks: Ranks, tmp_path: Path, devices: int, stages: int, shards: bool
) -> None:
    path = str(tmp_path / "other.ckpt")
    expected = merged(ranks(devices).run(save, path, devices, stages, True, shards))
    check_equal(merged(ranks(4).run(resume, path, 4, 2, True)), expected)


@pytest.mark.slow
def test_single_files_of_shards_go_to_ddp_and_come_from_there(ranks: Ranks, tmp_path: Path) -> None:
    path, of_ddp = str(tmp_path / "ours.ckpt"), str(tmp_path / "ddp.ckpt")
    expected = merged(ranks(4).run(save, path, 4, 2, False, True))
    check_equal(merged(ranks(2).run(resume, path, 2, None)), expected)
    expected = merged(ranks(2).run(save, of_ddp, 2, None, True))
    check_equal(merged(ranks(4).run(resume, of_ddp, 4, 2, True)), expected)


@pytest.mark.slow
def test_shards_are_saved_in_the_background(ranks: Ranks, tmp_path: Path) -> None:
    expected = merged(ranks(4).run(save_in_background, str(tmp_path), True))
    check_equal(merged(ranks(2).run(resume, str(tmp_path / "last.ckpt"), 2, 2)), expected)


class KeepsOptimizer(Net):
    """Its second run goes on with the optimizer of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: Any = None

    def configure_optimizers(self) -> Any:
        if self.kept is None:
            self.kept = torch.optim.Adam(self.parameters(), lr=0.02)
        return self.kept


def run_again(path: str) -> tuple[list[dict[str, Tensor]], list[int]]:
    """Runs on every rank: two runs with one optimizer, of two stages each and then of one, and a checkpoint after a third that
    trains nothing."""
    found, numbers = [], []
    module = KeepsOptimizer()
    for stages in (2, 1):
        look = Look()
        look.on_train_start = lambda *_: None  # type: ignore[method-assign]
        trainer = make_trainer(max_epochs=1, callbacks=[look], strategy=strategy_of(stages, shards=True), devices=4)
        trainer.fit(module)
        trainer.validate(module, verbose=False)
        trainer.save_checkpoint(f"{path}/{stages}.ckpt")
        found.append({key: value for key, value in look.ended.items() if key.count("/")})
        numbers.append(len(module.kept.state))
    return found, numbers


def read(path: str) -> dict[str, Tensor]:
    """The optimizer's states in a checkpoint, as one device goes on with them."""
    look = Look()
    trainer = make_trainer(max_epochs=2, callbacks=[look], strategy=strategy_of(1), devices=1)
    trainer.fit(KeepsOptimizer(), ckpt_path=path)
    return {key: value for key, value in look.begun.items() if key.count("/")}


@pytest.mark.slow
def test_an_optimizer_goes_on_in_another_run_with_other_shares(ranks: Ranks, tmp_path: Path) -> None:
    results = ranks(4).run(run_again, str(tmp_path))
    for index, stages in enumerate((2, 1)):
        expected = merged([found[index] for found, _ in results])
        check_equal(read(str(tmp_path / f"{stages}.ckpt")), expected)
        assert len({float(value) for key, value in expected.items() if key.endswith("step")}) == 1
