"""``Engine.embed`` and ``Engine.classify``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from compiled_llm.engine.pooling.launches import NAME, SCORES, STATES, PoolingTap, RequestPooled
from compiled_llm.engine.pooling.sentence_files import SentenceFiles
from compiled_llm.engine.pooling.served import served as served_by
from compiled_llm.engine.steps.request import Request
from compiled_llm.engine.steps.taps import EngineTap, TapPart
from compiled_llm.model.classifiers import is_classifier
from compiled_llm.model.facts import ModelFacts
from compiled_llm.requests.outputs import RequestOutput
from compiled_llm.requests.pooling.embeddings import POOLED, check_dimensions, embeddings_of
from compiled_llm.requests.prompts import listed
from compiled_llm.requests.sampling_params import SamplingParams

if TYPE_CHECKING:
    from compiled_llm.engine.parts import PoolingPart
    from compiled_llm.engine.pooling import part as this

    checked: PoolingPart = this
    checked_for_loops: TapPart = this

TAP: type[EngineTap] = PoolingTap

Texts = str | Sequence[int] | Iterable[str | Sequence[int]]
"""A text or its token ids, or several."""


def settings_of(
    facts: ModelFacts, params: SamplingParams | None, outputs: bool, pooled: bool
) -> tuple[SamplingParams, Callable[[Request], None]]:
    """Return the settings of requests for vectors, and what lets them have these; ValueError if they cannot.

    Args:
        outputs: whether they ask for other outputs of the model, too.
        pooled: whether they ask for vectors at all, and not for answers of a classifier.
    """
    if not pooled:
        raise ValueError(f"prompt: {type(facts.model).__name__} writes no answers; call engine.classify")
    if params not in (None, POOLED) or outputs:
        raise ValueError(
            "pooled=True: a prompt that is pooled has no answer and no other outputs; leave params, hidden_states and "
            "emitted out"
        )
    if facts.stacks_hidden_states:
        raise ValueError("pooled=True: the last layer of this model has several hidden states of a token, stacked")
    launches = SCORES if is_classifier(facts.model) else STATES

    def enter(request: Request) -> None:
        request.parts[NAME] = RequestPooled(launches)

    return POOLED, enter


@cache
def files_beside(name: str) -> SentenceFiles:
    """Return what files of sentence-transformers beside a model say; they are read once."""
    return SentenceFiles.of(name)


def served(facts: ModelFacts, pooling: str | None) -> dict[str, Any]:
    """Return the fields of the protocol's ``Pooled`` of a model; ValueError as ``served.served``."""
    return served_by(facts, files_beside(str(facts.model.name_or_path)), pooling)


def embed(
    engine: Any,
    model: PreTrainedModel,
    texts: Texts,
    dimensions: int | None,
    prompt_name: str | None,
    pooling: str | None,
) -> Tensor:
    """``Engine.embed``."""
    if is_classifier(model):
        raise ValueError(f"embed: {type(model).__name__} has a head; call engine.classify, or load a ...ForCausalLM")
    files = files_beside(str(model.name_or_path))
    normalizes, prompt = files.normalizes(pooling), files.prompt(prompt_name)
    width = int(model.config.get_text_config(decoder=True).hidden_size)
    if dimensions is not None:
        check_dimensions(dimensions, width)
    prompts = [prompt + text if isinstance(text, str) else text for text in listed(texts)]
    vectors = _vectors(engine.generate(prompts, pooled=True)) if prompts else []
    return torch.from_numpy(embeddings_of(vectors, dimensions or width, normalizes))


def classify(engine: Any, model: PreTrainedModel, texts: Texts) -> Tensor:
    """``Engine.classify``."""
    if not is_classifier(model):
        raise ValueError(
            f"classify: {type(model).__name__} has no head that classifies; load a ...ForSequenceClassification"
        )
    vectors = _vectors(engine.generate(listed(texts), pooled=True))
    return torch.from_numpy(embeddings_of(vectors, int(model.config.num_labels or 0), normalize=False))


def _vectors(outputs: Sequence[RequestOutput]) -> list[Any]:
    """Return the vector of each; RuntimeError why there is none."""
    for number, output in enumerate(outputs):
        if output.outputs[0].pooled is None:
            raise RuntimeError(f"texts[{number}]: it has no vector: {output.error or output.finish_reason}")
    return [output.outputs[0].pooled for output in outputs]
