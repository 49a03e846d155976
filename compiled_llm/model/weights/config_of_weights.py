"""Whether the config beside weights in a folder is the model's: with another one the same tensors answer otherwise."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel

_FREE = {
    *("transformers_version", "architectures", "dtype", "torch_dtype", "id2label", "label2id"),
    *("problem_type", "task_specific_params", "tie_word_embeddings", "quantization_config", "auto_map"),
    *("use_cache", "return_dict", "output_attentions", "output_hidden_states", "output_router_logits"),
    *("initializer_range", "initializer_factor", "router_aux_loss_coef", "router_jitter_noise", "pretraining_tp"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "is_decoder", "is_encoder_decoder", "chunk_size_feed_forward"),
}
"""What changes no logit: of files, of training, of what is returned. Dtypes and ties are compared with the tensors."""
_SHOWN = 3


def check_config(model: PreTrainedModel, stored: Mapping[str, Any]) -> None:
    """Check a folder's config, empty if it has none; ValueError if it is of another model, naming what differs."""
    kind = stored.get("model_type", model.config.model_type)
    if kind != model.config.model_type:
        raise ValueError(
            f"update_weights: the folder's config.json is of a {kind}, and the model is a {model.config.model_type}; "
            "give weights of the same model"
        )
    theirs, ours = stored.get("quantization_config"), _quantisation(model)
    if stored and (theirs is None) != (ours is None):
        said = "quantised, and those of the model are not" if theirs else "not quantised, and those of the model are"
        raise ValueError(f"update_weights: the weights in the folder are {said}; give weights like the model's")
    if stored and theirs is not None and (differing := _differing(theirs, ours)):
        raise ValueError(
            f"update_weights: the weights in the folder are quantised in another way ({', '.join(differing)}); give "
            "weights of the same quantisation"
        )
    if stored and (differences := list(_differences(_read(type(model.config), stored), _plain(model.config)))):
        more = len(differences) - _SHOWN
        raise ValueError(
            f"update_weights: the folder's config.json has {'; '.join(differences[:_SHOWN])}"
            f"{f'; and {more} more' if more > 0 else ''}: the model would compute something else with its weights; "
            "give weights of the same model, or load the folder as another one"
        )


def method_of(model: PreTrainedModel) -> str:
    """Return transformers' name of the way in which a model was quantised as it was loaded; nothing if it was not."""
    config = _quantisation(model)
    method = "" if config is None else str(getattr(config.get("quant_method"), "value", config.get("quant_method")))
    return method or ("a quantizer" if getattr(model, "hf_quantizer", None) is not None else "")


def _quantisation(model: PreTrainedModel) -> dict[str, Any] | None:
    config: Any = getattr(model.config, "quantization_config", None)
    said: dict[str, Any] | None = config.to_dict() if hasattr(config, "to_dict") else config
    return said


def _differing(theirs: Mapping[str, Any], ours: object) -> list[str]:
    """Name what two ways to quantise have otherwise, of what both say."""
    plain = json.loads(json.dumps(ours, default=str))
    return sorted(name for name in theirs.keys() & plain.keys() if theirs[name] != plain[name])


def _read(kind: type[PretrainedConfig], stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config as its class reads it: older files have other names."""
    try:
        return _plain(kind.from_dict(dict(stored)))
    except Exception as error:  # of the model's own code
        raise ValueError(
            f"update_weights: the folder's config.json is no {kind.__name__}: {type(error).__name__}: {error}"
        ) from error


def _plain(config: PretrainedConfig) -> dict[str, Any]:
    """Return a config as its file would be read."""
    plain: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return plain


def _differences(theirs: Mapping[str, Any], ours: Mapping[str, Any], under: str = "") -> Iterator[str]:
    """Yield what both have, and have otherwise; of the configs of parts, too."""
    for name in sorted(theirs.keys() & ours.keys()):
        their, our = theirs[name], ours[name]
        if isinstance(their, dict) and isinstance(our, dict) and "model_type" in our:
            yield from _differences(their, our, f"{under}{name}.")
        elif their != our and not (name in _FREE or name.startswith("_") or name.endswith(("dropout", "_pdrop"))):
            yield f"{under}{name}={their!r}, and the model {our!r}"
