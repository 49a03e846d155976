"""What indexers take to choose tokens is bounded, whatever prompts and batches are, and is in the account of memory."""

from __future__ import annotations

import functools
import random
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import compiled_llm
from compiled_llm import Engine, WrapConfig
from compiled_llm.execution.batch import Extension
from compiled_llm.execution.prefill.packing import chunks
from compiled_llm.execution.state.score_room import SHARE, ScoreRoom
from compiled_llm.kinds.indexers.blocks import BlockChoices
from compiled_llm.kinds.indexers.chosen import IndexedCache
from compiled_llm.kinds.indexers.index_keys import IndexScores
from compiled_llm.kvcache import memory
from compiled_llm.kvcache.memory import pages_to_allocate
from compiled_llm.kvcache.table import Span
from support.engine import tiny_engines
from support.indexed_models import FAMILIES, block_model, indexed_model, needs_indexers
from support.parity import FEW_PAGES, assert_account_is_empty, greedy, mixed_prompts

pytestmark = needs_indexers

CPU = torch.device("cpu")
SCORES = IndexScores(heads=4, chosen=6, size=8, dtype=torch.float32)


# ---- measured


class _Alive(TorchDispatchMode):
    """Counts the bytes of all tensors of a width that exist at a time.

    Attributes:
        peak: the most.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self._width, self._tensors, self._nbytes, self.peak = width, Counter[int](), dict[int, int](), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and self._width in tensor.shape:
                storage = tensor.untyped_storage()
                self._nbytes[storage._cdata] = storage.nbytes()
                self._tensors[storage._cdata] += 1
                weakref.finalize(tensor, self._dropped, storage._cdata)
        self.peak = max(self.peak, sum(self._nbytes.values()))
        return out

    def _dropped(self, storage: int) -> None:
        self._tensors[storage] -= 1
        if not self._tensors[storage]:
            del self._tensors[storage], self._nbytes[storage]


class Chosen(NamedTuple):
    """A call of an indexer: B rows of q tokens, the keys of each, and the most bytes that it took."""

    rows: int
    new: int
    keys: int
    nbytes: int


@contextmanager
def choices(model: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Chosen]]:
    """Note each call of an indexer."""
    (kind,) = {type(module) for module in model.modules() if type(module).__name__.endswith("Indexer")}
    forward, noted = kind.forward, list[Chosen]()

    def measured(self: Any, states: Tensor, *args: Any, **options: Any) -> Tensor:
        given = (own for own in (*args, *options.values()) if isinstance(own, (IndexedCache, BlockChoices)))
        rows = cache.rows if (cache := next(given, None)) else None
        if rows is None:  # a trial of wrap's
            return cast(Tensor, forward(self, states, *args, **options))
        with _Alive(rows.keys) as alive:
            chosen: Tensor = forward(self, states, *args, **options)
        noted.append(Chosen(*states.shape[:2], rows.keys, alive.peak))
        return chosen

    with monkeypatch.context() as patched:
        patched.setattr(kind, "forward", measured)
        yield noted


BUILD: dict[str, Callable[[int], Any]] = {
    **{case: functools.partial(indexed_model, case) for case in FAMILIES if "," not in case},
    "MiniMaxM3": block_model,
}


@pytest.mark.drawn(most=1)
@pytest.mark.parametrize("case", BUILD)
def test_scores_take_no_more_than_the_account_says(case: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if case == "MiniMaxM3" and not hasattr(transformers, "MiniMaxM3VLForCausalLM"):
        pytest.skip("this version of transformers has no model whose indexers choose blocks")
    plain, lengths = BUILD[case](seed), [101, 3, 70, 97, 90]
    inputs = {**mixed_prompts(lengths, 128, seed), "pad_token_id": 0}
    with choices(plain, monkeypatch) as noted:
        model: Any = compiled_llm.wrap(BUILD[case](seed), mode="eager", **{**FEW_PAGES, "max_batch_size": 5})
        greedy(model, inputs, 9)
        room, scores = model.compiled.stats().memory["scores"], model.compiled.model_runner().state.scores.scores
    assert max(call.nbytes for call in noted) <= room
    prefills = [call for call in noted if call.new > 1]
    assert len({call.new for call in prefills}) > 2, "361 tokens at once would take more"
    assert max(call.nbytes for call in prefills) > room / 4, "chunks are not smaller than they must be"
    for call in noted:
        own = scores.nbytes(call.rows * call.new, call.keys, call.rows)
        assert own / 3 < call.nbytes <= own, call
    assert_account_is_empty(model)


@pytest.mark.whole
def test_an_engine_mixes_as_far_as_scores_fit(seed: int) -> None:
    plain, model = indexed_model(seed=seed), indexed_model(seed=seed)
    wrapped: Any = compiled_llm.wrap(model, mode="eager", **{**FEW_PAGES, "kv_memory": "400 tokens"})
    prompts = [
        ids.tolist() for ids in torch.randint(3, 128, (6, 90), generator=torch.Generator().manual_seed(seed)).unbind()
    ]
    expected = [
        greedy(plain, {"input_ids": torch.tensor([own]), "pad_token_id": 0}, 9)[0, len(own) :] for own in prompts
    ]
    with Engine(wrapped, mixed=True) as engine:
        outputs = engine.generate(prompts, tiny_engines.greedy(9))
        assert engine.describe().memory["scores"] == wrapped.compiled.stats().memory["scores"] > 0
    assert [output.token_ids for output in outputs] == [own.tolist() for own in expected]


# ---- chunks


def room(positions: int, pages: int, page_size: int = 4, nbytes: int = 0, **options: Any) -> ScoreRoom:
    return ScoreRoom.of(SCORES, WrapConfig(page_size=page_size, **options), positions, 2, pages, nbytes)


def test_chunks_of_any_rows_are_as_large_as_scores_allow(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(200):
        size, positions = draw.choice([1, 4, 16]), draw.randint(1, 200)
        rows, most = draw.randint(1, 4), draw.randint(1, 150)
        own = room(positions, draw.randint(1, 300), size, max_batch_size=rows, nbytes=draw.choice([0, 10**5, 10**6]))
        longest = min(positions, own.row_pages * size)
        batch = []
        for number in range(rows):
            length = draw.randint(1, longest)
            ids = np.arange(draw.randint(1, length)) + 1000 * number
            batch.append(Extension(Span([1] * -(-length // size), length), ids, ids))
        pieces = list(chunks(batch, most, size, holds=own.holds))
        assert np.array_equal(
            np.concatenate([part.ids for chunk in pieces for part in chunk]), np.concatenate([row.ids for row in batch])
        )
        for number, chunk in enumerate(pieces):
            tokens, pages = (
                sum(len(part.ids) for part in chunk),
                sum(-(-part.row.exact_length // size) for part in chunk),
            )
            assert tokens <= most
            assert own.holds(tokens, pages, len(chunk))
            if number + 1 < len(pieces) and tokens < most:
                following = pieces[number + 1][0]
                with_one = -(-(following.row.exact_length - len(following.ids) + 1) // size)
                last = chunk[-1]
                already = -(-last.row.exact_length // size) if last.ids[0] // 1000 == following.ids[0] // 1000 else 0
                assert not own.holds(tokens + 1, pages + with_one - already, 1), "one token more would have fitted"


def test_one_token_of_the_longest_row_always_fits() -> None:
    for positions, pages in ((1, 2), (100, 3), (100, 1000)):
        for rows in (1, 2, 7):
            own = room(positions, pages, max_batch_size=rows)
            assert own.holds(1, own.row_pages, 1)
            assert own.of_decode(rows) <= own.limit
            assert room(positions, pages, max_batch_size=rows, nbytes=SHARE * own.limit + SHARE).limit == own.limit + 1


# ---- beside the pages


def allocated(config: WrapConfig, one: int, beside: Callable[[int], int] | None) -> int:
    return pages_to_allocate(config, one, CPU, 4096, beside)


def test_a_fraction_of_the_free_memory_holds_pages_and_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda device: 10_000)
    config = WrapConfig(kv_memory=0.5)
    for beside in (lambda pages: 1000, lambda pages: 13 * pages, lambda pages: min(13 * pages, 700)):
        pages = allocated(config, 10, beside)
        assert (pages - 1) * 10 + beside(pages) <= 5000 < pages * 10 + beside(pages + 1)
    assert allocated(config, 10, None) == 501


def test_scores_without_room_are_refused_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda device: 2**20)
    with pytest.raises(ValueError, match=r"kv_memory=0\.5 holds no page.* 600\.0 KiB beside it.* max_batch_size"):
        allocated(WrapConfig(kv_memory=0.5), 1000, lambda pages: 600 * 2**10)
    with pytest.raises(ValueError, match=r"kv_memory=819200: pages of .* scores, which take 300\.0 KiB with max_batch"):
        allocated(WrapConfig(kv_memory=800 * 2**10), 1024, lambda pages: 300 * 2**10)


def test_a_model_is_refused_before_its_pages_are_allocated(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped: Any = compiled_llm.wrap(
        indexed_model(seed=seed), mode="eager", **{**FEW_PAGES, "max_batch_size": 64, "kv_memory": "200 tokens"}
    )
    monkeypatch.setattr(memory, "free_bytes", lambda device: 2 * 2**20)
    with pytest.raises(ValueError, match=r"200 tokens.* scores, which take 3\.\d MiB with max_batch_size=64"):
        greedy(wrapped, {"input_ids": torch.tensor([[5, 6]]), "pad_token_id": 0}, 2)


def test_several_new_tokens_a_row_need_room_for_their_scores(seed: int) -> None:
    wrapped: Any = compiled_llm.wrap(indexed_model(seed=seed), mode="eager", **FEW_PAGES)
    with pytest.raises(
        ValueError, match=r"2 new tokens for each of 8 rows need 861\d+ bytes for an indexer's scores, "
    ):
        wrapped.compiled.model_runner().steps.step_of_several(8, 2)
