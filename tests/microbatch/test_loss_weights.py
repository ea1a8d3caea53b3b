"""How losses of microbatches make the loss of a batch: options, weights, and what a comparison with the whole batch says."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from lightning_fxpipe.errors import UnsupportedError
from lightning_fxpipe.microbatch.loss_weights import (
    Finding,
    LossOptions,
    LossReduction,
    Verdict,
    compare,
    loss_weights,
    weighted_sum,
)

AUTO = LossOptions()
MEAN, SUM = (LossOptions(reduction=reduction) for reduction in LossReduction)


def count(batch: Any) -> float:
    return float(batch)


class Counters:
    @staticmethod
    def double(batch: Any) -> Tensor:
        return torch.tensor(2 * batch)


# ------------------------------------------------------------------ options


@pytest.mark.parametrize(
    ("name", "expected"), [("auto", None), ("mean", LossReduction.MEAN), ("sum", LossReduction.SUM)], ids=str
)
def test_the_reduction_is_given_by_name(name: str, expected: LossReduction | None) -> None:
    assert LossOptions.of(name, None) == LossOptions(reduction=expected)


@pytest.mark.parametrize(
    "path", ["tests.microbatch.test_loss_weights.count", "tests.microbatch.test_loss_weights.Counters.double", count]
)
def test_a_function_is_given_itself_or_by_its_path(path: Any) -> None:
    weights = LossOptions.of("auto", path).weights(LossReduction.MEAN, [1, 3], [2, 2])
    assert weights == (0.25, 0.75)


@pytest.mark.parametrize(
    ("reduction", "weight", "words"),
    [
        ("median", None, "expected 'auto', 'mean' or 'sum'"),
        ("sum", count, "declares a sum"),
        ("auto", "no_such_module.count", "no such module"),
        ("auto", "count", "no such module"),
        ("auto", "tests.microbatch.test_loss_weights.absent", "tests.microbatch.test_loss_weights has no absent"),
        ("auto", "tests.microbatch.test_loss_weights.AUTO", "expected a function"),
        ("auto", 3, "expected a function"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_options_that_mean_nothing_are_value_errors(reduction: str, weight: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        LossOptions.of(reduction, weight)


def test_a_module_that_fails_to_import_tells_its_own_error(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fails_to_import.py").write_text("import no_such_dependency\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        LossOptions.of("auto", "fails_to_import.count")


# ------------------------------------------------------------------ weights


@pytest.mark.parametrize("counts", [[0, 0], [1, -1], [1, math.nan], [1, math.inf]], ids=str)
def test_weights_that_make_no_mean_are_refused(counts: list[float]) -> None:
    with pytest.raises(
        UnsupportedError, match=r"(?s)loss_weight function returned invalid weights.*count.*at least one of them positive"
    ):
        LossOptions(weight=count).weights(LossReduction.MEAN, counts, [1, 1])


def test_counting_draws_no_random_numbers_from_the_run() -> None:
    before = torch.get_rng_state()
    LossOptions(weight=lambda batch: torch.rand(())).weights(LossReduction.MEAN, [1, 2], [1, 1])
    assert torch.equal(torch.get_rng_state(), before)


def test_a_microbatch_of_weight_zero_does_not_count_even_if_it_is_nan() -> None:
    assert weighted_sum([math.nan, 2.0], [0.0, 0.5]) == 1.0
    assert math.isnan(weighted_sum([math.nan, 2.0], [0.1, 0.5]))


def judge(whole: float, losses: Sequence[float], options: LossOptions = AUTO, sizes: Sequence[int] | None = None) -> Finding:
    sizes = sizes or [2] * len(losses)
    weights = loss_weights(options.reduction or LossReduction.MEAN, sizes)
    return compare(whole, losses, sizes, options, weights, torch.float32)


values = st.floats(-1e3, 1e3).map(lambda value: float(torch.tensor(value)))


@given(st.lists(st.tuples(values, st.integers(1, 9)), min_size=2, max_size=8), st.sampled_from(list(LossReduction)))
def test_a_mean_or_a_sum_is_recognised(parts: list[tuple[float, int]], kind: LossReduction) -> None:
    losses, sizes = zip(*parts, strict=True)
    made = {reduction: weighted_sum(losses, loss_weights(reduction, sizes)) for reduction in LossReduction}
    largest = max(abs(value) for value in (*losses, *made.values()))
    assume(abs(made[LossReduction.SUM] - made[LossReduction.MEAN]) > 1e-3 * max(1.0, largest))
    whole = float(torch.tensor(made[kind], dtype=torch.float32))
    assert judge(whole, losses, sizes=sizes) == Finding(verdict=Verdict.FITS, reduction=kind)


@given(st.lists(values, min_size=2, max_size=8), st.floats(1e-4, 10))
def test_a_difference_that_is_no_rounding_is_never_taken_for_a_mean(losses: list[float], relative: float) -> None:
    mean = sum(losses) / len(losses)
    assume(abs(mean) > 1e-2 * max(map(abs, losses)))
    assume(abs(mean) > 1e-3)
    scale = max(abs(mean), sum(map(abs, losses)) / len(losses))
    assert judge(mean + relative * scale, losses, MEAN).verdict is Verdict.DIFFERS


@pytest.mark.parametrize(
    ("whole", "losses"),
    [(0.0, [0.0, 0.0]), (math.nan, [1.0, 1.0]), (1.0, [math.nan, 1.0]), (math.inf, [math.inf, 1.0]), (1e-8, [2e-8, -1e-8])],
    ids=str,
)
def test_zeros_and_nans_tell_nothing(whole: float, losses: list[float]) -> None:
    assert judge(whole, losses).verdict is Verdict.UNCLEAR


def test_what_differs_is_told_with_the_numbers() -> None:
    finding = judge(3.5, [1.0, 2.0])
    assert finding.verdict is Verdict.DIFFERS
    assert finding.observed == "3.5 for the whole batch, 1.5 as their weighted mean or 3 as their sum from its 2 microbatches"


@pytest.mark.parametrize(("options", "whole", "kind"), [(MEAN, 3.0, LossReduction.SUM), (SUM, 1.5, LossReduction.MEAN)])
def test_a_wrong_choice_is_known(options: LossOptions, whole: float, kind: LossReduction) -> None:
    finding = judge(whole, [1.0, 2.0], options)
    assert (finding.verdict, finding.reduction) == (Verdict.DIFFERS, kind)


@pytest.mark.parametrize(("options", "whole"), [(MEAN, 1.5), (SUM, 3.0)])
def test_a_right_choice_fits(options: LossOptions, whole: float) -> None:
    assert judge(whole, [1.0, 2.0], options).verdict is Verdict.FITS


def test_weights_of_the_user_are_the_only_candidate() -> None:
    options = LossOptions(reduction=LossReduction.MEAN, weight=count)
    assert compare(1.75, [1.0, 2.0], [2, 2], options, (0.25, 0.75), torch.float32).verdict is Verdict.FITS
    finding = compare(3.0, [1.0, 2.0], [2, 2], options, (0.25, 0.75), torch.float32)
    assert finding.verdict is Verdict.DIFFERS
    assert "1.75 as their weighted mean from" in finding.observed


def test_bfloat16_losses_may_differ_by_their_rounding() -> None:
    losses = [float(torch.tensor(value, dtype=torch.bfloat16)) for value in (1.234, 2.345, 0.987)]
    whole = float(torch.tensor(sum(losses) / 3, dtype=torch.bfloat16))
    assert compare(whole, losses, [1] * 3, AUTO, (1 / 3,) * 3, torch.bfloat16).reduction is LossReduction.MEAN
    assert compare(whole * 1.05, losses, [1] * 3, AUTO, (1 / 3,) * 3, torch.bfloat16).verdict is Verdict.DIFFERS


def test_a_mean_weighs_by_size_and_a_sum_does_not() -> None:
    assert loss_weights(LossReduction.MEAN, [3, 1]) == (0.75, 0.25)
    assert loss_weights(LossReduction.SUM, [3, 1]) == (1.0, 1.0)
