"""The way of prompts into an engine: requests are made of them, each answered through a handle, and added."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from compiled_llm.engine.input_processing.input_processor import TokenFacts, requests_for
from compiled_llm.engine.input_processing.prompts import Prompt
from compiled_llm.engine.input_processing.sampling import RequestSampling
from compiled_llm.engine.parts import IMAGES, EngineGrammars, GivenImages, MultimodalProcessor
from compiled_llm.engine.steps.request import Request
from compiled_llm.engine.thread.engine_thread import EngineThread
from compiled_llm.engine.thread.source import EngineSource
from compiled_llm.execution.lifecycle.runtime import Runtime
from compiled_llm.execution.model_runner import ModelRunner
from compiled_llm.execution.reporting.slow_paths import Reason
from compiled_llm.features import needed
from compiled_llm.requests.handle import RequestHandle
from compiled_llm.requests.prompts import shows_images
from compiled_llm.requests.sampling_params import SamplingParams
from compiled_llm.requests.text.answer_text import TextFormat
from compiled_llm.requests.text.detokenizer import TokenDecoder


@dataclass
class Intake:
    """The settings from which an engine makes its requests: options of ``Engine``, and values derived from them."""

    runtime: Runtime
    engine_thread: EngineThread
    tokenizer: Any
    processor: MultimodalProcessor | None
    forms: EngineGrammars | None  # None if they were taken out
    own_ends: frozenset[int]  # tokens that end answers besides those of the model
    max_model_len: int | None
    max_queue: int | None
    encoder_cache: int  # bytes
    images_in_steps: bool
    decoding: TokenDecoder | None = field(init=False)
    source: EngineSource = field(init=False)

    def __post_init__(self) -> None:
        self.source = EngineSource(self.engine_thread, self.runtime)
        self.decoding = None if self.tokenizer is None else TokenDecoder(self.tokenizer)

    @property
    def token_facts(self) -> TokenFacts:
        """The facts of the model's tokens that answers depend on."""
        return self.engine_thread.check.tokens.also_ending_at(self.own_ends)

    def handle(
        self,
        model_runner: ModelRunner,
        prompt: Prompt,
        params: SamplingParams,
        enter: Callable[[Request], None] | None = None,
        samplings: dict[int, RequestSampling] | None = None,
        **waiting: Any,
    ) -> RequestHandle:
        """Return the handle of a prompt's requests, which have not been added; arguments as of ``requests_for``."""
        images = self._images(model_runner, prompt, params, enter, waiting.get("salt"))
        requests = requests_for(
            prompt if images is None else images.ids,
            params,
            self.token_facts,
            model_runner,
            self.tokenizer,
            self.forms,
            max_model_len=self.max_model_len,
            enter=enter,
            samplings=samplings,
            keys=None if images is None else images.keys,
            **waiting,
        )
        if images is not None:
            for request in requests:
                images.enter(request)
        if self.forms is not None:
            self.forms.begin(requests, params)
        if (constraint := requests[0].constraint) is not None and constraint.processors:
            names = ", ".join(processor.name for processor in constraint.processors)
            self.runtime.counters.took_request(Reason("processors", names))
        return self.source.handle(requests, TextFormat.of(params, self.decoding))

    def _images(
        self,
        model_runner: ModelRunner,
        prompt: Prompt,
        params: SamplingParams,
        enter: object,
        salt: Hashable,
    ) -> GivenImages | None:
        """Return those of a prompt with images, and None of others."""
        if not shows_images(prompt):
            return None
        if enter is not None:
            raise ValueError("hidden_states, emitted, pooled: there are none of a prompt with images; leave them out")
        images = needed(IMAGES).images_of(
            prompt, self.processor, params, model_runner, salt, self.encoder_cache, self.images_in_steps
        )
        if images.slow is not None:
            self.runtime.counters.took_request(images.slow, "its images take longer")
        return images

    def add(self, handles: Sequence[RequestHandle]) -> None:
        """Let the requests of handles begin, all of them or none: QueueFullError if they are too many."""
        self.engine_thread.add(handles, self.max_queue)
        for handle in handles:
            if self.forms is not None and not handle.requests[0].ready:
                self.forms.compile(handle.requests)
