"""The table of docs/explanation/planning.md has the numbers of its script, and the statements about it hold."""

from __future__ import annotations

import random
import re
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest

from lightning_fxpipe.planner import partition

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "benchmarks" / "partition_quality.py"
(TABLE,) = re.findall(
    r"```text\n(.*?)```", (ROOT / "docs" / "explanation" / "planning.md").read_text(encoding="utf-8"), flags=re.DOTALL
)
ROWS = [(line[:14].strip(), *line[14:].split()) for line in TABLE.splitlines() if re.search(r"\d\.\d{3}", line)]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(SCRIPT.parent)
    import partition_quality

    return partition_quality


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "vit", "resnet", "unet"])
def test_the_rows_of_a_model_are_what_the_script_finds(script: Any, name: str) -> None:
    found = script.rows_of(script.MODELS[name], [2, 4, 8])
    assert [" ".join(row).split() for row in found] == [" ".join(row).split() for row in ROWS if row[0] == found[0][0]]


def test_the_plan_is_near_the_best_and_no_worse_than_lists_of_layers() -> None:
    assert len(ROWS) == 6 * 3
    for _, _, _, _, *numbers in ROWS:
        plan, best, *peers = map(float, numbers)
        assert 1 <= best <= plan <= 1.053 * best  # the bound that a plan aims at is not always the optimum
        assert plan <= min(peers)


def random_parts(numbers: random.Random) -> tuple[list[frozenset[str]], dict[str, int]]:
    """Pieces of a model, some of which use the same weights."""
    sizes = {f"p{index}": numbers.choice([0, 1, 2, 3, 5, 20]) for index in range(9)}
    return [frozenset(numbers.sample([*sizes], numbers.choice([0, 1, 1, 1, 2]))) for _ in range(8)], sizes


@pytest.mark.parametrize("seed", range(50))
def test_the_best_that_is_possible_is_that_of_all_cuts_and_of_the_solver(script: Any, seed: int) -> None:
    parts, sizes = random_parts(random.Random(seed))
    for num_stages in (1, 2, 3):
        ends = ([*cuts, len(parts)] for cuts in combinations(range(1, len(parts)), num_stages - 1))
        best = min(max(script.weights(script.joined(parts, of), sizes)) for of in ends)
        assert script.lightest_maximum(parts, sizes, num_stages) == best
        users = {fqn: tuple(place for place, part in enumerate(parts) if fqn in part) for fqn in sizes}
        weights = partition.Weights((0,) * len(parts), tuple((sizes[fqn], at) for fqn, at in users.items() if at))
        demands = partition.Demands(weights, [0] * (len(parts) - 1), num_stages)
        assert partition.lightest_maximum(demands) == best


def test_the_rules_of_others_by_hand(script: Any) -> None:
    assert script.uniform_cuts(10, 4) == [3, 6, 8, 10]
    assert script.equal_block_cuts([False, *[True] * 5, False, False], 2) == [4, 8]
    assert script.balanced_cuts([4, 1, 1, 1, 1, 4], 2) == [3, 6]
    assert script.balanced_cuts([1, 2], 3) == [1, 2, 2]


@pytest.mark.parametrize("seed", range(20))
def test_two_stages_of_deepspeed_differ_as_little_as_they_can(script: Any, seed: int) -> None:
    layers = random.Random(seed).choices(range(1, 9), k=7)

    def spread(ends: list[int]) -> int:
        stages = [sum(layers[start:end]) for start, end in pairwise([0, *ends])]
        return max(stages) - min(stages)

    assert spread(script.balanced_cuts(layers, 2)) == min(spread([end, 7]) for end in range(1, 7))
