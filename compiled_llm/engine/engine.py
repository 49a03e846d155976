"""``compiled_llm.Engine``: prompts in, answers out."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from torch import Tensor
from transformers import PreTrainedModel

from compiled_llm.config import MAX_NUM_SEQS
from compiled_llm.engine.admission.policies import AdmissionName
from compiled_llm.engine.chunks.policies import MaxStep
from compiled_llm.engine.device_loss import DeviceLostError as DeviceLostError
from compiled_llm.engine.engine_options import check_fits, check_options, is_count, speculation_of
from compiled_llm.engine.input_processing.input_processor import (
    QueueFullError as QueueFullError,
    TokenFacts,
)
from compiled_llm.engine.input_processing.prompts import Prompt
from compiled_llm.engine.input_processing.sampling import RequestSampling
from compiled_llm.engine.intake import Intake
from compiled_llm.engine.lifecycle.sleep import let_rise, put_to_sleep, wake_up
from compiled_llm.engine.lifecycle.update_weights import update_weights
from compiled_llm.engine.lifecycle.warmup import warm_up
from compiled_llm.engine.loop_settings import LogprobsMode, LoopSettings, Mixed
from compiled_llm.engine.metrics import EngineDescription, EngineStats
from compiled_llm.engine.parts import GRAMMARS, POOLING, EngineGrammars
from compiled_llm.engine.steps.request import RequestError
from compiled_llm.engine.thread.engine_thread import EngineThread
from compiled_llm.engine.wanted import wanted_of
from compiled_llm.execution.lifecycle.runtime import Runtime, runtime_of
from compiled_llm.execution.lifecycle.warmup import Report, Sizes, quiet
from compiled_llm.execution.model_runner import ModelRunner, Uncompiled
from compiled_llm.execution.threads.interrupts import deferred
from compiled_llm.features import check_has, feature, needed
from compiled_llm.kvcache.specs import token_numbers
from compiled_llm.requests.deciding import DECISIONS, QuestionReader
from compiled_llm.requests.handle import RequestHandle
from compiled_llm.requests.outputs import Decisions, RequestOutput
from compiled_llm.requests.prompts import with_params
from compiled_llm.requests.sampling_params import SamplingParams


class Engine:
    """An engine that serves many requests at once on one wrapped model, while ``generate`` goes on working.

    Examples:
        >>> engine = compiled_llm.Engine(model, tokenizer=tokenizer)  # doctest: +SKIP
        >>> outputs = engine.generate(["Hello", "The capital of France is"])  # doctest: +SKIP
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        tokenizer: Any = None,
        processor: Any = None,
        max_num_seqs: int | None = None,
        max_model_len: int | None = None,
        max_step_ms: MaxStep = "auto",
        mixed: Mixed = "auto",
        admission: AdmissionName = "auto",
        prefix_cache: bool = True,
        max_queue: int | None = None,
        logprobs_mode: LogprobsMode = "raw_logprobs",
        grammar_timeout: float = 30.0,
        grammar_worker: Any = None,
        watch_model: bool = True,
        tokenizer_eos: bool = False,
        speculative_config: Mapping[str, Any] | None = None,
        mm_encoder_cache_gb: float = 0.25,
        images_in_steps: bool | None = None,
    ) -> None:
        """Serve a wrapped model; nothing runs yet.

        Args:
            model: wrapped by ``compiled_llm.wrap``.
            tokenizer: for prompts of text and messages, and for the text of answers; the processor's if None.
            processor: the model's, for prompts with images (``AutoProcessor.from_pretrained``).
            max_num_seqs: how many requests run at once, at most, as in vLLM; None for 256, or as many as ``artifacts``
                have room for, if these are fewer. ``max_batch_size`` of ``wrap`` bounds ``generate`` alone.
            max_model_len: how many tokens a request may have, prompt and answer together, as in vLLM; None for as many
                as the model has positions.
            max_step_ms: how long a step may take, in milliseconds: prompts are computed in chunks that leave it so, as
                far as steps so far tell; a warning says so if not even the smallest ones do. ``"auto"``, on CUDA, for
                chunks that keep gaps between tokens short while answers are streamed and prompts come often; elsewhere,
                and with None, chunks have ``prefill_tokens``, however long they take.
            mixed: run prompts and running requests in one launch, which reads the weights once, where both fit in
                ``prefill_tokens``; ``"auto"`` for where that is known to be faster: on CUDA, with weights of 8 GB or
                more, beside short chunks of prompts. With ``batch_invariant=True`` of ``wrap`` nowhere.
            admission: which policy lets requests begin while pages are short. ``"auto"`` estimates what waiting costs,
                and what beginning does; ``"peak"`` lets one begin once all rows are likely to fit until they end;
                ``"greedy"`` as soon as its text fits, as vLLM does.
            prefix_cache: keep pages of texts, for later ones that begin like them.
            max_queue: how many requests may wait; None for any number.
            logprobs_mode: what log-probabilities are of, as in vLLM: ``"raw_logprobs"``, what the model says, or
                ``"processed_logprobs"``, what tokens are drawn from: after penalties, biases, barred tokens, the
                temperature and filters.
            grammar_timeout: seconds that a request with ``structured_outputs`` waits for its grammar to be compiled.
            grammar_worker: compiles grammars in a process of its own, where one that crashes or takes too much memory
                ends its requests alone; None for threads of this process. It ends with the engine.
            watch_model: look with each request whether the model was moved, hooked or set to train meanwhile. False
                saves that time if only this engine uses the model.
            tokenizer_eos: end answers at the tokenizer's ``eos_token``, too, as vLLM and ``compiled-llm serve`` do; as
                ``generate``, only at those of ``model.generation_config`` if False.
            images_in_steps: as the option of ``wrap``, which ``generate`` goes by; None for what that says.
            speculative_config: guess tokens, and check several of a request in one step: the same tokens in fewer
                steps, if guesses are right. A dictionary with vLLM's names: ``method``, which is ``"ngram"``, the text
                of the request itself; ``num_speculative_tokens``, how many are guessed at most, 1 to 7 (7); and how
                many of the last tokens are searched for in the text before them, ``prompt_lookup_max`` (4) to
                ``prompt_lookup_min`` (1). None for no guesses.
            mm_encoder_cache_gb: how much device memory may keep what encoders have made of images, in GiB, beside
                that of pages: an image that comes again after other text is not encoded again. The least recently
                used go first, and all of it with ``sleep``; ``stats().memory`` of the model counts it.

        Raises:
            TypeError: the model is not wrapped, or it is a ``PeftModel`` around one that is.
            ValueError: a number is impossible, there is no such mode, no step could be ``mixed``, or the model cannot
                check several tokens of a request in a step.
        """
        self._runtime = _wrapped(model)
        max_num_seqs = self._runtime.usual_rows(MAX_NUM_SEQS) if max_num_seqs is None else max_num_seqs
        tokenizer = getattr(processor, "tokenizer", None) if tokenizer is None else tokenizer
        settings = LoopSettings(
            max_num_seqs,
            max_step_ms,
            prefix_cache,
            logprobs_mode,
            watch_model,
            mixed,
            admission,
            speculation=speculative_config,
            max_model_len=max_model_len,
        )
        others = {"grammar_timeout": grammar_timeout, "mm_encoder_cache_gb": mm_encoder_cache_gb}
        check_options(settings._asdict() | others | {"max_queue": max_queue})
        self._settings = _fitting(settings, self._runtime)
        self._runtime.make_room(max_num_seqs)
        self._model = model
        self._tokenizer, self._processor = tokenizer, processor
        self._decider: QuestionReader | None = None  # once questions are asked
        self._engine_thread = EngineThread(model, self._runtime, self._settings)
        self._grammars = _grammars_of(self._engine_thread, tokenizer, grammar_worker, float(grammar_timeout))
        own_end = getattr(tokenizer, "eos_token_id", None) if tokenizer_eos else None
        in_steps = self._runtime.config.images_in_steps_on(model.device.type)
        self._intake = Intake(
            *(self._runtime, self._engine_thread, tokenizer, processor, self._grammars),
            own_ends=frozenset[int]() if own_end is None else frozenset([own_end]),
            max_model_len=max_model_len,
            max_queue=max_queue,
            encoder_cache=int(mm_encoder_cache_gb * 2**30),
            images_in_steps=in_steps if images_in_steps is None else images_in_steps,
        )
        self._runtime.engine = weakref.ref(self._engine_thread)
        self._runtime.engines.add(self._engine_thread)

    def __repr__(self) -> str:
        stats = self._engine_thread.placed.stats(self._engine_thread.waiting)
        state = "closed" if self.closed else "asleep" if self.asleep else f"{stats.running} requests running"
        return f"<{type(self).__name__}: {state}, {stats.waiting} waiting>"

    # ---- requests

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        hidden_states: Sequence[int] | None = None,
        emitted: Sequence[str] | None = None,
        pooled: bool = False,
    ) -> list[RequestOutput]:
        """Answer one prompt or several, and wait for all: one output each, in their order; arguments as of ``submit``.

        An answer that fails by itself has the finish reason ``"error"`` and its ``error``; the others go on.

        Args:
            params: for all of them, or one for each.

        Raises:
            ValueError: a prompt or its settings are impossible; nothing has run.
            QueueFullError: there are more than ``max_queue`` allows; nothing has run.
            RuntimeError: the engine is closed, or the model cannot be run now.
            Exception: what ended all requests.
        """
        return self._answered(prompts, params, hidden_states, emitted, pooled)

    def decide(self, state: object, questions: Mapping[str, Any], *, cache_salt: Hashable = None) -> Decisions:
        """Answer typed questions about a state, as ``transformers.pipeline("decision")`` does, and wait for all.

        Each is a prompt of its own, after which the log-probabilities of its options' labels are read; what prompts
        begin with alike, as the state, is computed once. Prompts, labels and temperatures are transformers', or those
        of ``decision.json`` and ``decision_template.jinja`` beside the model.

        Args:
            state: text, or JSON.
            questions: by name, ``{"type": "choice" | "score" | "noul", "instructions": ..., "criteria": ...}``.
            cache_salt: as of ``submit``.

        Returns:
            A dictionary of the answers, by the same names, with ``diagnostics``, ``prompt_tokens`` and
            ``cached_tokens``.

        Raises:
            ImportError: transformers is older than 5.24.
            ValueError: a question is impossible, labels are not distinct tokens, or a prompt is too long.
            RuntimeError: the engine is closed, or the model cannot be run now.
        """
        part = needed(DECISIONS)
        if self._decider is None:
            self._decider = part.decider_of(self._tokenizer, self._model.name_or_path)
        reads = self._decider.reads(state, questions)
        outputs = self._answered([read.prompt for read in reads], [read.params for read in reads], salt=cache_salt)
        return part.decisions_of(reads, outputs)

    def _answered(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        hidden_states: Sequence[int] | None = None,
        emitted: Sequence[str] | None = None,
        pooled: bool = False,
        **waiting: Any,
    ) -> list[RequestOutput]:
        model_runner = self._checked_runner()
        params, wanted = wanted_of(self._runtime.facts, params, hidden_states, emitted, pooled)
        samplings = dict[int, RequestSampling]()
        listed = with_params(prompts, params)
        handles = [self._intake.handle(model_runner, *entry, wanted, samplings, **waiting) for entry in listed]
        with deferred():  # an interrupt between the two would leave requests that no thread runs
            self._intake.add(handles)
            self._engine_thread.answer(handles)
        for error in (answer.error for handle in handles for answer in handle.answers):
            if error is not None and not isinstance(error, RequestError):  # it has ended all requests
                raise error
        return [handle.output() for handle in handles]

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        timeout: float | None = None,
        cache_salt: Hashable = None,
        hidden_states: Sequence[int] | None = None,
        emitted: Sequence[str] | None = None,
        pooled: bool = False,
    ) -> RequestHandle:
        """Begin to answer a prompt, and return at once.

        Args:
            prompt: token ids, text, chat messages, or one of vLLM's dictionaries of them.
            priority: smaller ones run first.
            timeout: seconds after which it ends with what it has; None for never.
            cache_salt: only requests with an equal one read what this one leaves in the prefix cache.
            hidden_states: layers whose hidden states its output has (``Completion.hidden_states``), as HuggingFace
                counts them: 0 for the embeddings, -1 for the last. Its prompt is computed whole, for each of ``n``
                answers, whatever the prefix cache has of it.
            emitted: names under which traced hooks emit what its output has (``Completion.emitted``); otherwise as
                ``hidden_states``.
            pooled: have the vector of the prompt's last token (``Completion.pooled``) in place of an answer; ``embed``
                and ``classify`` make of it what is mostly wanted.

        Raises:
            ValueError: the prompt or its settings are impossible, there is no such layer or no hook, or the host has
                too little memory for the hidden states.
            QueueFullError: ``max_queue`` requests wait already.
            RuntimeError: the engine is closed, or the model cannot be run now.
        """
        waiting: dict[str, Any] = {"priority": priority, "timeout": timeout, "salt": cache_salt}
        model_runner = self._checked_runner()
        params, wanted = wanted_of(self._runtime.facts, params, hidden_states, emitted, pooled)
        handle = self._intake.handle(model_runner, prompt, params or SamplingParams(), wanted, **waiting)
        self.begin(handle)
        return handle

    def prepare(self, prompt: Prompt, params: SamplingParams) -> RequestHandle:
        """Check a prompt as ``submit``; ``begin`` answers it."""
        return self._intake.handle(self._checked_runner(), prompt, params)

    @deferred()
    def begin(self, *handles: RequestHandle) -> None:
        """Begin to answer prepared prompts."""
        self._intake.add(handles)
        self._engine_thread.start_thread()

    def embed(
        self,
        texts: str | Sequence[int] | Iterable[str | Sequence[int]],
        dimensions: int | None = None,
        *,
        prompt_name: str | None = None,
        pooling: Literal["last"] | None = None,
    ) -> Tensor:
        """Return the embeddings of texts, ``[N, dimensions]`` float32 on the CPU: of each the last hidden state.

        They are pooled, begun with a prompt and made as long as 1 as the files of sentence-transformers in the model's
        folder say.

        Args:
            texts: one or several, each a text or its token ids, which get no prompt.
            dimensions: how many of an embedding's numbers are kept, the first ones; None for all.
            prompt_name: which of the folder's prompts texts begin with; None for its default, mostly none.
            pooling: ``"last"`` to take the last token, and length 1, where the folder does not say so.

        Raises:
            ValueError: the folder says nothing, or pools in another way; the model is a classifier; or a text, or
                another argument, is impossible.
            RuntimeError: a text has no vector, which is cancelled or has failed; or as ``generate``.
        """
        return needed(POOLING).embed(self, self._runtime.facts.model, texts, dimensions, prompt_name, pooling)

    def classify(self, texts: str | Sequence[int] | Iterable[str | Sequence[int]]) -> Tensor:
        """Return what a classifier's head says of texts, ``[N, labels]`` float32 on the CPU, as ``model(...).logits``.

        Raises:
            ValueError: the model has no head of a ``...ForSequenceClassification``, or a text is impossible.
            RuntimeError: as ``embed``.
        """
        return needed(POOLING).classify(self, self._runtime.facts.model, texts)

    def _checked_runner(self) -> ModelRunner:
        self._check_open()
        return self._engine_thread.check.check_for_request()

    def _check_open(self) -> None:
        self._check_usable()
        self._engine_thread.check.check_awake()

    def _check_usable(self) -> None:
        self._runtime.home.check()
        if self._engine_thread.closed:
            raise RuntimeError("the engine is closed; make another one")

    # ---- around them

    def warmup(
        self, rows: Sizes = None, *, profile: str | Path | None = None, structured: bool = False, report: Report = quiet
    ) -> None:
        """Compile and capture what steps of these sizes need, so that no request waits for it.

        Args:
            rows: how many requests will run at once, one number or several; 1 to ``max_num_seqs`` if None, and with
                ``"auto"`` what ``model.compiled.warmup("auto")`` prepares.
            profile: a file of ``model.compiled.save_profile``, as in ``model.compiled.warmup``.
            structured: prepare for ``structured_outputs``, too; else the first request that has some waits for it,
                unless the profile names some.
            report: called with what is being prepared, in words.

        Raises:
            ValueError: one is no whole number between 1 and ``max_num_seqs``; the profile cannot be used; or grammars
                cannot be compiled without a tokenizer, or a token that ends answers.
            RuntimeError: xgrammar is missing.
        """
        self._check_open()
        self._engine_thread.check.checked_runner()
        wanted = self._runtime.warming.wanted("rows", rows, profile, self._settings.max_num_seqs)
        if wrong := [size for size in wanted.sizes if not (is_count(size) and size <= self._settings.max_num_seqs)]:
            raise ValueError(
                f"rows: {wrong[0]!r} is not a whole number between 1 and max_num_seqs={self._settings.max_num_seqs}"
            )
        if structured or (self._tokenizer is not None and wanted.masked):
            check_has("structured_outputs", "structured=True")
            assert self._grammars is not None, "the part is there"
            self._grammars.prepare(self.token_facts.logits, self.token_facts.eos_token_ids)
        deferred_rows = wanted.sizes if structured else ()
        warm_up(self._runtime, self._engine_thread, wanted, deferred_rows, report, self._intake.images_in_steps)

    def stats(self) -> EngineStats:
        """Return what has happened so far."""
        self._runtime.home.check()
        return self._engine_thread.placed.stats(self._engine_thread.waiting)

    @property
    def model(self) -> PreTrainedModel:
        """The wrapped model that it answers by."""
        return self._model

    @property
    def logprobs_mode(self) -> LogprobsMode:
        """Whether log-probabilities are of the model's own logits, or of those that tokens are drawn from."""
        return self._settings.logprobs_mode

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of prompts and answers; None without one."""
        return self._tokenizer

    @property
    def processor(self) -> Any:
        """The processor of prompts with images; None without one."""
        return self._processor

    @property
    def token_facts(self) -> TokenFacts:
        """The facts of its model's tokens that answers depend on."""
        return self._intake.token_facts

    def describe(self) -> EngineDescription:
        """Return where device memory went, and how many requests of which length fit; allocates what is not there yet.

        Raises:
            RuntimeError: the engine is closed or asleep, or the model cannot be run now.
        """
        self._check_open()
        model_runner = self._engine_thread.check.checked_runner()
        return EngineDescription(
            memory=model_runner.memory(),
            pages=model_runner.pool.account(),
            page_size=model_runner.config.page_size,
            kv_dtype=str(model_runner.state.pages[0].dtype).removeprefix("torch."),
            kv_numbers_per_token=sum(map(token_numbers, model_runner.state.specs)),
            max_num_seqs=self._settings.max_num_seqs,
            max_tokens=self._settings.max_model_len or model_runner.max_positions,
            states=model_runner.state.states_of_rows,
            bytes_of_a_state=model_runner.state.bytes_of_a_state,
        )

    def reset_prefix_cache(self) -> None:
        """Forget the pages of texts that have been computed: weights have changed in a way that nothing shows."""
        with self.paused():
            pass

    @contextmanager
    def paused(self, weights_stay: bool = False) -> Iterator[None]:
        """Run nothing for the block; requests keep their place, and with ``weights_stay`` the prefix cache stays.

        Calls of ``generate`` do not wait for it: those that run in the engine's batch end first, others by themselves.
        """
        self._runtime.home.check()
        self._engine_thread.step_lock.check_elsewhere()
        with self._engine_thread.joined.left(), self._engine_thread.paused():
            try:
                yield
            finally:
                self._engine_thread.model_may_have_changed(weights_stay)

    def update_weights(self, folder: str | Path, *, requests: Literal["wait", "keep", "end"] = "wait") -> None:
        """Have the weights in a folder from now on, as ``save_pretrained`` writes them.

        They are read into host memory and checked while requests run; then they are copied in the place of the old
        ones, while nothing runs, and the prefix cache is emptied. Nothing is compiled or captured again. Calls of
        ``generate`` and ``forward`` in progress end first.

        Args:
            folder: with ``model.safetensors``, or an index and its files: tensors of the same names and shapes.
            requests: what becomes of those that have not ended. ``"wait"`` lets them end with the old weights, and
                those that come meanwhile begin with the new ones; ``"end"`` ends them with the finish reason
                ``"cancelled"`` and what they have; ``"keep"`` lets them go on with the new weights, over what they
                have computed with the old ones.

        Raises:
            ValueError: ``requests`` is something else; the model is quantised; or the folder is damaged or another
                model's. Nothing has changed.
            RuntimeError: another update is in progress; the model is or falls asleep, and requests would have to end
                first; or the engine is closed, or paused or running in this thread. Nothing has changed.
        """
        if requests not in ("wait", "keep", "end"):
            raise ValueError(f"requests={requests!r}: give 'wait', 'keep' or 'end'")
        self._check_usable()
        update_weights(self._runtime, Path(folder), requests)

    # ---- asleep

    def sleep(self, *, requests: Literal["park", "end"] = "park", weights: bool = False, graphs: bool = False) -> int:
        """Give the device's memory to others, until ``wake``: pages, with the prefix cache, are most of it.

        What was compiled stays, and so do requests with the tokens that they have got. It is the model that sleeps,
        with all of its engines: they take no requests, and ``model.generate`` and ``model(...)`` run HuggingFace's own
        code over its own cache, which take none of this memory. Calls of these in progress end first. Asleep already,
        it does nothing more, but for CUDA graphs and weights that are to follow.

        Args:
            requests: ``"park"`` lets those that run wait, with others, and go on after ``wake`` with the same draws;
                their deadlines stay. ``"end"`` ends all with the finish reason ``"cancelled"`` and what they have.
            weights: move parameters and buffers to host memory, too: the same ``Parameter`` objects, with other
                ``data``; gradients stay. Until ``wake`` the model cannot be called. On a CPU they are there already.
            graphs: give CUDA graphs, workspaces and buffers back, too; to capture again takes ``wake`` seconds. With
                ``weights`` they go as well, since they have the addresses of these; and all of it goes if the CUDA
                driver cannot keep addresses, which is logged.

        Returns:
            How many bytes of device memory were given back.

        Raises:
            RuntimeError: caches that you hold lie in the pages; or the engine is closed, or paused or running in this
                thread. Nothing has changed, except that requests compute again what they need.
            ValueError: ``requests`` is something else, or weights cannot be moved.
        """
        if requests not in ("park", "end"):
            raise ValueError(f"requests={requests!r}: give 'park' or 'end'")
        self._check_usable()
        return put_to_sleep(self._runtime, requests == "end", weights, graphs)

    def wake(self) -> None:
        """Take as many pages as before again, and what else was given back; nothing is compiled.

        CUDA graphs that ``sleep`` has left are as they were; others are captured again.

        Requests that wait go on. Any engine of the model may wake it; awake, it does nothing.

        Raises:
            RuntimeError: the engine is closed, or running in this thread.
            torch.OutOfMemoryError: there is too little memory. As after Ctrl-C, the model is asleep still; free some,
                and call this again.
        """
        self._check_usable()
        wake_up(self._runtime)

    @property
    def asleep(self) -> bool:
        """Whether device memory was given back by ``sleep``."""
        return self._runtime.asleep

    @property
    def lost(self) -> DeviceLostError | None:
        """Why nothing more runs on the device in this process, which has to be started again; None while it does."""
        return self._engine_thread.check.lost

    @property
    def uncompiled(self) -> Uncompiled | None:
        """Why new answers run uncompiled, as in ``stats()``, from any thread and at once."""
        model_runner = self._engine_thread.check.present
        return None if model_runner is None else model_runner.uncompiled

    @property
    def closed(self) -> bool:
        """Whether it serves no more."""
        return self._engine_thread.closed

    def close(self) -> None:
        """End all requests; the engine serves no more, and closing it again does nothing."""
        # The last engine of a model that is asleep brings its weights back; the next call takes the other memory again.
        if not (self._engine_thread.closed or self._runtime.home.left):
            self._engine_thread.close()
            if self._grammars is not None:
                self._grammars.close()
            let_rise(self._runtime)

    def __enter__(self) -> Engine:
        """Return the engine; it is closed at the end of the block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _fitting(settings: LoopSettings, runtime: Runtime) -> LoopSettings:
    """Return settings as a model runs by them; ValueError if they do not fit it, and nothing has changed."""
    check_fits(runtime, settings.max_num_seqs, settings.max_model_len, settings.mixed)
    speculation = speculation_of(settings.speculation, runtime, settings.max_num_seqs)
    mixed: Mixed = False if runtime.config.batch_invariant else settings.mixed
    return settings._replace(mixed=mixed, speculation=speculation)


def _grammars_of(
    engine_thread: EngineThread, tokenizer: object, worker: object, timeout: float
) -> EngineGrammars | None:
    """Return the grammars of an engine; None if structured outputs were taken out."""
    part = feature(GRAMMARS)
    arrive, end = engine_thread.request_table.paused_requests.arrive, engine_thread.cancel
    return None if part is None else part.grammars_of(tokenizer, worker, timeout, arrive, end)


def _wrapped(model: object) -> Runtime:
    runtime = runtime_of(model)
    if runtime is None:
        raise TypeError(
            f"Engine: the {type(model).__name__} is not wrapped; write compiled_llm.Engine(compiled_llm.wrap(model))"
        )
    if runtime.facts.model is not model:
        raise TypeError(
            f"Engine: the {type(model).__name__} is around a wrapped model, and an engine runs that one alone: with "
            "adapters in its modules, such as LoRA, and without what is done around a call, such as learned prompts. "
            "If that is what you want, write compiled_llm.Engine(model.get_base_model()); else call model.generate"
        )
    runtime.home.check()
    return runtime
