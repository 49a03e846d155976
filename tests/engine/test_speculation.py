"""An engine that guesses tokens: the same tokens as without, whatever is guessed, comes, goes and runs out."""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings, strategies as st
from hypothesis.stateful import initialize
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from compiled_llm.compilation.drafts import DrafterError
from compiled_llm.compilation.sampling.sampling import NOT_A_TOKEN
from compiled_llm.engine.draft_stats import DraftStats
from compiled_llm.engine.drafts import engine_drafts
from compiled_llm.engine.drafts.config import check_model
from compiled_llm.engine.engine import Engine
from compiled_llm.engine.steps.loop import Loop
from compiled_llm.engine.steps.plan import StepPlan
from compiled_llm.engine.steps.request import Request
from compiled_llm.execution.accepted import AcceptedTokens
from compiled_llm.execution.batch import Batch, Drafting, StepOutput
from compiled_llm.execution.drafts import texts
from compiled_llm.execution.drafts.ngram import NgramDrafter
from compiled_llm.execution.drafts.part import Drafts
from compiled_llm.execution.growth import grown
from compiled_llm.execution.state.staging import AREAS, Readback, Staging
from compiled_llm.kvcache import memory
from compiled_llm.kvcache.row import Row, reject
from compiled_llm.requests.outputs import RequestOutput
from compiled_llm.requests.sampling_params import SamplingParams
from compiled_llm.server.engine_process.facts import stats_of
from compiled_llm.server.openai.metrics import _EngineCollector
from support.commands.command_line import invoke
from support.engine.crowd import VOCABULARY, Crowd, NaiveDevice, PoisonedPool, next_token
from support.engine.tiny_engines import greedy, wrapped
from support.engine.unread_launches import check_launched, launch_unread, paused_amid
from support.execution.drafters import KINDS, Kind, knowing, let_sizes_turn
from support.execution.stand_in_cuda_graphs import let_a_cpu_capture
from support.noting import note_calls
from support.parity import assert_account_is_empty

pytestmark = pytest.mark.core

NOT_ACCEPTED = -2


# ---- any guesses, over a naive device


class NaiveDrafting:
    """Asks for a step of ``new_tokens`` a row."""

    wants = ()

    def __init__(self, new_tokens: int, device: DraftingDevice) -> None:
        self.new_tokens, self._device = new_tokens, device

    def entering(self, rows: Sequence[Row]) -> None: ...

    def read(self, accepted: Any) -> list[list[int]]:
        self._device.drafted += 1
        accepted.sync()
        runs: list[list[int]] = accepted.result()
        return runs


class DraftingDevice(NaiveDevice):
    """A naive device that guesses, and alone knows how long its rows are.

    Attributes:
        right: of 4 guesses, about so many are right.
    """

    right = 2

    def __init__(self, pool: PoisonedPool, max_rows: int) -> None:
        super().__init__(pool, max_rows)
        self.exact: dict[Row, int] = {}
        self.drafted = 0

    def run(self, batch: Batch, persistent: Any) -> StepOutput:
        for row in batch.decode:
            self.exact.setdefault(row, row.length_at_most)
        for entry in batch.extend:
            assert isinstance(entry.row, Row)
            self.exact.setdefault(entry.row, entry.row.length_at_most)
        new = 1 if batch.drafting is None else batch.drafting.new_tokens
        if new == 1:
            return self._plain(batch, persistent)
        decoded = self._drafted(batch.decode, new)
        accepted: Any = NaiveAccepted(batch.decode, self.readbacks.start(decoded), new)
        self._note_unsampled(persistent)
        if not batch.extend:
            return StepOutput(batch.decode, None, decoded, accepted=accepted)  # type: ignore[arg-type]
        earlier, self.unsampled = self.unsampled, []
        extended = self._plain(batch._replace(decode=()), persistent)
        self.unsampled = [*earlier, *self.unsampled]
        self._note_unsampled(persistent)
        tokens: Any = [*decoded, *extended.tokens]
        return StepOutput([*batch.decode, *extended.rows], None, tokens, accepted=accepted)

    def _plain(self, batch: Batch, persistent: Any) -> StepOutput:
        for row in batch.decode:
            self.exact[row] += 1
        for entry in batch.extend:
            assert isinstance(entry.row, Row)
            self.exact[entry.row] += len(entry.ids)
        return super().run(batch, persistent)

    def _drafted(self, rows: Sequence[Row], new: int) -> list[int]:
        self.fault("run")
        assert not self.unsampled, "the rows of an earlier step have no tokens yet"
        with grown(rows, [new] * len(rows), None, self._copies):
            runs = [self._run_of(row, new) for row in rows]
            self.fault("ran")
        return [token for run in runs for token in run]

    def _run_of(self, row: Row, new: int) -> list[int]:
        """Feed in the next token and guesses; return what was sampled, ``NOT_ACCEPTED`` for what does not count."""
        assert row.slot is not None, "a row runs without a slot"
        sampling, _ = self.slots[row.slot]
        start, tokens = self.exact[row], list[int]()
        fed = [self.next[row], *self._guesses(row, new)]
        assert row.length_at_most >= start + new, "the host's length is an upper bound"
        size = self.pool.page_size
        for at, token in enumerate(fed, start=start):
            page = row.pages[at // size]
            assert self.pool._owners[page] == 1, "a row guesses into a page that others read"
            self.pool.memory[page][at % size] = max(0, token), self.version
        deferred = sampling is not None and sampling.deferred
        for at in range(new):
            self.exact[row] = start + at + 1
            tokens.append(self._now_or_late(row))
            if deferred or tokens[-1] == NOT_A_TOKEN or at + 1 == new or fed[at + 1] != tokens[-1]:
                break
        row.position_at_most = row.length_at_most
        if not deferred:
            self.next[row] = max(0, tokens[-1])
        return tokens + [NOT_ACCEPTED] * (new - len(tokens))

    def _guesses(self, row: Row, new: int) -> list[int]:
        assert row.slot is not None
        sampling, seen = self.slots[row.slot]
        text, counted, guesses = [*self.text(row), self.next[row]], [*seen], list[int]()
        for at in range(new - 1):
            token = max(0, next_token(text, sampling, counted))
            if zlib.crc32(bytes([*text, at])) % 4 >= self.right:
                token = (token + 1) % VOCABULARY
            text.append(token)
            counted.append(token)
            guesses.append(token)
        return guesses

    def text(self, row: Row) -> list[int]:
        bound, row.length_at_most = row.length_at_most, self.exact.get(row, row.length_at_most)
        try:
            return super().text(row)
        finally:
            row.length_at_most = bound

    def _write(self, row: Row, ids: Sequence[int]) -> None:
        bound, row.length_at_most = row.length_at_most, self.exact[row]
        try:
            super()._write(row, ids)
        finally:
            row.length_at_most = bound


class NaiveAccepted:
    """What counts of a step, which the host has not read."""

    def __init__(self, rows: Sequence[Row], readback: Any, new_tokens: int) -> None:
        self.rows, self._readback, self.new_tokens, self._synced = rows, readback, new_tokens, False
        self.arrived = readback.arrived
        for row in rows:
            row.speculation.unread += (self,)

    def result(self) -> list[list[int]]:
        tokens = self._readback.result()
        starts = range(0, len(self.rows) * self.new_tokens, self.new_tokens)
        return [[token for token in tokens[at : at + self.new_tokens] if token != NOT_ACCEPTED] for at in starts]

    def sync(self) -> None:
        if not self._synced:
            reject(self, self.rows, [len(run) for run in self.result()])
            self._synced = True


class NaiveDrafts:
    """The guesses of a loop, whose number of tokens a row changes now and then."""

    def __init__(self, numbers: Sequence[int], device: DraftingDevice) -> None:
        self._numbers, self._device = numbers, device
        self._drafting = {number: NaiveDrafting(number, device) for number in {*numbers}}

    def new_tokens(self, requests: Sequence[Request], step: int) -> int:
        if all(request.constraint is not None for request in requests):
            return 1
        return self._numbers[self._device.drafted // 3 % len(self._numbers)]

    def drafting(self, plan: StepPlan) -> Drafting:
        return self._drafting[plan.new_tokens]


class Guessing(Crowd):
    """Requests that come and go while tokens are guessed."""

    @initialize(
        pages=st.integers(6, 20),
        size=st.integers(1, 4),
        rows=st.integers(1, 5),
        budget=st.integers(1, 12),
        caches=st.booleans(),
        late=st.booleans(),
        policy=st.sampled_from(["greedy", "greedy", "peak", "auto"]),
        numbers=st.lists(st.sampled_from([1, 2, 4, 8]), min_size=1, max_size=3),
        right=st.integers(0, 4),
        positions=st.sampled_from([10_000, 30]),
    )
    def start(self, pages, size, rows, budget, caches, late, policy, numbers, right, positions):  # type: ignore[no-untyped-def, override]
        self.numbers, self.right, self.positions = numbers, right, positions
        super().start(pages, size, rows, budget, caches, late, policy)

    def device_of(self, pool: PoisonedPool, slots: int) -> DraftingDevice:
        device = DraftingDevice(pool, slots)
        device.right = self.right
        return device

    def drafting(self) -> dict[str, Any]:
        assert isinstance(self.device, DraftingDevice)
        self.drafts = NaiveDrafts(self.numbers, self.device)
        return {"new_tokens": self.drafts.new_tokens, "max_positions": self.positions}


class TestGuessing(Guessing.TestCase):  # type: ignore[misc]
    settings = settings(derandomize=True, deadline=None, max_examples=25, stateful_step_count=30)


@pytest.mark.whole
class TestLargeGuessing(Guessing.TestCase):  # type: ignore[misc]
    settings = settings(deadline=None, max_examples=1000, stateful_step_count=80, database=None)


# ---- a real engine


NGRAMS = {"method": "ngram", "num_speculative_tokens": 7}
Asked = Sequence[tuple[list[int], SamplingParams]]


def drawn(tokens: int, seed: int, **others: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.9, "max_tokens": tokens, "ignore_eos": True, "seed": seed, **others})


def asked_for(seed: int) -> Asked:
    """Requests with each setting; texts of few tokens repeat themselves. First tokens differ."""
    few = [20, 21, 22, 23, 24]
    settings = [
        *(greedy(24), greedy(1), greedy(2), greedy(3), greedy(30, logprobs=2)),
        *(drawn(24, seed), drawn(24, seed, top_p=0.8, logprobs=3), drawn(24, seed, top_k=3), drawn(9, seed, min_p=0.2)),
        *(greedy(24, logprob_token_ids=[22, 90, 20]), drawn(9, seed, logprob_token_ids=[7])),
        *(drawn(24, seed, repetition_penalty=1.4), drawn(24, seed, presence_penalty=0.7, frequency_penalty=0.4)),
        *(drawn(24, seed, logit_bias={20: 2.0}), drawn(24, seed, allowed_token_ids=few)),
        drawn(24, seed, allowed_token_ids=few, stop_token_ids=[22], min_tokens=5),
        drawn(24, seed, allowed_token_ids=few, stop_token_ids=[23]),
        greedy(24, prompt_logprobs=1),
    ]
    return [([40 + number, *few[: number % 4 + 1] * 3], own) for number, own in enumerate(settings)]


def answered(model: Any, asked: Asked, config: dict[str, Any] | None = None, **options: Any) -> list[RequestOutput]:
    prompts, params = [prompt for prompt, _ in asked], [own for _, own in asked]
    with Engine(model, max_num_seqs=8, speculative_config=config, **options) as engine:
        outputs = engine.generate(prompts, params)
        if config is not None:
            drafts = engine.stats().drafts
            assert drafts is not None
            assert drafts.accepted_tokens == sum(drafts.accepted_per_position) <= drafts.draft_tokens
    assert_account_is_empty(model)
    return outputs


def assert_same(outputs: Sequence[RequestOutput], expected: Sequence[RequestOutput]) -> None:
    for own, other in zip(outputs, expected, strict=True):
        assert (own.token_ids, own.finish_reason, own.stop_reason) == (
            *(other.token_ids, other.finish_reason, other.stop_reason),
        )
        for ours, theirs in ((own.outputs[0].logprobs, other.outputs[0].logprobs), (own.prompt_logprobs,) * 2):
            assert (ours is None) == (theirs is None)
            for one, another in zip(ours or (), theirs or (), strict=True):
                assert (one or {}).keys() == (another or {}).keys()
                for token, logprob in (one or {}).items():
                    assert logprob.logprob == pytest.approx((another or {})[token].logprob, abs=1e-4)


def let_it_know(monkeypatch: pytest.MonkeyPatch, model: Any, outputs: Sequence[RequestOutput], kind: Kind) -> None:
    """Have engines guess by the answers; a drafter of another name has graphs of its own."""
    texts = [[*output.prompt_token_ids, *output.token_ids] for output in outputs]

    def made(*given: Any, heard: Any) -> Drafts:
        *others, _, _ = given
        return Drafts(*others, knowing(model, texts, kind), kind, heard=heard)

    monkeypatch.setattr(engine_drafts, "Drafts", made)


@pytest.mark.drawn(most=2)
@pytest.mark.usefixtures("one_thread", "reading")
@pytest.mark.parametrize("kind", [None, *KINDS])
def test_guesses_change_no_token(kind: Kind | None, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, asked = wrapped(max_batch_size=8), asked_for(seed)
    expected = answered(model, asked)
    if kind is not None:
        let_it_know(monkeypatch, model, expected, kind)
        let_sizes_turn(monkeypatch)
    assert_same(answered(model, asked, NGRAMS), expected)


@pytest.mark.usefixtures("one_thread", "reading")
def test_a_pool_of_what_plain_steps_need_is_enough_and_nobody_loses_pages(seed: int) -> None:
    """Guesses take what is free, and near its end a request runs in plain steps."""
    prompt, tokens = [40, 20, 21, 20, 21, 20], 30
    model = wrapped(len(prompt) + tokens - 1)
    ((expected,), (output,)) = (answered(model, [(prompt, greedy(tokens))], config) for config in (None, NGRAMS))
    assert_same([output], [expected])


@pytest.mark.drawn(most=1)
@pytest.mark.usefixtures("one_thread", "reading")
@pytest.mark.parametrize("tokens", [60, 100])
def test_requests_that_lose_their_pages_go_on_with_the_same_tokens(tokens: int, seed: int) -> None:
    model = wrapped(tokens, max_batch_size=8)
    asked = [(prompt, own) for prompt, own in asked_for(seed) if own.logprobs is None and own.prompt_logprobs is None]
    expected = answered(model, asked, admission="greedy")
    assert_same(answered(model, asked, NGRAMS, admission="greedy"), expected)


@pytest.mark.usefixtures("one_thread", "reading")
def test_what_the_prefix_cache_keeps_is_what_plain_steps_have_written(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chats that go on from answers, whose pages have guesses that were wrong."""
    model, asked = wrapped(max_batch_size=8), asked_for(seed)[:6]
    first = answered(model, asked)
    more = [([*prompt, *output.token_ids, 9, 8], greedy(12)) for (prompt, _), output in zip(asked, first, strict=True)]
    expected = answered(model, more)
    let_it_know(monkeypatch, model, first, "right now and then")
    let_sizes_turn(monkeypatch)
    with Engine(model, max_num_seqs=8, speculative_config=NGRAMS) as engine:
        assert_same(engine.generate(*map(list, zip(*asked, strict=True))), first)
        outputs = engine.generate(*map(list, zip(*more, strict=True)))
    assert_same(outputs, expected)
    assert sum(output.cached_tokens for output in outputs) > sum(len(prompt) for prompt, _ in asked)
    assert_account_is_empty(model)


@pytest.mark.whole
@pytest.mark.usefixtures("one_thread", "reading")
def test_pages_of_a_second_pass_are_those_without_guesses(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests whose texts begin in the prefix cache, and go on beyond it, guess; all of their pages are read back."""
    model, asked = wrapped(max_batch_size=8, page_size=3), asked_for(seed)[3:9]
    first = answered(model, asked)
    more = [([*prompt, *output.token_ids, 9, 8], own) for (prompt, own), output in zip(asked, first, strict=True)]
    let_sizes_turn(monkeypatch)
    stored: list[list[Tensor]] = []
    for config in (None, NGRAMS):
        with Engine(model, max_num_seqs=8, speculative_config=config) as engine:
            engine.generate(*map(list, zip(*asked, strict=True)))
            outputs = engine.generate(*map(list, zip(*more, strict=True)))
            assert all(
                output.cached_tokens > len(prompt) - 7 for output, (prompt, _) in zip(outputs, more, strict=True)
            )
            texts = [[*output.prompt_token_ids, *output.token_ids][:-1] for output in outputs]
            stored.append([pages for text in texts for pages in pages_of(model, text)])
    assert len(stored[0]) == 2 * len(more), "keys and values of one layer"
    for own, other in zip(*stored, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5)
    assert_account_is_empty(model)


def pages_of(model: Any, text: list[int]) -> list[Tensor]:
    """Return what the prefix cache has of a text, of each layer, ``[K, T, D]`` keys and values: all full pages."""
    runner = model.compiled.model_runner()
    row = Row(runner.pool, 0)
    row.begin_from(runner.prefixes.match(np.array(text)).pages)
    assert row.length_at_most > len(text) - 2 * runner.config.page_size, "all of it but the last page"
    found = [part for layer in range(len(runner.state.specs)) for part in runner.state.read(layer, row)]
    row.free()
    return found


@pytest.mark.usefixtures("one_thread", "reading")
def test_requests_that_the_host_constrains_run_beside_others(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def odd(tokens: list[int], logits: Any) -> Any:
        logits[::2] = -float("inf")
        return logits

    model, asked = wrapped(max_batch_size=8), list(asked_for(seed)[5:9])
    asked[1:1] = [([60, 20, 21, 20], drawn(20, seed, logits_processors=[odd]))]
    asked += [([61, 20, 21, 20], greedy(5, logits_processors=[odd], logprobs=1))]
    expected = answered(model, asked)
    let_it_know(monkeypatch, model, expected, "right")
    assert_same(answered(model, asked, NGRAMS), expected)


@pytest.mark.usefixtures("one_thread", "reading")
def test_hidden_states_are_those_of_plain_steps(seed: int) -> None:
    model = wrapped()
    found = []
    for config in (None, NGRAMS):
        with Engine(model, speculative_config=config) as engine:
            handle = engine.submit([5, 6, 5, 6, 5], greedy(12), hidden_states=[-1])
            found.append((handle.result(), engine.submit([5, 6, 5], greedy(4)).result().token_ids))
    (plain, other), (ours, again) = found
    assert (ours.token_ids, again) == (plain.token_ids, other)
    assert ours.hidden_states is not None
    assert plain.hidden_states is not None
    assert ours.hidden_states[-1].equal(plain.hidden_states[-1])


@pytest.mark.usefixtures("one_thread", "reading")
def test_a_cancelled_request_keeps_tokens_that_are_its_own(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = wrapped()
    (expected,) = answered(model, [([40, 20, 21], greedy(200))])
    let_it_know(monkeypatch, model, [expected], "right")
    with Engine(model, speculative_config=NGRAMS) as engine:
        handle = engine.submit([40, 20, 21], greedy(200))
        for number, _ in enumerate(handle):
            if number == 20:
                break
        handle.cancel()
        tokens = handle.result().token_ids
        assert 20 < len(tokens) <= 200
        assert tokens == expected.token_ids[: len(tokens)]
    assert_account_is_empty(model)


@pytest.mark.usefixtures("one_thread", "reading")
def test_a_drafter_that_raises_ends_requests_with_its_name_and_later_ones_go_on(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Any:
        raise KeyError("no text")

    model, prompt = wrapped(), [5, 6, 5, 6, 5]
    expected = answered(model, [(prompt, greedy(12))])[0].token_ids
    let_sizes_turn(monkeypatch)
    with Engine(model, speculative_config=NGRAMS) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(NgramDrafter, "propose", fails)
            with pytest.raises(DrafterError, match="the drafter NgramDrafter has raised KeyError: 'no text'"):
                engine.generate([prompt], greedy(12))
        assert engine.generate([prompt], greedy(12))[0].token_ids == expected
    assert_account_is_empty(model)


@pytest.mark.whole
@pytest.mark.usefixtures("one_thread")
def test_launches_wait_for_nothing_while_rows_come_and_go(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU whose device sleeps: nine launches follow each other, and nobody reads one."""
    monkeypatch.setattr(Loop, "asynchronous", True)
    let_sizes_turn(monkeypatch)
    model = wrapped()
    asked = [([40 + number, 20, 21, 20, 21, 20], greedy(120)) for number in range(4)]
    expected = answered(model, asked)
    for rows in (2, 3):  # to compile what a step needs writes the buffers
        answered(model, asked[:rows], NGRAMS)
    with Engine(model, max_num_seqs=3, speculative_config=NGRAMS) as engine:
        with paused_amid(engine, asked, 3, 8) as (loop, handles), model.compiled.loop_lock.taken():
            with monkeypatch.context() as patch:
                of_all = ((AcceptedTokens, "sync"), (Readback, "array"), (Readback, "result"))
                waits = [note_calls(patch, owner, name, lambda own: own) for owner, name in of_all]
                uploads = [note_calls(patch, Staging, name, lambda own, *_: own) for name in ("upload", "to_device")]
                launched = launch_unread(loop, handles[1].requests[0])
            assert not any(waits)
            assert sum(map(len, uploads)) <= AREAS, "on a GPU one more waits for the first"
        check_launched(launched, 3)
        for number in (0, 2, 3):
            assert handles[number].result(60).token_ids == expected[number].token_ids
    assert_account_is_empty(model)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("ngram", "speculative_config='ngram': give a dictionary"),
        ({"method": "eagle"}, "method='eagle'; give \"ngram\""),
        ({"method": "ngram", "model": "x"}, "there is no 'model'; it has method"),
        ({"method": "ngram", "num_speculative_tokens": 8}, "num_speculative_tokens=8; give 1 to 7"),
        ({"method": "ngram", "num_speculative_tokens": "two"}, "num_speculative_tokens='two'; give a whole number"),
        ({"method": "ngram", "prompt_lookup_min": 0}, "prompt_lookup_min=0; give 1 or more"),
        ({"method": "ngram", "prompt_lookup_min": 3, "prompt_lookup_max": 2}, "prompt_lookup_min=3 with prompt_lookup"),
    ],
)
def test_what_cannot_be_is_refused(given: Any, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        Engine(wrapped(), speculative_config=given)


@pytest.mark.parametrize(
    ("options", "said"),
    [({"batch_invariant": True, "mode": "compile"}, "batch_invariant=True"), ({"backend": "flashinfer"}, "flashinfer")],
)
def test_options_of_wrap_that_plan_or_add_otherwise_are_refused(options: Any, said: str) -> None:
    kinds = wrapped().compiled.facts.kinds
    with pytest.raises(ValueError, match=rf"speculative_config with a model that is wrapped with .*{said}"):
        check_model(options.get("backend", "auto"), options.get("batch_invariant", False), kinds)


@pytest.mark.parametrize("runs", [False, True])
def test_too_little_memory_for_texts_is_refused_before_anything_changes(
    runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With bytes; the model may have pages already."""
    model = wrapped()
    lifecycle = model.compiled.runner_lifecycle
    if runs:
        model.compiled.model_runner()
    for module in (texts, memory):
        monkeypatch.setattr(module, "free_bytes", lambda device: 1000)
    before, rows = lifecycle.present, lifecycle.rows
    with pytest.raises(
        ValueError, match=r"speculative_config: the texts .* take \d{4,} bytes, and 1000 are left on cpu"
    ):
        Engine(model, max_num_seqs=rows + 2 * (not runs), speculative_config=NGRAMS)
    assert (lifecycle.present, lifecycle.rows) == (before, rows)
    Engine(model).close()


def test_counts_of_several_loops_add_up() -> None:
    one, other = DraftStats.of([3, 0, 2], [2, 0, 0], 3), DraftStats.of([7], [7], 7)
    assert one == (2, 5, 2, (1, 1, 0))
    assert one.plus(other) == other.plus(one) == (3, 12, 9, (2, 2, 1, 1, 1, 1, 1))


@pytest.mark.whole
@pytest.mark.usefixtures("without_inductor")
def test_warmup_prepares_steps_that_guess(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Of each number of tokens, for the sizes that are asked for; requests then prepare nothing."""
    let_a_cpu_capture(monkeypatch)
    let_sizes_turn(monkeypatch)
    model, said = wrapped(mode="cuda-graphs", max_batch_size=2), list[str]()
    with Engine(model, max_num_seqs=2, speculative_config=NGRAMS) as engine:
        engine.warmup([1, 2], report=said.append)
        before = engine.stats()
        engine.generate([[5, 6, 5, 6, 5]], greedy(20))
        engine.generate([[5, 6, 5, 6, 5]] * 2, greedy(20))
        after = engine.stats()
    assert [line for line in said if "tokens each" in line] == [
        f"preparing steps of {rows} requests with {new} tokens each" for rows in (1, 2) for new in (2, 4, 8)
    ]
    assert after.drafts is not None
    assert after.drafts.drafts > 0
    assert (after.cold_starts, after.cuda_graphs) == (before.cold_starts, before.cuda_graphs)


SENTENCES = (
    "{} is a word. I like the word {}. {} is a word. I like the word",
    "{'name': '{}', 'kind': 'thing'}, {'name': '{}s', 'kind': 'thing'}, {'name': '{}",
    "Buy one {}, buy two {}s, buy one {}, buy two",
    "- the {} is red\n- the {} is blue\n- the {} is red\n- the",
    "def {}(a, b):\n    return a + b\n\ndef other_{}(a, b):\n    return a +",
)
WORDS = "house", "river", "pencil", "garden", "doctor", "window", "summer", "letter"


@pytest.mark.whole
def test_guesses_of_real_text_are_accepted(demo_model_dir: Path) -> None:
    """SmolLM2 goes on with forty texts that repeat themselves."""
    tokenizer = AutoTokenizer.from_pretrained(demo_model_dir)
    model = wrapped(8000, AutoModelForCausalLM.from_pretrained(demo_model_dir, dtype=torch.float32), max_batch_size=8)
    texts = [sentence.replace("{}", word) for sentence in SENTENCES for word in WORDS]
    asked = [(tokenizer(text)["input_ids"], greedy(12)) for text in texts]
    assert len(asked) == 40
    with Engine(model, max_num_seqs=8, speculative_config=NGRAMS) as engine:
        outputs = engine.generate(*map(list, zip(*asked, strict=True)))
        drafts = engine.stats().drafts
    assert drafts is not None
    print(drafts)
    assert drafts.accepted_tokens > 0
    assert drafts.accepted_per_position[0] > len(asked)
    with Engine(model, max_num_seqs=8) as engine:
        assert_same(outputs, engine.generate(*map(list, zip(*asked, strict=True))))
    assert_account_is_empty(model)


def test_metrics_have_the_names_of_vllms(seed: int) -> None:
    with Engine(wrapped(), speculative_config=NGRAMS) as engine:
        engine.generate([[5, 6, 5, 6, 5]], drawn(30, seed, allowed_token_ids=[5, 6]))
        drafts, stats = engine.stats().drafts, stats_of(engine, number=1, connections=0)
    assert drafts is not None
    assert drafts.draft_tokens > 0
    families = {family.name: family for family in _EngineCollector(stats).collect()}
    names = "num_drafts", "num_draft_tokens", "num_accepted_tokens"
    values = [families[f"compiled_llm_spec_decode_{name}"].samples[0].value for name in names]
    assert values == [drafts.drafts, drafts.draft_tokens, drafts.accepted_tokens]
    of_places = families["compiled_llm_spec_decode_num_accepted_tokens_per_pos"].samples
    assert [(sample.labels["position"], sample.value) for sample in of_places] == [
        (str(place), count) for place, count in enumerate(drafts.accepted_per_position)
    ]


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("ngram", "--speculative-config ngram: is no JSON"),
        ('{"method": "eagle"}', "--speculative-config: method='eagle'; give \"ngram\""),
        ('{"method": "ngram", "num_speculative_tokens": 0}', "--speculative-config: num_speculative_tokens=0; give 1"),
    ],
)
def test_the_server_refuses_before_it_loads(typed: str, said: str) -> None:
    done = invoke("serve", "demo", "--speculative-config", typed)
    assert (done.exit_code, done.stdout) == (2, "")
    assert said in done.stderr
