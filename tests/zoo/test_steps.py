"""LightningModules as people write them, through the pipeline and on one device: equal, or refused; never anything else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.ranks.pool import RankFailed, RankPool
from tests.zoo.lightning_modules import CASES, run_case, run_piped

Ranks = Callable[[int], RankPool]
TOLERANCE = 1e-5
SECONDS = 60.0


@dataclass(frozen=True)
class Refused:
    """The run ends with an error of the package that has these words.

    Attributes:
        words: Part of the error's message.
        late: Whether the run ends in some step, where the other ranks wait, and not before the first step on every rank.
    """

    words: str
    late: bool = False


@dataclass(frozen=True)
class Wrong:
    """The run gives other results than one device: a bug that is known, with its cause."""

    reason: str


# The verdicts that differ from "equal to one device", by case, or by case and number of microbatches.
NO_SUM_OF_MICROBATCHES = Refused("1F1B does not support this loss", late=True)
OWN_DRAWS = Wrong("with several microbatches each stage draws its own dropout, as docs/explanation/tracing.md says")
EXPECTED: dict[str | tuple[str, int], Refused | Wrong] = {
    # one call
    # several calls
    # random numbers
    ("dropout", 2): OWN_DRAWS,
    # state
    # losses and logs
    "sum_told_to_be_a_mean": NO_SUM_OF_MICROBATCHES,
    "mean_told_to_be_a_sum": NO_SUM_OF_MICROBATCHES,
    "standardised_interleaved": NO_SUM_OF_MICROBATCHES,
    "contrastive_interleaved": NO_SUM_OF_MICROBATCHES,
    "mean_over_tokens_interleaved": NO_SUM_OF_MICROBATCHES,
    # leftovers
    "divides_by_a_count": Refused(
        "training_step reads values that the forward of a submodule sets: model.blocks.0.num_positive"
    ),
    "tells_blocks": Refused("a shared object: self.shared['place']"),
    "counts_layers": Refused("a shared object: self.shared['depth']"),
    "logs_a_total": Refused("a shared object: type(self).block.totals['positive']"),
    "logs_numbers_of_hooks": Refused("a shared object: self.norms"),
    # models
}

# Steps that cannot run in stages, by case: they run on the last stage's rank, with a warning for each.
WHOLE = {
    "generates": ["predict_step"],
    "translates": ["validation_step"],
    "validates_graphs": ["validation_step"],
    "denoises": ["validation_step"],
    "decodes_first": ["validation_step", "predict_step"],
    "skips_in_a_list": ["validation_step"],
    "a_skip_in_a_list": ["validation_step"],
    "validates_by_a_count": ["validation_step"],
    "looks_at_buffers": ["validation_step"],
    "gives_features": ["validation_step", "predict_step"],
}

# On every change a third of the cases run, with one number of microbatches, those with a verdict among them; the others
# are slow.
UNUSUAL = EXPECTED | WHOLE
SLOW = {name for index, (name, case) in enumerate(CASES.items()) if index % 3 and name not in UNUSUAL and not case.always}
RUNS = [
    pytest.param(name, microbatches, marks=pytest.mark.slow if name in SLOW or microbatches != case.microbatches[-1] else ())
    for name, case in CASES.items()
    for microbatches in case.microbatches
]


@cache
def reference(name: str) -> dict[str, Any]:
    return run_case(CASES[name], {})


def merged(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """What the ranks have of the whole; where two have the same tensor, it must be the same."""
    whole: dict[str, Tensor] = {}
    for part in parts:
        for fqn, value in part.items():
            if fqn in whole:
                assert_near(value, whole[fqn], f"copies of {fqn}")
            whole[fqn] = value
    return whole


def assert_near(found: Any, expected: Any, what: str) -> None:
    """Equal structures with numbers that differ by rounding only."""
    assert type(found) is type(expected), f"{what}: {found} instead of {expected}"
    if isinstance(expected, Tensor):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=TOLERANCE, equal_nan=True, msg=lambda m: f"{what}: {m}")
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), f"{what}: {sorted(found)} instead of {sorted(expected)}"
        for key, value in expected.items():
            assert_near(found[key], value, f"{what}, {key}")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), f"{what}: {len(found)} entries instead of {len(expected)}"
        for index, value in enumerate(expected):
            assert_near(found[index], value, f"{what}, {index}")
    elif is_dataclass(expected):
        assert_near(vars(found), vars(expected), what)
    elif isinstance(expected, np.ndarray):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=TOLERANCE, err_msg=what)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-5, abs=TOLERANCE, nan_ok=True), what
    else:
        assert found == expected, what


def assert_equal_to_one_device(results: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    for rank, result in enumerate(results):
        for key in ("losses", "metrics", "last metrics", "logged", "validated", "tested", "rng"):
            if key in expected:
                assert_near(result[key], expected[key], f"rank {rank}, {key}")
    for step, wanted in enumerate(expected["gradients"]):
        assert_near(merged([result["gradients"][step] for result in results]), wanted, f"gradients of step {step}")
    assert_near(merged([result["state"] for result in results]), expected["state"], "state")
    if "predicted" in expected:
        # Rank 0 holds the last stage, so that is where the predictions are.
        assert_near(results[0]["predicted"], expected["predicted"], "predictions")


@pytest.mark.parametrize(("name", "microbatches"), RUNS, ids=lambda value: str(value))
def test_equal_or_refused(ranks: Ranks, request: pytest.FixtureRequest, name: str, microbatches: int) -> None:
    verdict = EXPECTED.get((name, microbatches), EXPECTED.get(name))
    if isinstance(verdict, Wrong):
        request.applymarker(pytest.mark.xfail(reason=verdict.reason, strict=True))
    expected = reference(name)
    pool = ranks(CASES[name].stages)
    if isinstance(verdict, Refused) and verdict.late:
        with pytest.raises(RankFailed, match=r"lightning_fxpipe\.errors\.") as failure:
            pool.run(run_piped, name, microbatches, timeout_seconds=SECONDS, grace_seconds=0.2)
        assert verdict.words in str(failure.value)
        return
    results = pool.run(run_piped, name, microbatches, timeout_seconds=SECONDS, grace_seconds=0.5)
    refusals = [result["refused"] for result in results if "refused" in result]
    if isinstance(verdict, Refused):
        assert len(refusals) == len(results), "some ranks ran"
        for refusal in refusals:
            assert verdict.words in refusal
        return
    assert not refusals, refusals[0]
    whole = [text.split()[1] for result in results for text in result["said"] if "cannot be pipelined" in text]
    assert list(dict.fromkeys(whole)) == WHOLE.get(name, [])  # each run says it
    assert_equal_to_one_device(results, expected)
    traces = CASES[name].traces
    assert traces is None or [result["traces"] for result in results] == [traces] * len(results)


def test_the_table_of_verdicts_names_cases_that_exist() -> None:
    known = {*CASES, *((name, count) for name, case in CASES.items() for count in case.microbatches)}
    assert [key for key in EXPECTED if key not in known] == []
