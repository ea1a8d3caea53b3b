"""Modules that leave tensors for each other, or for the step, where no argument and no result has them."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tests.zoo.steps_case import CLASSES, DIM, Case, Sgd, cross_entropy, labelled

NUM_BLOCKS = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.known: dict[str, Any] = {}  # what it knows besides itself; a dict, so that no module is registered twice

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Net(nn.Module):
    def __init__(self, block: type[Block]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Step(Sgd):
    block: type[Block] = Block

    def __init__(self) -> None:
        super().__init__()
        self.model = Net(self.block)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = cross_entropy(self.model(batch[0]), batch[1])
        self.log("loss", loss)
        return loss


class ValidatedStep(Step):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("validated", cross_entropy(self.model(batch[0]), batch[1]))


class KnowsTogether(Step):
    """All blocks know one dictionary."""

    def __init__(self, **shared: Any) -> None:
        super().__init__()
        self.shared = shared
        for block in self.model.blocks:
            block.known["shared"] = self.shared


class GatesTheNext(Block):
    gate: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if "next" in self.known:
            self.known["next"].gate = x.mean(1, keepdim=True).sigmoid()
        x = super().forward(x)
        return x if self.gate is None else x * self.gate


class Gates(Step):
    """Each block sets a tensor on the next one."""

    block = GatesTheNext

    def __init__(self) -> None:
        super().__init__()
        for before, after in zip(self.model.blocks, self.model.blocks[1:], strict=False):
            before.known["next"] = after


class ReadsTheLast(Block):
    def forward(self, x: Tensor) -> Tensor:
        shared = self.known["shared"]
        if "last" in shared:
            x = x + shared["last"]
        shared["last"] = x.mean(1, keepdim=True)
        return super().forward(x)


class SharesADict(KnowsTogether):
    """The step empties the dictionary."""

    block = ReadsTheLast

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.shared.clear()
        return super().training_step(batch, batch_idx)


class Down(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.known["skips"].append(x)
        return super().forward(x)


class Up(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.known["skips"].pop()


class PassesSkips(ValidatedStep):
    """As a U-Net whose blocks put skips in a list, and take them from there: in its stage alone a list would only grow."""

    depth = 2

    def __init__(self) -> None:
        super().__init__()
        blocks = [*(Down() for _ in range(self.depth)), *(Up() for _ in range(self.depth))]
        self.model = nn.Sequential(*blocks, nn.Linear(DIM, CLASSES))
        skips: list[Tensor] = []
        for block in blocks:
            block.known["skips"] = skips


class PassesASkip(PassesSkips):
    depth = 1


class MakesATable(Block):
    def forward(self, x: Tensor) -> Tensor:
        tables = self.known["tables"]
        if x.shape[1] not in tables:
            tables[x.shape[1]] = torch.arange(x.shape[1], dtype=x.dtype, device=x.device).cos()
        return super().forward(x * tables[x.shape[1]])


class SharesTables(Step):
    """What follows from no input and no weight each stage makes for itself: nothing has to be opened for it."""

    block = MakesATable

    def __init__(self) -> None:
        super().__init__()
        tables: dict[int, Tensor] = {}
        for block in self.model.blocks:
            block.known["tables"] = tables


class KeepsNorms(Step):
    """Hooks compute from what the blocks return, and keep that; the step logs it."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[Tensor] = []
        for block in self.model.blocks:
            block.register_forward_hook(lambda module, inputs, output: self.norms.append(output.detach().norm(dim=1)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.norms.clear()
        loss = super().training_step(batch, batch_idx)
        self.log("norm", torch.stack(self.norms).mean())
        return loss


class TrainsFeatures(Step):
    """Hooks keep what the blocks return, and the loss is made of it, too."""

    def __init__(self) -> None:
        super().__init__()
        self.features: dict[str, Tensor] = {}
        for name, block in self.model.blocks.named_children():
            block.register_forward_hook(lambda module, inputs, output, name=name: self.features.update({name: output}))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + 0.01 * sum(feature.square().mean() for feature in self.features.values())


class CountsFeatures(Block):
    """Leaves a number on itself."""

    num_positive = 1

    def forward(self, x: Tensor) -> Tensor:
        self.num_positive = int((x > 0).sum())
        return super().forward(x)


class DividesByACount(Step):
    block = CountsFeatures

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) / (1 + self.model.blocks[0].num_positive)


class ValidatesByACount(Step):
    """Only a validation step reads it: that runs on one rank."""

    block = CountsFeatures

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = cross_entropy(self.model(batch[0]), batch[1])
        self.log("validated", loss / (1 + self.model.blocks[0].num_positive))


class KnowsItsPlace(Block):
    """Finds by counting how deep it is."""

    def forward(self, x: Tensor) -> Tensor:
        self.known["shared"]["depth"] += 1
        return x + torch.tanh(self.linear(x)) / self.known["shared"]["depth"]


class CountsLayers(KnowsTogether):
    """A hook sets the counter back, which all blocks know."""

    block = KnowsItsPlace

    def __init__(self) -> None:
        super().__init__(depth=0)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.shared["depth"] = 0


class NotesSizes(Block):
    """Adds to a list of all blocks that nobody reads, and says once that it does."""

    sizes: ClassVar[list[int]] = []
    has_warned = False

    def forward(self, x: Tensor) -> Tensor:
        NotesSizes.has_warned = True
        self.sizes.append(x.shape[1])
        return super().forward(x)


class TakesNotes(Step):
    block = NotesSizes


class AddsToATotal(Block):
    totals: ClassVar[dict[str, float]] = {"positive": 0.0}

    def forward(self, x: Tensor) -> Tensor:
        AddsToATotal.totals["positive"] += float((x > 0).sum())
        return super().forward(x)


class LogsATotal(Step):
    """What blocks add up in an object of their class, the step logs."""

    block = AddsToATotal

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        AddsToATotal.totals["positive"] = 0.0
        loss = super().training_step(batch, batch_idx)
        self.log("positive", AddsToATotal.totals["positive"])
        return loss


class LogsNumbersOfHooks(Step):
    """As with norms above, but hooks keep numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[float] = []
        for block in self.model.blocks:
            block.register_forward_hook(lambda module, inputs, output: self.norms.append(output.detach().norm().item()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.norms.clear()
        loss = super().training_step(batch, batch_idx)
        self.log("norm", sum(self.norms) / len(self.norms))
        return loss


class AveragesInPlace(Block):
    """Its average is a tensor, and no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.average = torch.zeros(DIM)

    def forward(self, x: Tensor) -> Tensor:
        self.average.mul_(0.5).add_(x.detach().mean(0))
        return super().forward(x)


class ReadsAnAverage(Step):
    block = AveragesInPlace

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + self.model.blocks[0].average.mean()


class GivesFeatures(ValidatedStep):
    """What hooks keep of the blocks, steps that train nothing log and return; the training step does not."""

    def __init__(self) -> None:
        super().__init__()
        self.features = {str(number): torch.zeros(8, DIM) for number in range(NUM_BLOCKS)}
        for name, block in self.model.blocks.named_children():
            block.register_forward_hook(lambda module, inputs, output, name=name: self.features.update({name: output}))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.log_dict({f"feature {name}": feature.mean() for name, feature in self.features.items()})

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(batch[0]), self.features["0"], self.features["3"]


class IsTold(Block):
    """Computes by what the model has said."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x)) / (1 + self.known["shared"]["place"])


class Tells(KnowsTogether):
    """Its code sets a number that its blocks read, for each of them."""

    block = IsTold

    def __init__(self) -> None:
        super().__init__(place=0)

    def forward(self, x: Tensor) -> Tensor:
        for place, block in enumerate(self.model.blocks):
            self.shared["place"] = place
            x = block(x)
        return self.model.head(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return cross_entropy(self(batch[0]), batch[1])


class TellsBefore(Tells):
    """One number for all of them, before the model is called."""

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.shared["place"] = batch_idx
        return super().training_step(batch, batch_idx)


class KeepsAState(Block):
    """A recurrent state for the next batch, made anew where that has another size."""

    state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.state is None or self.state.shape != x.shape:
            self.state = torch.zeros_like(x)
        y = super().forward(x + self.state)
        self.state = torch.tanh(y.detach())
        return y


class Recurs(ValidatedStep):
    block = KeepsAState


class Fills(Block):
    """Notes in a buffer that it was trained."""

    filled: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("filled", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.filled.fill_(1.0)
        return super().forward(x)


class FilledNet(Net):
    """Does something else once its first block was trained; only that block's rank knows."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            if not self.training and block.filled > 0:
                x = 2 * x
        return self.head(x)


class LooksAtBuffers(ValidatedStep):
    def __init__(self) -> None:
        super().__init__()
        self.model = FilledNet(Fills)


class Criterion(nn.Module):
    """Looks at values outside of torch, as a matcher of boxes does, and has a table."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weights", torch.arange(1.0, CLASSES + 1))

    def forward(self, logits: Tensor, classes: Tensor) -> Tensor:
        order = logits.detach().numpy().argmax(1)
        return nn.functional.cross_entropy(logits, classes, self.weights) * float(1 + (order == 0).sum())


class Detects(Step):
    """The model makes its criterion in each call, where its parameters are: the first is another stage's."""

    def forward(self, x: Tensor, classes: Tensor) -> Tensor:
        logits = self.model(x)
        return Criterion().to(next(self.parameters()).device)(logits, classes)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(*batch)


CASES: dict[str, Case] = {
    "makes_its_criterion": Case(make=Detects, batches=labelled, microbatches=(1, 4), always=True),
    "looks_at_buffers": Case(
        make=LooksAtBuffers, batches=labelled, microbatches=(1, 4), evaluations=("validate",), always=True
    ),
    "keeps_a_state": Case(
        make=Recurs, batches=lambda: labelled(8, 8, 6, 8), microbatches=(1, 4), evaluations=("validate",), always=True
    ),
    "counts_layers": Case(make=CountsLayers, batches=labelled, microbatches=(4,), always=True),
    "tells_blocks": Case(make=Tells, batches=labelled, microbatches=(4,), always=True),
    "tells_blocks_before": Case(make=TellsBefore, batches=labelled, microbatches=(1, 4), always=True),
    "takes_notes": Case(make=TakesNotes, batches=labelled, microbatches=(4,), always=True),
    "logs_a_total": Case(make=LogsATotal, batches=labelled, microbatches=(4,), always=True),
    "logs_numbers_of_hooks": Case(make=LogsNumbersOfHooks, batches=labelled, microbatches=(4,), always=True),
    "reads_an_average": Case(make=ReadsAnAverage, batches=labelled, microbatches=(1,), always=True),
    "gives_features": Case(
        make=GivesFeatures, batches=labelled, microbatches=(4,), evaluations=("validate", "predict"), always=True
    ),
    "divides_by_a_count": Case(make=DividesByACount, batches=labelled, microbatches=(4,), always=True),
    "validates_by_a_count": Case(
        make=ValidatesByACount, batches=labelled, microbatches=(4,), evaluations=("validate",), always=True
    ),
    "gates_the_next_block": Case(make=Gates, batches=labelled, microbatches=(1, 4), always=True),
    "shares_a_dict": Case(make=SharesADict, batches=labelled, microbatches=(1, 4), always=True),
    "skips_in_a_list": Case(make=PassesSkips, batches=labelled, microbatches=(1, 4), evaluations=("validate",), always=True),
    "a_skip_in_a_list": Case(make=PassesASkip, batches=labelled, microbatches=(4,), evaluations=("validate",), always=True),
    "shares_tables": Case(make=SharesTables, batches=labelled, microbatches=(4,)),
    "hooks_keep_norms": Case(make=KeepsNorms, batches=labelled, microbatches=(1, 4), always=True),
    "hooks_keep_features": Case(make=TrainsFeatures, batches=labelled, microbatches=(1, 4), always=True),
}
