"""Reads the two configs of ``generate_batch`` into our settings, or finds the reason for HuggingFace's own manager."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
)
from transformers.generation.logits_process import (
    EncoderRepetitionPenaltyLogitsProcessor,
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    ExponentialDecayLengthPenalty,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from compiled_llm.compat.continuous_batching import batched_processors, processors_of
from compiled_llm.compilation.sampling.sampling import Sampling
from compiled_llm.engine.steps.request import Request
from compiled_llm.execution.reporting.slow_paths import Reason
from compiled_llm.huggingface.inspection.host_copies import HostCopies
from compiled_llm.huggingface.processors.processors import Prompts, is_in_graph, samplings_of
from compiled_llm.model.sizes import logits_width
from compiled_llm.requests.sampling_params import SamplingParams

if TYPE_CHECKING:
    from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessorList


logger = logging.getLogger("compiled_llm.generate")

_SEEDS = 2**62
_ANY_PROMPT = (0, 0)
_ANY_LENGTH = 20
_OF_ANY_PROMPT = (
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
)
"""Those that HuggingFace makes alike for all prompts."""
_BETWEEN_STEPS = (
    EncoderRepetitionPenaltyLogitsProcessor,
    ExponentialDecayLengthPenalty,
    TopHLogitsWarper,
    TypicalLogitsWarper,
    EpsilonLogitsWarper,
    EtaLogitsWarper,
)
HONOURED = frozenset(
    {
        "max_requests_per_batch",
        "allow_block_sharing",
        "return_logprobs",
        "seed",
        "per_request_processors",
        "drop_unsupported_processors",
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
"""Settings of a generation config that no continuous batching reads, HuggingFace's included, with their defaults."""


@dataclasses.dataclass(frozen=True)
class BatchSettings:
    """The settings by which the requests of one manager are answered."""

    generation: GenerationConfig  # the generation config, as HuggingFace's manager would have it
    batching: ContinuousBatchingConfig
    model: PreTrainedModel
    # those of the generation config that run here, as a prompt of a few tokens would have them
    processors: LogitsProcessorList
    obstacle: Reason | None  # why only HuggingFace's own manager can serve the requests, or None
    replaced: bool = False  # whether the user has given the processors, in place of the config

    @classmethod
    def of(
        cls, model: PreTrainedModel, generation: GenerationConfig | None, batching: ContinuousBatchingConfig | None
    ) -> BatchSettings:
        """Return the settings for both configs of a manager; ValueError without a generation config."""
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
        found = processors_of(model, config, _ANY_PROMPT, _ANY_LENGTH, end_tokens(config.eos_token_id))
        settings = cls(config, batching, model, LogitsProcessorList(filter(_is_served, found)), None)
        return dataclasses.replace(settings, obstacle=settings._obstacle(found))

    @property
    def in_graph(self) -> bool:
        return all(map(is_in_graph, self.processors))

    def batched_processors(self) -> ContinuousBatchingLogitsProcessorList:
        """Return HuggingFace's list of the processors, which checks a request's own settings."""
        supported = [entry for entry in self.processors if entry.supports_continuous_batching]
        return batched_processors(supported, self.batching)

    def with_processors(self, processors: Iterable[LogitsProcessor]) -> BatchSettings:
        """Return settings with other processors; ValueError if one of them cannot run here, or with the others."""
        settings = dataclasses.replace(self, processors=LogitsProcessorList(processors), replaced=True)
        if (reason := settings._obstacle(settings.processors)) is not None:
            raise ValueError(
                f"logit_processor: these run in HuggingFace's own manager alone: {reason.detail}; give them in the "
                "generation config of init_continuous_batching, or as logits_processors of an engine's request"
            )
        return settings

    def params(self, own: Mapping[str, Any], **limits: Any) -> SamplingParams:
        """Return the parameters of one request but for its processors; its ``own`` settings are checked."""
        SamplingParams(**own)
        temperature = 1.0 if self.generation.do_sample else 0.0
        logprobs = 0 if self.batching.return_logprobs else None
        return SamplingParams(temperature=temperature, logprobs=logprobs, **limits)

    def processors_for(
        self, prompt: Sequence[int], own: Mapping[str, Any], params: SamplingParams
    ) -> LogitsProcessorList:
        """Return the processors of one request, with its ``own`` settings."""
        found = self.processors
        if not (self.replaced or all(type(each) in _OF_ANY_PROMPT for each in found)):
            ends = params.stop_token_ids or ()
            device = "cpu" if self.in_graph else self.model.device
            found = processors_of(self.model, self.generation, prompt, params.max_tokens or 0, ends, device)
        return LogitsProcessorList(_with(own, each) for each in found if _is_served(each))

    def between_steps(self, processors: LogitsProcessorList, params: SamplingParams) -> SamplingParams:
        """Return the parameters of a request whose processors run between steps: all of them, since order counts."""
        return dataclasses.replace(params, logits_processors=[_for_request(processors)])

    def write(self, processors: LogitsProcessorList, prompt: Sequence[int], requests: Sequence[Request]) -> None:
        """Let the answers to a prompt be sampled as processors that are in the graph say, or raise ValueError."""
        if (read := self._read(processors, prompt)) is None:
            names = ", ".join(type(processor).__name__ for processor in processors)
            raise ValueError(f"generate_batch: with this prompt, these cannot be combined: {names}; leave one out")
        for request in requests:
            if request.sampling is not None:
                request.sampling = dataclasses.replace(read, seed=request.sampling.seed)
            elif read.adjustments:
                request.sampling = read

    def _read(self, processors: Iterable[LogitsProcessor], prompt: Sequence[int]) -> Sampling | None:
        prompts = Prompts(np.array([prompt], dtype=np.int64), HostCopies(), logits_width(self.model))
        settings = samplings_of(processors, bool(self.generation.do_sample), prompts)
        return None if settings is None else settings[0]

    def _obstacle(self, found: LogitsProcessorList) -> Reason | None:
        """Return why only HuggingFace's own manager can run the processors; it may drop some, and warns of them."""
        others: list[LogitsProcessor] = [processor for processor in found if not _is_served(processor)]
        if others and batched_processors(others, self.batching).do_processing:
            return Reason("processors", ", ".join(type(processor).__name__ for processor in others))
        if self.in_graph and self._read(self.processors, _ANY_PROMPT) is None:
            return Reason("processors", "one of a kind twice, or in another order")
        return None

    def warn_of_what_has_no_effect(self) -> None:
        if said := [*_without_effect(self.batching), *_unread(self.generation)]:
            logger.warning("compiled_llm: generate_batch: without effect here: %s", "; ".join(said))


def _is_served(processor: LogitsProcessor) -> bool:
    return type(processor) in _BETWEEN_STEPS or is_in_graph(processor)


def _with(settings: Mapping[str, Any], processor: LogitsProcessor) -> LogitsProcessor:
    """Return a processor with a request's own settings, which are called as its attributes are."""
    own = copy.copy(processor)
    vars(own).update({name: value for name, value in settings.items() if name in vars(own)})
    return own


def _for_request(processors: LogitsProcessorList) -> Callable[[list[int], list[int], Tensor], Tensor]:
    """Return HuggingFace's processors as one logits processor of an engine's request."""

    def huggingfaces(prompt: list[int], answer: list[int], logits: Tensor) -> Tensor:
        ids = torch.tensor([prompt + answer], dtype=torch.int64, device=logits.device)
        return processors(cast(torch.LongTensor, ids), cast(torch.FloatTensor, logits[None]))[0]

    huggingfaces.__name__ = ", ".join(
        type(processor).__name__ for processor in processors if not is_in_graph(processor)
    )
    return huggingfaces


def seeds(seed: int | None) -> Iterator[int | None]:
    """Yield a seed for each request to come, from ``ContinuousBatchingConfig.seed`` if it is given."""
    generator = None if seed is None else torch.Generator(device="cpu").manual_seed(seed)
    while True:
        yield None if generator is None else int(torch.randint(_SEEDS, (), generator=generator, device="cpu"))


def end_tokens(ends: int | Iterable[int] | None) -> list[int]:
    """Return the tokens of an ``eos_token_id``: a number, a list, or None; -1 is none."""
    listed = [ends] if isinstance(ends, int) else list(ends or ())
    return [token for token in listed if token >= 0]


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
