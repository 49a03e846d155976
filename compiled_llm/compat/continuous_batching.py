"""Private parts of HuggingFace's continuous batching that ours runs over.

| what | for | without it | ends when |
| --- | --- | --- | --- |
| ``ContinuousBatchingManager`` with ``output_router``, ``_generation_thread``, ``_request_lock``, \
``_request_counter``, ``_use_prefix_sharing``, ``is_tp_driver``, ``background_thread_status``, ``input_queue``, \
``cancel_queue``, ``_wake_up_loop`` (before 5.18 ``_has_new_requests``) | its ``add_request``, ``cancel_request``, \
``join``, ``get_result``, iterators and result handlers run as they are \
| ``generate_batch`` fails | ``generate_batch`` takes a manager |
| ``BackgroundThreadStatus``: ``clear``, ``request_stop``, ``mark_as_stopped``, ``record_fatal_error``, \
``can_accept_new_requests`` | when requests are taken, and what ``transformers serve`` calls healthy \
| requests are lost | the same |
| ``OutputRouter.deliver_batch`` | outputs to queues and handlers | no outputs | the same |
| ``RequestState``: ``to_generation_output``, ``fork``, ``num_children``, ``logprobs``, ``_timestamps`` | outputs \
with HuggingFace's fields and defaults | no outputs | ``GenerationOutput`` is documented |
| ``ContinuousBatchingLogitsProcessorList``: ``check_kwargs``, ``do_processing``, \
``logits_processor`` | which processors and settings of a request it takes | they would be accepted silently \
| the same |
| ``_get_logits_processor`` of a model | a config's processors | settings are ignored | it is public |
| ``_cached_continuous_batching_manager`` of a model | ``persistent_manager`` | made again in each call | the same |
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar, cast

import torch
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
)
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessorList
from transformers.generation.continuous_batching.continuous_api import (
    BackgroundThreadStatus,
    ContinuousBatchingManager,
    ContinuousMixin,
    OutputRouter as OutputRouter,
)
from transformers.generation.continuous_batching.requests import (
    RequestState as RequestState,
    RequestStatus as RequestStatus,
)

from compiled_llm.compat.huggingface import with_end_tokens

T = TypeVar("T")
_KEPT = "_cached_continuous_batching_manager"


class Inbox(Generic[T]):
    """The place into which HuggingFace's manager puts requests, in place of a queue: they are taken at once."""

    def __init__(self, take: Callable[[T], object]) -> None:
        self._take = take

    def put(self, item: T, block: bool = True, timeout: float | None = None) -> None:
        self._take(item)


class ManagerParts(ContinuousBatchingManager):
    """HuggingFace's manager without the part that runs the model: its requests, its queue of outputs, its thread."""

    # Its attributes are set here: its own ``__init__`` changes the attention of the model.

    def __init__(self, model: PreTrainedModel, config: GenerationConfig, batching: ContinuousBatchingConfig) -> None:
        self.model: Any = model
        self.generation_config = config
        self.continuous_batching_config = batching
        self.num_return_sequences: int = getattr(config, "num_return_sequences", None) or 1
        self.output_router = OutputRouter()
        self.background_thread_status = BackgroundThreadStatus()
        self.batch_processor: Any = None
        self.is_tp_driver = True
        self.warmed_up = False
        self.hard_stop = False  # whether unfinished requests fail once it stops
        self._generation_thread: Any = None
        self._request_lock = threading.Lock()
        self._request_counter = 0
        self._use_prefix_sharing = batching.allow_block_sharing
        self._leave = threading.Event()
        self.input_queue: Any = Inbox(self.submit)
        self.cancel_queue: Any = Inbox(self.cancel)
        self._wake_up_loop = self._has_new_requests = threading.Event()  # nobody waits for it

    def submit(self, state: RequestState) -> None:
        """Begin to answer a request; a fault of it becomes the ``error`` of its output."""

    def cancel(self, request_id: str) -> None:
        """End a request, without any more output of it; its children go on, unless none has begun."""

    def start_thread(self, finish: Callable[[], object]) -> None:
        """Start a thread that waits for ``ask_to_stop``, and then runs ``finish``."""
        self.background_thread_status.clear()
        self.hard_stop = False
        self._leave.clear()
        self._generation_thread = threading.Thread(
            target=self._wait_and_finish, args=(finish,), name="compiled_llm generate_batch", daemon=True
        )
        self._generation_thread.start()

    def _wait_and_finish(self, finish: Callable[[], object]) -> None:
        self._leave.wait()
        try:
            finish()
        except Exception as error:
            self.background_thread_status.record_fatal_error(error)
        finally:
            self.background_thread_status.mark_as_stopped()

    def ask_to_stop(self, hard: bool) -> None:
        """Let the thread end: at once if ``hard``, else with the last request; no request is taken any more."""
        status = self.background_thread_status
        status.request_stop(status.HARD_STOP if hard else status.FLUSH_AND_STOP, 0)
        self.hard_stop = self.hard_stop or hard
        self._leave.set()

    @property
    def started(self) -> bool:
        """Whether there is a thread that has not been seen to end."""
        return self._generation_thread is not None

    def stay_on_model(self) -> None:
        """Let HuggingFace's functions find this manager at the next call."""
        setattr(self.model, _KEPT, self)


def kept_manager(model: PreTrainedModel) -> ContinuousBatchingManager | None:
    """Return the manager that a call with ``persistent_manager=True`` has left on a model."""
    kept = getattr(model, _KEPT, None)
    return kept if isinstance(kept, ContinuousBatchingManager) else None


def forget_kept_manager(model: PreTrainedModel) -> None:
    """End the manager that ``kept_manager`` returns."""
    cast(ContinuousMixin, model).destroy_cached_continuous_batching_manager()


def processors_of(
    model: PreTrainedModel,
    config: GenerationConfig,
    prompt: Sequence[int],
    most: int,
    ends: Sequence[int],
    device: torch.device | str = "cpu",
) -> LogitsProcessorList:
    """Return a generation config's logits processors for one prompt and at most ``most`` more tokens."""
    generating: Any = model
    own = with_end_tokens(config, ends, device)
    own.max_length = len(prompt) + most
    ids = torch.tensor([list(prompt)], device=device)
    processors: LogitsProcessorList = generating._get_logits_processor(
        own, input_ids_seq_length=len(prompt), encoder_input_ids=ids, device=device
    )
    return processors


def batched_processors(
    processors: Sequence[Any], batching: ContinuousBatchingConfig
) -> ContinuousBatchingLogitsProcessorList:
    """Return HuggingFace's list of processors for batches; it warns of those that it drops."""
    return ContinuousBatchingLogitsProcessorList(
        logits_processor=LogitsProcessorList(processors),
        per_request_processors=batching.per_request_processors,
        drop_unsupported_processors=batching.drop_unsupported_processors,
    )


Processors = ContinuousBatchingLogitsProcessorList | LogitsProcessorList


def listed(processors: Processors) -> Sequence[Any]:
    """Return the processors in HuggingFace's list for batches, or in a plain one; ``clear`` puts a plain one there."""
    return processors.logits_processor if isinstance(processors, ContinuousBatchingLogitsProcessorList) else processors


def with_children(state: RequestState) -> list[RequestState]:
    """Return the states of a request and of its children, by HuggingFace's ids."""
    return [state, *(state.fork(f"{state.request_id}__child#{number}") for number in range(state.num_children))]


def note_times(state: RequestState, tokens: int) -> None:
    """Note the present time for tokens of a request up to this number that have none yet."""
    state._timestamps.extend([time.perf_counter()] * (tokens - len(state._timestamps)))
