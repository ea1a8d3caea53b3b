"""What optimizers keep goes into checkpoints and comes back as on one device, whatever kind of thing it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fxpipe import FxPipeStrategy, UnsupportedError
from tests.lit import make_trainer
from tests.ranks.pool import RankPool

Ranks = Callable[[int], RankPool]


class Curious(torch.optim.Optimizer):
    """Keeps what others do: nested and empty containers, plain values, tensors of other shapes, entries of its own."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})
        self.calls = 0
        self.restored = 0
        self.register_load_state_dict_post_hook(self._note)

    def _note(self, optimizer: Any) -> None:
        self.restored += 1

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        self.calls += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["factors"] = [torch.zeros(parameter.shape[0]), []]
                    state["history"] = {"losses": {0: torch.zeros(()), 1: 0.5}, "none": {}, "norms": [torch.zeros(3)]}
                    state["shape"] = tuple(parameter.shape)
                    state["count"] = 0
                    state["mean"] = torch.zeros(parameter.shape)
                state["count"] += 1
                state["factors"][0] += (
                    parameter.grad.flatten(1).pow(2).mean(1) if parameter.dim() > 1 else parameter.grad.pow(2)
                )
                state["history"]["losses"][0] += parameter.grad.sum()
                state["history"]["norms"][0][state["count"] % 3] = parameter.grad.norm()
                state["mean"] = state["mean"] * 0.9 + parameter.grad
                scale = state["factors"][0].sqrt().add(1).view(-1, *[1] * (parameter.dim() - 1))
                size = 1 + 0.01 * self.calls + 0.1 * float(state["history"]["norms"][0].mean())
                parameter.sub_(group["lr"] * size * (state["mean"] / scale))
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "calls": self.calls, "trace": [torch.full((2,), float(self.calls))]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.calls = state_dict["calls"]
        assert state_dict["trace"][0].tolist() == [self.calls] * 2


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW amsgrad": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "AdamW tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2), foreach=False),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "Adam foreach": lambda p: torch.optim.Adam(p, lr=1e-2, foreach=True),
    "SGD without state": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.02),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adamax": lambda p: torch.optim.Adamax(p),
    "ASGD": lambda p: torch.optim.ASGD(p),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "RAdam": lambda p: torch.optim.RAdam(p),
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p),
    "Curious": Curious,
}


COMMON = ["AdamW tensor lr", "AdamW fused", "Adagrad", "SGD without state", "Curious"]
FURTHER = [name for name in OPTIMIZERS if name not in COMMON]
NAMED = [name for name in OPTIMIZERS if "A" in name]  # that get the parameters' names, too


class Model(L.LightningModule):
    """The last layer has a group of its own, so that the group is empty elsewhere; the first layer is frozen."""

    def __init__(self, optimizer: str, *, named: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(4)
            self.model = nn.Sequential(*(nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(4)), nn.Linear(12, 5))
        self.model[0].requires_grad_(False)
        self.optimizer, self.named = optimizer, named

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        parts = list(self.model[:-1].named_parameters()), list(self.model[-1].named_parameters())
        groups = [{"params": part if self.named else [p for _, p in part]} for part in parts]
        return OPTIMIZERS[self.optimizer](groups)


def plain(value: Any) -> Any:
    """A value that can be compared by ``==``."""
    if isinstance(value, Tensor):
        return str(value.dtype), value.tolist()
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    return type(value)(map(plain, value)) if isinstance(value, (list, tuple)) else value


class Looks(L.Callback):
    """Keeps the optimizer's state by parameter at the beginning of a run, and when it is saved."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}
        self.saved: dict[str, Any] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.found = self._look(trainer, pl_module)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        if not self.saved:
            self.saved = self._look(trainer, pl_module)

    def _look(self, trainer: L.Trainer, module: L.LightningModule) -> dict[str, Any]:
        optimizer = trainer.optimizers[0]
        names = {id(parameter): fqn for fqn, parameter in module.named_parameters()}
        groups = [
            plain({**{k: v for k, v in group.items() if k != "params"}, "names": [names[id(p)] for p in group["params"]]})
            for group in optimizer.param_groups
        ]
        state = {names[id(parameter)]: plain(dict(value)) for parameter, value in optimizer.state.items()}
        return {**state, "groups": groups, "calls": getattr(optimizer, "calls", None)}


def train(name: str, stages: int, folder: str, ckpt_path: str | None = None, *, named: bool = False) -> dict[str, Any]:
    L.seed_everything(1, verbose=False)
    module, looks = Model(name, named=named), Looks()
    keep = ModelCheckpoint(dirpath=folder, filename=f"{name}-{{epoch}}", save_top_k=-1)
    place = {"strategy": FxPipeStrategy(num_microbatches=2), "devices": stages} if stages else {}
    trainer = make_trainer(max_epochs=2, callbacks=[looks, keep], enable_checkpointing=True, **place)
    data = TensorDataset(torch.linspace(-1, 1, 24 * 12).view(24, 12), torch.arange(24) % 5)
    trainer.fit(module, DataLoader(data, batch_size=8), ckpt_path=ckpt_path)
    weights = {fqn: p.detach().clone() for fqn, p in module.named_parameters() if not p.is_meta}
    return {
        "found": looks.found,
        "saved": looks.saved,
        "weights": weights,
        "hooks": getattr(trainer.optimizers[0], "restored", 0),
    }


def train_all(names: Sequence[str], stages: int, folder: str, origin: str | None) -> list[dict[str, Any]]:
    paths = {name: origin and f"{origin}/{name}-epoch=0.ckpt" for name in names}
    return [train(name, stages, folder, paths[name], named=name in NAMED) for name in names]


def check(name: str, before: list[dict[str, Any]], after: list[dict[str, Any]], where: str) -> None:
    saved = {key: value for result in before for key, value in result["saved"].items()}
    found = {key: value for result in after for key, value in result["found"].items()}
    assert found == saved, f"{name} {where}"
    expected = {key: value for result in before for key, value in result["weights"].items()}
    for result in after:
        for fqn, value in result["weights"].items():
            torch.testing.assert_close(
                value, expected[fqn], rtol=0, atol=2e-6, msg=lambda text: f"{name} {where} {fqn}: {text}"
            )
        assert result["hooks"] == (1 if name == "Curious" else 0)


@pytest.mark.parametrize("names", [COMMON, pytest.param(FURTHER, marks=pytest.mark.slow)], ids=["common", "further"])
def test_states_of_all_kinds_come_back_on_another_number_of_stages_and_from_one_device(
    ranks: Ranks, tmp_path: Path, names: list[str]
) -> None:
    two = ranks(2).run(train_all, names, 2, str(tmp_path / "two"), None)
    three = ranks(3).run(train_all, names, 3, str(tmp_path / "again"), str(tmp_path / "two"))
    alone = train_all(names, 0, str(tmp_path / "alone"), None)
    from_alone = ranks(2).run(train_all, names, 2, str(tmp_path / "again"), str(tmp_path / "alone"))
    for index, name in enumerate(names):
        check(name, [r[index] for r in two], [r[index] for r in three], "from two stages to three")
        check(name, [alone[index]], [r[index] for r in from_alone], "from one device to two stages")


class Unusual(torch.optim.SGD):
    """Has a state_dict of its own making."""

    def state_dict(self) -> dict[str, Any]:
        return {"fast": super().state_dict(), "slow": {}}


class Local(torch.optim.SGD):
    """Keeps beside the parameters' states what depends on which parameters it has."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "norm": sum(float(p.norm()) for group in self.param_groups for p in group["params"])}


def refused(kind: type[torch.optim.Optimizer], folder: str) -> str:
    module = Model("Curious")
    module.configure_optimizers = lambda: kind(module.parameters(), lr=0.1)
    keep = ModelCheckpoint(dirpath=folder)
    trainer = make_trainer(
        max_epochs=1, callbacks=[keep], enable_checkpointing=True, strategy=FxPipeStrategy(num_microbatches=2), devices=2
    )
    data = TensorDataset(torch.ones(8, 12), torch.zeros(8, dtype=torch.long))
    with pytest.raises(UnsupportedError) as caught:
        trainer.fit(module, DataLoader(data, batch_size=8))
    return f"after {trainer.global_step} steps: {caught.value}"


def test_states_that_no_other_number_of_stages_could_use_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    for message in ranks(2).run(refused, Unusual, str(tmp_path)):
        assert message.startswith("after 0 steps")
        assert "The optimizer state cannot be saved or restored stage by stage" in message
        assert "Unusual.state_dict" in message
        assert "'fast', 'slow'" in message
    for message in ranks(2).run(refused, Local, str(tmp_path)):
        assert "The optimizer state cannot be saved: entries that belong to no parameter differ" in message
        assert "Local" in message
        assert "norm" in message
    assert list(tmp_path.iterdir()) == []
