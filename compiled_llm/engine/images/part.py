"""The functions by which the rest of the engine uses images."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor

from compiled_llm.compat.huggingface import sees_images
from compiled_llm.compat.images.prompt_positions import prompt_positions
from compiled_llm.engine.images.encoder.compiled_encoder import slower_encoder
from compiled_llm.engine.images.inputs import inputs_of as inputs_of
from compiled_llm.engine.images.keys import digests_of, runs_of, token_keys
from compiled_llm.engine.images.prompt_encoder import PromptEncoder, in_dtype
from compiled_llm.engine.images.read_in_steps import prepare as prepare, steps_obstacle
from compiled_llm.engine.images.request_images import OF_TOKENS, RequestImages
from compiled_llm.execution.model_runner import ModelRunner
from compiled_llm.execution.reporting.slow_paths import Reason
from compiled_llm.kinds.support import FoundKind, refusal
from compiled_llm.model.facts import ModelFacts
from compiled_llm.model.traced.shallow_copies import shallow_copy, with_another
from compiled_llm.requests.sampling_params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from compiled_llm.engine.images import part as this
    from compiled_llm.engine.parts import ImagesPart, MultimodalProcessor

    checked: ImagesPart = this


def images_of(
    prompt: object,
    processor: MultimodalProcessor | None,
    params: SamplingParams,
    model_runner: ModelRunner,
    salt: Hashable,
    cache_bytes: int,
    in_steps: bool = True,
) -> RequestImages:
    """Return a prompt with images as requests have it.

    Args:
        prompt: messages, one of vLLM's dictionaries, or what a processor returned for one prompt.
        processor: the engine's; None if it has none.
        salt: only requests with an equal one find what this one leaves in caches.
        cache_bytes: what an engine keeps of encoders' outputs at most.
        in_steps: whether steps read images where they can.

    Raises:
        ValueError: the model is text-only, the prompt is not one that it can compute, or an option does not go with it.
    """
    facts = model_runner.state.facts
    _check_model(facts)
    _check_options(facts, params, model_runner)
    image_token = _image_token(facts)
    inputs = _checked(inputs_of(prompt, processor, image_token))
    ids = inputs["input_ids"][0].cpu().numpy().astype(np.int64)
    runs = runs_of(ids, image_token)
    of_images = {name: inputs[name] for name in inputs if name not in ("attention_mask", *OF_TOKENS)}
    pixels = in_dtype(of_images, facts.model.dtype)
    if not len(runs[0]):
        raise ValueError(
            f"prompt: it has {', '.join(pixels)} and none of its tokens is one of an image, {image_token}; give what "
            "the model's own processor returns"
        )
    if runs[-1][-1] == len(ids) - 1:
        raise ValueError("prompt: it ends with an image; let at least one token of text follow")
    counts = [len(run) for run in runs]
    begun = digests_of(pixels, counts)  # meanwhile positions are counted
    positions = prompt_positions(facts.model_class, _copy(facts), inputs)
    if positions is None:
        raise ValueError("prompt: this version of transformers does not say which positions images have; update it")
    digests = [*begun]
    encoder = PromptEncoder(pixels, counts, [(salt, digest) for digest in digests], cache_bytes)
    slow: Reason | None = None
    if in_steps and (obstacle := steps_obstacle(encoder, model_runner)) is not None:
        in_steps = False
        slow = Reason("prefill", obstacle)
    elif in_steps:
        slow = slower_encoder(model_runner)
    return RequestImages(facts, ids, inputs, positions, token_keys(ids, runs, digests), runs, encoder, in_steps, slow)


def check_kinds(kinds: Sequence[FoundKind]) -> None:
    """Raise ValueError if an engine takes no images for a model with such layers."""
    if (refused := refusal(kinds, "images", "prompt: it has an image")) is not None:
        raise ValueError(refused)


def _check_model(facts: ModelFacts) -> None:
    name = facts.model_class.__name__
    if not sees_images(facts.model):
        raise ValueError(
            f"prompt: it has an image, and {name} reads text alone; give text, or serve a vision-language model"
        )
    check_kinds(facts.kinds)
    if not facts.fills_caches:
        raise ValueError(
            f"prompt: it has an image, and the engine cannot take over what HuggingFace's cache keeps of {name}; "
            "model.generate takes what the model's processor returns"
        )


def _check_options(facts: ModelFacts, params: SamplingParams, model_runner: ModelRunner) -> None:
    if params.prompt_logprobs is not None:
        raise ValueError("prompt_logprobs: there are none of a prompt with images; leave it out")
    if model_runner.config.batch_invariant:
        raise ValueError(
            "prompt: it has an image, which HuggingFace's forward computes, and the model is wrapped with "
            "batch_invariant=True; give text, or wrap without it"
        )
    if facts.hooks:
        raise ValueError(
            "prompt: it has an image, which HuggingFace's forward computes without traced hooks; remove them "
            "(handle.remove())"
        )


def _checked(given: Mapping[str, object]) -> dict[str, Tensor]:
    """Return what a processor returned for one prompt without padding; ValueError for anything else."""
    inputs: dict[str, Tensor] = {}
    for name, value in given.items():
        if "video" in name or "audio" in name or name in ("input_features", "second_per_grid_ts"):
            raise ValueError(f"prompt: {name}: videos and sound are not served; give text and images")
        if not isinstance(value, Tensor):
            raise ValueError(f'prompt: {name} is a {type(value).__name__}; call the processor with return_tensors="pt"')
        inputs[name] = value
    ids = inputs["input_ids"]
    if ids.dim() != 2 or len(ids) != 1 or ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"prompt: input_ids are {ids.dtype} of shape {list(ids.shape)}; give those of one prompt, [1, T] integers"
        )
    mask = inputs.get("attention_mask")
    if mask is not None and not bool((mask != 0).all()):
        raise ValueError("prompt: attention_mask hides tokens; call the processor with one prompt, without padding")
    return inputs


def _image_token(facts: ModelFacts) -> int:
    config = facts.model.config
    names = ("image_token_id", "image_token_index")
    token = next((value for name in names if (value := getattr(config, name, None)) is not None), None)
    if token is None:
        raise ValueError(
            f"prompt: the config of {facts.model_class.__name__} has no image_token_id, by which an engine "
            "knows the tokens of images; call model.generate"
        )
    return int(token)


def _copy(facts: ModelFacts) -> PreTrainedModel:
    """Return a copy of the model for a method that leaves something in it, or in its part without the head."""
    path = ("model",) if "model" in facts.model._modules else ()
    return cast("PreTrainedModel", with_another(facts.model, path, shallow_copy))
