"""The processor of a model that reads images: whether there is one, and itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from torch import Tensor
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
from transformers.utils.hub import cached_file

from compiled_llm.commands.loading.source import Source
from compiled_llm.engine.parts import IMAGES, MultimodalProcessor
from compiled_llm.features import needed

_FILES = ("processor_config.json", "preprocessor_config.json")


def processor_place(source: Source) -> str | None:
    """Return the folder or hub id of a model's processor; None for a model that reads text alone, or lacks one."""
    if source.gguf_file is not None or not any(_has(source.location, name) for name in _FILES):
        return None
    config = AutoConfig.from_pretrained(source.location, trust_remote_code=False)
    return source.location if config.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES else None


def required_processor_place(source: Source) -> str:
    """Return the place of the processor that ``--image`` needs; ValueError if there is none."""
    if (place := processor_place(source)) is None:
        raise ValueError(f"--image: {source.name} reads text alone, or its folder has no processor; leave it out")
    return place


def encode_with_images(processor: MultimodalProcessor, messages: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """Return what a processor makes of messages with files; ValueError if one is no image."""
    token = getattr(processor, "image_token_id", -1)
    return needed(IMAGES).inputs_of(messages, processor, token)


def load_processor(place: str) -> MultimodalProcessor:
    from transformers import AutoProcessor

    # No class of HuggingFace's says what it takes: each processor names its own inputs.
    return cast("MultimodalProcessor", AutoProcessor.from_pretrained(place, trust_remote_code=False))


def _has(location: str, name: str) -> bool:
    missing: dict[str, Any] = {
        f"_raise_exceptions_for_{kind}": False for kind in ("missing_entries", "connection_errors", "gated_repo")
    }
    return cached_file(location, name, **missing) is not None
