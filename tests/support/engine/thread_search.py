"""Random schedules of threads that use one model and its engines in all ways at once, and what must hold of them.

Threads ask, stream, cancel, and give requests code that raises anything; some call ``generate`` with streamers that
call the model again; one puts the model to sleep, gives it other weights, pauses, closes and makes engines.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compiled_llm.engine.engine import Engine
from compiled_llm.engine.steps.request import RequestError
from compiled_llm.kvcache.row import Row
from compiled_llm.requests.handle import RequestHandle
from compiled_llm.requests.outputs import Completion
from compiled_llm.requests.sampling_params import SamplingParams
from support.engine.text_tokenizers import Numbers
from support.engine.tiny_engines import greedy, tiny, wrapped
from support.in_threads import start
from support.parity import alone, assert_account_is_empty

LONGEST = 48
THREADS = 5
PATIENCE = 120.0
"""Seconds after which a schedule that has not ended counts as hanging."""
ERRORS = [SystemExit, asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, MemoryError, StopIteration, KeyError]
PROMPTS = [[5, 6, 7, 8] * 5, [5, 6, 7, 8] * 5 + [9], [5, 6, 7], [40, 41, 42, 43, 44, 45, 46], [100]]
REFUSALS = (
    "is asleep",
    "the engine is closed",
    "another update is in progress",
    "caches hold",  # or a forward is in progress
    "were given back by sleep()",  # in the midst of a forward
)
"""What a call may be told while another thread stops the model."""


class Expected:
    """The tokens of each prompt with each of two sets of weights, of a model that nothing else uses."""

    def __init__(self, folder: Path) -> None:
        self.folders = [folder / "first", folder / "second"]
        models = [tiny(seed) for seed in (0, 1)]
        for path, model in zip(self.folders, models, strict=True):
            model.save_pretrained(path)
        self.answers = [[alone(model, prompt, LONGEST) for model in models] for prompt in PROMPTS]

    def check(self, prompt: int, tokens: Sequence[int], whole: int | None = None) -> None:
        """Check that tokens are of one set of weights; ``whole`` if so many must be there."""
        assert whole is None or len(tokens) == whole, f"{len(tokens)} tokens of {whole}"
        assert any(list(tokens) == answer[: len(tokens)] for answer in self.answers[prompt]), (prompt, tokens)

    def check_text(self, prompt: int, answer: Completion, stop: str) -> None:
        """Check that an answer ends before the first stop string, and is one of the two as far as it goes."""
        texts = ["".join(f"{token} " for token in whole).partition(stop)[0] for whole in self.answers[prompt]]
        assert any(text.startswith(answer.text or "") for text in texts), (prompt, answer)
        assert (answer.stop_reason == stop) == (answer.finish_reason == "stop")


class Planted:
    """Fails at its n-th call."""

    def __init__(self, error: type[BaseException], at: int) -> None:
        self._error, self._left = error, at

    def fail(self) -> None:
        self._left -= 1
        if self._left == 0:
            raise self._error("planted")

    def __call__(self, answer: list[int], logits: Tensor) -> Tensor:
        self.fail()
        return logits


class Streamer:
    """Calls something in the midst of an answer."""

    def __init__(self, call: Callable[[], Any], at: int) -> None:
        self._call, self._left = call, at

    def put(self, _: Any) -> None:
        self._left -= 1
        if self._left == 0:
            self._call()

    def end(self) -> None: ...


class Schedule:
    """One random schedule: a model with two engines, and the threads that use them."""

    def __init__(self, seed: int, expected: Expected) -> None:
        self._seed, self._expected = seed, expected
        self.done: Counter[str] = Counter()  # how often each kind of action ended, and how often it was refused
        draw = random.Random(seed)
        self._model: Any = wrapped(draw.choice((600, 1200, 4000)))
        self._rows = draw.choice((2, 6, 16))
        self._engines = [self._new_engine() for _ in range(draw.choice((1, 2)))]
        self._over = threading.Event()

    def _new_engine(self) -> Engine:
        return Engine(self._model, tokenizer=Numbers(fails_on=(17, 90)), max_num_seqs=self._rows)

    def run(self, actions: int) -> None:
        """Run so many actions a thread, and check what is left."""
        before, began = set(threading.enumerate()), time.monotonic()
        users = [start(lambda number=number: self._use(number, actions)) for number in range(THREADS)]
        stopper = start(self._stop)
        draw = random.Random(f"{self._seed}, main")
        while not all(user.done() for user in users) and time.monotonic() < began + PATIENCE:
            self._interrupted(draw)
        _await(users)
        self._over.set()
        _await([stopper])
        for future in (*users, stopper):
            future.result()
        _await([ending := start(self._end)])
        ending.result()
        self._check_threads(before)

    def _use(self, number: int, actions: int) -> None:
        draw = random.Random(f"{self._seed}, {number}")
        kinds = [
            *(self._submit, self._submit, self._submit_failing, self._listen_failing, self._text, self._cancel),
            *(self._generate, self._several, self._await, self._stream_into_model, self._criteria),
            *(self._keep, self._batch),
        ]
        for _ in range(actions):
            self._do(draw.choice(kinds), draw)

    def _stop(self) -> None:
        draw = random.Random(f"{self._seed}, stop")
        kinds = [self._sleep, self._sleep, self._update, self._update, self._pause, self._replace, self._look]
        while not self._over.wait(draw.random() * 0.2):
            self._do(draw.choice(kinds), draw)

    def _do(self, action: Callable[[random.Random], None], draw: random.Random) -> None:
        name = action.__name__.removeprefix("_")
        try:
            action(draw)
        except RuntimeError as error:
            if not any(refusal in str(error) for refusal in REFUSALS):
                raise
            name += ", refused"
        self.done[name] += 1

    def _interrupted(self, draw: random.Random) -> None:
        """Press Ctrl-C while this thread, the main one, does what users do."""
        main = threading.get_ident()
        timer = threading.Timer(draw.random() * 0.1, lambda: signal.pthread_kill(main, signal.SIGINT))
        action = draw.choice([self._submit, self._several, self._generate, self._criteria, self._text])
        try:
            try:
                timer.start()
                self._do(action, draw)
            finally:
                while timer.is_alive():
                    time.sleep(0.001)
                time.sleep(0.001)
        except KeyboardInterrupt:
            self.done["interrupted"] += 1
        timer.join()

    # ---- what users do

    def _engine(self, draw: random.Random) -> Engine:
        return draw.choice(self._engines)

    def _request(self, draw: random.Random, **settings: Any) -> tuple[int, int, SamplingParams]:
        number, length = draw.randrange(len(PROMPTS)), draw.randint(1, LONGEST)
        return number, length, greedy(length, **settings)

    def _check_result(self, handle: RequestHandle, number: int, length: int) -> None:
        try:
            handle.result(PATIENCE)
        except RequestError as error:  # of its processor, or of the tokenizer
            if "planted" not in str(error):
                raise
        self._check_answer(handle.output().outputs[0], number, length)

    def _check_answer(self, answer: Completion, number: int, length: int) -> None:
        assert answer.error is None or "planted" in str(answer.error), answer.error
        whole = length if answer.finish_reason == "length" else None
        self._expected.check(number, answer.token_ids, whole)

    def _submit(self, draw: random.Random) -> None:
        asked = [self._request(draw) for _ in range(draw.choice((1, 1, 4)))]
        engine, timeout = self._engine(draw), draw.choice((None, None, None, 0.02))
        handles = [
            engine.submit(PROMPTS[number], params, priority=draw.randrange(2), timeout=timeout)
            for number, _, params in asked
        ]
        for handle, (number, length, _) in zip(handles, asked, strict=True):
            self._check_result(handle, number, length)

    def _submitted(self, draw: random.Random, **settings: Any) -> tuple[RequestHandle, int, int]:
        number, length, params = self._request(draw, **settings)
        return self._engine(draw).submit(PROMPTS[number], params), number, length

    def _submit_failing(self, draw: random.Random) -> None:
        at = draw.randint(1, 20)
        self._check_result(*self._submitted(draw, logits_processors=[Planted(draw.choice(ERRORS), at)]))

    def _listen_failing(self, draw: random.Random) -> None:
        handle, number, length = self._submitted(draw)
        handle.when_changed(Planted(draw.choice(ERRORS), draw.randint(1, 5)).fail)
        self._check_result(handle, number, length)

    def _text(self, draw: random.Random) -> None:
        number, length, _ = self._request(draw)
        token = draw.choice(draw.choice(self._expected.answers[number]))
        stop = draw.choice((None, f"{token} ", f"{token} ", "never"))
        handle = self._engine(draw).submit(PROMPTS[number], greedy(length, stop=stop))
        with contextlib.suppress(RequestError):
            text = "".join(handle.text()) if draw.random() < 0.5 else asyncio.run(_text_of(handle))
            assert text == handle.result(PATIENCE).text
            self._expected.check_text(number, handle.output().outputs[0], stop or "never")
        self._check_result(handle, number, length)

    def _cancel(self, draw: random.Random) -> None:
        handle, number, length = self._submitted(draw)
        for count, _ in enumerate(handle):
            if count == draw.randrange(8):
                handle.cancel()
        self._check_result(handle, number, length)

    def _several(self, draw: random.Random) -> None:
        asked = [self._request(draw) for _ in range(3)]
        bad = self._request(draw, logits_processors=[Planted(draw.choice(ERRORS), 3)])
        prompts, params = zip(*((PROMPTS[number], params) for number, _, params in (*asked, bad)), strict=True)
        outputs = self._engine(draw).generate(list(prompts), list(params))
        for output, (number, length, _) in zip(outputs, asked, strict=False):
            self._check_answer(output.outputs[0], number, length)

    def _await(self, draw: random.Random) -> None:
        patience = draw.choice((PATIENCE, 0.005))

        async def ask() -> tuple[RequestHandle, int, int]:
            submitted = self._submitted(draw)
            with contextlib.suppress(asyncio.TimeoutError, RequestError):
                await asyncio.wait_for(submitted[0]._ended(), patience)
            return submitted

        self._check_result(*asyncio.run(ask()))

    def _generate(self, draw: random.Random, **options: Any) -> None:
        number, length, _ = self._request(draw)
        self._expected.check(number, alone(self._model, PROMPTS[number], length, **options), length)

    def _criteria(self, draw: random.Random) -> None:
        def stop(ids: Tensor, scores: Any) -> Tensor:
            return torch.zeros(len(ids), dtype=torch.bool)

        self._generate(draw, stopping_criteria=[stop])

    def _batch(self, draw: random.Random) -> None:
        """Rows of different prompts, some of them drawn; whether tokens are right only greedy ones show."""
        rows, length = draw.randint(1, 4), draw.randint(1, LONGEST)
        ids = torch.tensor([PROMPTS[2]] * rows)
        options: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "max_new_tokens": length}
        for row in self._model.generate(ids, do_sample=False, **options)[:, 3:].tolist():
            self._expected.check(2, row, length)
        assert self._model.generate(ids, do_sample=True, **options).shape == (rows, 3 + length)

    def _keep(self, draw: random.Random) -> None:
        """Hold a cache for a while, which keeps its pages from all others."""
        with torch.no_grad():
            kept = self._model(torch.tensor([PROMPTS[0]])).past_key_values
        time.sleep(draw.random() * 0.05)
        del kept

    def _stream_into_model(self, draw: random.Random) -> None:
        def forward(draw: random.Random) -> None:
            with torch.no_grad():
                self._model(torch.tensor([PROMPTS[0]]), use_cache=False)

        def elsewhere(draw: random.Random) -> None:
            _await([inside := start(lambda: self._generate(draw))])
            inside.result()

        inner = draw.choice((forward, self._generate, elsewhere, self._submit, self._several))
        self._generate(draw, streamer=Streamer(lambda: self._do_inside(inner, draw), draw.randint(2, 6)))

    def _do_inside(self, action: Callable[[random.Random], None], draw: random.Random) -> None:
        try:
            action(draw)
        except (RuntimeError, ValueError) as error:
            if not any(refusal in str(error) for refusal in (*REFUSALS, "pages of 4 tokens")):
                raise

    # ---- what stops the model

    def _sleep(self, draw: random.Random) -> None:
        engine = self._engine(draw)
        try:
            engine.sleep(requests=draw.choice(("park", "end")), weights=draw.random() < 0.5)
            time.sleep(draw.random() * 0.05)
            if draw.random() < 0.3:
                engine.update_weights(draw.choice(self._expected.folders), requests="end")
        finally:
            engine.wake()

    def _update(self, draw: random.Random) -> None:
        folder = draw.choice(self._expected.folders)
        self._engine(draw).update_weights(folder, requests=draw.choice(("wait", "end")))

    def _pause(self, draw: random.Random) -> None:
        with self._engine(draw).paused(weights_stay=draw.random() < 0.5):
            if draw.random() < 0.5:
                number = draw.randrange(len(PROMPTS))
                self._expected.check(number, alone(self._model, PROMPTS[number], 4), 4)
            time.sleep(draw.random() * 0.02)

    def _replace(self, draw: random.Random) -> None:
        place = draw.randrange(len(self._engines))
        old, self._engines[place] = self._engines[place], self._new_engine()
        old.close()

    def _look(self, draw: random.Random) -> None:
        self._engine(draw).stats()
        self._engine(draw).reset_prefix_cache()

    # ---- what is left

    def _end(self) -> None:
        (output,) = self._engines[0].generate(PROMPTS[2], greedy(4))
        self._expected.check(2, output.token_ids, 4)
        self._expected.check(2, alone(self._model, PROMPTS[2], 4), 4)
        for engine in self._engines:
            self._let_end(engine)
            stats = engine.stats()
            assert (stats.running, stats.waiting) == (0, 0)
            engine.close()
        gc.collect()  # the traceback of a Ctrl-C may hold a cache in a circle
        if self._model.compiled.stats().pages.used:
            _print_who_keeps_pages()
        assert_account_is_empty(self._model)

    def _let_end(self, engine: Engine) -> None:
        """Wait for requests that went on when Ctrl-C had ended the wait for them."""
        deadline = time.monotonic() + PATIENCE
        while engine._engine_thread.request_table and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not engine._engine_thread.request_table

    def _check_threads(self, before: set[threading.Thread]) -> None:
        deadline = time.monotonic() + 20
        while (left := _ours() - before) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not left


def _print_who_keeps_pages() -> None:
    for row in (found for found in gc.get_objects() if isinstance(found, Row) and found.pages):
        print(f"{row} is kept by")
        for keeper in gc.get_referrers(row):
            keepers = [str(outer)[:150] for outer in gc.get_referrers(keeper)[:6]]
            print(f"    {type(keeper).__name__}: {str(keeper)[:200]}, which {keepers} keep")


async def _text_of(handle: RequestHandle) -> str:
    return "".join([piece async for piece in handle.text()])


def _ours() -> set[threading.Thread]:
    names = ("compiled_llm engine", "compiled_llm output")
    return {thread for thread in threading.enumerate() if thread.name in names}


def _await(futures: list[Future[Any]]) -> None:
    """Wait for threads; say where all of them are if they do not end, or if one has failed."""
    _, left = wait(futures, PATIENCE)
    if left:
        faulthandler.dump_traceback(sys.__stderr__, all_threads=True)
        failed = [future.exception() for future in futures if future.done() and future.exception() is not None]
        raise TimeoutError(f"{len(left)} of {len(futures)} threads hang; their stacks are printed; others: {failed}")
