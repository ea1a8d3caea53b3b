"""Cuts before modules that the user names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from lightning_fxpipe.errors import PartitionError
from lightning_fxpipe.planner.cost import Chain


def check_split_points(root: nn.Module, split_points: Sequence[str]) -> None:
    """Raises :class:`PartitionError` for a path that is no module's."""
    paths = {path for path, _ in root.named_modules() if path}
    unknown = [point for point in split_points if point not in paths]
    if unknown:
        near = [path for path in sorted(paths) if path.rpartition(".")[2] == unknown[0].rpartition(".")[2]][:3]
        raise PartitionError(
            "A split point does not name a module of the model.",
            observed=unknown[0],
            expected="paths as in model.named_modules()" + (f", such as {', '.join(near)}" if near else ""),
            todo="Set split_points to the paths of the first modules of the later stages.",
        )


def modules_around(paths: Iterable[str]) -> frozenset[str]:
    """The modules that hold those of some paths: they have to be open for a cut to fall before these."""
    split = [path.split(".") for path in paths]
    return frozenset(".".join(parts[:length]) for parts in split for length in range(1, len(parts)))


def cuts_before(chain: Chain, split_points: Sequence[str]) -> tuple[int, ...]:
    """The cuts before some modules.

    Args:
        chain: The chain, in which what holds the modules is open.
        split_points: Their paths.

    Raises:
        PartitionError: The region does not come by one of them, or no cut may fall there.
    """
    cuts = sorted(_cut_before(chain, point) for point in split_points)
    if len(set(cuts)) < len(cuts):
        raise PartitionError(
            "Two split points denote the same place.",
            observed=", ".join(split_points),
            expected="modules with computation between them",
            todo="Remove one of them.",
        )
    return tuple(cuts)


def _cut_before(chain: Chain, point: str) -> int:
    inside = [i for i, unit in enumerate(chain.units) if f"{unit.path}.".startswith(f"{point}.")]
    if not inside:
        raise _not_there(chain, point)
    cut = inside[0] - 1
    while cut >= 0 and chain.units[cut].is_recomputed:  # each stage computes it for itself
        cut -= 1
    if cut < 0 or not chain.allows_cut(cut):
        raise PartitionError(
            "The model cannot be cut before a split point.",
            where=point,
            observed="there is no computation before it" if cut < 0 else chain.sites[cut].obstacle,
            expected="a place that only tensors of known size cross",
            todo="Use the module before or after it.",
        )
    return cut


def _not_there(chain: Chain, point: str) -> PartitionError:
    whole = [(path, reason) for path, reason in chain.traced.kept_whole.items() if point.startswith(f"{path}.")]
    observed = f"{whole[0][0]} cannot be split: {whole[0][1]}" if whole else "the step's calls of the model do not run it"
    return PartitionError(
        "The model cannot be cut at a split point.",
        where=point,
        observed=observed,
        expected="a module that the step's calls of the model run",
        todo="Use another module, or change the code that prevents the split." if whole else "Use a module that runs.",
    )
