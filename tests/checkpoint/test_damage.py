"""Damage is told, by an error of ours: no changed bit, no missing part and no part of another checkpoint goes unseen."""

from __future__ import annotations

import json
import pickle
import random
import re
import shutil
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.utils.data import DataLoader

from lightning_fxpipe import FxPipeError
from lightning_fxpipe.__main__ import main
from lightning_fxpipe.checkpoint.atomic import replacing
from lightning_fxpipe.checkpoint.checksums import Checksums, checksum
from lightning_fxpipe.checkpoint.converting import read_whole
from lightning_fxpipe.checkpoint.damage import damage_error, damage_told
from lightning_fxpipe.checkpoint.locations import Location
from lightning_fxpipe.checkpoint.pickles import Reading
from lightning_fxpipe.strategy import checkpoint_hooks
from tests.lit import make_trainer

KINDS = ("ckpt", "folder", "safetensors")


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(24, 24), nn.BatchNorm1d(24), nn.Linear(24, 24))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.model(batch).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.named_parameters(prefix="model"), 1e-2)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints of one model in each format: ``a.folder`` and the like."""
    pytest.importorskip("safetensors")
    folder = tmp_path_factory.mktemp("whole")
    for seed, name in enumerate("ab"):
        L.seed_everything(seed, verbose=False)
        trainer = make_trainer(max_epochs=1 + seed)
        trainer.fit(Model(), DataLoader(torch.randn(16, 24), batch_size=8))
        trainer.save_checkpoint(folder / f"{name}.ckpt")
        for kind in ("folder", "safetensors"):
            assert main(["convert", str(folder / f"{name}.ckpt"), str(folder / f"{name}.{kind}"), *_as(kind)]) == 0
    return folder


def _as(kind: str) -> list[str]:
    return ["--to", "folder"] if kind == "folder" else []


def read(path: Path) -> Any:
    return read_whole(Location.of(path), Reading(weights_only=True))[1]


def is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(is_same, one, other))
    return bool(one == other)


# ------------------------------------------------------------------------------------- what can happen to a file


def flip(content: bytearray, choose: random.Random) -> None:
    content[choose.randrange(len(content))] ^= 1 << choose.randrange(8)


def zero(content: bytearray, choose: random.Random) -> None:
    start, length = choose.randrange(len(content)), choose.choice([8, 64, 512, 4096])
    content[start : start + length] = bytes(len(content[start : start + length]))


def cut(content: bytearray, choose: random.Random) -> None:
    del content[choose.randrange(len(content)) :]


def insert(content: bytearray, choose: random.Random) -> None:
    start = choose.randrange(len(content))
    content[start:start] = choose.randbytes(choose.choice([1, 7, 64]))


def scramble(content: bytearray, choose: random.Random) -> None:
    start, length = choose.randrange(len(content)), choose.choice([1, 16, 300])
    content[start : start + length] = choose.randbytes(len(content[start : start + length]))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("damage", [flip, zero, cut, insert, scramble])
def test_no_damage_goes_unseen(
    damage: Callable[[bytearray, random.Random], None], kind: str, seed: int, whole: Path, tmp_path: Path
) -> None:
    """torch reads a changed bit without a word, and files could come from two checkpoints of one model."""
    choose = random.Random(zlib.crc32(f"{damage.__name__} {kind} {seed}".encode()))
    source, path = whole / f"a.{kind}", tmp_path / f"damaged.{kind}"
    shutil.copytree(source, path) if source.is_dir() else shutil.copy(source, path)
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        before = file.read_bytes()
        content = bytearray(before)
        damage(content, choose)
        file.write_bytes(content)
        assert is_told_or_harmless(path, source), file.name
        file.write_bytes(before)


def is_told_or_harmless(path: Path, source: Path) -> bool:
    """An error of ours and no other; or nothing that anybody would read has changed, such as bytes between two records."""
    try:
        found = read(path)
    except FxPipeError:
        assert main(["inspect", str(path), "--verify"]) == 1
        return True
    return is_same(found, read(source))


@pytest.mark.parametrize("name", ["__0_0.distcp", "meta.pt", ".metadata", "checksums.json"])
def test_a_file_of_another_checkpoint_is_no_part_of_this_one(name: str, whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "mixed"
    shutil.copytree(whole / "a.folder", path)
    shutil.copy(whole / "b.folder" / name, path / name)
    with pytest.raises(FxPipeError, match="checksum"):
        read(path)


def test_a_value_of_another_checkpoint_is_none_of_this_one(whole: Path, tmp_path: Path) -> None:
    """In the place of an option of the optimizer, which is no tensor, a whole one of another checkpoint may be."""
    path = tmp_path / "mixed"
    shutil.copytree(whole / "a.folder", path)
    checksums = json.loads((path / "checksums.json").read_text())
    key = next(key for key in checksums["values"] if key.endswith("param_groups.0.lr"))
    checksums["values"][key] ^= 1
    (path / "checksums.json").write_text(json.dumps(checksums))
    with pytest.raises(FxPipeError, match=re.escape(key)):
        read(path)


def test_a_broken_tensor_of_a_folder_holds_no_code(whole: Path, tmp_path: Path) -> None:
    """Torch refuses the function that it then seems to name, and says how to trust it."""
    path = tmp_path / "folder"
    shutil.copytree(whole / "a.folder", path)
    part = path / "__0_0.distcp"
    part.write_bytes(part.read_bytes().replace(b"_rebuild_tensor_v2", b"_rebuild_tensor_vX"))
    with pytest.raises(FxPipeError, match="_rebuild_tensor_vX"):
        read(path)


def test_a_value_without_a_checksum_is_none_of_the_folder(whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "folder"
    shutil.copytree(whole / "a.folder", path)
    checksums = json.loads((path / "checksums.json").read_text())
    del checksums["values"]["model.model.0.weight"]
    (path / "checksums.json").write_text(json.dumps(checksums))
    with pytest.raises(FxPipeError, match="none was saved"):
        read(path)


def test_a_large_file_has_the_checksum_of_all_of_it(tmp_path: Path) -> None:
    content = bytearray(random.Random(1).randbytes(3 << 20))
    checksums = Checksums(values={}, files={"large": checksum(bytes(content))})
    (tmp_path / "large").write_bytes(content)
    checksums.check_file("here", tmp_path / "large")
    content[0] ^= 1
    (tmp_path / "large").write_bytes(content)
    with pytest.raises(FxPipeError, match="large has checksum"):
        checksums.check_file("here", tmp_path / "large")


def test_damage_in_a_folder_of_others_is_told(tmp_path: Path) -> None:
    """Of FSDP, for instance: torch writes checksums into the parts, and does not look at them."""
    weight = torch.randn(64, 64)
    dcp_save({"model": {"weight": weight}}, storage_writer=FileSystemWriter(tmp_path / "folder"), no_dist=True)
    torch.save({"pytorch-lightning_version": "2.6.0"}, tmp_path / "folder" / "meta.pt")
    assert torch.equal(read(tmp_path / "folder")["state_dict"]["weight"], weight)
    part = tmp_path / "folder" / "__0_0.distcp"
    content = bytearray(part.read_bytes())
    content[content.index(weight.numpy().tobytes()) + 5] ^= 1
    part.write_bytes(content)
    with pytest.raises(FxPipeError, match="weight in __0_0.distcp"):
        read(tmp_path / "folder")


@pytest.mark.parametrize("name", ["__0_0.distcp", "meta.pt", ".metadata", "checksums.json"])
def test_a_folder_without_one_of_its_files_is_not_complete(
    name: str, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "folder"
    shutil.copytree(whole / "a.folder", path)
    (path / name).unlink()
    capsys.readouterr()
    assert main(["inspect", str(path)]) == 1
    assert f"no {name}" in "".join(capsys.readouterr())
    with pytest.raises(FxPipeError, match=f"no {name}"):
        read(path)


def test_a_cut_part_is_seen_without_reading_it(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "folder"
    shutil.copytree(whole / "a.folder", path)
    part = path / "__0_0.distcp"
    num_bytes = part.stat().st_size
    part.write_bytes(part.read_bytes()[:-1])
    capsys.readouterr()
    assert main(["inspect", str(path)]) == 1
    assert f"Complete     no: {num_bytes - 1} of {num_bytes} bytes of __0_0.distcp" in capsys.readouterr().out


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_checkpoint_is_verified(kind: str, whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(whole / f"a.{kind}"), "--verify"]) == 0
    assert "Verified     yes" in capsys.readouterr().out
    assert main(["inspect", str(whole / f"a.{kind}")]) == 0
    assert "Verified" not in capsys.readouterr().out


def test_what_has_no_checksums_is_said_to_have_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"weight": torch.ones(3)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert main(["inspect", str(tmp_path / "old.pt"), "--verify"]) == 0
    assert "Verified     no: it has no checksums" in capsys.readouterr().out


# ------------------------------------------------------------------------------------- what readers raise


@pytest.mark.parametrize("error", [EOFError(), KeyError("x"), MemoryError(), RecursionError(), OSError(22, "x"), ValueError()])
def test_whatever_a_reader_raises_is_damage(error: Exception) -> None:
    with pytest.raises(FxPipeError, match=type(error).__name__), damage_told("here"):
        raise error


@pytest.mark.parametrize("error", [PermissionError(), TimeoutError(), KeyboardInterrupt(), damage_error("there", "x")])
def test_what_is_no_damage_stays_what_it_is(error: BaseException) -> None:
    with pytest.raises(type(error)) as raised, damage_told("here"):
        raise error
    assert raised.value is error


def test_a_class_that_is_not_known_is_torchs_error_and_a_broken_pickle_is_not(tmp_path: Path) -> None:
    torch.save({"path": tmp_path}, tmp_path / "class.pt")
    with pytest.raises(pickle.UnpicklingError, match="PosixPath"):
        read(tmp_path / "class.pt")
    (tmp_path / "broken.pt").write_bytes(b"\x80\x02\x00.")
    with pytest.raises(FxPipeError, match="damaged"):
        read(tmp_path / "broken.pt")


def test_what_needs_more_memory_than_there_is_may_be_damage() -> None:
    assert "more memory" in str(damage_error("here", MemoryError()))
    assert "damaged" in str(damage_error("here", EOFError()))


# ------------------------------------------------------------------------------------- through a Trainer


@pytest.mark.parametrize("kind", ["ckpt", "folder"])
def test_a_run_does_not_go_on_from_a_damaged_checkpoint(kind: str, whole: Path, tmp_path: Path) -> None:
    source, path = whole / f"a.{kind}", tmp_path / f"damaged.{kind}"
    shutil.copytree(source, path) if source.is_dir() else shutil.copy(source, path)
    file = path / "__0_0.distcp" if source.is_dir() else path
    weight = read(source)["state_dict"]["model.2.weight"].numpy().tobytes()
    content = bytearray(file.read_bytes())
    content[content.index(weight) + 1] ^= 4
    file.write_bytes(content)
    trainer = make_trainer(strategy="fxpipe", max_epochs=3)
    with pytest.raises(FxPipeError, match="cannot be read") as raised:
        trainer.fit(Model(), DataLoader(torch.randn(16, 24), batch_size=8), ckpt_path=str(path))
    assert path.name in str(raised.value)
    assert trainer.global_step == 0


@pytest.mark.parametrize("kind", ["ckpt", "folder"])
@pytest.mark.parametrize("function", ["read_checkpoint", "load_optimizers"])
def test_a_checkpoint_that_another_run_replaces_meanwhile_is_refused(
    function: str, kind: str, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of the two is whole, and what had been read before would be of one, the rest of the other."""
    path = tmp_path / f"last.{kind}"
    copy = shutil.copytree if kind == "folder" else shutil.copy
    copy(whole / f"a.{kind}", path)
    original = getattr(checkpoint_hooks, function)

    def replaced_before(*args: Any, **kwargs: Any) -> Any:
        with replacing(path) as new:
            copy(whole / f"b.{kind}", new)
        return original(*args, **kwargs)

    monkeypatch.setattr(checkpoint_hooks, function, replaced_before)
    trainer = make_trainer(strategy="fxpipe", max_epochs=3)
    with pytest.raises(FxPipeError, match="replaced while it was being read"):
        trainer.fit(Model(), DataLoader(torch.randn(16, 24), batch_size=8), ckpt_path=str(path))


def test_ranks_share_the_checksums_of_a_file(whole: Path, tmp_path: Path) -> None:
    """Each tensor is compared by one of them: all read no more of it than one."""
    path = tmp_path / "damaged.ckpt"
    with zipfile.ZipFile(whole / "a.ckpt") as archive:
        tensors = [name for name in archive.namelist() if Path(name).parent.name == "data"]
        contents = {name: archive.read(name) for name in tensors if len(archive.read(name)) > 100}
    assert len(contents) >= 6
    for record in contents.values():
        content = bytearray((whole / "a.ckpt").read_bytes())
        content[content.index(record) + 50] ^= 1
        path.write_bytes(content)
        told = 0
        for rank in range(3):
            try:
                read_whole(Location.of(path), Reading(is_checked=lambda number, rank=rank: number % 3 == rank))  # type: ignore[misc]
            except FxPipeError:
                told += 1
        assert told == 1
