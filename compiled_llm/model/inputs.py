"""Checks of calls, before anything changes: each message names the argument, its value and the way out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from compiled_llm.model.version.model_version import ModelVersion
from compiled_llm.model.version.training import Difference


def vocabulary_of(model: PreTrainedModel) -> int:
    embeddings: Any = model.get_input_embeddings()
    # An adapter of PEFT's that takes the layer's place shows its weight alone.
    return int(getattr(embeddings, "num_embeddings", None) or len(embeddings.weight))


def check_ready(version: ModelVersion) -> None:
    """Raise ValueError if a wrapped model is in training mode, and a module of it computes other tokens there."""
    found = version.training()
    if found is not None and not found.checkpoints:
        raise ValueError(f"the wrapped model is {in_training(found)}")


def in_training(found: Difference) -> str:
    """Return the end of a message about a module that acts otherwise in training mode, with the way out."""
    way_out = "model.gradient_checkpointing_disable() or model.eval()" if found.checkpoints else "model.eval()"
    return f"in training mode, where {found} acts otherwise; call {way_out} first"


def check_prompt(
    model: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor | None, continues: bool = False
) -> None:
    """Check ids and their mask, longer than the ids if they continue a cache; ValueError says what is wrong."""
    check_ids(input_ids)
    # On the host: each question to a CUDA device waits for it.
    lowest, highest = (int(value) for value in input_ids.cpu().aminmax())
    check_range(lowest, highest, vocabulary_of(model))
    if attention_mask is not None:
        _check_mask(input_ids, attention_mask, continues)


def has_tokens(input_ids: object, embeddings: object) -> bool:
    """Whether there are token ids to check: with embeddings, HuggingFace takes ids of as many rows and no columns."""
    if isinstance(input_ids, Tensor) and isinstance(embeddings, Tensor):
        return input_ids.shape != (len(embeddings), 0)
    return input_ids is not None


def check_range(lowest: int, highest: int, vocabulary: int) -> None:
    """Raise ValueError if the smallest or the largest of some token ids is not in the vocabulary."""
    if lowest < 0 or highest >= vocabulary:
        wrong = lowest if lowest < 0 else highest
        raise ValueError(
            f"input_ids: token id {wrong} is out of range 0 to {vocabulary - 1}; "
            "was the text tokenized with this model's tokenizer?"
        )


def check_ids(input_ids: object) -> None:
    """Raise ValueError if ids are no 2-D tensor of integers, or empty; reading values would wait for the device."""
    if not isinstance(input_ids, Tensor) or input_ids.dim() != 2:
        raise ValueError(f"input_ids: must be a [batch, tokens] tensor of token ids; got {_shape(input_ids)}")
    if input_ids.is_floating_point() or input_ids.dtype == torch.bool:
        raise ValueError(f"input_ids: dtype is {input_ids.dtype}; token ids are integers, call .long()")
    if input_ids.numel() == 0:
        raise ValueError(f"input_ids: shape {tuple(input_ids.shape)} holds no token; give at least one row and token")


def _check_mask(input_ids: Tensor, attention_mask: Tensor, continues: bool) -> None:
    fits = isinstance(attention_mask, Tensor) and attention_mask.dim() in (2, 4)
    if fits and attention_mask.dim() == 2:
        wider = continues and attention_mask.shape[1] > input_ids.shape[1]
        fits = attention_mask.shape[0] == input_ids.shape[0] and (wider or attention_mask.shape == input_ids.shape)
    if not fits:
        raise ValueError(
            f"attention_mask: {_shape(attention_mask)} does not fit input_ids of {_shape(input_ids)}; give a "
            "tensor of the same shape, 0 where a token is padding"
        )
    if attention_mask.dim() == 2 and not bool((shown := attention_mask.cpu().any(dim=1)).all()):
        row = int(shown.logical_not().nonzero()[0])  # ``shown`` is of bytes if the mask is
        raise ValueError(f"attention_mask: row {row} is all padding; leave it out of the batch")


def _shape(value: object) -> str:
    return f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
