"""Time to plan models that are too large to load: transformers on the meta device.

    python benchmarks/plan_time.py                                   # 100 to 1,000 layers, for 64 stages
    python benchmarks/plan_time.py --layers 126 --stages 64 512 --llama-405b

"Plan" is ``make_plan``: trace, partition, boundaries. "Simulated" is ``simulate_plan``: that, the costs of each unit, and 1F1B.
Each runs in a process of its own; memory is the most that it had resident, the imports among it.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[100, 300, 1000])
    parser.add_argument("--stages", type=int, nargs="+", default=[64])
    parser.add_argument("--llama-405b", action="store_true", help="Llama of transformers with 405 billion parameters")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(measured(options.layers[0], options.stages[0], options.llama_405b)))
        return
    rows = []
    for num_layers in options.layers:
        for num_stages in options.stages:
            rows.append((str(num_layers), str(num_stages), *launch(num_layers, num_stages, options.llama_405b)))
            print(f"{num_layers} layers, {num_stages} stages: {rows[-1][3]}", file=sys.stderr, flush=True)
    from lightning_fxpipe.reporting.table import render_table

    headers = ("Layers", "Stages", "Parameters", "Plan", "Simulated", "Memory", "Heaviest stage / mean")
    print(render_table("Planning on the meta device", headers, rows, right_aligned=headers))


def launch(num_layers: int, num_stages: int, is_llama: bool) -> tuple[str, ...]:
    """Plans in a process of its own; returns the cells of a row."""
    from lightning_fxpipe.reporting.table import human_bytes, human_count, human_seconds

    command = [sys.executable, __file__, "--worker", "--layers", str(num_layers), "--stages", str(num_stages)]
    done = subprocess.run([*command, *(["--llama-405b"] if is_llama else [])], capture_output=True, text=True, timeout=1800)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    found = json.loads(done.stdout.splitlines()[-1])
    return (
        human_count(found["parameters"]),
        human_seconds(found["plan"]),
        human_seconds(found["simulated"]),
        human_bytes(found["memory"]),
        f"{found['heaviest']:.3f}",
    )


# --------------------------------------------------------------------------- in the process that plans


def measured(num_layers: int, num_stages: int, is_llama: bool) -> dict[str, Any]:
    import torch

    from lightning_fxpipe import make_plan, simulate_plan
    from lightning_fxpipe.simulation import Device

    with torch.device("meta"):
        model = make_llama(num_layers) if is_llama else make_gpt(num_layers)
    ids = torch.zeros(8, 32, dtype=torch.long)
    batch: Any = {"input_ids": ids} if is_llama else ids
    device = Device(flops_per_second=1e14, bytes_per_second=1e12)
    begin = time.perf_counter()
    plan = make_plan(model, batch, num_stages=num_stages)
    planned = time.perf_counter()
    simulate_plan(model, batch, num_stages=num_stages, num_microbatches=4, device=device, schedules=["1f1b"])
    weights = [stage.num_parameters for stage in plan.stages]
    return {
        "parameters": plan.num_parameters,
        "plan": planned - begin,
        "simulated": time.perf_counter() - planned,
        "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "heaviest": max(weights) * num_stages / sum(weights),
    }


def make_gpt(num_layers: int) -> Any:
    """Of width 256; what a layer computes does not matter here."""
    from torch import nn

    layers = (
        nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.1, batch_first=True, norm_first=True) for _ in range(num_layers)
    )
    return nn.Sequential(nn.Embedding(1000, 256), *layers, nn.Linear(256, 1000))


def make_llama(num_layers: int) -> Any:
    """That of transformers, in the sizes of Llama 3.1 405B."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=16384,
        intermediate_size=53248,
        num_hidden_layers=num_layers,
        num_attention_heads=128,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


if __name__ == "__main__":
    main()
