"""Formats of checkpoints, read and written in one process: bit for bit there and back, and one clear line for what is none."""

from __future__ import annotations

import json
import shutil
import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.consolidate_checkpoint import _format_checkpoint
from torch import Tensor, nn

from lightning_fxpipe import FxPipeError, UnsupportedError
from lightning_fxpipe.__main__ import main
from lightning_fxpipe.checkpoint.inspecting import look_into
from lightning_fxpipe.checkpoint.locations import Location, check_seen_by_all
from lightning_fxpipe.checkpoint.stage_state import names_in_parts, prefix_of, with_all_names, without_foreign_extras
from tests.lit import LitModel, make_loader, make_trainer


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a plain Trainer: two parameter groups, a scheduler, tied weights."""
    folder = tmp_path_factory.mktemp("plain")
    L.seed_everything(5, verbose=False)
    keep = ModelCheckpoint(dirpath=folder, filename="plain")
    make_trainer(max_epochs=1, callbacks=[keep], enable_checkpointing=True).fit(LitModel("gpt"), make_loader("gpt"))
    return folder / "plain.ckpt"


@pytest.fixture
def named(plain: Path, tmp_path: Path) -> Path:
    """The same, which says what parameters its optimizer has numbered, as those of the strategy do."""
    checkpoint = torch.load(plain)
    module = LitModel("gpt")
    names = {id(parameter): fqn for fqn, parameter in module.named_parameters()}
    groups = module.configure_optimizers()["optimizer"].param_groups
    fqns = [[names[id(parameter)] for parameter in group["params"]] for group in groups]
    checkpoint["lightning_fxpipe"] = {"group_fqns": [fqns]}
    torch.save(checkpoint, tmp_path / "named.ckpt")
    return tmp_path / "named.ckpt"


def assert_same(one: Any, other: Any, path: str = "") -> None:
    """Bit for bit, with the same types and the same order."""
    assert type(one) is type(other), path
    if isinstance(one, Tensor):
        assert one.dtype == other.dtype, path
        assert one.stride() == other.stride(), path
        assert torch.equal(one, other), path
    elif isinstance(one, dict):
        assert list(one) == list(other), path
        assert vars(one) == vars(other) if isinstance(one, OrderedDict) else True, path
        for key, value in one.items():
            assert_same(value, other[key], f"{path}.{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), path
        for index, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_same(a, b, f"{path}.{index}")
    else:
        assert one == other, path


def by_name(checkpoint: dict[str, Any]) -> dict[str, Any]:
    return dict(sorted(checkpoint.items()))


def consolidated(folder: Path) -> dict[str, Any]:
    """What ``python -m lightning.pytorch.utilities.consolidate_checkpoint`` writes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _format_checkpoint(_load_distributed_checkpoint(folder))


def convert(*arguments: object) -> None:
    assert main(["convert", *map(str, arguments)]) == 0


# ------------------------------------------------------------------ there and back


@pytest.mark.parametrize("knows_names", [True, False])
def test_a_file_becomes_a_folder_and_the_same_file_again(knows_names: bool, plain: Path, named: Path, tmp_path: Path) -> None:
    source = named if knows_names else plain
    convert(source, tmp_path / "folder")
    convert(tmp_path / "folder", tmp_path / "back.ckpt")
    convert(tmp_path / "back.ckpt", tmp_path / "again")
    convert(tmp_path / "again", tmp_path / "back2.ckpt")
    for name in ("back.ckpt", "back2.ckpt"):
        assert_same(by_name(torch.load(tmp_path / name)), by_name(torch.load(source)))


def test_optimizers_in_folders_are_keyed_by_fqn_where_the_names_are_known(named: Path, tmp_path: Path) -> None:
    convert(named, tmp_path / "folder")
    keys = look_into(Location.of(tmp_path / "folder")).checkpoint["optimizer_states"][0]["state"]
    assert set(keys) == {fqn for fqn, _ in LitModel("gpt").named_parameters()}


@pytest.mark.parametrize("knows_names", [True, False])
def test_what_lightning_makes_of_a_folder_resumes_as_the_file(
    knows_names: bool, plain: Path, named: Path, tmp_path: Path
) -> None:
    convert(named if knows_names else plain, tmp_path / "folder")
    torch.save(consolidated(tmp_path / "folder"), tmp_path / "consolidated.ckpt")
    states = []
    for path in (plain, tmp_path / "consolidated.ckpt"):
        module = LitModel("gpt")
        trainer = make_trainer(max_epochs=2)
        trainer.fit(module, make_loader("gpt"), ckpt_path=path)
        states.append({"model": module.state_dict(), "optimizer": trainer.optimizers[0].state_dict()["state"]})
    assert_same(*states)


def test_what_fabric_makes_of_a_folder_is_known(named: Path, tmp_path: Path) -> None:
    convert(named, tmp_path / "folder")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save(_load_distributed_checkpoint(tmp_path / "folder"), tmp_path / "fabric.ckpt")
    convert(tmp_path / "fabric.ckpt", tmp_path / "back.ckpt")
    back, source = torch.load(tmp_path / "back.ckpt"), torch.load(named)
    assert_same(back["optimizer_states"], source["optimizer_states"])
    assert_same(by_name(back["state_dict"]), by_name(dict(source["state_dict"])))


@pytest.mark.parametrize(("prefix", "is_named"), [("", True), ("model.", False)])
def test_names_that_torch_keeps_of_parameters_are_used_if_they_are_the_modules(
    prefix: str, is_named: bool, plain: Path, tmp_path: Path
) -> None:
    checkpoint = torch.load(plain)
    (state,) = checkpoint["optimizer_states"]
    fqns = [fqn for fqn, _ in LitModel("gpt").named_parameters()]
    for group in state["param_groups"]:
        group["param_names"] = [fqns.pop().removeprefix(prefix) for _ in group["params"]]
    torch.save(checkpoint, tmp_path / "source.ckpt")
    convert(tmp_path / "source.ckpt", tmp_path / "folder")
    keys = look_into(Location.of(tmp_path / "folder")).checkpoint["optimizer_states"][0]["state"]
    assert all(isinstance(key, str) == is_named for key in keys)
    convert(tmp_path / "folder", tmp_path / "back.ckpt")
    assert_same(torch.load(tmp_path / "back.ckpt")["optimizer_states"], checkpoint["optimizer_states"])


def test_load_from_checkpoint_takes_what_a_folder_is_consolidated_to_not_the_folder(plain: Path, tmp_path: Path) -> None:
    convert(plain, tmp_path / "folder")
    with pytest.raises(IsADirectoryError):
        LitModel.load_from_checkpoint(tmp_path / "folder", name="gpt")
    torch.save(consolidated(tmp_path / "folder"), tmp_path / "whole.ckpt")
    loaded = LitModel.load_from_checkpoint(tmp_path / "whole.ckpt", name="gpt")
    assert_same(by_name(dict(loaded.state_dict())), by_name(dict(torch.load(plain)["state_dict"])))


class Numbers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.last = nn.Linear(3, 3)
        self.last.weight = self.first.weight
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("brain", torch.ones(2, dtype=torch.bfloat16))
        self.register_buffer("part", torch.arange(6.0)[::2])


def test_safetensors_keep_one_name_of_shared_tensors_and_loading_brings_back_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    state = Numbers().state_dict()
    torch.save(state, tmp_path / "state.pt")
    convert(tmp_path / "state.pt", tmp_path / "weights.safetensors")
    assert "last.weight = first.weight" in capsys.readouterr().out
    assert set(safetensors.load_file(tmp_path / "weights.safetensors")) == set(state) - {"last.weight"}
    convert(tmp_path / "weights.safetensors", tmp_path / "back.ckpt")
    back = torch.load(tmp_path / "back.ckpt")["state_dict"]
    assert set(back) == set(state)
    for name, value in state.items():
        assert back[name].dtype == value.dtype
        assert torch.equal(back[name], value)


def test_safetensors_say_what_they_have_no_place_for(plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("safetensors")
    convert(plain, tmp_path / "w.safetensors")
    out = capsys.readouterr().out
    assert "Left out" in out
    assert "optimizer_states" in out
    convert(tmp_path / "w.safetensors", tmp_path / "start.ckpt")
    module = LitModel("gpt")
    module.load_state_dict(torch.load(plain)["state_dict"])
    loaded = LitModel.load_from_checkpoint(tmp_path / "start.ckpt", name="gpt")
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), loaded.parameters(), strict=True))
    trainer = make_trainer(max_epochs=1, limit_train_batches=1)
    trainer.fit(loaded, make_loader("gpt"), ckpt_path=tmp_path / "start.ckpt")
    assert trainer.global_step == 1


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_a_folder_of_weights_with_an_index_is_read(kind: str, tmp_path: Path) -> None:
    state = {"a.weight": torch.randn(3, 3), "b": torch.randn(2), "c.weight": torch.ones(1)}
    base = {"safetensors": "model", "bin": "pytorch_model"}[kind]
    names = {"a.weight": f"{base}-1.{kind}", "b": f"{base}-1.{kind}", "c.weight": f"{base}-2.{kind}"}
    (tmp_path / "hub").mkdir()
    for shard in set(names.values()):
        tensors = {name: state[name] for name in state if names[name] == shard}
        if kind == "safetensors":
            pytest.importorskip("safetensors.torch").save_file(tensors, tmp_path / "hub" / shard)
        else:
            torch.save(tensors, tmp_path / "hub" / shard)
    (tmp_path / "hub" / f"{base}.{kind}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    convert(tmp_path / "hub", tmp_path / "w.ckpt")
    assert_same(torch.load(tmp_path / "w.ckpt")["state_dict"], state)
    (tmp_path / "hub" / f"{base}-2.{kind}").unlink()
    assert main(["inspect", str(tmp_path / "hub")]) == 1


@pytest.mark.parametrize("wrap", [dict, lambda s: {"state_dict": s}, lambda s: {"model": s, "epoch": 3}])
@pytest.mark.parametrize("is_zip", [True, False])
def test_state_dicts_are_known_bare_and_under_the_usual_keys(wrap: Callable[..., Any], is_zip: bool, tmp_path: Path) -> None:
    state = Numbers().state_dict()
    torch.save(wrap(state), tmp_path / "w.pt", _use_new_zipfile_serialization=is_zip)
    convert(tmp_path / "w.pt", tmp_path / "w.ckpt")
    assert_same(dict(torch.load(tmp_path / "w.ckpt")["state_dict"]), dict(state))


def test_only_weights_on_request(named: Path, tmp_path: Path) -> None:
    convert(named, tmp_path / "w.ckpt", "--weights-only")
    keys = set(torch.load(tmp_path / "w.ckpt"))
    assert {"state_dict", "epoch", "global_step"} <= keys
    assert not {"optimizer_states", "lr_schedulers", "callbacks"} & keys


# ------------------------------------------------------------------ what is there, and what is none


def test_inspect_says_what_a_checkpoint_holds(named: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    convert(named, tmp_path / "folder")
    texts = []
    for path in (named, tmp_path / "folder"):
        capsys.readouterr()
        assert main(["inspect", str(path), "--tensors"]) == 0
        texts.append(capsys.readouterr().out)
    for text in texts:
        for part in ("Step         5, epoch 0", "lightning 2.", "ModelCheckpoint", "exp_avg_sq", "weight_decay=0.1", "float32"):
            assert part in text
        assert "model.blocks.0.qkv.weight" in text
    tables = [text[text.index("Tensors\n") :] for text in texts]
    assert tables[0] == tables[1]


def test_inspect_prints_the_same_as_json(named: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["inspect", str(named), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["complete"], found["global_step"], found["epoch"]) == (True, 5, 0)
    shapes = {name: [*value.shape] for name, value in torch.load(named)["state_dict"].items()}
    assert {name: each["shape"] for name, each in found["tensors"]["model"].items()} == shapes
    assert found["optimizers"][0][0]["weight_decay"] == 0.1


def test_inspect_reads_no_tensors(named: Path, tmp_path: Path) -> None:
    convert(named, tmp_path / "folder")
    for path in (named, tmp_path / "folder"):
        state = look_into(Location.of(path)).checkpoint["state_dict"]
        assert len(state) == len(LitModel("gpt").state_dict())
        assert all(value.is_meta for value in state.values())


class Harmful:
    def __reduce__(self) -> Any:
        return _note, (1,)


def test_inspect_runs_no_code_and_convert_only_what_is_trusted(
    plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({**torch.load(plain), "hyper_parameters": {"x": Harmful()}}, tmp_path / "h.ckpt")
    _noted.clear()
    assert main(["inspect", str(tmp_path / "h.ckpt")]) == 0
    assert main(["convert", str(tmp_path / "h.ckpt"), str(tmp_path / "folder")]) == 1
    assert "The checkpoint contains objects that could execute code." in (err := capsys.readouterr().err)
    assert "--trust" in err
    assert _noted == []
    convert(tmp_path / "h.ckpt", tmp_path / "folder", "--trust")
    assert _noted == [1]


_noted: list[int] = []


def _note(value: int) -> int:
    _noted.append(value)
    return value


def _write_nothing(path: Path, plain: Path) -> None:
    path.touch()


def _write_noise(path: Path, plain: Path) -> None:
    path.write_bytes(bytes(range(40, 240)) * 9)


def _write_half(path: Path, plain: Path) -> None:
    content = plain.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def _write_list(path: Path, plain: Path) -> None:
    torch.save([1, 2], path)


def _write_empty_folder(path: Path, plain: Path) -> None:
    path.mkdir()


def _write_unfinished_folder(path: Path, plain: Path) -> None:
    convert(plain, path, "--to", "folder")
    (path / "meta.pt").unlink()


def _write_folder_without_index(path: Path, plain: Path) -> None:
    convert(plain, path, "--to", "folder")
    (path / ".metadata").unlink()
    (path / "meta.pt").unlink()


def _write_cut_folder(path: Path, plain: Path) -> None:
    convert(plain, path, "--to", "folder")
    (path / ".metadata").write_bytes((path / ".metadata").read_bytes()[:100])


def _write_cut_rest(path: Path, plain: Path) -> None:
    convert(plain, path, "--to", "folder")
    (path / "meta.pt").write_bytes((path / "meta.pt").read_bytes()[:100])


def _write_bad_header(path: Path, plain: Path) -> None:
    pytest.importorskip("safetensors")
    path.write_bytes(b"\x10\0\0\0\0\0\0\0" + b'{"a":1')


@pytest.mark.parametrize(
    "write",
    [
        *(_write_nothing, _write_noise, _write_half, _write_list, _write_empty_folder),
        *(_write_unfinished_folder, _write_folder_without_index, _write_cut_folder, _write_cut_rest, _write_bad_header, None),
    ],
)
@pytest.mark.parametrize("command", ["inspect", "convert"])
def test_a_damaged_checkpoint_gives_a_message_and_a_failing_status(
    write: Callable[[Path, Path], None] | None, command: str, plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "source.ckpt"
    if write is not None:
        write(source, plain)
    capsys.readouterr()
    rest = [str(tmp_path / "target.ckpt")] if command == "convert" else []
    assert main([command, str(source), *rest]) == 1
    captured = capsys.readouterr()
    if command == "inspect" and write is _write_unfinished_folder:
        assert "Complete     no: no meta.pt" in captured.out  # what is there can be looked at
        return
    assert captured.err.startswith("error: ")
    assert "Traceback" not in captured.err
    assert str(source) in captured.err
    assert ("No such file or folder: " in captured.err) == (write is None)  # and then it is not called damaged
    assert not list(tmp_path.glob("target*"))


def test_nothing_is_overwritten_without_a_word(plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "target.ckpt"
    target.write_text("precious")
    assert main(["convert", str(plain), str(target)]) == 1
    assert "--force" in capsys.readouterr().err
    assert target.read_text() == "precious"
    convert(plain, target, "--force", "--to", "folder")
    convert(plain, target, "--force")
    assert main(["convert", str(target), str(target), "--force"]) == 1
    assert_same(torch.load(target), torch.load(plain))


def test_what_was_there_stays_until_the_new_one_is_complete(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "target.ckpt"
    shutil.copy(plain, target)
    monkeypatch.setattr("torch.save", _fails_halfway)
    for kind in ("file", "folder"):
        assert main(["convert", str(plain), str(target), "--force", "--to", kind]) == 1
        assert target.read_bytes() == plain.read_bytes()
        assert [path.name for path in tmp_path.iterdir()] == ["target.ckpt"]


def _fails_halfway(value: Any, file: Any) -> None:
    if hasattr(file, "write"):
        file.write(b"half")
    raise OSError("no space left on device")


# ------------------------------------------------------------------ places


def test_locations_are_paths_and_urls(tmp_path: Path) -> None:
    assert Location.of(f"file://{tmp_path}/a").path == Location.of(tmp_path / "a").path == tmp_path / "a"
    assert Location.of("memory://x/y").path is None
    with pytest.raises(TypeError, match="token"):
        Location.of(tmp_path, {"token": 1})


def test_memory_is_refused_for_several_ranks_only() -> None:
    check_seen_by_all(Location.of("memory://x"), 1)
    with pytest.raises(UnsupportedError, match="visible to one process only"):
        check_seen_by_all(Location.of("memory://x"), 2)


def test_checkpoints_behind_a_url_are_read(plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Location.of("memory://formats/plain.ckpt").writing() as file:
        file.write(plain.read_bytes())
    assert main(["inspect", "memory://formats/plain.ckpt"]) == 0
    convert("memory://formats/plain.ckpt", tmp_path / "copy.ckpt")
    assert_same(torch.load(tmp_path / "copy.ckpt"), torch.load(plain))
    Location.of("memory://formats/plain.ckpt").remove()
    assert not Location.of("memory://formats/plain.ckpt").exists()


# ------------------------------------------------------------------ names


def test_entries_in_parts_are_found_by_what_they_lack() -> None:
    whole, lacking = torch.ones(1), torch.ones(1, device="meta")
    fqns, mine = ["a", "b", "c"], {"a": whole, "b": whole}
    checkpoint = {
        "state_dict": {"a": whole, "b": whole},
        "like the state": {"a": whole, "b": whole},
        "parameters": {"a": whole, "c": lacking},
        "complete": {"a": whole, "b": whole, "c": whole},
        "something": {"a": whole, "x": 1},
        "epoch": 3,
    }
    assert names_in_parts(checkpoint, mine, fqns) == ["like the state", "parameters"]
    with pytest.raises(UnsupportedError, match="callbacks"):
        names_in_parts({**checkpoint, "callbacks": {"Average": {"c": lacking}}}, mine, fqns)


def test_extra_states_of_other_stages_are_left_to_them() -> None:
    class Extra(nn.Module):
        def __init__(self, device: str) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2, device=device)

        def get_extra_state(self) -> Any:
            return {"count": 1}

        def set_extra_state(self, state: Any) -> None: ...

    module = nn.Sequential(Extra("cpu"), Extra("meta"))
    states = {name: module.state_dict() for name in ("state_dict", "current_model_state")}
    for state in (found := without_foreign_extras({**states, "epoch": 1}, module))["state_dict"], found["current_model_state"]:
        assert "0._extra_state" in state
        assert "1._extra_state" not in state
        assert "1.linear.weight" in state
    assert found["epoch"] == 1


def test_names_of_a_model_inside_the_module_are_found_where_they_are_clear() -> None:
    expected = ["net.a.weight", "net.b.weight", "head.weight"]
    assert prefix_of(["a.weight", "b.weight"], expected) == "net."
    assert prefix_of(["net.a.weight", "other"], expected) == ""
    assert prefix_of(["weight"], expected) == ""  # of three
    assert prefix_of(["unknown"], expected) == ""


def test_further_names_of_a_tensor_are_filled_in() -> None:
    module = Numbers()
    state = {name: value for name, value in module.state_dict().items() if name != "last.weight"}
    assert set(with_all_names(state, module)) == set(module.state_dict())
    assert "first.bias" not in with_all_names({"last.weight": state["first.weight"]}, module)


def test_an_error_of_a_file_names_it(tmp_path: Path) -> None:
    torch.save({"a": 1}, tmp_path / "x.pt")
    with pytest.raises(FxPipeError, match=r"x\.pt"):
        look_into(Location.of(tmp_path / "x.pt"))
