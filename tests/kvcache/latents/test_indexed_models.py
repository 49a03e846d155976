"""DeepSeek-V3.2 and GLM-5: queries read the tokens that an indexer chooses, whose keys have pages of their own."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

import compiled_llm
from compiled_llm import Engine
from compiled_llm.kinds.indexers.chosen import INDEXED_BEFORE, positions_of
from compiled_llm.kinds.indexers.index_keys import IndexedRows
from compiled_llm.kinds.refusals import UnsupportedModelError
from compiled_llm.kinds.spec import JoinedSpec, TokenPlaces
from compiled_llm.kvcache.releasable_memory import ReleasableMemory
from compiled_llm.kvcache.specs import allocate_pages
from compiled_llm_ops.reference.backend import Reference
from support.engine import tiny_engines
from support.indexed_models import (
    FAMILIES,
    INDEX,
    TOP,
    indexed_model,
    model_with_other_latents,
    needs_indexers,
)
from support.latent_models import RANK, ROPE
from support.parity import FEW_PAGES, assert_account_is_empty, greedy, mixed_prompts

pytestmark = needs_indexers

needs_other_latents = pytest.mark.skipif(
    not hasattr(transformers, "MistralLarge4ForConditionalGeneration"), reason="transformers is too old for the model"
)
CASES = pytest.mark.parametrize("case", FAMILIES)
"""Engines and caches see of a family whether its layers share choices; all give HuggingFace's tokens."""
LONG = [5, 3 * TOP + 2, 40, 11, 4, TOP, 1]
"""Texts of up to five times as many tokens as a query reads."""
"""A layer without experts, which would take most of compiling; --whole compiles three."""


def pair(seed: int, case: str = "DeepseekV32", mode: Any = "eager", **options: Any) -> tuple[PreTrainedModel, Any]:
    return plain_model(case, seed), compiled_llm.wrap(indexed_model(case, seed), mode=mode, **{**FEW_PAGES, **options})


@functools.cache
def plain_model(case: str, seed: int) -> PreTrainedModel:
    """One that nothing changes, whose tokens several tests compare with."""
    return indexed_model(case, seed)


@functools.cache
def tokens_of(plain: PreTrainedModel, lengths: tuple[int, ...], seed: int, new: int) -> Tensor:
    tokens: Tensor = greedy(plain, {**mixed_prompts([*lengths], 128, seed), "pad_token_id": 0}, new)
    return tokens


def check_tokens(
    plain: PreTrainedModel, model: Any, seed: int, batches: Sequence[list[int]] = (LONG,), new: int = 12
) -> None:
    for lengths in batches:
        inputs = {**mixed_prompts(lengths, 128, seed), "pad_token_id": 0}
        torch.testing.assert_close(greedy(model, inputs, new), tokens_of(plain, tuple(lengths), seed, new))
    stats = model.compiled.stats()
    assert (stats.generate_calls, stats.recompiles) == ({"fast loop": len(batches)}, 0)
    assert_account_is_empty(model)


# ---- pages of index keys


def test_index_keys_have_pages_of_their_own(seed: int) -> None:
    spec = JoinedSpec(6, 0, 4, torch.float32)
    (memory,) = allocate_pages([spec], 5, ReleasableMemory(torch.device("cpu")))
    assert memory.shape == (5, 4, 6)
    keys = torch.randn(2, 1, 7, 6)
    places = TokenPlaces(7, *torch.tensor([(3, 1, 0, 6), (3, 2, 1, 0), (1, 0, 1, 6)]).T)
    spec.write(memory, places, keys, keys[..., :0])
    assert torch.equal(memory[3, 1], keys[0, 0, 6])
    read, nothing = spec.read(memory, torch.tensor([3, 1]), 5)
    assert (read.shape, nothing.shape) == ((1, 5, 6), (1, 5, 0))
    assert torch.equal(read[0, 4], keys[1, 0, 6])


def int32(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


@pytest.mark.parametrize("packed", [False, True])
def test_each_query_scores_its_own_rows_keys_alone(packed: bool, seed: int) -> None:
    """Row 0 has pages 3 and 1, and six tokens; row 1 has page 2, and three; the newest of each is new."""
    memory, keys = torch.randn(5, 4, 6), torch.randn(2, 6)
    table = (int32(0, 2, 3) if packed else int32(0, 2), int32(3, 1, 2))
    rows = IndexedRows(int32(0, 1), int32(5, 2), *table, 4, 0 if packed else 2, 3)
    found = rows.extended(keys[None] if packed else keys[:, None], memory)
    assert torch.equal(memory[1, 1], keys[0])
    assert torch.equal(memory[2, 2], keys[1])
    mask = rows.mask()
    own = [memory[[3, 1]].flatten(0, 1)[:6], memory[2, :3]]
    for row, wanted in enumerate(own):
        seen = mask[0, 0, row] if packed else mask[row, 0, 0]
        assert torch.equal((found[0] if packed else found[row])[seen], wanted)
        places = seen.nonzero()[:, 0].int()
        chosen = torch.stack([places[:3], places[:3]])
        chosen = chosen[None] if packed else chosen[:, None]
        assert positions_of(chosen, rows)[row].tolist() == [0, 1, 2]
    hidden = int32(*range(mask.shape[-1]))
    for row, length in enumerate((6, 3)):
        seen = mask[0, 0, row] if packed else mask[row, 0, 0]
        both = hidden.expand(1, 2, -1) if packed else hidden.expand(2, 1, -1)
        positions = positions_of(both, rows)[row][~seen]
        assert bool(((positions < 0) | (positions >= length)).all()), "attention leaves these out"


# ---- the same tokens


@pytest.mark.drawn(most=1)
@CASES
def test_tokens_equal_huggingfaces(case: str, seed: int) -> None:
    check_tokens(*pair(seed, case), seed, ([5], LONG), 20)


@pytest.mark.whole
def test_decode_by_plan_and_prefills_in_chunks(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check_tokens(*pair(seed, prefill_tokens=16), seed)
    monkeypatch.setattr(Reference, "decode_ops", lambda self, device: None)
    check_tokens(*pair(seed), seed)


# ---- what is refused


@needs_other_latents
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"no_rope_layers": [1, 0, 1]}, r"layer 1 keeps something else .* and \(1, 4, 0\), and that is no latent"),
        ({"no_rope_layers": [1, 0, 1], "kv_source_layers": [0, 1, 0]}, "layer 1 keeps something else"),
        ({"kv_source_layers": [0, 1, 1]}, "layer 0 keeps latents in HuggingFace's cache, and others"),
        ({"kv_source_layers": [0, 0, 0], "indexer_types": ["full", "shared", "shared"]}, "layer [01] keeps"),
    ],
    ids=["without a rotated part", "and one of two shared", "shared by a layer", "shared by all"],
)
def test_latents_of_other_kinds_are_refused_before_anything_runs(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        compiled_llm.wrap(model_with_other_latents(**options), **FEW_PAGES, mode="eager")


@needs_other_latents
def test_latents_of_the_known_kind_are_served_in_the_same_family(seed: int) -> None:
    plain, inputs = model_with_other_latents(seed), mixed_prompts([5, 2 * TOP], 120, seed)
    expected = greedy(plain, inputs, 4)
    assert torch.equal(greedy(compiled_llm.wrap(plain, **FEW_PAGES, mode="eager"), inputs, 4), expected)


@pytest.mark.parametrize("kind", INDEXED_BEFORE)
def test_layers_that_cache_expanded_keys_are_refused(kind: str, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """As transformers 5.17 names them."""
    model = indexed_model(seed=seed)
    monkeypatch.setattr(model.config, "layer_types", [kind] * 3)
    with pytest.raises(UnsupportedModelError, match=f"'{kind}'.*install transformers 5.18 or later"):
        compiled_llm.wrap(model)


# ---- what it takes


def test_a_token_takes_a_latent_and_an_index_key_a_layer(seed: int) -> None:
    for case, index_keys in (("DeepseekV32", 3), ("GlmMoeDsa, shared choices", 2)):
        _, model = pair(seed, case)
        with Engine(model) as engine:
            engine.generate([[5, 6, 7]], tiny_engines.greedy(2))
            described = engine.describe()
        numbers = 3 * (RANK + ROPE) + index_keys * INDEX
        assert described.kv_numbers_per_token == numbers
        assert described.memory["pages"] == 4 * numbers * 4 * (described.pages.total + 1)
