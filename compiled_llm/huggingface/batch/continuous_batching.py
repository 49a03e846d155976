"""``init_continuous_batching`` of a wrapped model: HuggingFace's manager over our engine."""

# HuggingFace's ``generate_batch``, its context manager, ``generate(cache_implementation="paged")``, managers that are
# kept, and ``transformers serve`` run their own code over it.

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

from compiled_llm.compat.condition import Condition
from compiled_llm.compat.continuous_batching import (
    ManagerParts,
    RequestState,
    forget_kept_manager,
    kept_manager,
    listed,
)
from compiled_llm.engine.engine import Engine
from compiled_llm.execution.limits import whole_limit
from compiled_llm.execution.reporting.slow_paths import Reason
from compiled_llm.huggingface.batch.batch_answers import BatchAnswers
from compiled_llm.huggingface.batch.batch_settings import BatchSettings, end_tokens, logger, seeds
from compiled_llm.huggingface.call.current_call import took
from compiled_llm.huggingface.handle import CompiledModel
from compiled_llm.huggingface.inspection.model_obstacles import passed_over
from compiled_llm.requests.sampling_params import SamplingParams

_ROWS = 256  # how many requests run at once if nothing says it, and ``generate`` has room for fewer than there are


def manager_for(
    model: PreTrainedModel,
    runtime: CompiledModel,
    original: Callable[..., Any],
    generation_config: GenerationConfig | None,
    batching_config: ContinuousBatchingConfig | None,
    hints: Any,
) -> Any:
    """Return a manager over the engine, or HuggingFace's own if only that one can serve the configs."""
    # ``model`` is in evaluation mode afterwards, as HuggingFace leaves it.
    if runtime.asleep:  # HuggingFace's own would take what memory there is
        raise RuntimeError("generate_batch: the model is asleep, and has no pages; call wake() on its engine")
    model.eval()
    kept, reason = kept_manager(model), runtime.obstacle()
    if isinstance(kept, EngineManager) and reason is not None:
        forget_kept_manager(model)
        kept = None
    if isinstance(kept, EngineManager):
        took(runtime, "engine")
        return kept
    if kept is not None:
        reason = Reason("kept_manager")
    settings = None if reason is not None else BatchSettings.of(model, generation_config, batching_config)
    if settings is None or settings.obstacle is not None:
        took(runtime, "original", reason if settings is None else settings.obstacle)
        return _huggingfaces(original, generation_config, batching_config, hints)
    took(runtime, "engine")
    runtime.counters.passed(passed_over(model, runtime.facts.version))
    settings.warn_of_what_has_no_effect()
    room, requests = runtime.config.max_batch_size, getattr(hints, "num_requests", 0)
    return EngineManager(model, settings, _rows(settings.batching, room, requests), requests)


def _huggingfaces(original: Callable[..., Any], *arguments: Any) -> Any:
    manager = original(*arguments)
    if torch.is_inference_mode_enabled():
        manager.warmed_up = True  # else it would make tensors here that its own thread cannot write to
    return manager


class EngineManager(ManagerParts):
    """HuggingFace's manager, whose requests an engine answers."""

    def __init__(self, model: PreTrainedModel, settings: BatchSettings, rows: int, requests: int = 0) -> None:
        """Run at most ``rows`` requests at once; ``requests`` are expected, 0 if their number is unknown."""
        super().__init__(model, settings.generation, settings.batching)
        self._settings = settings
        self._rows = rows
        self._expected = requests or rows
        self._take_processors()
        self._seeds = seeds(settings.batching.seed)
        self._answers: dict[str, BatchAnswers] = {}  # of each id, children included, that has not ended
        self._changed = Condition()
        self._kept = False
        self.engine = self._new_engine()

    def _new_engine(self) -> Engine:
        runtime = self.model.compiled
        joined = runtime.engine
        sharing = self._settings.batching.allow_block_sharing
        engine = Engine(
            self.model, max_num_seqs=self._rows, prefix_cache=sharing, logprobs_mode="processed_logprobs"
        )  # HuggingFace's are of what tokens are drawn from
        runtime.engine = joined  # no call of generate joins this one, which ends with the manager's last request
        return engine

    @property
    def logit_processor(self) -> Any:
        """HuggingFace's list of processors for the requests to come; users may clear or replace it."""
        return self._processors

    @logit_processor.setter
    def logit_processor(self, processors: Any) -> None:
        self._settings = self._settings.with_processors(listed(processors))
        self._take_processors()

    def _take_processors(self) -> None:
        self._processors = self._settings.batched_processors()
        self._listed = listed(self._processors)

    def _settings_now(self) -> BatchSettings:
        """Return the settings of new requests; HuggingFace's list may have been cleared."""
        if listed(self._processors) is not self._listed:
            self.logit_processor = self._processors
        return self._settings

    # ---- HuggingFace's control of it

    def warmup(self) -> None:
        self.engine.warmup([min(self._expected, self._rows)])
        self.warmed_up = True

    def start(self) -> None:
        """Take requests; the weights may have changed since the last session."""
        if self.is_running():
            logger.warning("compiled_llm: generate_batch: the manager runs already")
            return
        if self.engine.closed:
            self.engine = self._new_engine()
        self.engine.reset_prefix_cache()
        self.batch_processor = BatchProcessor(self)
        self.start_thread(self._finish)

    def stop(
        self,
        block: bool = True,
        timeout: float | None = None,
        keep_for_next_session: bool = False,
        hard_stop: bool = False,
    ) -> None:
        """Take no more requests; ``timeout`` is in seconds, and ``hard_stop`` lets unfinished ones fail."""
        if not self.started:
            logger.warning("compiled_llm: generate_batch: the manager was not started")
            return
        self._kept = keep_for_next_session
        self.ask_to_stop(hard_stop)
        if keep_for_next_session:
            self.stay_on_model()
        if block:
            self.join(0.0, timeout)
        if not keep_for_next_session:
            self.batch_processor = None

    def join(self, stop_trigger_time: float, timeout: float | None = None) -> None:
        """Wait until it has stopped, ``timeout`` seconds at most."""
        if (thread := self._generation_thread) is not None:
            thread.join(timeout)
            if thread.is_alive():
                logger.warning("compiled_llm: generate_batch: requests still run after %s s", timeout)
            else:
                self._generation_thread = None

    def destroy(self) -> None:
        """Stop, and give all pages back; doing it again does nothing."""
        if self.is_running():
            self.stop()
        self.engine.close()

    def switch_to_cb_friendly_attn(self, model: Any, auto_switch_to_flash: bool = True) -> None:
        """Leave the attention as it is: ours is set for each step, and in no config."""

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Run nothing for the block, which may change the weights; RuntimeError if the manager does not run."""
        if not self.is_running():
            raise RuntimeError("pause: the manager does not run; call start() first")
        with self.engine.paused():
            yield

    def _finish(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.hard_stop or not self._answers)
        error = RuntimeError("the manager was stopped before this request had ended")
        for answers in set(self._answers.values()):
            answers.fail(error)
        if not self._kept:
            self.engine.close()

    # ---- requests

    def add_request(
        self,
        input_ids: list[int],
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        eos_token_id: int | list[int] | None = None,
        **logit_processor_kwargs: Any,
    ) -> str | None:
        """Begin to answer a prompt; return the request's id, or None if the manager takes no more requests.

        A fault of the prompt becomes the ``error`` of its output.

        Args:
            eos_token_id: tokens that end it; those of the generation config if None, -1 for none.
        """
        if (reason := self.refusal()) is not None:
            logger.warning("compiled_llm: generate_batch: %s A request of %d tokens is lost.", reason, len(input_ids))
            return None
        config = self.generation_config
        state_of = partial(
            RequestState,
            initial_tokens=list(input_ids),
            max_new_tokens=config.max_new_tokens if max_new_tokens is None else max_new_tokens,
            eos_token_id=config.eos_token_id if eos_token_id is None else eos_token_id,
            streaming=streaming,
            record_timestamps=record_timestamps,
            logit_processor_kwargs=logit_processor_kwargs,
        )
        own_id = self.next_id() if request_id is None else request_id
        ids = [own_id, *(f"{own_id}__child#{number}" for number in range(self.num_return_sequences - 1))]
        answers = BatchAnswers([state_of(each) for each in ids], self.output_router, self._forget)
        with self._changed:
            self._answers.update(dict.fromkeys(ids, answers))
        self._submit(answers)
        return own_id

    def _submit(self, answers: BatchAnswers) -> None:
        state = answers.states[0]
        try:
            settings = self._settings_now()
            params = self._params(state, settings)
            handle = self.engine.prepare(state.initial_tokens, params)
            added = settings.added_to(params, state.initial_tokens)
            for request in handle.requests:
                request.sampling = added(request.sampling)
            self.engine.begin(handle)
        except Exception as error:  # its own; other requests go on
            answers.fail(error)
        else:
            answers.follow(handle)

    def _params(self, state: RequestState, settings: BatchSettings) -> SamplingParams:
        self._processors.check_kwargs(state.logit_processor_kwargs)
        limit = state.max_new_tokens
        return settings.params(
            state.initial_tokens,
            state.logit_processor_kwargs,
            next(self._seeds),
            max_tokens=None if limit is None else whole_limit(limit),
            ignore_eos=True,
            stop_token_ids=tuple(end_tokens(state.eos_token_id)),
            n=self.num_return_sequences,
        )

    def cancel_request(self, request_id: str) -> None:
        """End a request, without any more output; its children go on, unless none has begun."""
        if (answers := self._answers.get(request_id)) is not None:
            answers.cancel(request_id)

    def _forget(self, answers: BatchAnswers) -> None:
        with self._changed:
            for state in answers.states:
                self._answers.pop(state.request_id, None)
            self._changed.notify_all()

    def requests_by_id(self, running: bool) -> dict[str, RequestState]:
        """Return the unfinished requests that have begun to run, or those that wait, by id."""
        with self._changed:
            both = [(answers, state) for answers in set(self._answers.values()) for state in answers.states]
        return {state.request_id: state for answers, state in both if answers.running == running}


class BatchProcessor:
    """The interface of a running manager that ``transformers serve`` and other callers read."""

    def __init__(self, manager: EngineManager) -> None:
        self._manager = manager
        self.scheduler = self  # callers ask either

    @property
    def active_requests(self) -> dict[str, RequestState]:
        return self._manager.requests_by_id(running=True)

    @property
    def waiting_requests(self) -> dict[str, RequestState]:
        return self._manager.requests_by_id(running=False)

    def has_pending_requests(self) -> bool:
        return bool(self.active_requests or self.waiting_requests)


def _rows(batching: ContinuousBatchingConfig, room: int, requests: int) -> int:
    """Return how many requests run at once; more than there is room for creates the model runner again, once."""
    if batching.max_requests_per_batch is not None:
        return batching.max_requests_per_batch
    return room if 0 < requests <= room else max(room, _ROWS)
