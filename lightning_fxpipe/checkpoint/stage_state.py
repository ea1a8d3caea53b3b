"""A stage's state to and from checkpoints of the whole model, keyed by FQN.

A checkpoint is a folder of ``torch.distributed.checkpoint``: ``model.<fqn>``, ``optimizer_<i>.state.<fqn>.<name>`` and
``optimizer_<i>.param_groups`` with the FQNs of the whole model, beside Lightning's file with everything else. No key names a
stage, so the layout does not depend on how many there were. Plain ``.ckpt`` files of a single device load as well.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from functools import partial
from typing import Any

import lightning
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_fxpipe._compat.lightning import metadata_filename
from lightning_fxpipe._compat.torch import tree_leaves
from lightning_fxpipe.checkpoint.checksums import CHECKSUMS_FILE
from lightning_fxpipe.checkpoint.damage import damage_error
from lightning_fxpipe.checkpoint.folders import BESIDE, Folder, KeyPath, open_folder
from lightning_fxpipe.checkpoint.formats import (
    MODULE_STATES,
    OPTIMIZER,
    VERSION_KEY,
    StoredCheckpoint,
    is_distributed_folder,
    read_stored,
    stored_of,
    taken_optimizers,
    with_items,
)
from lightning_fxpipe.checkpoint.locations import Location
from lightning_fxpipe.checkpoint.pickles import Reading
from lightning_fxpipe.errors import UnsupportedError
from lightning_fxpipe.optim.optimizers import GROUPS, STATE, StageOptimizer
from lightning_fxpipe.planner.cost import canonical_fqns
from lightning_fxpipe.reporting.messages import inform

# Our entry of a checkpoint: where it comes from, and the random generators.
ENTRY = "lightning_fxpipe"
# In it what a folder has no place for: what states have beside their items, the order of the model's names, and that it has
# checksums, or it could lose them unseen.
_ATTRIBUTES, _NAMES, _CHECKSUMS = "attributes", "names", "has_checksums"


def entry_of(checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
    """Our entry; empty where there is none."""
    return checkpoint.get(ENTRY) or {}


def without_notes(checkpoint: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """The checkpoint without some of what is in our entry, and without an entry that is then empty."""
    entry = {key: value for key, value in entry_of(checkpoint).items() if key not in names}
    return {key: value for key, value in checkpoint.items() if key != ENTRY} | ({ENTRY: entry} if entry else {})


def drop_placeholders(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries that are no placeholders."""
    return with_items(state, {fqn: value for fqn, value in state.items() if not _is_placeholder(value)})


def without_foreign_extras(checkpoint: Mapping[str, Any], module: nn.Module) -> dict[str, Any]:
    """The checkpoint without what modules of other stages keep beside their tensors: theirs is right, ours has not run."""
    foreign = {
        f"{path}.{_EXTRA}"
        for path, child in module.named_modules()
        if (tensors := [*child.parameters(), *child.buffers()]) and all(tensor.is_meta for tensor in tensors)
    }
    result = dict(checkpoint)
    for name, state in checkpoint.items():
        if isinstance(state, Mapping) and not foreign.isdisjoint(state):
            result[name] = with_items(state, {fqn: value for fqn, value in state.items() if fqn not in foreign})
    return result


# torch's name of what ``get_extra_state`` returns.
_EXTRA = "_extra_state"


def taken_parts(checkpoint: dict[str, Any], fqns: Collection[str]) -> dict[str, Any]:
    """Takes out of the checkpoint what ranks have in parts, under the names that it has in a folder."""
    beside = names_in_parts(checkpoint, drop_placeholders(checkpoint["state_dict"]), fqns)
    parts = {name: drop_placeholders(state) for name, state in taken_states(checkpoint, beside, fqns).items()}
    return parts | {f"optimizer_{index}": state for index, state in enumerate(checkpoint.pop("optimizer_states", []))}


def taken_states(checkpoint: dict[str, Any], beside: Collection[str], fqns: Iterable[str]) -> dict[str, Any]:
    """Takes out the states of the model, under their names in a folder; our entry keeps what that has no place for.

    Args:
        checkpoint: The checkpoint.
        beside: Names of the states beside ``state_dict``.
        fqns: Names of the whole model's tensors, in their order.
    """
    known = {name: checkpoint[name] for name in ("state_dict", *beside)}
    attributes = {name: dict(vars(state)) for name, state in known.items() if isinstance(state, OrderedDict)}
    notes = {_NAMES: list(fqns), _CHECKSUMS: True, **({_ATTRIBUTES: attributes} if attributes else {})}
    checkpoint[ENTRY] = {**entry_of(checkpoint), **notes}
    return {"model" if name == "state_dict" else BESIDE + name: checkpoint.pop(name) for name in known}


def states_beside(checkpoint: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The entries beside ``state_dict`` that have names of the model, such as weights beside averaged ones."""
    names = checkpoint["state_dict"].keys()
    return {key: value for key, value in checkpoint.items() if key != "state_dict" and _has_names_of(value, names)}


def _has_names_of(value: Any, names: Set[str]) -> bool:
    return isinstance(value, Mapping) and bool(value) and value.keys() <= names


def checkpoint_of_folder(folder: Folder, rest: Mapping[str, Any], is_wanted: Callable[[KeyPath], bool]) -> dict[str, Any]:
    """Returns the dict that a Trainer has in place of a folder, with optimizers by FQN.

    Args:
        folder: The folder.
        rest: What it has beside the tensors.
        is_wanted: Says by its path whether a value is read. Other tensors are on the meta device, other values left out.
    """
    found, checkpoint = folder.read(folder.roots, is_wanted), dict(rest)
    optimizers = taken_optimizers(checkpoint, found)
    if optimizers:
        checkpoint["optimizer_states"] = [{**saved, STATE: saved.get(STATE, {})} for saved in optimizers]
    states = {"state_dict": found.pop(folder.model_root, {})}
    states |= {key.removeprefix(BESIDE): value for key, value in found.items()}
    order = entry_of(rest).get(_NAMES, ())  # the keys of a folder have none
    for name, state in states.items():
        checkpoint[name] = restore_state(rest, name, state, order) if isinstance(state, Mapping) else state
    return without_notes(checkpoint, _NAMES, _ATTRIBUTES, _CHECKSUMS)


def rest_of(folder: Folder) -> dict[str, Any]:
    """Reads the part of a folder that is no tensors; raises :class:`FxPipeError` if its checksums are lost."""
    rest = folder.read_rest()
    if folder.checksums is None and entry_of(rest).get(_CHECKSUMS):
        raise damage_error(folder.location.text, f"no {CHECKSUMS_FILE}")
    return rest


def restore_state(checkpoint: Mapping[str, Any], name: str, items: Mapping[str, Any], order: Iterable[str]) -> dict[str, Any]:
    """A state that was in a folder, as it was before: in an order, and with what :func:`taken_states` has kept."""
    attributes = entry_of(checkpoint).get(_ATTRIBUTES, {}).get(name)
    state = in_order(items, order)
    if attributes is None:
        return state
    result = OrderedDict(state)
    vars(result).update(attributes)
    return result


def names_in_parts(checkpoint: Mapping[str, Any], mine: Mapping[str, Any], fqns: Collection[str]) -> list[str]:
    """The entries beside ``state_dict`` of which this rank has a part, such as weights beside averaged ones.

    They have placeholders under names of the model, or tensors for just what this rank holds.

    Raises:
        UnsupportedError: There are placeholders where no part is expected: they would be written in place of values.
    """
    known = {*fqns}
    others = {name: value for name, value in checkpoint.items() if name not in ("state_dict", "optimizer_states")}
    found = [name for name, value in others.items() if _is_partial(value, mine, known)]
    for name, value in others.items():
        if name not in found and any(map(_is_placeholder, tree_leaves(value))):
            raise UnsupportedError(
                "A checkpoint entry contains tensors of other stages, which this rank does not hold.",
                where=f'checkpoint["{name}"]',
                expected="tensors that this rank holds, or an entry that has the names of the module's state_dict",
                todo="Copy the tensors in a hook, in which all of them have values, or store them under the names of the "
                "module's state_dict.",
            )
    return found


def _is_partial(value: Any, mine: Mapping[str, Any], fqns: set[str]) -> bool:
    return _has_names_of(value, fqns) and (
        any(map(_is_placeholder, value.values())) or (len(value) < len(fqns) and drop_placeholders(value).keys() == mine.keys())
    )


def read_checkpoint(location: Location, module: nn.Module, reading: Reading, into: Collection[str] = ()) -> dict[str, Any]:
    """Reads what a rank needs of a checkpoint but for the optimizers' states. Called by every rank.

    Args:
        location: A folder, or anything else that ``checkpoint.folders`` or
            ``checkpoint.formats`` reads.
        module: The module, with placeholders for other stages' tensors.
        reading: How.
        into: FQNs of tensors of the module that are read in place, which saves memory.

    Returns:
        The checkpoint. In states of the model, tensors on the meta device stand for those of the other stages.
    """
    if is_folder(location):
        expected = module.state_dict()
        return _read_folder(open_folder(location, reading), expected, _of_others(expected), into)
    with location.local_copy() as path:
        return _loadable(partial(read_stored, path, reading), location.text, module)


def checkpoint_of(content: Any, where: str, module: nn.Module) -> dict[str, Any]:
    """Returns what a rank needs of a checkpoint that has been read whole, as :func:`read_checkpoint` does.

    Args:
        content: A Trainer's checkpoint, or a state dict.
        where: The file that it was read from.
        module: The module, with placeholders for other stages' tensors.
    """
    return _loadable(partial(stored_of, content, where), where, module)


def _loadable(read: Callable[[Callable[[str], bool]], StoredCheckpoint], where: str, module: nn.Module) -> dict[str, Any]:
    expected = module.state_dict()
    others = _of_others(expected)
    stored = read(lambda fqn: fqn not in others)
    if not stored.format.has_weights_only:
        return stored.checkpoint
    if prefix := prefix_of(stored.checkpoint["state_dict"], expected):
        inform(f"The names in {where} match the submodule {prefix.rstrip('.')}, so the weights are loaded into it.")
        stored = read(lambda fqn: prefix + fqn not in others)
        stored.checkpoint["state_dict"] = {prefix + fqn: value for fqn, value in stored.checkpoint["state_dict"].items()}
    inform(f"{where} contains weights only: the run starts at step 0 with a new optimizer.")
    return as_first_step(with_all_names(stored.checkpoint["state_dict"], module))


def _of_others(expected: Mapping[str, Any]) -> set[str]:
    return {fqn for fqn, value in expected.items() if _is_placeholder(value)}


def is_folder(location: Location) -> bool:
    """Returns True if a location is a folder of torch.distributed.checkpoint, complete or not."""
    if location.path is None:
        return bool(location.system.isdir(location.text))
    return is_distributed_folder(location.path) or location.inside(metadata_filename()).exists()


def version_of(location: Location) -> str:
    """Returns a text that differs for a later checkpoint of the same name; empty if there is none."""
    main = location.inside(metadata_filename()) if is_folder(location) else location
    return main.version() if main.exists() else ""


def as_first_step(state: dict[str, Any]) -> dict[str, Any]:
    """The checkpoint of a run that has these weights and has not begun."""
    nothing: dict[str, Any] = {"callbacks": {}, "optimizer_states": [], "lr_schedulers": []}
    return {VERSION_KEY: lightning.__version__, "state_dict": state, **nothing}


def _read_folder(folder: Folder, expected: Mapping[str, Any], others: set[str], into: Collection[str]) -> dict[str, Any]:
    root = folder.model_root
    beside = folder.entries(rf"{re.escape(BESIDE)}.+")
    places: dict[KeyPath, Tensor] = {(root, fqn): expected[fqn] for fqn in into if fqn in expected}
    in_parts = {root, *(f"{BESIDE}{name}" for name in MODULE_STATES)}
    state = folder.read({root, *beside}, lambda path: path[0] not in in_parts or path[1] not in others, places)
    checkpoint = rest_of(folder)
    for name in (root, *beside):
        known = "state_dict" if name == root else name.removeprefix(BESIDE)
        checkpoint[known] = restore_state(checkpoint, known, state.get(name, {}), expected)
    if folder.entries(OPTIMIZER) or any(re.fullmatch(OPTIMIZER, key) for key in checkpoint):
        checkpoint["optimizer_states"] = []  # Lightning asks whether there are any; they are read when they are restored
    return checkpoint


def in_order(state: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """The state with its names in an order, and others after them."""
    order = {fqn: index for index, fqn in enumerate(names)}
    return with_items(state, dict(sorted(state.items(), key=lambda item: order.get(item[0], len(order)))))


def prefix_of(names: Collection[str], expected: Collection[str]) -> str:
    """Returns the prefix of all names in the module: they may be those of a model inside it. Empty if it is ambiguous."""
    if not names or not {*names}.isdisjoint(expected):
        return ""
    first = next(iter(names))
    candidates = [fqn.removesuffix(first) for fqn in expected if fqn.endswith(f".{first}")]
    matches = {prefix: sum(prefix + name in expected for name in names) for prefix in candidates}
    best = sorted(matches, key=lambda prefix: matches[prefix], reverse=True)
    is_clear = best and (len(best) == 1 or matches[best[0]] > matches[best[1]])
    return best[0] if is_clear else ""


def with_all_names(state: Mapping[str, Any], module: nn.Module) -> dict[str, Any]:
    """The state with what it lacks of names that are further ones of a tensor that it has, such as tied weights."""
    first = canonical_fqns(module)
    found = {first[fqn]: value for fqn, value in state.items() if fqn in first}
    missing = [fqn for fqn in module.state_dict() if fqn not in state and first.get(fqn) in found]
    return {**state, **{fqn: found[first[fqn]] for fqn in missing}}


def _is_placeholder(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta


def load_model(module: nn.Module, state: Mapping[str, Any], *, strict: bool) -> None:
    """Loads a checkpoint's state into the module, as on one device: with its hooks, and its errors on every rank.

    Raises:
        RuntimeError: Shapes differ, or with ``strict`` the keys.
    """
    # Tensors of other stages go from the meta device to the meta device: nothing is copied, and all is checked.
    module.load_state_dict(state, strict=strict)
    for metric in module.modules():
        if isinstance(metric, Metric):
            metric.to(metric.device)  # a metric takes tensors as they are, from wherever they were read to


def load_optimizers(
    location: Location, reading: Reading, checkpoint: Mapping[str, Any], optimizers: Sequence[StageOptimizer]
) -> None:
    """Restores the optimizers from a checkpoint that has been read so. Called by every rank."""
    saved = checkpoint.get("optimizer_states") or []
    if saved or not is_folder(location):
        for optimizer, state in zip(optimizers, saved, strict=False):
            optimizer.load(state, copies=True)
        return
    folder = open_folder(location, reading)
    roots = folder.entries(OPTIMIZER)
    stored = folder.read(roots, lambda path: path[1] != STATE)
    names = [f"optimizer_{index}" for index in range(len(optimizers))]
    others = {
        (name, key)
        for name, optimizer in zip(names, optimizers, strict=True)
        if name in stored
        for key in optimizer.not_wanted(stored[name][GROUPS])
    }
    states = folder.read(roots, lambda path: path[1] == STATE and (path[0], path[2]) not in others)
    stored = {name: {**saved, STATE: states.get(name, {}).get(STATE, {})} for name, saved in stored.items()}
    stored |= {key: value for key, value in checkpoint.items() if re.fullmatch(OPTIMIZER, key)}
    for name, optimizer in zip(names, optimizers, strict=True):
        if name in stored:
            optimizer.load(stored[name])


def portable_rng(state: Mapping[str, Any]) -> dict[str, Any]:
    """Generator states as tensors and plain values, which ``torch.load(weights_only=True)`` accepts."""
    portable = {key: value for key, value in state.items() if key in ("python", "torch", "cuda")}
    if "numpy" in state:
        name, keys, *rest = state["numpy"]
        portable["numpy"] = [name, [int(key) for key in keys], *rest]
    return portable


def usable_rng(portable: Mapping[str, Any]) -> dict[str, Any]:
    """Inverse of :func:`portable_rng`."""
    version, internal, gauss = portable["python"]
    return {**portable, "python": (version, tuple(internal), gauss)}
