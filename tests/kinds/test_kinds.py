"""Eight promises of every kind of layer.

They give HuggingFace's tokens in `generate` and in an engine, captured and compiled; HuggingFace's logits; caches that
are read out and written back; beams and drafts; prefix hits; and a sentence for each feature that the
table of support denies a kind.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

from compiled_llm.config import WrapConfig
from compiled_llm.engine.admission.greedy import Greedy
from compiled_llm.engine.admission.policies import POLICIES
from compiled_llm.engine.engine import Engine
from compiled_llm.engine.parts import IMAGES
from compiled_llm.features import needed
from compiled_llm.kinds import support as table
from compiled_llm.kinds.support import FEATURES, ORIGINAL, YES, No
from compiled_llm.model.checks import check_layers
from compiled_llm_ops import register_variant
from support.engine.random_requests import CAPTURES
from support.engine.tiny_engines import PATIENCE, greedy as greedily
from support.execution.page_checks import check_pages
from support.execution.stand_in_cuda_graphs import let_a_cpu_capture
from support.indexed_models import PlacedOnCuda
from support.kinds import BLOCKS, IN_FP8, KINDS, LATENT, NO_ATTENTION, OPTIONS, RECURRENT, Kind, each
from support.parity import assert_account_is_empty, greedy

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("one_thread")]

LENGTHS = [5, 1, 4, 8, 17, 40]
"""On and beside pages of 4 tokens; the last two are longer than a chunk."""


def prompts_of(lengths: Sequence[int], seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 128, (length,), generator=generator).tolist() for length in lengths]


def left_padded(prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(own)) + [*own] for own in prompts])
    mask = torch.tensor([[0] * (width - len(own)) + [1] * len(own) for own in prompts])
    return {"input_ids": ids, "attention_mask": mask, "pad_token_id": 0}


def new_tokens(model: Any, prompts: Sequence[Sequence[int]], new: int, **options: Any) -> list[list[int]]:
    """What greedy decoding of a batch adds to each row."""
    out = greedy(model, left_padded(prompts), new, **options)
    found: list[list[int]] = out[:, max(map(len, prompts)) :].tolist()
    return found


def expected(kind: Kind, prompts: Sequence[Sequence[int]], new: int, seed: int, small: bool = False) -> list[list[int]]:
    return [kind.alone(prompt, new, seed, small) for prompt in prompts]


def answers(engine: Engine, prompts: list[list[int]], new: int) -> list[list[int]]:
    return [output.token_ids for output in engine.generate(prompts, greedily(new))]


def padded_after(rows: list[list[int]], ends: list[int]) -> list[list[int]]:
    """Rows with pads after the first of the ends, as wide as the longest."""
    stops = [next((at + 1 for at, token in enumerate(row) if token in ends), len(row)) for row in rows]
    return [(row[:stop] + [0] * len(row))[: max(stops)] for row, stop in zip(rows, stops, strict=True)]


def check_tokens(kind: Kind, model: Any, seed: int, small: bool = False, new: int = 12) -> None:
    """In one batch, twice, and one row alone; in an engine, too; rows leave one by one."""
    prompts = prompts_of(LENGTHS, seed)
    wanted = expected(kind, prompts, new, seed, small)
    ends = [wanted[0][4], wanted[3][9]]
    assert new_tokens(model, prompts, new) == wanted
    assert new_tokens(model, prompts, new, eos_token_id=ends) == padded_after(wanted, ends)
    assert new_tokens(model, prompts[:1], new) == wanted[:1]
    with Engine(model) as engine:
        with engine.paused(weights_stay=True):
            handles = [engine.submit(prompt, greedily(new - 2 * row)) for row, prompt in enumerate(prompts)]
        answered = [handle.result(PATIENCE).token_ids for handle in handles]
    assert answered == [own[: new - 2 * row] for row, own in enumerate(wanted)]
    stats = model.compiled.stats()
    assert (stats.generate_calls, stats.recompiles, stats.graph_breaks) == ({"fast loop": 3}, 0, 0)
    assert_account_is_empty(model)


# ---- tokens


@pytest.mark.drawn(most=3)
@each(*KINDS, *IN_FP8)
def test_tokens_in_generate(kind: Kind, reading: None, seed: int) -> None:
    """Some rows end early."""
    model, prompts = kind.wrapped(seed), prompts_of(LENGTHS, seed)
    wanted = expected(kind, prompts, 12, seed)
    ends = [wanted[0][4], wanted[3][9]]
    for _ in range(2):
        assert new_tokens(model, prompts, 12) == wanted
        assert new_tokens(model, prompts, 12, eos_token_id=ends) == padded_after(wanted, ends)
    for prompt, own in zip(prompts[:2], wanted, strict=False):
        assert new_tokens(model, [prompt], 12) == [own]
    stats = model.compiled.stats()
    assert (stats.generate_calls, stats.recompiles) == ({"fast loop": 6}, 0)
    assert_account_is_empty(model)


@pytest.mark.drawn(most=2)
@pytest.mark.either("mixed")
@pytest.mark.parametrize("mixed", [False, True], ids=["", "mixed steps"])
@each(*KINDS, *IN_FP8)
def test_tokens_in_an_engine(kind: Kind, mixed: bool, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With so few pages that rows lose theirs, and begin again; some are cancelled."""
    monkeypatch.setitem(POLICIES, "auto", Greedy)
    model, prompts = kind.wrapped(seed, kv_memory="100 tokens"), prompts_of(LENGTHS, seed)
    with Engine(model, mixed=mixed and kind("mixed") is YES) as engine:
        handles = []
        for prompt in prompts:
            handles.append(engine.submit(prompt, greedily(24)))
            cancelled = engine.submit(prompt[::-1], greedily(24))
            next(iter(cancelled))
            cancelled.cancel()
        assert [handle.result(PATIENCE).token_ids for handle in handles] == expected(kind, prompts, 24, seed)
        assert engine.stats().preemptions > 0
    assert_account_is_empty(model)


# ---- captured


@pytest.mark.drawn(most=2)
@each(*KINDS, *IN_FP8)
def test_captured_steps_give_the_same_tokens(kind: Kind, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    let_a_cpu_capture(monkeypatch)
    model = kind.wrapped(seed)
    check_tokens(kind, model, seed)
    phases = {"decode", "prefill"} if kind("captured_prefills") is YES else {"decode"}
    assert {row.phase for row in model.compiled.cuda_graphs if row.replays} == phases


# ---- compiled


@pytest.mark.drawn(most=1)
@pytest.mark.usefixtures("without_inductor")
@pytest.mark.parametrize("mode", ["compile", *CAPTURES])
@each(*KINDS, *IN_FP8)
def test_traced_steps_give_the_same_tokens(kind: Kind, mode: Any, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    CAPTURES.get(mode, lambda patch: None)(monkeypatch)
    check_tokens(kind, kind.wrapped(seed, small=True, mode=mode), seed, small=True)


@pytest.mark.slow
@pytest.mark.whole
@each(*KINDS, *IN_FP8)
def test_compiled_steps_give_the_same_tokens(kind: Kind, seed: int) -> None:
    check_tokens(kind, kind.wrapped(seed, mode="compile"), seed)


# ---- logits


@pytest.mark.drawn(most=4)
@each(*KINDS)
@torch.no_grad()
def test_logits_are_huggingfaces(kind: Kind, seed: int) -> None:
    """Of rows of mixed lengths, and of parts of a text that go on in a cache, of one token and of more."""
    model, plain, prompts = kind.wrapped(seed), kind.plain(seed), prompts_of(LENGTHS, seed)
    inputs = left_padded(prompts)
    mask = inputs["attention_mask"]
    found = model(inputs["input_ids"], attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits
    for row, prompt in enumerate(prompts):
        torch.testing.assert_close(found[row, -len(prompt) :], plain(torch.tensor([prompt])).logits[0], **CLOSE)
    ids = torch.tensor(prompts_of([29, 29], seed))
    cache, parts = model.compiled.new_cache(), ids.split([18, 1, 1, 5, 4], dim=1)
    found = torch.cat([model(part, past_key_values=cache).logits for part in parts], dim=1)
    torch.testing.assert_close(found, plain(ids).logits, **CLOSE)
    assert set(model.compiled.stats().forward_calls) == {"compiled"}
    cache.close()
    assert_account_is_empty(model)


@pytest.mark.drawn(most=4)
@each(*KINDS)
@torch.no_grad()
def test_logits_of_padded_rows_without_position_ids(kind: Kind, seed: int) -> None:
    """Rows see what they see alone; if a kind counts the padding as HuggingFace does, its own forward runs."""
    model, plain, prompts = kind.wrapped(seed), kind.plain(seed), prompts_of([48, 28], seed)
    inputs = left_padded(prompts)
    given = {"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"]}
    original = kind("left_padding") is ORIGINAL
    found, padded = model(**given).logits, plain(**given).logits
    for row, prompt in enumerate(prompts):
        wanted = padded[row, -len(prompt) :] if original else plain(torch.tensor([prompt])).logits[0]
        torch.testing.assert_close(found[row, -len(prompt) :], wanted, **CLOSE)
    stats = model.compiled.stats()
    assert stats.forward_calls == {"original" if original else "compiled": 1}
    assert_account_is_empty(model)


CLOSE: dict[str, float] = {"rtol": 1e-3, "atol": 1e-3}


# ---- caches


@pytest.mark.drawn(most=2)
@each(*KINDS, *IN_FP8)
def test_a_cache_goes_on_with_a_conversation(kind: Kind, seed: int) -> None:
    """Of rows of mixed lengths; a turn is one token, more than a chunk, and none."""
    model, rows = kind.wrapped(seed), prompts_of([5, 18, 8], seed)
    cache = model.compiled.new_cache()
    for words in ([], [7], [8] * 20, [9, 8]):
        said = [[*row, *words] for row in rows]
        out = greedy(model, left_padded(said), 5, past_key_values=cache, return_dict_in_generate=True)
        assert out.past_key_values is cache
        rows = [own + row[-5:].tolist() for own, row in zip(said, out.sequences, strict=True)]
        assert [row[-5:] for row in rows] == expected(kind, said, 5, seed)
    cache.close()
    assert_account_is_empty(model)


@pytest.mark.drawn(most=4)
@each(*KINDS, *IN_FP8)
def test_a_cache_that_is_read_out_is_huggingfaces(kind: Kind, seed: int) -> None:
    model, prompts = kind.wrapped(seed), prompts_of([18, 18], seed)
    out = greedy(model, left_padded(prompts), 6, return_dict_in_generate=True)
    found = out.past_key_values.handed_over(model.config)
    with torch.no_grad():
        wanted = kind.plain(seed)(out.sequences[:, :-1], use_cache=True).past_key_values
    assert_same_caches(found, wanted, kind)
    del out
    assert_account_is_empty(model)


def assert_same_caches(found: Any, wanted: Any, kind: Kind) -> None:
    # What lies between two numbers of fp8 is a sixteenth of it away, or less.
    close = {"rtol": 0.07, "atol": 0.02} if kind.codec else {"rtol": 1e-4, "atol": 1e-4}
    compared = 0
    for own, other in zip(found.layers, wanted.layers, strict=True):
        assert type(own) is type(other)
        for name, state in tensors_of(other):
            torch.testing.assert_close(dict(tensors_of(own))[name], state, **close)
            compared += 1
    assert compared >= 2


def tensors_of(layer: Any) -> Iterator[tuple[str, Tensor]]:
    """What a layer of HuggingFace's cache keeps, recurrent states and index keys among it."""
    for name in ("keys", "values", "indexer_keys", "idx_keys", "conv_states", "recurrent_states"):
        kept = getattr(layer, name, None)
        for number, state in kept.items() if isinstance(kept, dict) else [(0, kept)]:
            if state is not None:
                yield f"{name} {number}", state


@pytest.mark.drawn(most=2)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@each(*KINDS, *IN_FP8)
def test_huggingfaces_caches_are_read_in_and_written_back(kind: Kind, cache: str, seed: int) -> None:
    """Or they take HuggingFace's own loop, with the same tokens."""
    model, caches, said = kind.wrapped(seed), [], []
    for own in (kind.plain(seed), model):
        config: Any = own.config
        caches.append(DynamicCache(config=config) if cache == "dynamic" else StaticCache(config, max_cache_len=64))
        inputs, texts = left_padded(prompts_of([17, 17], seed)), []
        for turn in range(3):
            texts.append(greedy(own, inputs, 5, past_key_values=caches[-1]))
            ids = torch.cat([texts[-1], torch.full((2, 2), 5 + turn)], dim=1)
            inputs |= {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        said.append(torch.cat(texts, dim=1))
    assert torch.equal(*said)
    works = kind(f"{cache}_cache") is YES
    assert model.compiled.stats().generate_calls == {"fast loop" if works else "original": 3}
    assert_same_caches(*reversed(caches), kind)
    assert_account_is_empty(model)


# ---- beams and drafts


@pytest.mark.drawn(most=2)
@each(*KINDS, *IN_FP8)
def test_beams(kind: Kind, seed: int) -> None:
    model, plain, prompts = kind.wrapped(seed), kind.plain(seed), prompts_of([6, 29], seed)
    wanted = [new_tokens(plain, [prompt], 10, num_beams=3)[0] for prompt in prompts]
    assert new_tokens(model, prompts, 10, num_beams=3) == wanted
    assert "original" not in model.compiled.stats().generate_calls
    assert_account_is_empty(model)


@pytest.mark.drawn(most=2)
@each(*KINDS, *IN_FP8)
def test_drafts(kind: Kind, seed: int) -> None:
    model, (prompt,) = kind.wrapped(seed), prompts_of([13], seed)
    said, wanted = [prompt * 2], expected(kind, [prompt * 2], 12, seed)
    for options in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": kind.tiny_model(seed + 1)}):
        if isinstance(kind("crop"), No):
            with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
                new_tokens(model, said, 12, **options)
        else:
            assert new_tokens(model, said, 12, **options) == wanted
    assert "original" not in model.compiled.stats().generate_calls
    assert_account_is_empty(model)


# ---- prefix hits


@pytest.mark.drawn(most=2)
@each(*KINDS, *IN_FP8)
def test_prompts_that_come_together_and_begin_alike(kind: Kind, seed: int) -> None:
    """Those that may begin with pages of the same step compute what they have in common once."""
    model = kind.wrapped(seed, prefill_tokens=64)
    beginning, *others = prompts_of([40, 9, 8, 7], seed)
    prompts = [beginning + own for own in others]
    with Engine(model) as engine:
        for _ in range(2):
            assert answers(engine, prompts, 9) == expected(kind, prompts, 9, seed)
            assert engine.stats().cached_tokens > 0
            engine.reset_prefix_cache()
    assert_account_is_empty(model)


@pytest.mark.drawn(most=2)
@each(*KINDS, *IN_FP8)
def test_prompts_that_begin_alike_begin_with_cached_pages(kind: Kind, seed: int) -> None:
    """What an engine has cached is what a prompt begins with, until it sleeps."""
    model = kind.wrapped(seed, prefill_tokens=64)
    beginning, *others = prompts_of([40, 9, 8, 7], seed)
    prompts = [beginning + own for own in others]
    wanted = expected(kind, prompts, 9, seed)
    with Engine(model) as engine:
        for again in range(2):
            hits = []
            for prompt, own in zip([*prompts, prompts[1]], [*wanted, wanted[1]], strict=True):
                before = engine.stats().cached_tokens
                assert answers(engine, [prompt], 9) == [own]
                hits.append(engine.stats().cached_tokens - before)
            assert hits == [*kind.hits]
            assert answers(engine, prompts, 9) == wanted
            if not again:
                engine.sleep()
                engine.wake()
    assert_account_is_empty(model)


# ---- what works and what is refused


def wrapped_with(option: str, kind: Kind, seed: int, model: Any = None) -> Any:
    register_variant("no_change")
    options = {**OPTIONS[option], **(kind.wrap_options if option == "variants" else {})}
    return check_pages(kind.wrapped(seed, model=model, **options))


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("kind", "option"),
    [pytest.param(kind, option, marks=kind.marks) for kind in KINDS for option in OPTIONS if kind(option) is YES],
    ids=str,
)
def test_each_option_works(kind: Kind, option: str, seed: int) -> None:
    model, prompts = wrapped_with(option, kind, seed), prompts_of([5, 17, 33], seed)
    if option == "batch_invariant":
        return  # its programs are compiled: `tests/engine/invariance`
    found = new_tokens(model, prompts, 10)
    if option == "kv_dtype":
        assert found == [new_tokens(model, [prompt], 10)[0] for prompt in prompts]
        assert torch.float8_e4m3fn in {pages.dtype for pages in model.compiled.model_runner().state.pages}
    else:
        assert found == expected(kind, prompts, 10, seed)
    assert_account_is_empty(model)


@pytest.mark.drawn(most=2)
@each(*(kind for kind in KINDS if kind("mixed") is YES))
def test_mixed_steps(kind: Kind, seed: int) -> None:
    model, prompts = check_pages(kind.wrapped(seed)), prompts_of(LENGTHS, seed)
    with Engine(model, mixed=True) as engine:
        handles = []
        for prompt in prompts:
            handles.append(engine.submit(prompt, greedily(12)))
            next(iter(handles[0]))
        assert [handle.result(PATIENCE).token_ids for handle in handles] == expected(kind, prompts, 12, seed)
        assert engine.stats().mixed_steps > 0
    assert_account_is_empty(model)


@pytest.mark.drawn(most=3)
@each(*(kind for kind in KINDS if kind("crop") is YES))
def test_a_cropped_cache_goes_on(kind: Kind, seed: int) -> None:
    model, (prompt,) = kind.wrapped(seed), prompts_of([18], seed)
    cache, again = model.compiled.new_cache(), [*prompt[:15], 7]
    new_tokens(model, [prompt], 5, past_key_values=cache)
    cache.crop(-7)
    assert new_tokens(model, [again], 5, past_key_values=cache) == expected(kind, [again], 5, seed)
    cache.close()
    assert_account_is_empty(model)


def ask(feature: str, kind: Kind, seed: int) -> None:
    """Ask for a feature that is refused."""
    if feature in OPTIONS:
        wrapped_with(feature, kind, seed)
        return
    model = kind.wrapped(seed)
    facts, runtime = model.compiled.facts, model.compiled
    if feature == "mixed":
        Engine(model, mixed=True)
    elif feature == "drafts":
        with pytest.raises(ValueError, match=kind.refusal("drafts")):
            runtime.model_runner().steps.step_of_several(1, 2)
        Engine(model, speculative_config={"method": "ngram"})
    elif feature == "images":
        needed(IMAGES).check_kinds(facts.kinds)
    elif feature == "crop":
        cache = runtime.new_cache()
        new_tokens(model, [[5, 6, 7]], 5, past_key_values=cache)
        cache.crop(-2)
    elif feature == "backend":
        config, placed = WrapConfig(backend="flashinfer", page_size=4), cast(Any, PlacedOnCuda())
        check_layers(placed, facts.layers, config)
    else:
        changed = {"window": {"window_left": 9}, "soft_cap": {"logits_soft_cap": 30.0}}[feature]
        check_layers(model, [layer._replace(**changed) for layer in facts.layers], runtime.config)


@pytest.mark.parametrize(
    ("kind", "feature"),
    [
        pytest.param(kind, feature, marks=kind.marks)
        for kind in (*KINDS, NO_ATTENTION)
        for feature in FEATURES
        # A model without attention is of the recurrent kind, too, which says it then.
        if isinstance(kind(feature), No) and (kind is RECURRENT or kind(feature) is not RECURRENT(feature))
    ],
    ids=str,
)
def test_what_a_kind_refuses_is_refused_by_its_sentence(kind: Kind, feature: str, seed: int) -> None:
    with pytest.raises(ValueError, match=kind.refusal(feature)):
        ask(feature, kind, seed)


@pytest.mark.parametrize("option", ["cascade", "page_size"])
def test_a_model_that_is_refused_is_as_it_was(option: str, seed: int) -> None:
    kind = {"cascade": LATENT, "page_size": BLOCKS}[option]
    model = kind.tiny_model(seed)
    classes = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match=kind.refusal(option)):
        wrapped_with(option, kind, seed, model)
    assert [type(module) for module in model.modules()] == classes


def test_each_kind_has_a_row_and_each_row_a_cell_for_each_feature() -> None:
    assert [kind.support for kind in (*KINDS, NO_ATTENTION)] == [*table.KINDS]
    for row in table.KINDS:
        assert row.cells.keys() == {*FEATURES}, row.kind


def test_each_option_of_wrap_is_a_feature_or_not_about_layers() -> None:
    about_none = {"mode", "max_batch_size", "kv_memory", "prefill_tokens", "kv_scales", "fuse_projections", "progress"}
    about_none |= {"packed", "workspace_bytes", "graph_memory", "max_graphs", "artifacts", "eager_first"}
    about_none |= {"images_in_steps"}
    assert {option.name for option in dataclasses.fields(WrapConfig)} - about_none <= {*FEATURES}
