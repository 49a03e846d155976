"""What a server answers of whole texts by a model: its class says so, and the files beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from compiled_llm.engine.pooling.sentence_files import SentenceFiles
from compiled_llm.model.classifiers import is_classifier
from compiled_llm.model.facts import ModelFacts

ACTIVATIONS = ("sigmoid", "softmax", "identity")
_OF_TOKENIZERS = ("restore_suffix", "truncation", "max_length", "padding", "return_tensors")
"""Options of sentence-transformers beside those of a chat template: texts are neither cut nor padded."""


def served(facts: ModelFacts, files: SentenceFiles, pooling: str | None) -> dict[str, Any]:
    """Return the fields of the protocol's ``Pooled`` as plain values, with a sentence for what is not served.

    Args:
        files: those beside the model.
        pooling: ``"last"`` if whoever serves the model says so.

    Raises:
        ValueError: ``pooling`` is given, and cannot be had.
    """
    named = files._replace(name="the model")  # clients see no folders
    name, config = type(facts.model).__name__, facts.model.config
    if not is_classifier(facts.model):
        embedding = _embedding(facts, files if pooling else named, pooling)
        if pooling is not None and isinstance(embedding, str):
            raise ValueError(f"pooling={pooling!r}: {embedding}")
        no_labels = f"{name} has no head that classifies; POST /v1/completions"
        return {"embedding": embedding, "ranking": _said(lambda: _by_tokens(named)), "labelling": no_labels}
    if pooling is not None:
        raise ValueError(f"pooling={pooling!r}: {name} has a head; leave it out")
    return {
        "embedding": f"{name} has a head; POST /classify gives its scores",
        "ranking": _said(lambda: _by_label(named, config)),
        "labelling": _said(lambda: _labelling(named, config)),
        "silent": f"{name} writes no text; POST /classify gives its scores",
    }


def _said(made: Callable[[], dict[str, Any]]) -> dict[str, Any] | str:
    try:
        return made()
    except ValueError as error:
        return str(error).removeprefix("embed: ")


def _embedding(facts: ModelFacts, files: SentenceFiles, pooling: str | None) -> dict[str, Any] | str:
    if facts.stacks_hidden_states:
        return "the last layer of this model has several hidden states of a token, stacked"
    width = int(facts.model.config.get_text_config(decoder=True).hidden_size)
    prompts = {"prompts": dict(files.prompts), "default_prompt": files.default_prompt}
    return _said(lambda: {"width": width, "normalizes": files.normalizes(pooling), **prompts})


def _by_tokens(files: SentenceFiles) -> dict[str, Any]:
    """Return how the scores of two tokens rank documents."""
    tokens = (files.modules or {}).get("LogitScore")
    if tokens is None:
        raise ValueError(
            "modules.json beside the model names no LogitScore of sentence-transformers, by whose two tokens documents "
            "are ranked"
        )
    ids = tokens.get("true_token_id"), tokens.get("false_token_id")
    if None in ids:
        raise ValueError("its LogitScore has one token alone, whose logit is not served; use sentence-transformers")
    return {"tokens": ids, "activation": _activation(files, {}, "sigmoid"), **_prompt_of_pairs(files)}


def _by_label(files: SentenceFiles, config: Any) -> dict[str, Any]:
    """Return how a classifier's only label ranks documents."""
    if config.num_labels != 1:
        raise ValueError(
            f"the model has {config.num_labels} labels, and ranks need one; POST /classify gives their scores"
        )
    return {"activation": _activation(files, vars(config), "sigmoid"), **_prompt_of_pairs(files)}


def _labelling(files: SentenceFiles, config: Any) -> dict[str, Any]:
    usual = "sigmoid" if config.num_labels == 1 else "softmax"
    by_problem = {"regression": "identity", "multi_label_classification": "sigmoid"}
    labels = [str(config.id2label.get(number, number)) for number in range(config.num_labels)]
    usual = by_problem.get(config.problem_type or "", usual)
    return {"labels": labels, "activation": _activation(files, vars(config), usual)}


def _activation(files: SentenceFiles, config: Mapping[str, Any], usual: str) -> str:
    """Return what makes a score of a number, as the files say, or else a config of older ones; ValueError if else."""
    older = (config.get("sentence_transformers") or {}).get("activation_fn")
    named = files.activation or older or config.get("sbert_ce_default_activation_function") or usual
    found = str(named).rpartition(".")[2].lower()
    if found not in ACTIVATIONS:
        raise ValueError(f"the files beside the model name the activation {named!r}, which is not served")
    return found


def _prompt_of_pairs(files: SentenceFiles) -> dict[str, Any]:
    message = (files.transformer.get("modality_config") or {}).get("message")
    found: dict[str, Any] = {"prompt": files.prompt() or None}
    if message is None:
        return found
    options = (files.transformer.get("processing_kwargs") or {}).get("chat_template") or {}
    chat = {name: value for name, value in options.items() if name not in _OF_TOKENIZERS}
    return {**found, "chat": chat, "in_parts": message.get("format") != "flat"}
