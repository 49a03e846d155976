"""What the two configs of ``generate_batch`` ask for: settings of ours, nothing, or HuggingFace's own manager."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
)

from compiled_llm.compat.continuous_batching import batched_processors, processors_of
from compiled_llm.engine.params import SamplingParams
from compiled_llm.execution.slow_paths import Reason
from compiled_llm.huggingface.processors import is_a_number, sampling_of

logger = logging.getLogger("compiled_llm.generate")

_SEEDS = 2**62
_SETTINGS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")

HONOURED = frozenset(
    {
        *("max_requests_per_batch", "allow_block_sharing", "return_logprobs", "seed"),
        *("per_request_processors", "drop_unsupported_processors"),
    }
)
"""Fields of ``ContinuousBatchingConfig`` that do here what they do in HuggingFace's manager."""
DECIDED_BY_WRAP = {
    "page_size": "page_size",
    "block_size": "page_size",
    "num_blocks": "kv_memory",
    "max_memory_percent": "kv_memory",
    "max_batch_tokens": "prefill_tokens",
    "use_cuda_graph": "mode",
    "varlen_compile_config": "mode",
    "decode_compile_config": "mode",
    "default_compile_level": "mode",
    "use_default_compile_configs": "mode",
}
"""Its fields that an option of ``wrap`` stands for."""
NEEDLESS = frozenset(
    {
        *("max_blocks_per_request", "use_async_batching", "q_padding_interval_size", "kv_padding_interval_size"),
        *("scheduler_type", "safety_margin", "auto_switch_to_flash", "max_queue_size", "max_cached_graphs"),
        *("cpu_offload_space", "cpu_offload_space_safety_threshold"),
        *("disable_nccl_graph_mixing", "cpu_group_timeout"),
    }
)
"""Its fields that tune what the engine does in another way: no text depends on them."""
UNREAD = {
    "num_beams": 1,
    "max_length": None,
    "max_time": None,
    "stop_strings": None,
    "output_scores": False,
    "output_logits": False,
    "output_attentions": False,
    "output_hidden_states": False,
    "prompt_lookup_num_tokens": None,
    "assistant_early_exit": None,
    "token_healing": False,
    "compile_config": None,
}
"""Settings of a generation config that no continuous batching reads, HuggingFace's own included, and what is none."""


@dataclasses.dataclass(frozen=True)
class BatchSettings:
    """How the requests of one manager are answered.

    Attributes:
        generation: the config, as HuggingFace's manager would have it.
        batching: the other one.
        processors: those of the generation config that the graph has.
        obstacle: why only HuggingFace's own manager can do it, or None.
    """

    generation: GenerationConfig
    batching: ContinuousBatchingConfig
    processors: LogitsProcessorList
    obstacle: Reason | None

    @classmethod
    def of(
        cls, model: PreTrainedModel, generation: GenerationConfig | None, batching: ContinuousBatchingConfig | None
    ) -> BatchSettings:
        """Return the settings that two arguments of ``init_continuous_batching`` stand for.

        Raises:
            ValueError: there is no generation config.
        """
        given = model.generation_config if generation is None else generation
        if given is None:
            raise ValueError("generate_batch: the model has no generation config; give generation_config=")
        config = copy.copy(given)
        if config.eos_token_id is None:
            config.eos_token_id = -1  # HuggingFace's sign for none; its own manager writes it into the user's config
        if batching is None:
            batching = getattr(config, "continuous_batching_config", None)
        if not isinstance(batching, ContinuousBatchingConfig):
            batching = ContinuousBatchingConfig()
        found = processors_of(model, config)
        in_graph = LogitsProcessorList([processor for processor in found if is_a_number(processor)])
        return cls(config, batching, in_graph, _obstacle(found, in_graph, batching))

    def check_of_request(self) -> Any:
        """Return what checks the settings that a request brings, as HuggingFace does."""
        checked = [entry for entry in self.processors if entry.supports_continuous_batching]
        return batched_processors(checked, self.batching).check_kwargs

    def params(self, own: Mapping[str, Any], seed: int | None, **limits: Any) -> SamplingParams:
        """Return how one request is answered.

        Args:
            own: settings that the request brings, checked.
            seed: of its first answer; None to draw one.
            limits: other fields of ``SamplingParams``.
        """
        shared = sampling_of(self.processors, bool(self.generation.do_sample))
        assert shared is not None, "there are processors that the graph does not have"
        settings = {name: getattr(shared, name) for name in _SETTINGS} | dict(own)
        logprobs = 0 if self.batching.return_logprobs else None
        return SamplingParams(**settings, seed=seed, logprobs=logprobs, **limits)

    def warn_of_what_has_no_effect(self) -> None:
        """Name in one line what has been set and changes nothing."""
        if said := [*_without_effect(self.batching), *_unread(self.generation)]:
            logger.warning("compiled_llm: generate_batch: without effect here: %s", "; ".join(said))


def seeds(seed: int | None) -> Iterator[int | None]:
    """Yield the seed of each request to come, which ``ContinuousBatchingConfig.seed`` decides if it is given."""
    generator = None if seed is None else torch.Generator(device="cpu").manual_seed(seed)
    while True:
        yield None if generator is None else int(torch.randint(_SEEDS, (), generator=generator, device="cpu"))


def _obstacle(
    found: LogitsProcessorList, in_graph: LogitsProcessorList, batching: ContinuousBatchingConfig
) -> Reason | None:
    others: list[LogitsProcessor] = [processor for processor in found if not is_a_number(processor)]
    if others and batched_processors(others, batching).do_processing:  # else it has dropped them, and said so
        return Reason("processors", ", ".join(type(processor).__name__ for processor in others))
    shared = sampling_of(in_graph, do_sample=False)
    if shared is None:
        return Reason("processors", "one of a kind twice, or in another order")
    if shared.filtered:
        return Reason("processors", ", ".join(type(processor).__name__ for processor in in_graph))
    return Reason("logprobs") if batching.return_logprobs and shared.edits else None


def _without_effect(batching: ContinuousBatchingConfig) -> Iterator[str]:
    for field in dataclasses.fields(batching):
        value = getattr(batching, field.name)
        if field.name not in HONOURED and value != field.default:
            by = DECIDED_BY_WRAP.get(field.name)
            yield f"{field.name}={value!r}" + ("" if by is None else f" (wrap's {by} decides)")


def _unread(config: GenerationConfig) -> Iterator[str]:
    for name, none in UNREAD.items():
        value = getattr(config, name, None)
        if value not in (None, none) and not (name == "max_length" and config.max_new_tokens is not None):
            yield f"{name}={value!r}"
