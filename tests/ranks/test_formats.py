"""Checkpoints of a pipeline in the formats of others: written as a plain Trainer writes them, read wherever they come from."""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import fsspec
import lightning as L
import pytest
import torch
import torch.distributed as dist
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import CatMetric, MeanMetric

from lightning_fxpipe import FxPipeStrategy
from lightning_fxpipe.__main__ import main
from tests.lit import make_trainer
from tests.ranks.pool import RankPool

Ranks = Callable[[int], RankPool]


class Counted(nn.Module):
    """Has a state beside its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.number = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)

    def get_extra_state(self) -> Any:
        return {"number": self.number, "tensor": torch.full((3,), float(self.number))}

    def set_extra_state(self, state: Any) -> None:
        self.number = state["number"]


class Rich(L.LightningModule):
    """Has in its state what there is: tied weights, buffers, lists of metrics, other memory formats, and no tensors.

    One tensor is large enough to be sent by itself.
    """

    def __init__(self, options: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(*(Counted() for _ in range(6)))
        self.net[3].linear.weight = self.net[0].linear.weight
        for number, module in enumerate(self.net):
            module.number = number + 1
        self.wide = nn.Parameter(torch.randn(4, 4, 6, 200).to(memory_format=torch.channels_last))
        self.norm = nn.LayerNorm(8)
        self.register_buffer("scale", torch.ones(3))
        self.losses, self.mean = CatMetric(), MeanMetric()
        self.losses.persistent(True)
        self.mean.persistent(True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        # The large parameter is used first, so that it lies in the stage that is not on rank 0.
        loss = self.norm(self.net(batch[0] + self.wide.mean())).square().mean() + self.net(batch[0]).square().mean()
        self.losses.update(loss.detach())
        self.mean.update(loss.detach())
        return loss

    def configure_optimizers(self) -> Any:
        decay = [p for p in self.parameters() if p.dim() > 1]
        rest = [p for p in self.parameters() if p.dim() <= 1]
        optimizer = torch.optim.AdamW([{"params": decay}, {"params": rest, "weight_decay": 0.0}], lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(16, 8, generator=torch.Generator().manual_seed(1))), batch_size=4)


def trained(
    stages: int,
    *,
    folder: str | None = None,
    epochs: int = 1,
    ckpt_path: str | None = None,
    averages: bool = False,
    module: L.LightningModule | None = None,
    weights_only: bool | None = None,
    save_weights_only: bool = False,
    **options: Any,
) -> tuple[Any, L.Trainer]:
    """Trains a pipeline, or with one stage a plain Trainer's module."""
    L.seed_everything(5, verbose=False)
    module = Rich() if module is None else module
    callbacks: list[Any] = [EMAWeightAveraging()] if averages else []
    if folder is not None:
        callbacks.append(ModelCheckpoint(dirpath=folder, filename="end", save_weights_only=save_weights_only))
    strategy: dict[str, Any] = {}
    if stages > 1:
        strategy = {"strategy": FxPipeStrategy(num_microbatches=2, **options), "devices": stages}
    trainer = make_trainer(max_epochs=epochs, callbacks=callbacks, enable_checkpointing=folder is not None, **strategy)
    trainer.fit(module, loader(), ckpt_path=ckpt_path, weights_only=weights_only)
    return module, trainer


def results(stages: int, **options: Any) -> dict[str, Any]:
    """All that a run leaves behind."""
    module, trainer = trained(stages, **options)
    optimizer = trainer.optimizers[0]
    return {
        "state": {fqn: value for fqn, value in module.state_dict().items() if not is_placeholder(value)},
        "moments": {f: optimizer.state[p] for f, p in module.named_parameters() if p in optimizer.state},
        "lr": [group["lr"] for group in optimizer.param_groups],
        "step": trainer.global_step,
    }


def is_placeholder(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta


def differences(one: Any, other: Any, *, tolerance: float, path: str = "") -> list[str]:
    """Where two nested values differ; with a tolerance of 0 also in the layout of tensors and the order of keys."""
    if type(one) is not type(other):
        return [f"{path}: {type(one).__name__} and {type(other).__name__}"]
    if isinstance(one, Tensor):
        same = one.shape == other.shape and one.dtype == other.dtype and one.stride() == other.stride()
        return [] if same and torch.allclose(one.double(), other.double(), rtol=0, atol=tolerance) else [path]
    if isinstance(one, Mapping):
        found = [] if list(one) == list(other) else [f"{path}: keys {[*one]} and {[*other]}"]
        pairs = [(f"{path}.{key}", one[key], other[key]) for key in one if key in other]
    elif isinstance(one, (list, tuple)):
        found = [] if len(one) == len(other) else [f"{path}: {len(one)} and {len(other)} entries"]
        pairs = [(f"{path}.{index}", a, b) for index, (a, b) in enumerate(zip(one, other, strict=False))]
    elif isinstance(one, float):
        return [] if abs(one - other) <= tolerance else [f"{path}: {one} and {other}"]
    else:
        return [] if one == other else [f"{path}: {one} and {other}"]
    return found + [text for where, a, b in pairs for text in differences(a, b, tolerance=tolerance, path=where)]


def without_paths(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint without our entry and without what says where it lies."""
    kept = {key: value for key, value in checkpoint.items() if key != "lightning_fxpipe"}
    kept["callbacks"] = {
        name: {key: value for key, value in state.items() if key not in ("best_model_path", "dirpath")}
        for name, state in kept["callbacks"].items()
    }
    return kept


@pytest.mark.parametrize("averages", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_file_is_that_of_a_plain_trainer_and_a_folder_is_the_same(averages: bool, ranks: Ranks, tmp_path: Path) -> None:
    places = {name: str(tmp_path / name) for name in ("plain", "file", "folder")}
    trained(1, folder=places["plain"], averages=averages)
    for kind in ("file", "folder"):
        options = {"averages": averages, "save_distributed_checkpoint": kind == "folder"}
        ranks(2).run(results, 2, folder=places[kind], **options)
    converted = str(tmp_path / "converted.ckpt")
    assert main(["convert", f"{places['folder']}/end.ckpt", converted]) == 0
    plain, file, other = (torch.load(p) for p in (f"{places['plain']}/end.ckpt", f"{places['file']}/end.ckpt", converted))
    # The same keys in the same order, shapes, strides, dtypes, numbers of parameters, types.
    assert differences(without_paths(plain), without_paths(file), tolerance=1e-5) == []
    # A folder knows no strides; everything else is equal to the last bit.
    without_strides = [
        text
        for text in differences(by_name(without_paths(file)), by_name(without_paths(other)), tolerance=0)
        if "wide" not in text and not text.startswith(".optimizer_states.0.state.0.")
    ]
    assert without_strides == []
    assert torch.equal(file["state_dict"]["wide"], other["state_dict"]["wide"])
    for key, value in file["optimizer_states"][0]["state"][0].items():
        assert torch.equal(value, other["optimizer_states"][0]["state"][0][key])
    assert file["state_dict"]["net.0.linear.weight"].data_ptr() == file["state_dict"]["net.3.linear.weight"].data_ptr()
    assert_resumes_alike(ranks(2), [f"{places['file']}/end.ckpt", f"{places['folder']}/end.ckpt"], averages)


def by_name(checkpoint: dict[str, Any]) -> dict[str, Any]:
    return dict(sorted(checkpoint.items()))


def assert_resumes_alike(pool: RankPool, paths: list[str], averages: bool) -> None:
    """On one device, and in a pipeline bit for bit from each of them."""
    alone = results(1, epochs=2, ckpt_path=paths[0], averages=averages)
    first = pool.run(results, 2, epochs=2, ckpt_path=paths[0], averages=averages)
    for path in paths[1:]:
        again = pool.run(results, 2, epochs=2, ckpt_path=path, averages=averages)
        assert differences(first, again, tolerance=0) == []
    for result in first:
        assert result["step"] == alone["step"] == 8
        for kind in ("state", "moments"):
            expected = {fqn: alone[kind][fqn] for fqn in result[kind]}
            assert differences(expected, result[kind], tolerance=1e-5) == []


# ------------------------------------------------------------------ weights, errors


def outcome(stages: int, change: str | None = None, *, strict: bool = True, **options: Any) -> str:
    """What a run says when it ends: the error, or the parameter that is looked at."""
    L.seed_everything(5, verbose=False)
    module = Rich()
    if change == "renamed":
        module.other = module.norm
        del module.norm
        module.norm_of = lambda x: module.other(x)
        module.training_step = lambda batch, batch_idx: module.other(module.net(batch[0] + module.wide.mean())).square().mean()
    elif change == "resized":
        module.wide = nn.Parameter(torch.randn(4, 4, 6, 201))
    module.strict_loading = strict
    try:
        trained(stages, module=module, epochs=2, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "done"


def cases(paths: dict[str, str], stages: int) -> dict[str, str]:
    """Outcomes of loading into modules that do and do not fit, by name."""
    found = {}
    for source in ("plain", "folder", "state dict"):
        for change in ("renamed", "resized"):
            found[f"{source} {change}"] = outcome(stages, change, ckpt_path=paths[source])
    found["lenient"] = outcome(stages, "renamed", ckpt_path=paths["folder"], strict=False)
    found["inner"] = outcome(stages, ckpt_path=paths["inner"])
    found["inner lenient"] = outcome(stages, ckpt_path=paths["inner"], strict=False)
    found["absent"] = outcome(stages, ckpt_path=paths["absent"])
    found["weights of a trainer"] = outcome(stages, ckpt_path=paths["weights"])
    return found


def test_what_does_not_fit_is_one_devices_error_on_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    paths = {name: str(tmp_path / name) for name in ("state dict", "inner", "absent")}
    trained(1, folder=str(tmp_path / "plain"))
    trained(1, folder=str(tmp_path / "weights"), save_weights_only=True)
    ranks(2).run(results, 2, folder=str(tmp_path / "folder"))
    paths |= {name: str(tmp_path / name / "end.ckpt") for name in ("plain", "folder", "weights")}
    torch.save(Rich().state_dict(), paths["state dict"])
    torch.save(Rich().net.state_dict(), paths["inner"])
    both = ranks(2).run(cases, paths, 2)
    assert both[0] == both[1]
    found = both[0]
    for change in ("renamed", "resized"):
        expected = outcome(1, change, ckpt_path=paths["plain"])
        assert expected.startswith("RuntimeError: Error(s) in loading state_dict for Rich")
        assert found[f"plain {change}"] == found[f"folder {change}"] == found[f"state dict {change}"] == expected
    assert found["absent"] == outcome(1, ckpt_path=paths["absent"])
    assert found["weights of a trainer"] == outcome(1, ckpt_path=paths["weights"])
    assert 'Missing key(s) in state_dict: "wide", "scale", "norm.weight"' in found["inner"]
    assert "net." not in found["inner"]  # its names have been found without the prefix
    assert found["lenient"] == found["inner lenient"] == "done"


def begun(paths: list[str]) -> list[dict[str, Any]]:
    """A module's weights as they are loaded from files, and the steps of a run that begins with them."""
    found = []
    for path in paths:
        torch.manual_seed(9)
        module = Plain()
        trainer = make_trainer(max_steps=1, strategy=FxPipeStrategy(num_microbatches=2), devices=2)
        trainer.validate(module, loader(), ckpt_path=path, verbose=False)
        loaded = {fqn: value.clone() for fqn, value in module.state_dict().items()}
        trainer.fit(module, loader(), ckpt_path=path)
        found.append({"loaded": loaded, "step": trainer.global_step})
    return found


def test_weights_of_files_begin_a_run_at_step_0(ranks: Ranks, tmp_path: Path) -> None:
    torch.manual_seed(1)
    state = Plain().state_dict()
    paths = [str(tmp_path / name) for name in ("weights.pt", "weights.ckpt")]
    torch.save(state, paths[0])
    assert main(["convert", paths[0], paths[1]]) == 0
    if importlib.util.find_spec("safetensors") is not None:
        paths.append(str(tmp_path / "weights.safetensors"))
        assert main(["convert", paths[0], paths[2]]) == 0
    for result in ranks(2).run(begun, paths):
        assert len(result) == len(paths)
        for run in result:
            assert run["step"] == 1
            assert differences(dict(state), run["loaded"], tolerance=0) == []


def pickles(stages: int, path: str) -> list[str]:
    """Outcomes with a checkpoint that holds an object of a class which torch does not trust."""
    asked = [{}, {"weights_only": True}, {"weights_only": False}]
    return [outcome(stages, ckpt_path=path, **options).partition(":")[0] for options in asked]


def save_odd(folder: str, save_distributed_checkpoint: bool) -> None:
    L.seed_everything(5, verbose=False)
    module = Rich(argparse.Namespace(depth=3))
    trained(2, folder=folder, module=module, save_distributed_checkpoint=save_distributed_checkpoint)


@pytest.mark.parametrize("is_folder", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_weights_only_is_obeyed_as_on_one_device(is_folder: bool, ranks: Ranks, tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    ranks(2).run(save_odd, folder, is_folder)
    for found in ranks(2).run(pickles, 2, f"{folder}/end.ckpt"):
        assert found == ["UnpicklingError", "UnpicklingError", "done"]
    if not is_folder:
        assert pickles(1, f"{folder}/end.ckpt") == ["UnpicklingError", "UnpicklingError", "done"]


# ------------------------------------------------------------------ places


class Far(DirFileSystem):  # type: ignore[misc]
    """A file system that is none of this machine, as far as fsspec says; its root is the option ``root`` or the variable's."""

    protocol = "far"
    cachable = False
    root = "/"

    def __init__(self, root: str | None = None, **options: Any) -> None:
        super().__init__(path=root or Far.root, fs=LocalFileSystem(auto_mkdir=True))

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(entry) for entry in path]
        return str(path).removeprefix("far://")


def places(root: str, as_folder: bool) -> list[str]:
    """Saves twice behind URLs, removes what is to be removed, and resumes."""
    fsspec.register_implementation("far", Far, clobber=True)
    Far.root = f"{root}/far"
    _, trainer = trained(2, save_distributed_checkpoint=as_folder)
    said = []
    for url in (f"file://{root}/near", "far://there"):
        for name in ("a", "a", "b"):
            trainer.save_checkpoint(f"{url}/{name}.ckpt")
        trainer.strategy.remove_checkpoint(f"{url}/b.ckpt")
        trainer.strategy.barrier()
        said.append(outcome(2, ckpt_path=f"{url}/a.ckpt"))
    trainer.save_checkpoint("far://options/c.ckpt", storage_options={"root": f"{root}/elsewhere"})
    try:
        trainer.save_checkpoint(f"{root}/x.ckpt", storage_options={"token": 1})
    except TypeError as error:
        said.append(str(error))
    return [*said, outcome(2, folder="memory://x")]


@pytest.mark.parametrize("as_folder", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_urls_are_places_for_checkpoints(as_folder: bool, ranks: Ranks, tmp_path: Path) -> None:
    for said in ranks(2).run(places, str(tmp_path), as_folder):
        assert said[:2] == ["done", "done"]
        assert "token would have no effect" in said[2]
        assert "UnsupportedError" in said[3]
        assert "in the memory of one process" in said[3]
    for folder in ("near", "far/there"):
        assert [path.name for path in (tmp_path / folder).iterdir()] == ["a.ckpt"]
        assert (tmp_path / folder / "a.ckpt").is_dir() == as_folder
    assert (tmp_path / "elsewhere" / "options" / "c.ckpt").exists()


# ------------------------------------------------------------------ sharded by others


class Plain(L.LightningModule):
    """What others shard."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
        self.register_buffer("scale", torch.ones(2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.net(batch[0]).square().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def sharded(folder: str, root: str) -> dict[str, Any]:
    """Trains with fully_shard and saves as Lightning's strategies do: FSDP under "model", model parallel under "state_dict"."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    torch.manual_seed(3)
    module = Plain()
    mesh = init_device_mesh("cpu", (2,))
    for layer in module.net:
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    optimizer = module.configure_optimizers()
    for batch in loader():
        optimizer.zero_grad()
        module.net(batch[0]).square().mean().backward()
        optimizer.step()
    state = get_model_state_dict(module)
    dcp_save({root: state, "optimizer_0": get_optimizer_state_dict(module, optimizer)}, checkpoint_id=folder)
    if dist.get_rank() == 0:
        progress = make_trainer(max_epochs=1).fit_loop.state_dict()
        rest = {"epoch": 1, "global_step": 4, "loops": {"fit_loop": progress}, "callbacks": {}, "lr_schedulers": []}
        torch.save({**rest, "pytorch-lightning_version": L.__version__}, f"{folder}/meta.pt")
    dist.barrier()
    return {fqn: value.full_tensor() if hasattr(value, "full_tensor") else value for fqn, value in state.items()}


def resumed(stages: int, path: str) -> dict[str, Any]:
    torch.manual_seed(9)
    return results(stages, module=Plain(), epochs=2, ckpt_path=path)


@pytest.mark.parametrize("root", ["model", "state_dict"])
def test_folders_of_sharded_runs_load(root: str, ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(sharded, str(tmp_path / "sharded"), root)
    assert main(["convert", str(tmp_path / "sharded"), str(tmp_path / "file.ckpt")]) == 0
    alone = resumed(1, str(tmp_path / "file.ckpt"))
    for path in ("sharded", "file.ckpt"):
        for result in ranks(2).run(resumed, 2, str(tmp_path / path)):
            for kind in ("state", "moments"):
                expected = {fqn: alone[kind][fqn] for fqn in result[kind]}
                for fqn, value in expected.items():
                    moments = {key: result[kind][fqn][key] for key in value} if isinstance(value, dict) else result[kind][fqn]
                    assert differences(value, moments, tolerance=1e-5) == []


# ------------------------------------------------------------------ an optimizer without a state


class Stateless(Plain):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def stateless(folder: str, ckpt_path: str | None) -> dict[str, Any]:
    epochs = 1 if ckpt_path is None else 2
    return results(2, module=Stateless(), folder=folder, epochs=epochs, ckpt_path=ckpt_path, save_distributed_checkpoint=True)


def test_an_optimizer_without_a_state_resumes_from_a_folder_and_from_its_consolidation(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(stateless, str(tmp_path / "a"), None)
    again = ranks(2).run(stateless, str(tmp_path / "b"), str(tmp_path / "a" / "end.ckpt"))
    command = [sys.executable, "-m", "lightning.pytorch.utilities.consolidate_checkpoint", "end.ckpt"]
    subprocess.run(command, cwd=tmp_path / "a", check=True, capture_output=True, timeout=120)
    alone = results(1, module=Stateless(), epochs=2, ckpt_path=str(tmp_path / "a" / "end.ckpt.consolidated"))
    shutil.rmtree(tmp_path / "a")
    for result in again:
        expected = {fqn: alone["state"][fqn] for fqn in result["state"]}
        assert differences(expected, result["state"], tolerance=1e-5) == []


# ------------------------------------------------------------------ memory


class Large(L.LightningModule):
    """Two layers of 32 MiB, one for each stage, that cost nothing to run."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Embedding(2**20, 8) for _ in range(2)))
        self.net[0].weight.data.fill_(1.0)
        self.net[1].weight.data.fill_(1.0)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        rows = batch[0].argmax(1)
        return self.net[1]((self.net[0](rows).sum(1) * 0).long()).mean() + self.net[0](rows).mean() * 0

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def growth(path: str) -> int:
    """Bytes by which the peak of this process's memory rises while a single file is saved."""
    strategy = FxPipeStrategy(num_microbatches=1, gather_after_run=False, save_distributed_checkpoint=False)
    trainer = make_trainer(max_steps=1, strategy=strategy, devices=2)
    grown: list[int] = []

    class Saves(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            Path("/proc/self/clear_refs").write_text("5")  # the peak is what it is now
            before = peak()
            trainer.save_checkpoint(path)
            grown.append(peak() - before)

    trainer.callbacks.append(Saves())
    trainer.fit(Large(), loader())
    return grown[0]


def peak() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def test_rank_0_receives_what_it_lacks_once(ranks: Ranks, tmp_path: Path) -> None:
    rank_0, rank_1 = ranks(2).run(growth, str(tmp_path / "large.ckpt"))
    mib = 2**20
    assert (tmp_path / "large.ckpt").stat().st_size > 64 * mib
    assert 28 * mib < rank_0 < 44 * mib
    assert rank_1 < 12 * mib
