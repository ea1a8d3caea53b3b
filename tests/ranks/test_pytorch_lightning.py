"""Users of ``pytorch_lightning`` get the same strategy, by name and by class; what they mix is refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest

from lightning_fxpipe import FxPipeStrategy
from tests.otherroot import in_other_root
from tests.ranks.pool import RankPool
from tests.ranks.runs import assert_as_on_one_device

pytest.importorskip("pytorch_lightning")

Ranks = Callable[[int], RankPool]

# By test module, names of runs.
RUNS = {
    "tests.ranks.test_callbacks": (
        *("ModelCheckpoint top k", "EarlyStopping", "EMAWeightAveraging resumed", "BaseFinetuning resumed", "TQDMProgressBar"),
        *("BasePredictionWriter epoch", "ThroughputMonitor", "LearningRateMonitor", "ModelSummary"),
    ),
    "tests.ranks.test_hooks": ("trace plain",),
    "tests.ranks.test_replica": (
        "asks for replicas",
        "hooks of rank 0",
        "own log",
        "collectives",
        "sampler of the Trainer",
    ),
}

TRAINER = "Trainer(strategy='fxpipe', accelerator='cpu', devices=2, logger=False)"


def do(folder: str, stages: int) -> list[Any]:
    """All runs, each in a folder of its own."""
    results = []
    for module, names in RUNS.items():
        for name in names:
            own = Path(folder, module, name)
            own.mkdir(parents=True, exist_ok=True)
            results.append(in_other_root(module).do(name, str(own), stages))
    return results


def test_runs_are_those_of_one_device_under_the_other_name(ranks: Ranks, tmp_path: Path) -> None:
    names = [name for of_module in RUNS.values() for name in of_module]
    expected = do(str(tmp_path), 0)
    results = ranks(2).run(do, str(tmp_path), 2, timeout_seconds=300)
    for index, name in enumerate(names):
        assert_as_on_one_device([result[index] for result in results], expected[index], name)


def run(code: str) -> str:
    result = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("first", ["lightning_fxpipe", "pytorch_lightning"])
def test_the_strategy_is_registered_whoever_is_imported_first(first: str) -> None:
    out = run(
        f"import {first}, lightning_fxpipe, pytorch_lightning\ntrainer = pytorch_lightning.{TRAINER}\n"
        "from pytorch_lightning.strategies import ParallelStrategy\n"
        "print(isinstance(trainer.strategy, ParallelStrategy), trainer.world_size, trainer.strategy.num_processes)"
    )
    assert out.split()[-3:] == ["True", "1", "2"]


def test_nobody_imports_the_other_package_for_those_who_do_not() -> None:
    out = run(f"import lightning_fxpipe, lightning, sys\nlightning.{TRAINER}\nprint('pytorch_lightning' in sys.modules)")
    assert out.split()[-1] == "False"


def test_a_strategy_for_the_other_package_is_refused() -> None:
    import pytorch_lightning

    from lightning_fxpipe.pl import FxPipeStrategy as Other

    with pytest.raises(ValueError, match=r"instance of `pytorch_lightning\.strategies\.Strategy`"):
        pytorch_lightning.Trainer(strategy=FxPipeStrategy(), accelerator="cpu", devices=2)
    with pytest.raises(ValueError, match=r"instance of `lightning\.pytorch\.strategies\.Strategy`"):
        L.Trainer(strategy=Other(), accelerator="cpu", devices=2)  # type: ignore[arg-type]


def test_a_module_or_callback_of_the_other_package_is_refused() -> None:
    import pytorch_lightning

    from lightning_fxpipe.errors import UnsupportedError
    from lightning_fxpipe.strategy.support import check_one_root

    class Module(L.LightningModule):
        pass

    trainer = pytorch_lightning.Trainer(strategy="fxpipe", accelerator="cpu", devices=2, logger=False)
    with pytest.raises(Exception, match="must be a `LightningModule`"):  # Lightning's own
        trainer.fit(Module())  # type: ignore[arg-type]
    trainer.callbacks.append(L.pytorch.callbacks.EarlyStopping("loss"))  # type: ignore[attr-defined]
    with pytest.raises(
        UnsupportedError,
        match=r"(?s)The run mixes `lightning` and `pytorch_lightning`.*"
        r"a Trainer of pytorch_lightning and EarlyStopping of lightning.*lightning_fxpipe\.pl",
    ):
        check_one_root(trainer, pytorch_lightning.LightningModule())  # type: ignore[arg-type]


def test_a_config_names_the_class_for_its_command_line() -> None:
    out = run(
        "import lightning_fxpipe\nfrom pytorch_lightning.cli import LightningCLI\n"
        "from pytorch_lightning.demos.boring_classes import BoringModel\n"
        "strategy = {'class_path': 'lightning_fxpipe.pl.FxPipeStrategy', 'init_args': {'num_microbatches': 3}}\n"
        "trainer = {'strategy': strategy, 'accelerator': 'cpu', 'devices': 2, 'logger': False}\n"
        "cli = LightningCLI(BoringModel, run=False, args={'trainer': trainer})\n"
        "print(type(cli.trainer.strategy).__module__, cli.trainer.strategy._num_microbatches)"
    )
    assert out.split()[-2:] == ["lightning_fxpipe.pl", "3"]
