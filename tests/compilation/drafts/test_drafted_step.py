"""Steps that draft give the tokens of steps that do not, one by one, whatever rows' settings and drafts are.

Each setting of sampling has a row of one batch. The model, pages, tables and ops are real, in float32 on a CPU.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from compiled_llm.compilation import drafts
from compiled_llm.compilation.drafts import BAD_COUNTS, NEW_TOKENS, NOT_ACCEPTED, NOT_DRAFTED
from compiled_llm.compilation.programs import Arguments
from compiled_llm.compilation.sampling.sampling import NOT_A_TOKEN, SamplingTables
from compiled_llm.execution.drafts.ngram import NgramDrafter
from compiled_llm.execution.drafts.texts import Texts
from support.compilation.drafted_cases import DRAFTERS, SETTINGS, START, STEPS, case_of, check, ngrams_of
from support.compilation.drafted_rows import Known, Rows, always, never, parts_of, some_of, sometimes, tiny_model
from support.execution.page_checks import check_pages
from support.ops.page_tags import CHAIN_KNOWN, CHAIN_ORIGIN, CHAIN_SKIPPED

OF_ROWS = "slots", "positions", "lengths", "starts"


@pytest.mark.drawn(most=2)
@pytest.mark.parametrize("page_size", [1, 3])
@pytest.mark.parametrize("new", NEW_TOKENS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_tokens_are_those_of_plain_steps(drafter: str, new: int, page_size: int, seed: int) -> None:
    case = case_of(page_size, seed)
    check(case, DRAFTERS[drafter](case), lambda step: new)


@pytest.mark.whole
def test_layers_may_see_windows(seed: int) -> None:
    check(case := case_of(3, seed, windows=True), DRAFTERS["mixed"](case), lambda step: 4)


def test_steps_may_have_other_numbers_of_tokens(seed: int) -> None:
    check(case := case_of(3, seed), DRAFTERS["mixed"](case), lambda step: NEW_TOKENS[step % 3])


def test_right_drafts_all_count_and_wrong_ones_do_not(seed: int) -> None:
    case = case_of(3, seed)
    rows = case.rows()
    assert torch.equal(rows.drafted(case.known(), 8)[:-1], case.answers[:-1, :8])
    assert (rows.drafted(case.known(always), 4)[:-1, 1:] == NOT_ACCEPTED).all()
    assert (rows.drafted(case.known(always, lambda *_: torch.zeros(1)), 4)[:-1, 1:] == NOT_DRAFTED).all()


def test_a_step_leaves_what_plain_steps_leave(seed: int) -> None:
    case = case_of(3, seed)
    rows = case.rows()
    for _ in range(STEPS // 8):
        rows.drafted(case.known(), 8)
    for name, ours, plain in zip(SamplingTables._fields, rows.tables, case.after.tables, strict=True):
        for own, other in zip(
            *((table,) if isinstance(table, Tensor) else table for table in (ours, plain)), strict=True
        ):
            assert torch.equal(own[:-1], other[:-1]), name
    for name in ("positions", "lengths"):
        ours, plain = (getattr(each.inputs, name)[:-1] for each in (rows, case.after))
        assert torch.equal(ours, plain), name
    for slot, prompt in enumerate(case.prompts):
        text = [*prompt, *case.answers[slot, : STEPS - 1].tolist()]
        assert rows.texts[slot, : len(text)].tolist() == text


def test_texts_are_looked_up(seed: int) -> None:
    """Or all would be right because nothing is proposed."""
    rows = case_of(3, seed).rows()
    first = rows.drafted(ngrams_of(rows), 8)
    assert (first != NOT_DRAFTED).sum() > len(first)


# ---- what a row's drafter says


@pytest.mark.parametrize("count", [-1, 4])
def test_counts_that_cannot_be_are_said(count: int, seed: int) -> None:
    case = case_of(3, seed)
    rows = case.rows()
    bad = case.known(never, lambda slots, lengths, k: torch.where(slots == 2, count, k))
    tokens = rows.drafted(bad, 4)
    assert tokens[2].tolist() == [BAD_COUNTS, NOT_DRAFTED, NOT_DRAFTED, NOT_DRAFTED]
    assert torch.equal(tokens[3], case.answers[3, :4])


def test_tokens_that_no_vocabulary_has_are_wrong_drafts(seed: int) -> None:
    case = case_of(3, seed)
    check(case, lambda rows: Unknown(case.known()), lambda step: 4)


class Unknown(NamedTuple):
    """A drafter whose tokens do not exist."""

    known: Known

    def propose(self, slots: Tensor, lengths: Tensor, k: int) -> tuple[Tensor, Tensor]:
        tokens, counts = self.known.propose(slots, lengths, k)
        return torch.where(tokens % 2 == 0, tokens + 10**6, -tokens), counts


def test_rows_whose_sampling_is_deferred_count_one(seed: int) -> None:
    case = case_of(3, seed)
    rows = case.rows()
    deferred = 1
    rows.tables.numbers[4][deferred] |= 64
    tokens = rows.drafted(case.known(), 4)
    assert tokens[deferred].tolist() == [NOT_A_TOKEN, *[NOT_ACCEPTED] * 3]
    assert torch.equal(tokens[2], case.answers[2, :4])
    at = rows.inputs.slots.tolist().index(deferred)
    assert rows.inputs.lengths[at] == len(case.prompts[deferred]) + 1


# ---- watched


@pytest.mark.parametrize("goes_back", [True, False], ids=["", "a tap that is not told is wrong"])
def test_taps_hear_of_what_does_not_count(goes_back: bool, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tags of pages are checked: a row that forgets wrong drafts goes on after its own tokens."""
    case = case_of(3, seed)
    model = check_pages(tiny_model(3, rows=len(SETTINGS)))
    tags = model.compiled.model_runner().state.taps[0].inputs
    tags.chains[:] = CHAIN_KNOWN + CHAIN_ORIGIN
    tags.chains[len(SETTINGS)] = CHAIN_SKIPPED  # padding
    if not goes_back:
        monkeypatch.setattr(type(tags), "went_back", lambda *_: None)
    rows = Rows(parts_of(model), 3, case.prompts, SETTINGS, START, (tags,))
    for new in (4, 2, 8):
        rows.drafted(case.known(sometimes, some_of), new)
    assert (int(tags.faults[0]) == 0) is goes_back


# ---- compiled


@pytest.mark.drawn(most=1)
@pytest.mark.usefixtures("without_inductor")
@pytest.mark.parametrize("count", [1, 3])
def test_each_number_of_tokens_has_a_program_that_is_one_graph(count: int, seed: int) -> None:
    """Texts may have another size, as those of a model with more pages have, and room for more rows."""
    case = case_of(3, seed)
    model = tiny_model(3, mode="compile")
    programs = model.compiled.model_runner().graph_manager.programs
    for new, room in ((2, 8), (4, 8), (2, 16)):
        other = tiny_model(3, rows=room)
        texts = Texts(other.compiled.model_runner().state)
        texts.longest.fill_(3)
        drafter = NgramDrafter(texts.tokens, texts.longest, texts.shortest)
        rows = Rows(parts_of(model), 3, case.prompts[:count], SETTINGS[:count], START, texts=texts.tokens)
        if count == 1:
            rows.inputs = rows.inputs._replace(**{name: getattr(rows.inputs, name)[:1] for name in OF_ROWS})

        def compiled(parted: Any, forward: Any, inputs: Any, tables: Any, pages: Any, specs: Any) -> Any:
            return programs.prepared(Arguments(parted, inputs, tables, pages, specs))()

        answers = [rows.drafted(drafter, new, compiled) for _ in range(3)]
        sampled = [[token for step in answers for token in step[row].tolist() if token >= 0] for row in range(count)]
        for row, own in enumerate(sampled):
            assert own == case.answers[row, : len(own)].tolist()
            assert len(own) >= 3
    found = {name: graphs for name, graphs in programs.graph_counts().items() if "drafts" in name}
    size = "batch 1" if count == 1 else "larger batches"
    assert found == {f"decode, {size}, {new} tokens with drafts": 1 for new in (2, 4)}


# ---- planted faults: these tests see them


def planted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    accept, before, sample = drafts.accept_drafts, drafts._before, drafts.sample_tokens

    def one_too_many(sampled: Tensor, fed: Tensor, offered: Tensor, *rest: Tensor) -> Tensor:
        tokens = accept(sampled, fed, offered, *rest)
        count = (tokens > NOT_ACCEPTED).sum(dim=1)
        short = (count <= offered)[:, None] & (torch.arange(tokens.shape[1]) == count[:, None])
        return torch.where(short, sampled, tokens)

    def of_one_position(*given: Any, **more: Any) -> Tensor:
        positions = given[3].view(-1, 4)
        return sample(*given[:3], positions[:, :1].expand_as(positions).flatten(), *given[4:], **more)

    def blind(fed: Tensor) -> Tensor:
        return torch.full_like(before(fed), -1)

    faults = {
        "accept_drafts": one_too_many,
        "sample_tokens": of_one_position,
        "_before": blind,
    }
    monkeypatch.setattr(drafts, name, faults[name])


@pytest.mark.drawn(most=1)
@pytest.mark.parametrize("name", ["accept_drafts", "sample_tokens", "_before"])
def test_planted_faults_are_seen(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of(3, seed)
    planted(name, monkeypatch)
    with pytest.raises(AssertionError, match="get other tokens"):
        check(case, DRAFTERS["mixed"](case), lambda step: 4)
