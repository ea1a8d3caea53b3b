"""Writes ``docs/reference/zoo.md``: the verdict on each model of the zoo. ``python -m tests.zoo.table``"""

from __future__ import annotations

import logging
import warnings
from pathlib import Path

from lightning_fxpipe.errors import FxPipeError
from tests.zoo.entry import Entry
from tests.zoo.harness import SIZES, Traces, check
from tests.zoo.models import ENTRIES

TARGET = Path(__file__).parents[2] / "docs" / "reference" / "zoo.md"
HEAD = f"""# Test models

Each model is cut into two and four stages, which run one after another on separate copies, in training and in evaluation,
with {", ".join(map(str, SIZES[:-1]))} and {SIZES[-1]} samples. Loss, results, every gradient and every buffer must equal those
of the whole model. The models are tiny; `tests/zoo` has them all. Written by `python -m tests.zoo.table`.

*Nodes* and the columns to its right refer to the largest number of stages. *Balance* is the parameters of the heaviest stage
over those of the ideal one. *Bytes* cross the boundaries for one microbatch of {SIZES[0]}, all results included (a key-value
cache as well).

| Model | Stages | Nodes | Trace s | Balance | Bytes | Verdict |
|---|---|---|---|---|---|---|
"""


def row(entry: Entry) -> str:
    """The model's line of the table."""
    traces = Traces.of(entry)
    try:
        for num_stages in entry.stages:
            for training in (True, False):
                check(traces, num_stages, training=training)
    except FxPipeError as error:
        if entry.refused is None or entry.refused not in str(error):
            raise
        return f"| {entry.name} | | | | | | refused: {entry.why} |"
    num_stages = max(entry.stages)
    plan = traces.plan(num_stages)
    nodes = len(traces.assignment(num_stages, training=True).chain.traced.graph.nodes)
    weights = [stage.num_parameters for stage in plan.stages]
    balance = max(weights) * num_stages / sum(weights)
    crossing = sum(tensor.num_bytes for stage in plan.stages for tensor in stage.outputs)
    verdict = "equal" + ("; another graph for each batch size" if entry.retraced else "")
    if num_stages < 4:
        verdict += f"; {entry.why}"
    return f"| {entry.name} | {num_stages} | {nodes} | {traces.seconds:.1f} | {balance:.2f} | {crossing} | {verdict} |"


def main() -> None:
    """Checks all models and writes the table."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    rows = []
    for entry in ENTRIES:
        rows.append(row(entry))
        print(rows[-1], flush=True)
    TARGET.write_text(HEAD + "\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
