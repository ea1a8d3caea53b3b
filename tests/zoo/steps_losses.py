"""Steps whose loss is a mean over samples, a sum, a mean over something else, or nothing that microbatches could make."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.steps_calls import TokenModel
from tests.zoo.steps_case import Case, cross_entropy, generator, labelled, mlp
from tests.zoo.steps_several import Clip, SimClr
from tests.zoo.steps_state import Plain

PADDING = 0


class SumOfBatch(Plain):
    """Logs the sum, twice, and what is no loss."""

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        logits = self.model(batch[0])
        loss = F.cross_entropy(logits, batch[1], reduction="sum") * 0.1
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("as number", loss.item())
        self.log("accuracy", (logits.argmax(1) == batch[1]).float().mean())
        return {"loss": loss}


class SumInSeveralCalls(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.head(self.model(batch[0]).tanh()), batch[1], reduction="sum") * 0.1


class SumWithNoise(Plain):
    """Draws around the model's call: the whole batch must get the same numbers, and the next batch the ones after."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0] + 0.1 * torch.randn_like(batch[0]) + 0.1 * torch.randn(batch[0].shape, generator=self.generator)
        logits = self.model(x)
        logits = logits + 0.3 * torch.randn_like(logits)
        self.log("noise", logits.mean())
        return F.cross_entropy(logits, batch[1], reduction="sum") * 0.1


class ChangesInPlace(Plain):
    """Writes into its batch and into the model's result."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0].mul_(2).sub_(1)
        return F.cross_entropy(self.model(x).div_(0.5), batch[1], reduction="sum") * 0.1


class MeanOverTokens(TokenModel):
    """The mean is over the tokens that are not padding: their number differs from microbatch to microbatch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch["ids"])
        loss = F.cross_entropy(logits.transpose(1, 2), batch["labels"], ignore_index=PADDING)
        self.log("train_loss", loss, prog_bar=True)
        return loss


class SumOverTokens(TokenModel):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch["ids"])
        loss = F.cross_entropy(logits.transpose(1, 2), batch["labels"], ignore_index=PADDING, reduction="sum") * 0.02
        self.log("train_loss", loss)
        return loss


def num_tokens(batch: Any) -> Tensor:
    return (batch["labels"] != PADDING).sum()


def token_batches(*lengths: int) -> list[Any]:
    """Each row is longer than the one before."""
    g = generator()
    ids = [torch.randint(1, 11, (len(lengths), max(lengths)), generator=g) for _ in range(3)]
    kept = torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)
    return [{"ids": batch, "labels": torch.where(kept, batch, PADDING)} for batch in ids]


def batches_of_lengths(*lengths: int) -> list[Any]:
    """Every batch is padded to a length of its own."""
    return [token_batches(2, 3, 4, length)[0] for length in lengths]


class Standardised(Plain):
    """A loss that divides by a statistic of the batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        losses = F.cross_entropy(self.model(batch[0]), batch[1], reduction="none")
        return losses.mean() / losses.detach().std()


class MeanAndConstant(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return cross_entropy(self.model(batch[0]), batch[1]) + 0.25


class SumAndConstant(Plain):
    """A sum, and something that one device adds once: neither a mean nor a sum."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.model(batch[0]), batch[1], reduction="sum") + 0.25


class LanguageModel(nn.Module):
    """Computes its loss itself, in Hugging Face's manner: a mean over the labels that are not ignored."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.token, self.body, self.head = nn.Embedding(11, 10), mlp(10, 10, 10, 10), nn.Linear(10, 11)
        self.reduction = reduction

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.body(self.token(ids)))
        flat = logits.reshape(-1, 11), labels.reshape(-1)
        loss = F.cross_entropy(*flat, ignore_index=PADDING, reduction=self.reduction)
        return {"loss": loss * (0.1 if self.reduction == "sum" else 1), "logits": logits}


class LossInModel(Plain):
    """No code of the step could tell what the loss of the whole batch is."""

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        self.model = LanguageModel(reduction)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.model(**batch)["loss"]
        self.log("loss", loss)
        return loss


class SumInModel(LossInModel):
    def __init__(self) -> None:
        super().__init__("sum")


class TimeFirst(Plain):
    """The model's result has the batch as its second dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.model = mlp(6, 10, 10, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).unsqueeze(0).repeat(2, 1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        steps = self(batch[0])
        return (steps - batch[0]).pow(2).sum(2).mean(0).sum() * 0.1


# 1F1B runs the rest of the step for each microbatch; the loss must be a sum over them.
INTERLEAVED: dict[str, Any] = {"schedule": "1f1b"}

CASES: dict[str, Case] = {
    "sum_of_batch": Case(make=SumOfBatch, batches=lambda: labelled(8, 8, 5), microbatches=(1, 2, 4, 8)),
    "sum_of_odd_batch": Case(make=SumOfBatch, batches=lambda: labelled(7, 5, 7), microbatches=(2, 3)),
    "sum_accumulated": Case(
        make=SumOfBatch, batches=lambda: labelled(7, 8, 8, 8), microbatches=(4,), trainer={"accumulate_grad_batches": 2}
    ),
    "sum_as_told": Case(
        make=SumOfBatch, batches=lambda: labelled(7, 8), microbatches=(2,), strategy=INTERLEAVED | {"loss_reduction": "sum"}
    ),
    "sum_in_three_stages": Case(make=SumOfBatch, batches=lambda: labelled(9, 8), microbatches=(4,), stages=3),
    "sum_in_several_calls": Case(make=SumInSeveralCalls, batches=labelled, microbatches=(2, 8)),
    "sum_with_noise": Case(make=SumWithNoise, batches=labelled, microbatches=(2,)),
    "sum_in_place": Case(make=ChangesInPlace, batches=labelled, microbatches=(2,)),
    "sum_told_to_be_a_mean": Case(
        make=SumOfBatch, batches=labelled, microbatches=(2,), strategy=INTERLEAVED | {"loss_reduction": "mean"}
    ),
    "mean_told_to_be_a_sum": Case(
        make=MeanAndConstant, batches=labelled, microbatches=(2,), strategy=INTERLEAVED | {"loss_reduction": "sum"}
    ),
    "mean_over_tokens": Case(make=MeanOverTokens, batches=lambda: token_batches(2, 3, 5, 6), microbatches=(2, 4)),
    "mean_over_tokens_weighted": Case(
        make=MeanOverTokens,
        batches=lambda: token_batches(2, 3, 5, 6),
        microbatches=(1, 2, 3, 4),
        strategy=INTERLEAVED | {"loss_weight": "tests.zoo.steps_losses.num_tokens"},
    ),
    "microbatch_without_tokens": Case(
        make=MeanOverTokens,
        batches=lambda: token_batches(0, 0, 5, 6),
        microbatches=(2, 4),
        strategy=INTERLEAVED | {"loss_weight": num_tokens},
    ),
    "sum_over_tokens": Case(make=SumOverTokens, batches=lambda: batches_of_lengths(5, 7, 6, 9, 8, 5, 6), microbatches=(2, 4)),
    "lengths_weighted": Case(
        make=MeanOverTokens,
        batches=lambda: batches_of_lengths(5, 7, 6, 9, 8),
        microbatches=(2,),
        strategy=INTERLEAVED | {"loss_weight": num_tokens},
    ),
    "standardised": Case(make=Standardised, batches=labelled, microbatches=(1, 2)),
    "mean_and_constant": Case(make=MeanAndConstant, batches=lambda: labelled(7, 8), microbatches=(2, 8)),
    "sum_and_constant": Case(make=SumAndConstant, batches=labelled, microbatches=(2,)),
    "contrastive": Case(make=Clip, batches=labelled, microbatches=(2,)),
    "contrastive_of_one_encoder": Case(make=SimClr, batches=labelled, microbatches=(2,)),
    "loss_in_model": Case(make=LossInModel, batches=lambda: token_batches(2, 3, 5, 6), microbatches=(2, 4)),
    "loss_in_model_weighted": Case(
        make=LossInModel,
        batches=lambda: token_batches(2, 3, 0, 6),
        microbatches=(2, 4),
        strategy=INTERLEAVED | {"loss_weight": num_tokens},
    ),
    "sum_in_model": Case(make=SumInModel, batches=lambda: token_batches(2, 3, 5, 6), microbatches=(2, 4)),
    "time_first": Case(make=TimeFirst, batches=labelled, microbatches=(2, 8)),
    "sum_interleaved": Case(make=SumOfBatch, batches=lambda: labelled(9, 8, 5), microbatches=(2, 4), strategy=INTERLEAVED),
    "noise_interleaved": Case(make=SumWithNoise, batches=labelled, microbatches=(4,), strategy=INTERLEAVED),
    "mean_interleaved": Case(
        make=MeanAndConstant,
        batches=lambda: labelled(7, 8, 8),
        microbatches=(3,),
        stages=3,
        trainer={"accumulate_grad_batches": 2},
        strategy=INTERLEAVED,
    ),
    "several_calls_interleaved": Case(make=SumInSeveralCalls, batches=labelled, microbatches=(4,), strategy=INTERLEAVED),
    "standardised_interleaved": Case(make=Standardised, batches=labelled, microbatches=(2,), strategy=INTERLEAVED),
    "contrastive_interleaved": Case(make=Clip, batches=labelled, microbatches=(2,), strategy=INTERLEAVED),
    "mean_over_tokens_interleaved": Case(
        make=MeanOverTokens, batches=lambda: token_batches(2, 3, 5, 6), microbatches=(2,), strategy=INTERLEAVED
    ),
}
