"""Private parts of transformers that we depend on, all of them; ``tests/test_huggingface_compat.py`` tests each.

Methods that a wrapped model overrides (``huggingface/wrapped_model.py``):

| ``GenerationMixin``'s | why | without it | ends when |
| --- | --- | --- | --- |
| ``_sample`` | the loop is ours | HuggingFace's loop runs | generate takes a decoding method of the model's own |
| ``_beam_search`` | pages go back at the end | pages stay taken | a loop closes the cache it was given |
| ``_assisted_decoding`` | the same | the same | the same |
| ``_prepare_cache_for_generation`` | rows, not tensors | the original path | a model can name its cache class |
| ``_prepare_generation_config`` | its results are kept | slower first tokens | it deep-copies nothing |
| ``_prepare_special_tokens`` | they are uploaded once | slower first tokens | the config keeps the tensors |
| ``_prepare_attention_mask_for_generation`` | the host knows the tokens | waits | 5.23 is the oldest supported |
| ``_prepare_position_ids_for_generation`` | the host knows the mask | waits | 5.23 is the oldest supported |

Attributes, a function or two each:

| attribute | for | without it | ends when |
| --- | --- | --- | --- |
| ``config._attn_implementation_internal`` | switching each step | a walk over all modules | a setter does without |
| ``config._experts_implementation_internal`` | experts on fake tensors | float32 is refused | all dtypes have fakes |
| ``GenerationConfig._bos_token_tensor``, ``_eos_token_tensor``, ``_pad_token_tensor``, \
``_decoder_start_token_tensor`` | one upload, not one a call | slower first tokens | the config keeps the tensors |
| ``GenerationConfig._mask_length`` (from 5.23) | the width of a dropped mask | rows cannot go on | masks stay |
| ``Cache._is_user_defined`` | whether it goes back to the user | we would close it | generate says so |
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from transformers import Cache, GenerationConfig, GenerationMixin, PretrainedConfig

_SPECIAL_TOKENS = ("_bos_token_tensor", "_eos_token_tensor", "_pad_token_tensor", "_decoder_start_token_tensor")


def is_huggingfaces(method: Any) -> bool:
    """Return whether a bound method is ``GenerationMixin``'s own, not one of the model's class."""
    function = method.__func__
    return function is vars(GenerationMixin).get(function.__name__)


def attention_implementations(configs: Iterable[PretrainedConfig]) -> list[str | None]:
    """Return the name of the attention implementation that each config has."""
    return [config._attn_implementation_internal for config in configs]


def set_attention_implementations(configs: Sequence[PretrainedConfig], names: Sequence[str | None]) -> None:
    """Give each config the attention implementation of that name, without a walk over the modules."""
    for config, name in zip(configs, names, strict=True):
        config._attn_implementation_internal = name


def experts_implementation(config: PretrainedConfig) -> str | None:
    """Return the name of the implementation that mixtures of experts have; None if the config knows of none."""
    return getattr(config, "_experts_implementation_internal", None)


def set_experts_implementation(config: PretrainedConfig, name: str) -> None:
    """Give mixtures of experts the implementation of that name."""
    config._experts_implementation_internal = name


def special_tokens(config: GenerationConfig) -> list[Tensor | None]:
    """Return the tensors of a call's special tokens: BOS, EOS, padding and the decoder's start."""
    return [getattr(config, name) for name in _SPECIAL_TOKENS]


def set_special_tokens(config: GenerationConfig, tensors: Sequence[Tensor | None]) -> None:
    """Set what ``special_tokens`` returns."""
    for name, tensor in zip(_SPECIAL_TOKENS, tensors, strict=True):
        setattr(config, name, tensor)


def pad_token(config: GenerationConfig) -> Tensor | None:
    """Return the padding token of a call, a 0-dim tensor; None if it has none."""
    return config._pad_token_tensor


def mask_width(config: GenerationConfig, tokens: int) -> int:
    """Return how many columns an attention mask had that generate has dropped because it hides nothing.

    Args:
        config: the call's.
        tokens: the width if nothing is noted.
    """
    return getattr(config, "_mask_length", tokens)


def is_users_own(cache: Cache) -> bool:
    """Return whether the user gave the cache to ``generate``, which did not make it."""
    return getattr(cache, "_is_user_defined", False)
