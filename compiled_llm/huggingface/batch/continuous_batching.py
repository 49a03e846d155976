"""``init_continuous_batching`` of a wrapped model: HuggingFace's manager over our engine."""

# HuggingFace's ``generate_batch``, its context manager, ``generate(cache_implementation="paged")``, managers that are
# kept, and ``transformers serve`` run their own code over it.

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

from compiled_llm.compat.condition import Condition
from compiled_llm.compat.continuous_batching import (
    ManagerParts,
    Processors,
    RequestState,
    forget_kept_manager,
    kept_manager,
    listed,
    with_children,
)
from compiled_llm.engine.engine import Engine
from compiled_llm.execution.limits import whole_limit
from compiled_llm.execution.reporting.slow_paths import Reason
from compiled_llm.huggingface.batch.batch_answers import BatchAnswers, deliver_failure
from compiled_llm.huggingface.batch.batch_settings import BatchSettings, end_tokens, logger, seeds
from compiled_llm.huggingface.call.current_call import took
from compiled_llm.huggingface.handle import CompiledModel
from compiled_llm.huggingface.inspection.model_obstacles import passed_over
from compiled_llm.requests.handle import RequestHandle

if TYPE_CHECKING:
    from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager
    from transformers.generation.continuous_batching.utils import WorkloadHints


_ROWS = 256  # how many requests run at once if nothing says it, and ``generate`` has room for fewer than there are


def manager_for(
    model: PreTrainedModel,
    runtime: CompiledModel,
    original: Callable[..., ContinuousBatchingManager],
    generation_config: GenerationConfig | None,
    batching_config: ContinuousBatchingConfig | None,
    hints: WorkloadHints | None,
) -> ContinuousBatchingManager:
    """Return a manager over the engine, or HuggingFace's own if only that one can serve the configs."""
    # ``model`` is in evaluation mode afterwards, as HuggingFace leaves it.
    if runtime.asleep:  # HuggingFace's own would take what memory there is
        raise RuntimeError("generate_batch: the model is asleep, and has no pages; call wake() on its engine")
    model.eval()
    kept = kept_manager(model)
    reason = runtime.obstacle()
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
    room = runtime.config.max_batch_size
    requests = getattr(hints, "num_requests", 0)
    return EngineManager(model, settings, _rows(settings.batching, room, requests), requests)


def _huggingfaces(original: Callable[..., ContinuousBatchingManager], *arguments: object) -> ContinuousBatchingManager:
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
    def logit_processor(self, processors: Processors) -> None:
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
        self.batch_processor = self
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

    def submit(self, state: RequestState) -> None:
        states = with_children(state)
        ids = [each.request_id for each in states]
        try:
            handle = self._prepared(state)
            answers = BatchAnswers(states, handle, self.output_router, partial(self._forget, ids))
            with self._changed:
                self._answers.update(dict.fromkeys(ids, answers))
            self.engine.begin(handle)
        except Exception as error:  # its own; other requests go on
            self._forget(ids)
            deliver_failure(self.output_router, states, error)
        else:
            answers.follow()

    def _prepared(self, state: RequestState) -> RequestHandle:
        settings = self._settings_now()
        prompt = state.initial_tokens
        limit = state.max_new_tokens
        self._processors.check_kwargs(state.logit_processor_kwargs)
        params = settings.params(
            state.logit_processor_kwargs,
            seed=next(self._seeds),
            max_tokens=None if limit is None else whole_limit(limit),
            ignore_eos=True,
            stop_token_ids=tuple(end_tokens(state.eos_token_id)),
            n=self.num_return_sequences,
        )
        processors = settings.processors_for(prompt, state.logit_processor_kwargs, params)
        if not settings.in_graph:
            return self.engine.prepare(prompt, settings.between_steps(processors, params))
        handle = self.engine.prepare(prompt, params)
        settings.write(processors, prompt, handle.requests)
        return handle

    def cancel(self, request_id: str) -> None:
        if (answers := self._answers.get(request_id)) is not None:
            answers.cancel(request_id)

    def _forget(self, ids: Sequence[str]) -> None:
        with self._changed:
            for each in ids:
                self._answers.pop(each, None)
            self._changed.notify_all()

    # ---- the interface of a running manager, its ``batch_processor``, that ``transformers serve`` and others read

    @property
    def scheduler(self) -> EngineManager:
        return self

    @property
    def active_requests(self) -> dict[str, RequestState]:
        return self._requests(running=True)

    @property
    def waiting_requests(self) -> dict[str, RequestState]:
        return self._requests(running=False)

    def has_pending_requests(self) -> bool:
        return bool(self._answers)

    def _requests(self, running: bool) -> dict[str, RequestState]:
        """Return the unfinished requests that have begun to run, or those that wait, by id."""
        with self._changed:
            found = [answers for answers in set(self._answers.values()) if answers.running == running]
        return {request_id: state for answers in found for request_id, state in answers.states.items()}


def _rows(batching: ContinuousBatchingConfig, room: int, requests: int) -> int:
    """Return how many requests run at once; more than there is room for creates the model runner again, once."""
    if batching.max_requests_per_batch is not None:
        return batching.max_requests_per_batch
    return room if 0 < requests <= room else max(room, _ROWS)
