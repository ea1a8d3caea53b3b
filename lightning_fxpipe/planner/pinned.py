"""Modules whose stage the user chooses, by patterns of their paths; the solver places what lies between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import pairwise

from torch import nn

from lightning_fxpipe.errors import PartitionError
from lightning_fxpipe.planner.cost import Chain
from lightning_fxpipe.planner.partition import Firsts


def pinned_modules(root: nn.Module, stage_of: Sequence[tuple[str, int]], num_stages: int) -> dict[str, int]:
    """The stage of each module that a pattern matches, by its path, but for those inside of another one in the same stage.

    Args:
        root: The module that paths are relative to.
        stage_of: Patterns with ``*`` and ``?``, and stages from 0 on, or from -1 back for the last ones; a later pattern goes
            before an earlier one.
        num_stages: Number of stages.

    Raises:
        PartitionError: There is no such module, or no such stage.
    """
    paths = [path for path, _ in root.named_modules() if path]
    found: dict[str, int] = {}
    for pattern, stage in stage_of:
        if not -num_stages <= stage < num_stages:
            raise PartitionError(
                "stage_of assigns a module to a stage that does not exist.",
                where=pattern,
                observed=f"stage {stage} of {num_stages}",
                expected=f"a stage from 0 to {num_stages - 1}, or from {-num_stages} to -1",
                todo="Correct stage_of, or use more stages.",
            )
        matching = [path for path in paths if fnmatchcase(path, pattern)]
        if not matching:
            raise PartitionError(
                "A pattern in stage_of matches no module.",
                observed=pattern,
                expected="paths as in model.named_modules(), optionally with the wildcards * and ?",
                todo="Correct the pattern.",
            )
        found |= dict.fromkeys(matching, stage % num_stages)
    # A module inside of one that is in the same stage need not be open for it.
    return {path: stage for path, stage in found.items() if _stage_around(found, path) != stage}


def _stage_around(modules: Mapping[str, int], path: str) -> int | None:
    """The stage of the innermost of some modules that a path is inside of; None for none."""
    parts = path.split(".")
    around = (".".join(parts[:length]) for length in range(len(parts) - 1, 0, -1))
    return next((modules[outer] for outer in around if outer in modules), None)


def pinned_units(chain: Chain, modules: Mapping[str, int]) -> list[int | None]:
    """The stage that each unit of a chain has to be in; None for any. The innermost module that has one decides.

    Raises:
        PartitionError: A module is inside of one that stays whole, or none of its calls are in the region; or an earlier call
            would be in a later stage.
    """
    found: list[int | None] = []
    reached: set[str] = set()
    for unit in chain.units:
        around = [path for path in modules if f"{unit.path}.".startswith(f"{path}.")]
        reached.update(around)
        found.append(None if unit.is_recomputed or not around else modules[max(around, key=len)])
    for path in modules:
        # Of what holds others that a pattern matches, too, nothing else may be left.
        if path not in reached and not any(other.startswith(f"{path}.") for other in reached):
            raise _not_reached(chain, path)
    pinned = [(position, stage) for position, stage in enumerate(found) if stage is not None]
    for (before, earlier), (after, later) in pairwise(pinned):
        if earlier > later:
            raise PartitionError(
                "The stages assigned by stage_of are impossible.",
                observed=f"{chain.units[before].path} in stage {earlier}, and {chain.units[after].path}, which runs later, in "
                f"stage {later}",
                expected="stages that do not decrease in the order in which the model calls its modules",
                todo="Correct stage_of: data passes through each stage once, from the first to the last.",
            )
    return found


def pinned_firsts(units: Sequence[int | None], num_stages: int) -> list[Firsts]:
    """With which units each stage may begin, by its last one: none of another stage may be in it."""
    found: list[Firsts] = []
    for stage in range(num_stages):
        first, firsts = 0, []
        for position, of_unit in enumerate(units):
            first = position + 1 if of_unit not in (None, stage) else first
            firsts.append(first)
        found.append(firsts)
    return found


def _not_reached(chain: Chain, path: str) -> PartitionError:
    whole = [(outer, reason) for outer, reason in chain.traced.kept_whole.items() if path.startswith(f"{outer}.")]
    return PartitionError(
        "The model cannot be cut at a module in stage_of.",
        where=path,
        observed=(f"{whole[0][0]} cannot be split: {whole[0][1]}") if whole else "the step's calls of the model do not run it",
        expected="a module that the step's calls of the model run",
        todo="Choose another module, or change the code that prevents the split." if whole else "Choose a module that runs.",
    )


def no_pinned_cut() -> PartitionError:
    """Returns the error if modules cannot be in the stages assigned to them."""
    return PartitionError(
        "The stages assigned by stage_of are impossible.",
        observed="no legal cuts place all of these modules there without an empty stage",
        expected="a legal cut between modules of different stages, and at least one module per stage",
        todo="Remove some modules from stage_of, or choose other stages.",
    )
