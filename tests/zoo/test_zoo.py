"""Every model of the zoo in two and four stages gives what it gives whole, in training and in evaluation."""

from __future__ import annotations

from functools import lru_cache

import pytest

from lightning_fxpipe.errors import FxPipeError
from tests.zoo.entry import Entry
from tests.zoo.harness import Traces, check
from tests.zoo.models import ENTRIES

# Many rounds of opening, or long scans: several seconds each. `-m "not slow"` leaves them out.
SLOW = set(
    """bart bert bloom convnext distilbert electra falcon gemma gpt2_cache_off gpt2_checkpoint_reentrant gpt_neox
    llama_checkpoint mamba2 marian mistral mixtral nn_transformer pegasus phi qwen2_moe qwen3 roberta swin
    switch_transformers t5 wav2vec2""".split()  # noqa: SIM905
)


@lru_cache(maxsize=2)
def traces_of(name: str) -> Traces:
    """Traces of a model; the tests of one model run one after another."""
    return Traces.of(next(entry for entry in ENTRIES if entry.name == name))


@pytest.mark.parametrize("entry", [pytest.param(e, marks=pytest.mark.slow) if e.name in SLOW else e for e in ENTRIES], ids=str)
def test_stages_equal_the_whole_model(entry: Entry) -> None:
    traces = traces_of(entry.name)
    if entry.refused is not None:
        with pytest.raises(FxPipeError, match=entry.refused):
            traces.plan(entry.stages[0])
        return
    for num_stages in entry.stages:
        for training in (True, False):
            check(traces, num_stages, training=training)


def test_the_zoo_is_large_enough() -> None:
    assert len({entry.name for entry in ENTRIES}) == len(ENTRIES) >= 45
    assert sum(entry.make_module.__module__ == "tests.zoo.pretrained" for entry in ENTRIES) >= 26
