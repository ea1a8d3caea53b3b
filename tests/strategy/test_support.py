"""What a pipeline cannot honour is refused before the first step: each reason by itself, and all of them at once."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.accelerators import MPSAccelerator
from lightning.pytorch.callbacks import BatchSizeFinder, ModelCheckpoint, ModelPruning, StochasticWeightAveraging
from lightning.pytorch.plugins import (
    BitsandbytesPrecision,
    MixedPrecision,
    Precision,
    TransformerEnginePrecision,
)
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import BinaryAccuracy

from lightning_fxpipe import FxPipeStrategy, make_plan
from lightning_fxpipe.distributed.topology import Placement, Replicas, Topology
from lightning_fxpipe.errors import UnsupportedError
from lightning_fxpipe.schedules.by_name import SCHEDULES
from lightning_fxpipe.schedules.own_table import schedule_of_table
from lightning_fxpipe.simulation import ActionTable
from lightning_fxpipe.strategy.plan_report import report_plan
from lightning_fxpipe.strategy.support import (
    check_batch_dim,
    check_converted,
    check_has_batch,
    check_optimizers,
    check_sampler,
    check_trainer,
    placement_for,
    report_batch_norm,
)
from tests.lit import LitModel, make_trainer
from tests.models import UNet
from tests.owntables import SPLIT_V


class Manual(LitModel):
    """Steps its optimizer itself."""

    def __init__(self, name: str = "mlp") -> None:
        super().__init__(name)
        self.automatic_optimization = False


class OwnBackward(LitModel):
    """Overrides the hook that a pipeline never calls."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()


class Measuring(LitModel):
    """Holds torchmetrics objects, one of them deep inside, with a model or without."""

    def __init__(self, name: str = "mlp", with_model: bool = True) -> None:
        super().__init__(name)
        self.seen = MeanMetric()
        self.group = nn.ModuleDict({"fit": MetricCollection({"accuracy": BinaryAccuracy()})})
        if with_model:
            self.group["fit"]["accuracy"].features = nn.Linear(2, 2)


def trainer_for(fn: TrainerFn = TrainerFn.FITTING, **options: Any) -> L.Trainer:
    trainer = make_trainer(**options)
    trainer.state.fn = fn
    return trainer


def refusal(trainer: L.Trainer, module: L.LightningModule) -> UnsupportedError:
    with pytest.raises(UnsupportedError) as caught:
        check_trainer(trainer, module)
    assert caught.value.what == "strategy='fxpipe' does not support this configuration."
    return caught.value


class OwnBackwardPrecision(Precision):
    """Runs backward itself."""

    def backward(self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        tensor.backward()


class OwnClipping(Precision):
    """Clips the gradients that it sees."""

    def clip_grad_by_norm(self, optimizer: Any, clip_val: int | float) -> None:
        raise AssertionError("never called")


def with_plugin(make: Callable[[], Any], **options: Any) -> Callable[[], L.Trainer]:
    """A Trainer with a precision plugin that is put in afterwards, past Lightning's own checks."""

    def made() -> L.Trainer:
        trainer = trainer_for(**options)
        trainer.strategy.precision_plugin = make()
        return trainer

    return made


def other_scaler() -> MixedPrecision:
    plugin = MixedPrecision("bf16-mixed", "cpu")
    plugin.scaler = object()  # type: ignore[assignment]
    return plugin


with_scaler = with_plugin(other_scaler)


@pytest.mark.parametrize("fn", list(TrainerFn))
def test_a_plain_module_passes_every_kind_of_run(fn: TrainerFn) -> None:
    check_trainer(trainer_for(fn), LitModel("mlp"))


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "32-true", "64-true"])
def test_precision_without_a_scaler_passes(precision: Any) -> None:
    check_trainer(trainer_for(precision=precision), LitModel("mlp"))


@pytest.mark.parametrize("make", [lambda: MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu")), OwnClipping])
def test_scalers_of_torch_and_unused_overrides_pass(make: Callable[[], Any]) -> None:
    check_trainer(with_plugin(make)(), LitModel("mlp"))


def test_a_plugin_that_replaces_the_module_is_refused() -> None:
    module = LitModel("mlp")
    assert check_converted(module, module) is module
    with pytest.raises(UnsupportedError, match="precision plugin replaces the LightningModule with another module"):
        check_converted(nn.Sequential(module), module)


def other_accelerator() -> L.Trainer:
    trainer = trainer_for()
    trainer.strategy.accelerator = object.__new__(MPSAccelerator)
    return trainer


def saves_into_memory() -> L.Trainer:
    trainer = trainer_for(enable_checkpointing=True, callbacks=[ModelCheckpoint(dirpath="memory://x")])
    trainer.strategy.num_processes = 2  # type: ignore[attr-defined]
    return trainer


REFUSED: dict[str, tuple[Callable[[], L.Trainer], Callable[[], L.LightningModule], str, str]] = {
    # what: (trainer, module, words of the reason, words of the way out)
    "torchmetrics": (trainer_for, Measuring, "(group.fit, group.fit.accuracy)", "a model outside the LightningModule"),
    "scaler": (with_scaler, lambda: LitModel("mlp"), "gradient scaler of type object", "torch.amp.GradScaler"),
    "transformer engine": (
        with_plugin(lambda: object.__new__(TransformerEnginePrecision)),
        lambda: LitModel("mlp"),
        "TransformerEnginePrecision",
        "bf16-mixed",
    ),
    "bitsandbytes": (
        with_plugin(lambda: object.__new__(BitsandbytesPrecision)),
        lambda: LitModel("mlp"),
        "BitsandbytesPrecision",
        "bf16-mixed",
    ),
    "plugin's backward": (
        with_plugin(OwnBackwardPrecision),
        lambda: LitModel("mlp"),
        "OwnBackwardPrecision.backward",
        "pre_backward",
    ),
    "plugin's clipping": (
        with_plugin(OwnClipping, gradient_clip_val=0.5),
        lambda: LitModel("mlp"),
        "OwnClipping.clip_grad_by_norm",
        "clip by value",
    ),
    "averaging": (
        lambda: trainer_for(callbacks=[StochasticWeightAveraging(1e-2)]),
        lambda: LitModel("mlp"),
        "StochasticWeightAveraging",
        "EMAWeightAveraging",
    ),
    "batch size finder": (
        lambda: trainer_for(callbacks=[BatchSizeFinder()]),
        lambda: LitModel("mlp"),
        "BatchSizeFinder",
        "batch size by hand",
    ),
    "validation by time": (
        lambda: trainer_for(val_check_interval="00:00:00:10"),
        lambda: LitModel("mlp"),
        "val_check_interval as a time",
        "number of batches",
    ),
    "accelerator": (
        other_accelerator,
        lambda: LitModel("mlp"),
        "the accelerator MPSAccelerator",
        "accelerator='gpu' with CUDA devices",
    ),
    "checkpoints in one process": (
        saves_into_memory,
        lambda: LitModel("mlp"),
        "checkpoints in memory://x",
        "object store",
    ),
    "pruning": (
        lambda: trainer_for(callbacks=[ModelPruning("l1_unstructured")]),
        lambda: LitModel("mlp"),
        "ModelPruning",
        "on one device",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_each_is_refused_with_its_reason_and_the_way_out(what: str) -> None:
    make, make_module, reason, way_out = REFUSED[what]
    module = make_module()
    error = refusal(make(), module)
    assert error.where == type(module).__name__
    assert error.observed is not None
    assert error.todo is not None
    assert reason in error.observed
    assert way_out in error.todo
    assert "; " not in error.observed  # one fault, one reason


def test_a_subclass_of_a_refused_callback_is_refused() -> None:
    class Mine(BatchSizeFinder):
        pass

    assert "BatchSizeFinder" in str(refusal(trainer_for(callbacks=[Mine()]), LitModel("mlp")))


def test_all_faults_are_in_one_error() -> None:
    trainer = with_scaler()
    trainer.callbacks += [StochasticWeightAveraging(1e-2), ModelPruning("l1_unstructured")]
    error = refusal(trainer, Measuring("mlp"))
    reasons = [
        "metrics that contain a model",
        "gradient scaler",
        "StochasticWeightAveraging",
        "ModelPruning",
    ]
    assert error.observed is not None
    assert error.todo is not None
    assert [reason for reason in reasons if reason not in error.observed] == []
    assert error.observed.count("; ") == error.todo.count("; ") == len(reasons) - 1


@pytest.mark.parametrize("fn", [TrainerFn.VALIDATING, TrainerFn.TESTING, TrainerFn.PREDICTING])
@pytest.mark.parametrize("make", [Manual, lambda: OwnBackward("mlp")], ids=["manual", "backward"])
def test_what_concerns_backward_is_no_fault_without_one(fn: TrainerFn, make: Callable[[], L.LightningModule]) -> None:
    check_trainer(trainer_for(fn), make())


def test_metrics_with_a_model_are_refused_in_evaluation_too_and_others_never() -> None:
    assert "metrics that contain a model" in str(refusal(trainer_for(TrainerFn.VALIDATING), Measuring()))
    check_trainer(trainer_for(), Measuring(with_model=False))


# ------------------------------------------------------------------ optimizers


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)


class Quantised(nn.Parameter):
    """Its values change when it is moved, as those of bitsandbytes' layers."""

    def to(self, *args: Any, **kwargs: Any) -> Any:
        return self


class Scaled(Tensor):
    """Its values lie in two other tensors, as torchao's."""

    @staticmethod
    def __new__(cls, values: Tensor, scale: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, values.shape, dtype=scale.dtype)  # type: ignore[attr-defined]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError


class WithManifold(nn.Parameter):
    """Has something beside its values that an optimizer reads."""


def test_tensors_whose_values_lie_elsewhere_are_refused_by_name() -> None:
    """Layers that are quantised had errors of their own class in setup, without the parameter's name."""
    module = LitModel("mlp")
    module.kept = WithManifold(torch.ones(2))
    module.kept.manifold = "sphere"  # type: ignore[attr-defined]
    check_trainer(trainer_for(), module)
    module.first = Quantised(torch.ones(2))
    module.register_buffer("second", Scaled(torch.zeros(2, dtype=torch.int8), torch.ones(1)))
    assert "(first: Quantised, second: Scaled)" in str(refusal(trainer_for(), module))


def test_lazy_layers_that_nothing_has_run_are_refused_by_name() -> None:
    """The plan needs their sizes, also where ``configure_optimizers`` would run them: the dry run ended in torch's error."""
    module = LitModel("mlp")
    module.late = nn.LazyLinear(3)
    assert "uninitialised lazy layers (late.weight, late.bias)" in str(refusal(trainer_for(), module))
    module.late(torch.zeros(1, 2))
    check_trainer(trainer_for(), module)


@pytest.mark.parametrize("count", [1, 2])
def test_any_number_of_optimizers_passes(count: int) -> None:
    check_optimizers([sgd() for _ in range(count)], 2)


def test_no_optimizer_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="configure_optimizers returned no optimizer"):
        check_optimizers([], 2)


def test_manual_optimization_is_no_fault_and_may_have_a_backward_of_its_own() -> None:
    class Both(Manual, OwnBackward):
        pass

    check_trainer(trainer_for(), Both())


def test_lbfgs_is_one_that_needs_all_parameters_and_the_user_is_told() -> None:
    class Mine(torch.optim.LBFGS):
        pass

    for kind in (torch.optim.LBFGS, Mine):
        optimizers = [sgd(), kind([nn.Parameter(torch.ones(1))])]
        with pytest.warns(UserWarning, match=f"{kind.__name__} needs all parameters at once.*AdamW"):
            assert check_optimizers(optimizers, 2) == optimizers[1:]
        assert check_optimizers(optimizers, 1) == []


# ------------------------------------------------------------------ stages, batch, BatchNorm


def test_all_ranks_of_a_pipeline_are_one_replica() -> None:
    assert make_trainer(strategy="fxpipe", devices=1).world_size == 1
    trainer = make_trainer(strategy="fxpipe", devices=2)
    assert isinstance(trainer.strategy, FxPipeStrategy)
    assert trainer.strategy.num_processes == 2
    assert trainer.world_size == 1


def placed(num_ranks: int, schedule: str = "auto", stages: int | str = "auto", each: int | str = "auto") -> Placement:
    return placement_for(
        num_ranks,
        SCHEDULES[schedule],
        num_stages=stages,  # type: ignore[arg-type]
        stages_per_rank=each,  # type: ignore[arg-type]
    )


def test_each_device_has_one_stage_or_as_many_as_the_schedule_wants() -> None:
    assert placed(3) == Placement(num_ranks=3)
    assert placed(3, stages=3) == Placement(num_ranks=3)
    assert placed(2, "interleaved_1f1b") == Placement(num_ranks=2, stages_per_rank=2)
    assert placed(2, "interleaved_1f1b", each=3) == Placement(num_ranks=2, stages_per_rank=3)
    assert placed(2, "dualpipev") == Placement(num_ranks=2, stages_per_rank=2, is_v=True)
    assert placed(1, "1f1b", stages=4) == Placement(num_ranks=1, stages_per_rank=4)
    assert placed(2, "gpipe", stages=4, each=2) == Placement(num_ranks=2, stages_per_rank=2)


@pytest.mark.parametrize("each", [1, 3])
def test_numbers_of_stages_that_contradict_each_other_are_refused(each: int) -> None:
    with pytest.raises(
        UnsupportedError, match="num_stages and stages_per_rank contradict each other[^*]*num_stages=4 and stages_per_rank="
    ) as caught:
        placed(2, stages=4, each=each)
    assert caught.value.expected == f"num_stages={2 * each} with that many stages per device, or fewer with several replicas"


def test_fewer_stages_than_devices_make_replicas() -> None:
    """The pipeline is as long as its stages need; all devices are shared out among its replicas."""
    assert placed(8, stages=2) == Placement(num_ranks=2)
    assert placed(4, stages=1) == Placement(num_ranks=1)
    assert placed(4, stages=4, each=2) == Placement(num_ranks=2, stages_per_rank=2)
    assert placed(4, "zbv_zero_bubble", stages=4) == Placement(num_ranks=2, stages_per_rank=2, is_v=True)
    assert placed(4, "interleaved_1f1b", stages=4, each=2) == Placement(num_ranks=2, stages_per_rank=2)
    assert placed(6, "zb_h1", stages=3) == Placement(num_ranks=3)


@pytest.mark.parametrize(("stages", "devices"), [(3, 4), (3, 2)])
def test_stages_that_cannot_be_shared_out_are_refused(stages: int, devices: int) -> None:
    with pytest.raises(UnsupportedError, match="cannot be distributed evenly") as caught:
        placed(devices, stages=stages)
    assert caught.value.observed == f"{stages} stages and {devices} devices"
    assert f"Trainer(devices={stages})" in str(caught.value)
    assert f"num_stages={devices}" in str(caught.value)


@pytest.mark.parametrize(("schedule", "stages", "wanted"), [("zbv_zero_bubble", 2, 4), ("v_half", 6, 4), ("zb_h1", 4, 2)])
def test_a_schedule_for_another_number_of_stages_is_refused(schedule: str, stages: int, wanted: int) -> None:
    with pytest.raises(UnsupportedError, match=f"'{schedule}' does not support this number of stages per device") as caught:
        placed(2, schedule, stages=stages)
    assert f"num_stages={wanted}" in str(caught.value)


def test_a_table_for_another_number_of_devices_is_refused() -> None:
    schedule = schedule_of_table(ActionTable.from_csv(SPLIT_V), "mine.csv")
    found = placement_for(2, schedule, num_stages="auto", stages_per_rank="auto")
    assert found == Placement(num_ranks=2, stages_per_rank=2, is_v=True)
    assert placement_for(4, schedule, num_stages="auto", stages_per_rank="auto") == found  # two replicas
    with pytest.raises(UnsupportedError, match="The schedule table is for a different number of devices") as caught:
        placement_for(3, schedule, num_stages="auto", stages_per_rank="auto")
    assert (caught.value.where, caught.value.observed) == ("mine.csv", "2 lines and 3 devices")
    assert "Trainer(devices=2)" in str(caught.value)
    with pytest.raises(UnsupportedError, match="'mine.csv' does not support this number of stages per device"):
        placement_for(2, schedule, num_stages=2, stages_per_rank="auto")


def test_a_batch_passes_through_and_none_is_refused() -> None:
    batch = object()
    assert check_has_batch(batch) is batch
    with pytest.raises(UnsupportedError, match="(?s)No batch is available to trace the model.*no dataloader"):
        check_has_batch(None)


def test_batch_norm_over_microbatches_is_reported_with_its_place() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Sequential(nn.BatchNorm2d(2)))
    for num_microbatches in (4, None):
        with pytest.warns(UserWarning, match=r"2 BatchNorm layers \(1, \.\.\.\).*num_microbatches=1"):
            report_batch_norm(module, num_microbatches)


@pytest.mark.parametrize(
    ("module", "num_microbatches"),
    [(nn.BatchNorm1d(2), 1), (nn.Sequential(nn.LayerNorm(2), nn.GroupNorm(1, 2)), 4)],
    ids=["one microbatch", "no BatchNorm"],
)
def test_nothing_is_reported_where_statistics_do_not_change(module: nn.Module, num_microbatches: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report_batch_norm(module, num_microbatches)


def reported(caplog: pytest.LogCaptureFixture, *, num_ranks: int, with_skips: bool, has_tags: bool) -> str:
    """What is said of a plan of three stages whose ranks talk over gloo, which has tags, or not."""
    model = UNet(4) if with_skips else nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    batch = torch.randn(2, 1, 16, 16) if with_skips else torch.randn(2, 2)
    placement = Placement(num_ranks=num_ranks, stages_per_rank=3 // num_ranks)
    group: Any = object()
    topology = Topology(
        group=group,
        control_group=group if has_tags else None,
        rank=0,
        placement=placement,
        device=torch.device("cpu"),
    )
    with caplog.at_level("INFO", "lightning_fxpipe"):
        report_plan(
            make_plan(model, batch, num_stages=3),
            model,
            schedule=SCHEDULES["1f1b"],
            num_microbatches=4,
            num_samples=None,
            placement=placement,
            ranks_per_machine=num_ranks,
            topology=topology,
        )
    return caplog.text


def test_the_plan_says_the_schedule_and_which_rank_holds_which_stage(caplog: pytest.LogCaptureFixture) -> None:
    out = reported(caplog, num_ranks=3, with_skips=False, has_tags=True)
    assert "Schedule 1f1b, 4 microbatches of 2 samples; rank 0: stage 2, rank 1: stage 1" in out


@pytest.mark.parametrize(
    ("num_ranks", "with_skips", "has_tags", "is_said"),
    [(3, True, False, True), (3, True, True, False), (3, False, False, False), (1, True, False, False)],
    ids=["NCCL", "gloo", "nothing skips", "one rank"],
)
def test_it_is_said_where_skips_are_passed_on(
    caplog: pytest.LogCaptureFixture, num_ranks: int, with_skips: bool, has_tags: bool, is_said: bool
) -> None:
    out = reported(caplog, num_ranks=num_ranks, with_skips=with_skips, has_tags=has_tags)
    assert ("sent past stages" in out) == with_skips
    assert ("forwarded by the stages in between" in out) == is_said


def test_a_plan_for_another_batch_dimension_is_refused() -> None:
    for given, of_plan in ((0, 0), (0, 1), (1, 1)):  # the default goes with any
        check_batch_dim(given, of_plan)
    with pytest.raises(UnsupportedError, match="a different batch dimension") as caught:
        check_batch_dim(1, 0)
    assert caught.value.observed == "FxPipeStrategy(batch_dim=1) and a plan with batch_dim=0"


@pytest.mark.parametrize("where", ["sampler", "batch_sampler"])
def test_a_sampler_for_several_replicas_is_refused(where: str) -> None:
    def loader(num_replicas: int) -> DataLoader[Any]:
        sampler = DistributedSampler(range(8), num_replicas=num_replicas, rank=0)  # type: ignore[arg-type]
        if where == "sampler":
            return DataLoader(range(8), sampler=sampler)  # type: ignore[arg-type]
        return DataLoader(range(8), batch_sampler=torch.utils.data.BatchSampler(sampler, 2, False))  # type: ignore[arg-type]

    check_sampler(loader(1), Replicas())
    with pytest.raises(UnsupportedError, match="yields different samples on each process"):
        check_sampler(loader(2), Replicas())


def test_one_stage_has_no_optimizer_that_needs_others() -> None:
    optimizer = torch.optim.LBFGS(nn.Linear(2, 2).parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert check_optimizers([optimizer], 1) == []
