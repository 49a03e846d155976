"""`batch_invariant=True` over recurrent layers and latents: a row's bits are those of its tokens, however computed."""

from __future__ import annotations

import pytest
import torch

from compiled_llm.engine.admission.greedy import Greedy
from compiled_llm.engine.admission.policies import POLICIES
from compiled_llm.engine.engine import Engine
from support.engine.invariant_answers import answers_of, check_answers, check_forwards, invariant, some_requests
from support.engine.invariant_kinds import KINDS
from support.parity import assert_account_is_empty

pytestmark = pytest.mark.usefixtures("one_thread")


def check_kind(
    kind: str,
    seed: int,
    count: int,
    few_pages: bool = False,
    warm: bool = False,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Answers in batches, chunks, forks, over cached pages and states, and computed again, and rows of `model(...)`."""
    model = invariant(KINDS[kind](seed).to(dtype), 260 if few_pages else 4000)
    asked = some_requests(seed, count)
    with Engine(model, max_num_seqs=6) as engine:
        if warm:  # compiling takes longer than a request is waited for
            engine.warmup([1, 6])
        outputs = answers_of(engine, asked, seed)
        stats = engine.stats()
    assert stats.cached_tokens > 0
    assert not few_pages or stats.preemptions > 0
    assert check_answers(model, asked, outputs) > 10 * count
    if not few_pages:
        check_forwards(model, seed, count // 2 if count < 100 else count)
    assert_account_is_empty(model)


@pytest.mark.whole
@pytest.mark.usefixtures("without_inductor")
@pytest.mark.parametrize("few_pages", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_answers_have_the_bits_of_the_teacher_forced_model(
    kind: str, few_pages: bool, seed: int, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if few_pages:
        monkeypatch.setitem(POLICIES, "auto", Greedy)
    check_kind(kind, seed, 1000 if whole else 24 if few_pages else 8, few_pages)


@pytest.mark.slow
@pytest.mark.whole
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_programs_have_them(kind: str, dtype: torch.dtype, seed: int) -> None:
    check_kind(kind, seed, 8, dtype=dtype, warm=True)
