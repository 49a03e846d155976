"""A prompt's step after a step with drafts that nobody has read: positions are those of the tokens that count."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from compiled_llm.engine.engine import Engine
from compiled_llm.engine.loop_settings import Mixed
from compiled_llm.engine.steps.loop import Loop
from compiled_llm.execution.prefill.launches import PrefillLaunches
from compiled_llm.execution.prefill.packing import PrefillChunk
from compiled_llm.requests.outputs import RequestOutput
from support.engine.tiny_engines import PATIENCE, greedy, huggingfaces, wrapped
from support.execution.drafters import let_sizes_turn
from support.parity import assert_account_is_empty

pytestmark = pytest.mark.usefixtures("one_thread")

NGRAMS = {"method": "ngram", "num_speculative_tokens": 3}
TOKENS = 40


def answered(prompts: Sequence[list[int]], mixed: Mixed, drafts: bool) -> list[RequestOutput]:
    """Answer the first prompt, and each time that it has some more tokens another one beside it; then go on with it."""
    model = wrapped(max_batch_size=8)
    with Engine(model, max_num_seqs=8, mixed=mixed, speculative_config=NGRAMS if drafts else None) as engine:
        first, others = engine.submit(prompts[0], greedy(TOKENS)), list(prompts[1:])
        handles = [first]
        for count, _ in enumerate(first):
            if count % 3 == 0 and others:
                handles.append(engine.submit(others.pop(), greedy(2)))
        outputs = [handle.result(PATIENCE) for handle in handles]
        text = [*outputs[0].prompt_token_ids, *outputs[0].token_ids]
        again = engine.submit([*text, 9, 8], greedy(8)).result(PATIENCE)  # begins with pages of the first answer
        assert again.cached_tokens > len(text) - 6
        stats = engine.stats()
        assert not mixed or stats.mixed_steps
        assert stats.drafts is None or stats.drafts.draft_tokens > stats.drafts.accepted_tokens
    assert_account_is_empty(model)
    return [*outputs, again]


@pytest.mark.parametrize("mixed", [True, False])
def test_prompts_beside_drafts_change_no_token(mixed: Mixed, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Loop, "asynchronous", property(lambda _: True))  # as on CUDA: steps are read one late
    let_sizes_turn(monkeypatch)
    chance = random.Random(seed)
    prompts = [[chance.randrange(3, 90) for _ in range(3)] * 4]
    prompts += np.random.default_rng(seed).integers(3, 90, (10, 9)).tolist()
    expected, outputs = (answered(prompts, mixed, drafts) for drafts in (False, True))
    for output in [*expected, *outputs]:
        assert list(output.token_ids) == huggingfaces(output.prompt_token_ids, len(output.token_ids))
    assert list(outputs[0].token_ids) == list(expected[0].token_ids)
    assert list(outputs[-1].token_ids) == list(expected[-1].token_ids)


def test_prompts_with_hidden_states_run_beside_drafts(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launch of prompts gives what these ask for, and that of rows with drafts gives none of it."""
    monkeypatch.setattr(Loop, "asynchronous", property(lambda _: True))
    let_sizes_turn(monkeypatch)
    wanted: list[tuple[str, ...]] = []
    make_ready = PrefillLaunches.make_ready

    def noting(self: PrefillLaunches, like: PrefillChunk, **options: Any) -> None:
        wanted.append(like.wants)
        make_ready(self, like, **options)

    monkeypatch.setattr(PrefillLaunches, "make_ready", noting)
    prompts = np.random.default_rng(seed).integers(3, 90, (4, 9)).tolist()
    found = []
    with Engine(wrapped(max_batch_size=8), max_num_seqs=8, speculative_config=NGRAMS) as engine:
        for prompt in prompts[2:]:
            first = engine.submit(prompts[0], greedy(TOKENS))
            next(iter(first))
            wanted.clear()
            hidden = [-1] if prompt is prompts[3] else None
            beside = [engine.submit(prompt, greedy(4), hidden_states=hidden), engine.submit(prompts[1], greedy(1))]
            found += [first.result(PATIENCE), *(handle.result(PATIENCE) for handle in beside)]
            assert {*wanted} <= ({(), ("hidden_states",)} if hidden else {()})
        assert (drafts := engine.stats().drafts) is not None
        assert drafts.draft_tokens > 0
    for output in found:
        assert list(output.token_ids) == huggingfaces(output.prompt_token_ids, len(output.token_ids))
    assert len(found[4].hidden_states[-1]) == 9 + 4 - 1
