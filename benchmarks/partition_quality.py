"""How heavy the heaviest stage is: the plan's cuts against the best that there are, and against what others cut by.

    python benchmarks/partition_quality.py                            # all models, 2, 4 and 8 stages; a minute
    python benchmarks/partition_quality.py --models gpt2 unet --stages 2
    python benchmarks/partition_quality.py --write docs/explanation/planning.md   # puts the table there

The models are made on the meta device, and nothing is downloaded (partition_models.py). Each number is the parameters of the
heaviest stage over a bound that no cuts can be below: the mean of the stages, or the largest layer.

- Plan: ``make_plan``.
- Optimum: the best that the same legal cuts allow with every module open, down to torch's own layers.
- DeepSpeed, Uniform: ``PipelineModule`` with ``partition_method`` "parameters" and "uniform", which cut a list of layers: the
  functions ``partition_balanced`` and ``partition_uniform`` of ``deepspeed/runtime/utils.py``, of November 2026, written anew.
- Equal blocks: equally many blocks on each stage, the embedding with the first and the head with the last.

A weight that several stages use counts in each of them, which holds a copy.
"""

from __future__ import annotations

import argparse
import re
import sys
import warnings
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from partition_models import MODELS, Work

Parts = list[frozenset[str]]  # of a model, in order: the parameters that each uses
HEADERS = ("Model", "Stages", "Bound", "Plan", "Optimum", "DeepSpeed", "Uniform", "Equal blocks")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--write", type=Path, metavar="PAGE", help="Markdown page whose first text block gets the table")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    from lightning_fxpipe.reporting.table import render_table

    rows = [row for name in options.models for row in rows_of(MODELS[name], options.stages)]
    table = render_table("Parameters of the heaviest stage over the bound", HEADERS, rows, right_aligned=HEADERS[1:])
    print(table)
    if options.write:
        block = f"```text\n{table}\n```"
        page = options.write.read_text(encoding="utf-8")
        options.write.write_text(re.sub(r"```text\n.*?```", lambda _: block, page, count=1, flags=re.DOTALL), encoding="utf-8")


def rows_of(work: Work, stages: Iterable[int]) -> list[tuple[str, ...]]:
    """The model's lines, one for each number of stages."""
    import torch

    from lightning_fxpipe.planner.cost import canonical_fqns
    from lightning_fxpipe.reporting.table import human_count

    with torch.device("meta"):
        model = work.make()
    sizes = {fqn: parameter.numel() for fqn, parameter in model.named_parameters()}
    layers, is_block = layers_of(model, work.layers, canonical_fqns(model))
    pieces = finest_pieces(model, work.batch(), sizes.keys())
    rows: list[tuple[str, ...]] = []
    for num_stages in stages:
        print(f"{work.title}, {num_stages} stages", file=sys.stderr, flush=True)
        bound = max(-(-sum(sizes.values()) // num_stages), max(weights(pieces, sizes)))
        peers = [
            joined(layers, balanced_cuts(weights(layers, sizes), num_stages)),
            joined(layers, uniform_cuts(len(layers), num_stages)),
            joined(layers, equal_block_cuts(is_block, num_stages)),
        ]
        plan = planned_stages(model, work.batch(), num_stages, sizes.keys())
        found = [max(weights(parts, sizes)) for parts in (plan, *peers)]
        found.insert(1, lightest_maximum(pieces, sizes, num_stages))
        rows.append((work.title, str(num_stages), human_count(bound), *(f"{weight / bound:.3f}" for weight in found)))
    return rows


def weights(parts: Iterable[frozenset[str]], sizes: Mapping[str, int]) -> list[int]:
    return [sum(sizes[fqn] for fqn in part) for part in parts]


# --------------------------------------------------------------------------- what there is to cut


def finest_pieces(model: Any, batch: dict[str, Any], fqns: Iterable[str]) -> Parts:
    """What lies between two legal cuts, with every module open."""
    from lightning_fxpipe.planner.cost import build_chain
    from lightning_fxpipe.tracing.discovery import regions
    from lightning_fxpipe.tracing.region import StepCall
    from lightning_fxpipe.tracing.trace import trace_region

    (call, *_) = regions(model, StepCall.of_training(model, batch), batch_size=8, batch_dim=0)
    chain = build_chain(trace_region(model, call, opened=None, check=False))
    pieces, piece, wanted = [], frozenset[str](), frozenset(fqns)
    for unit, site in zip(chain.units, chain.sites, strict=True):
        piece |= unit.tensor_fqns & wanted
        # A cut after a unit that is computed again is the cut before it.
        if site.position == len(chain.units) - 1 or not (site.obstacle or unit.is_recomputed):
            pieces.append(piece)
            piece = frozenset()
    assert frozenset().union(*pieces) == wanted
    return pieces


def planned_stages(model: Any, batch: dict[str, Any], num_stages: int, fqns: Iterable[str]) -> Parts:
    from lightning_fxpipe import make_plan

    return [frozenset(fqns) & {*stage.fqns} for stage in make_plan(model, batch, num_stages=num_stages).stages]


def layers_of(model: Any, paths: Sequence[str], names: Mapping[str, str]) -> tuple[Parts, list[bool]]:
    """The parameters of each layer of a list, under their first names; and which layers are blocks of a kind."""
    layers, is_block = [], []
    for path in paths:
        blocks = [f"{path[:-1]}{index}" for index in range(len(model.get_submodule(path[:-2])))] if path[-1] == "*" else [path]
        for block in blocks:
            modules = [(of, model.get_submodule(of)) for of in block.split("+")]
            layers.append(frozenset(names[f"{of}.{name}"] for of, module in modules for name, _ in module.named_parameters()))
            is_block.append(path[-1] == "*")
    assert frozenset().union(*layers) == {*names.values()} - {name for name, _ in model.named_buffers()}
    return layers, is_block


# --------------------------------------------------------------------------- where to cut


def lightest_maximum(pieces: Parts, sizes: Mapping[str, int], num_stages: int) -> int:
    """Weight of the heaviest stage in the best partition: bisection over it. A stage that has a piece more never gets lighter,
    copies counted, so that to fill one after the other needs the fewest."""
    total = sum(weights(pieces, sizes))
    return bisect_left(range(total), True, key=lambda limit: num_filled(pieces, sizes, limit) <= num_stages)


def num_filled(pieces: Parts, sizes: Mapping[str, int], limit: int) -> float:
    """How many stages there are if each is filled as far as the limit allows."""
    count, held, weight = 1, set[str](), 0
    for piece in pieces:
        weight += sum(sizes[fqn] for fqn in piece - held)
        if weight > limit:
            count, held, weight = count + 1, set(), sum(sizes[fqn] for fqn in piece)
            if weight > limit:
                return float("inf")
        held |= piece
    return count


def uniform_cuts(num_layers: int, num_stages: int) -> list[int]:
    """How many layers lie before the end of each stage: equally many, the first stages have what is left over."""
    each, more = divmod(num_layers, num_stages)
    return [stage * each + min(stage, more) for stage in range(1, num_stages + 1)]


def balanced_cuts(layers: Sequence[int], num_stages: int) -> list[int]:
    """DeepSpeed's: a dynamic programme that looks for the least difference of the heaviest and the lightest stage.

    What it keeps of the stages so far is the one choice whose difference is least, so that it may miss the best.
    """
    if len(layers) <= num_stages:
        return [min(stage, len(layers)) for stage in range(1, num_stages + 1)]
    best: dict[int, tuple[int, float, list[int]]] = {0: (0, float("inf"), [])}  # by number of layers: heaviest, lightest, cuts
    for _ in range(num_stages):
        following = {}
        for end in range(1, len(layers) + 1):
            choices = []
            for start in (start for start in best if start < end):
                (heaviest, lightest, cuts), weight = best[start], sum(layers[start:end])
                choices.append((max(heaviest, weight), min(lightest, weight), [*cuts, end]))
            if choices:
                following[end] = min(reversed(choices), key=lambda choice: choice[0] - choice[1])  # the last of equal ones
        best = following
    return best[len(layers)][2]


def equal_block_cuts(is_block: Sequence[bool], num_stages: int) -> list[int]:
    """Equally many blocks for each stage; what is none goes with the block after it, at the end with the one before."""
    places = [index for index, block in enumerate(is_block) if block]
    return [places[count - 1] + 1 for count in uniform_cuts(len(places), num_stages)[:-1]] + [len(is_block)]


def joined(layers: Parts, ends: Sequence[int]) -> Parts:
    """The stages that lie between some cuts."""
    return [frozenset().union(*layers[start:end]) for start, end in pairwise([0, *ends])]


if __name__ == "__main__":
    main()
