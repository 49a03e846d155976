"""Classifiers: models whose head scores a whole text by its last token."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_ENDING = "ForSequenceClassification"


def is_classifier(model: PreTrainedModel | type[PreTrainedModel]) -> bool:
    """Whether a HuggingFace model, or a class of them, has such a head, by its name."""
    kind = model if isinstance(model, type) else type(model)
    return kind.__name__.endswith(_ENDING)


def names_classifier(config: PretrainedConfig) -> bool:
    """Whether a model's config names a class of them."""
    return any(name.endswith(_ENDING) for name in config.architectures or ())
