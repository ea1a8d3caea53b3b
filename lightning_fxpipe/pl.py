"""The strategy for those who import ``pytorch_lightning``, which is ``lightning`` under another name.

``import lightning_fxpipe`` registers it as ``Trainer(strategy="fxpipe")``; this module, which imports ``pytorch_lightning``, is
for those who make it themselves, or name its class in a config: ``lightning_fxpipe.pl.FxPipeStrategy``.
"""

from pytorch_lightning.strategies import ParallelStrategy

from lightning_fxpipe.strategy.strategy import PipelineStrategy


class FxPipeStrategy(PipelineStrategy, ParallelStrategy):  # type: ignore[misc]  # noqa: D101
    __doc__ = PipelineStrategy.__doc__
