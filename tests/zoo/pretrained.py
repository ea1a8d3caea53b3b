"""Architectures of ``transformers``, tiny and with random weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.entry import Batch, Entry

transformers: Any = __import__("transformers")
transformers.logging.set_verbosity_error()

VOCABULARY = 67
LENGTH = 9
HEADS: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def loss_of(result: Any) -> Tensor:
    """The loss that the model computed itself."""
    loss: Tensor = result.loss
    return loss


def pretrained(
    name: str,
    make_batch: Callable[[int, int], Batch],
    /,
    kind: str,
    config: str | None = None,
    *,
    entry: dict[str, Any] | None = None,
    **options: Any,
) -> Entry:
    """An entry for the class ``kind`` with a config of these options."""

    def make_module() -> nn.Module:
        model_class = getattr(transformers, kind)
        config_class = getattr(transformers, config) if config else model_class.config_class
        module: nn.Module = model_class(config_class(**options))
        return module

    return Entry(name=name, make_module=make_module, make_batch=make_batch, loss=loss_of, **(entry or {}))


def generator(seed: int) -> torch.Generator:
    """Random numbers of a batch."""
    return torch.Generator().manual_seed(seed)


def tokens(size: int, seed: int, length: int = LENGTH) -> Tensor:
    """Token numbers, without the special ones."""
    return torch.randint(3, VOCABULARY, (size, length), generator=generator(seed))


def mask(size: int, seed: int) -> Tensor:
    """An attention mask with padding at the right."""
    lengths = torch.randint(LENGTH // 2, LENGTH + 1, (size, 1), generator=generator(seed + 1))
    return (torch.arange(LENGTH)[None] < lengths).long()


def text(size: int, seed: int) -> Batch:
    """A language model's batch without padding."""
    ids = tokens(size, seed)
    return {"input_ids": ids, "labels": ids}


def padded_text(size: int, seed: int) -> Batch:
    """A language model's batch with padding."""
    ids, attention = tokens(size, seed), mask(size, seed)
    return {"input_ids": ids * attention, "attention_mask": attention, "labels": ids.masked_fill(attention == 0, -100)}


def classified_text(size: int, seed: int) -> Batch:
    """Padded text with one class for each sample."""
    batch = dict(padded_text(size, seed))
    batch["labels"] = torch.randint(0, 2, (size,), generator=generator(seed + 2))
    return batch


def pairs(size: int, seed: int) -> Batch:
    """Padded source text and target text."""
    attention = mask(size, seed)
    return {
        "input_ids": tokens(size, seed) * attention,
        "attention_mask": attention,
        "labels": tokens(size, seed + 1, LENGTH - 2),
    }


def images(size: int, seed: int, side: int = 32) -> Batch:
    """Images with a class each."""
    return {
        "pixel_values": torch.randn(size, 3, side, side, generator=generator(seed)),
        "labels": torch.randint(0, 2, (size,), generator=generator(seed + 1)),
    }


def segmented_images(size: int, seed: int) -> Batch:
    """Images with a class for each pixel."""
    labels = torch.randint(0, 2, (size, 32, 32), generator=generator(seed + 1))
    return {"pixel_values": images(size, seed)["pixel_values"], "labels": labels}


def images_and_text(size: int, seed: int) -> Batch:
    """Images with captions."""
    return {
        "pixel_values": images(size, seed)["pixel_values"],
        "input_ids": tokens(size, seed),
        "attention_mask": mask(size, seed),
        "return_loss": True,
    }


def waves(size: int, seed: int) -> Batch:
    """Sound with a transcript."""
    return {
        "input_values": torch.randn(size, 400, generator=generator(seed)),
        "labels": torch.randint(1, 20, (size, 3), generator=generator(seed + 1)),
    }


def spectrograms(size: int, seed: int) -> Batch:
    """Log-mel features with a transcript."""
    return {
        "input_features": torch.randn(size, 8, 20, generator=generator(seed)),
        "labels": tokens(size, seed, 5),
    }


GPT2: dict[str, Any] = {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 4, "n_head": 2, "n_positions": 32}
ENCODER_DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}
TOWERS: dict[str, Any] = {
    "text_config": {**HEADS, "num_hidden_layers": 2},
    "vision_config": {**VISION, "num_hidden_layers": 2},
    "projection_dim": 12,
}


def checkpointed(entry: Entry, *, reentrant: bool) -> Entry:
    """The same with gradient checkpointing on."""

    def make_module() -> nn.Module:
        module: Any = entry.make_module()
        module.gradient_checkpointing_enable({"use_reentrant": reentrant})
        return module  # type: ignore[no-any-return]

    return replace(entry, name=f"{entry.name}_checkpoint{'_reentrant' if reentrant else ''}", make_module=make_module)


DECODERS = [
    pretrained("gpt2", padded_text, "GPT2LMHeadModel", **GPT2),
    pretrained("gpt2_cache_off", text, "GPT2LMHeadModel", **GPT2, use_cache=False),
    pretrained("llama", padded_text, "LlamaForCausalLM", **HEADS),
    pretrained("qwen3", text, "Qwen3ForCausalLM", **HEADS, head_dim=8),
    pretrained("gemma", padded_text, "GemmaForCausalLM", **HEADS, head_dim=8),
    pretrained("mistral", padded_text, "MistralForCausalLM", **HEADS, sliding_window=4),
    pretrained("phi", text, "PhiForCausalLM", **HEADS),
    pretrained("gpt_neox", padded_text, "GPTNeoXForCausalLM", **HEADS),
    pretrained("falcon", padded_text, "FalconForCausalLM", **HEADS),
    pretrained("bloom", padded_text, "BloomForCausalLM", vocab_size=VOCABULARY, hidden_size=16, n_layer=4, n_head=2),
    pretrained(
        "opt", padded_text, "OPTForCausalLM", vocab_size=VOCABULARY, hidden_size=16, word_embed_proj_dim=16, ffn_dim=24,
        num_hidden_layers=4, num_attention_heads=2, max_position_embeddings=32, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    ),
]  # fmt: skip
EXPERTS = [
    pretrained("mixtral", padded_text, "MixtralForCausalLM", **HEADS, num_local_experts=4),
    pretrained(
        "qwen2_moe", padded_text, "Qwen2MoeForCausalLM", **HEADS, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=12, shared_expert_intermediate_size=12, entry={"retraced": True},
    ),
    pretrained(
        "switch_transformers", pairs, "SwitchTransformersForConditionalGeneration", vocab_size=VOCABULARY, d_model=16, d_kv=8,
        d_ff=24, num_layers=2, num_decoder_layers=2, num_heads=2, num_experts=4, decoder_start_token_id=0,
        num_sparse_encoder_layers=1, num_sparse_decoder_layers=1,
    ),
]  # fmt: skip
STATE_SPACE = [
    pretrained(
        "mamba", text, "MambaForCausalLM", vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=4, state_size=4,
        use_cache=False,
        entry={"stages": (2,), "why": "with four, a cut falls where evaluation uses a layer's parameters in another order"},
    ),
    pretrained(
        "mamba2", text, "Mamba2ForCausalLM", vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=4, state_size=4,
        num_heads=4, head_dim=8, n_groups=1, chunk_size=4,
    ),
]  # fmt: skip
ENCODERS = [
    pretrained("bert", padded_text, "BertForMaskedLM", **HEADS),
    pretrained("roberta", classified_text, "RobertaForSequenceClassification", **HEADS),
    pretrained(
        "distilbert", padded_text, "DistilBertForMaskedLM", vocab_size=VOCABULARY, dim=16, hidden_dim=24, n_layers=4, n_heads=2,
        max_position_embeddings=32,
    ),
    pretrained("electra", classified_text, "ElectraForSequenceClassification", **HEADS, embedding_size=12),
    pretrained("albert", padded_text, "AlbertForMaskedLM", **HEADS, embedding_size=12),
    pretrained(
        "deberta_v2_classifier", classified_text, "DebertaV2ForSequenceClassification", **HEADS,
        entry={"refused": "cannot be traced", "why": "its forward counts the labels that are not negative"},
    ),
    pretrained(
        "deberta_v2", padded_text, "DebertaV2ForMaskedLM", entry={"retraced": True}, **HEADS, relative_attention=True,
        pos_att_type=["p2c", "c2p"], position_buckets=8, norm_rel_ebd="layer_norm", share_att_key=True,
    ),
]  # fmt: skip
ENCODER_DECODERS = [
    pretrained(
        "t5", pairs, "T5ForConditionalGeneration", vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=24, num_layers=2,
        num_decoder_layers=2, num_heads=2, decoder_start_token_id=0,
    ),
    pretrained("bart", pairs, "BartForConditionalGeneration", **ENCODER_DECODER),
    pretrained("marian", pairs, "MarianMTModel", **ENCODER_DECODER),
    pretrained("pegasus", pairs, "PegasusForConditionalGeneration", **ENCODER_DECODER),
]  # fmt: skip
VISION_MODELS = [
    pretrained("vit", images, "ViTForImageClassification", **VISION),
    pretrained("dinov2", images, "Dinov2ForImageClassification", **VISION),
    pretrained(
        "swin", images, "SwinForImageClassification", image_size=32, patch_size=4, embed_dim=8, depths=[2, 2], num_heads=[2, 2],
        window_size=4, drop_path_rate=0.0,
    ),
    pretrained("convnext", images, "ConvNextForImageClassification", hidden_sizes=[8, 12, 16], depths=[1, 2, 1], num_stages=3),
    pretrained(
        "resnet", images, "ResNetForImageClassification", embedding_size=8, hidden_sizes=[8, 12, 16], depths=[1, 2, 1],
        layer_type="basic",
    ),
    pretrained(
        "segformer", segmented_images, "SegformerForSemanticSegmentation", num_encoder_blocks=2, depths=[1, 1],
        sr_ratios=[2, 1], hidden_sizes=[8, 16], patch_sizes=[7, 3], strides=[4, 2], num_attention_heads=[1, 2],
        mlp_ratios=[2, 2], decoder_hidden_size=16, num_labels=2, drop_path_rate=0.0,
    ),
    pretrained("clip", images_and_text, "CLIPModel", **TOWERS),
]  # fmt: skip
SPEECH = [
    pretrained(
        "wav2vec2", waves, "Wav2Vec2ForCTC", **{**HEADS, "vocab_size": 20}, conv_dim=[8, 8], conv_stride=[5, 4],
        conv_kernel=[10, 8], num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, num_feat_extract_layers=2,
        layerdrop=0.0, apply_spec_augment=False, ctc_loss_reduction="mean",
    ),
    pretrained(
        "whisper", spectrograms, "WhisperForConditionalGeneration", **ENCODER_DECODER, num_mel_bins=8, max_source_positions=10,
        max_target_positions=16, suppress_tokens=None, begin_suppress_tokens=None,
    ),
]  # fmt: skip

CHECKPOINTED = [checkpointed(DECODERS[2], reentrant=False), checkpointed(DECODERS[0], reentrant=True)]

ENTRIES = [*DECODERS, *EXPERTS, *STATE_SPACE, *ENCODERS, *ENCODER_DECODERS, *VISION_MODELS, *SPEECH, *CHECKPOINTED]
