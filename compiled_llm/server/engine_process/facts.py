"""The facts that an engine process tells its clients of its model and its engine."""

from __future__ import annotations

from typing import Any

import msgspec
from transformers import PreTrainedModel

from compiled_llm.engine.engine import Engine
from compiled_llm.engine.input_processing.input_processor import TokenFacts
from compiled_llm.engine.parts import GRAMMARS, POOLING
from compiled_llm.execution.lifecycle.runtime import runtime_of
from compiled_llm.features import feature
from compiled_llm.model.facts import ModelFacts
from compiled_llm.protocol.messages import Pooled, Ready, StatsReply
from compiled_llm.requests.default_sampling import default_sampling
from compiled_llm.server.parts import SERVED_IMAGES


def ready_of(
    model: PreTrainedModel,
    engine: Engine,
    name: str,
    tokenizer: object = None,
    location: str | None = None,
    gguf_file: str | None = None,
    chat_template: str | None = None,
    pooling: str | None = None,
) -> Ready:
    """Return the facts of a wrapped model; clients can load the tokenizer from ``location``.

    Raises:
        ValueError: ``pooling`` names one that the model does not have.
    """
    described, runtime = engine.describe(), runtime_of(model)
    assert runtime is not None, "an engine's model is wrapped"
    pooled = _pooled(runtime.facts, pooling)
    return Ready(
        model=name,
        vocabulary=runtime.model_runner().vocabulary,
        eos_token_ids=sorted(engine.token_facts.eos_token_ids),
        form_ends=[] if pooled.silent else _form_ends(engine.token_facts, tokenizer),
        max_tokens=described.max_tokens,
        max_num_seqs=described.max_num_seqs,
        tokenizer=location,
        gguf_file=gguf_file,
        model_type=str(model.config.model_type),
        sampling=default_sampling(getattr(model, "generation_config", None)),
        chat_template=chat_template,
        images=_reads_images(model, engine),
        pooled=pooled,
    )


def _pooled(facts: ModelFacts, pooling: str | None) -> Pooled:
    part = feature(POOLING)
    return Pooled() if part is None else msgspec.convert(part.served(facts, pooling), Pooled)


def _reads_images(model: PreTrainedModel, engine: Engine) -> bool:
    images = feature(SERVED_IMAGES)
    return images is not None and images.reads_images(model, engine.processor)


def _form_ends(model: TokenFacts, tokenizer: object) -> list[int]:
    grammars = feature(GRAMMARS)
    try:
        return sorted(grammars.ends_of(model.eos_token_ids, (), model.logits, tokenizer)) if grammars else []
    except (RuntimeError, ValueError):  # answers can have no form here; a request for one is refused
        return []


def stats_of(engine: Engine, number: int, connections: int) -> StatsReply:
    figures = engine.stats()
    names = [name for name in StatsReply.__struct_fields__ if name not in ("number", "connections")]
    values = {name: msgspec.to_builtins(_as_map(getattr(figures, name))) for name in names}
    return msgspec.convert({"number": number, "connections": connections, **values}, StatsReply)


def _as_map(value: Any) -> object:
    return value._asdict() if hasattr(value, "_asdict") else value
