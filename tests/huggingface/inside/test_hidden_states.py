"""Hidden states of each step are HuggingFace's, and the steps that give them are ours."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.utils import output_capturing

import compiled_llm
from compiled_llm.huggingface.processors import output_room
from support.execution.stand_in_cuda_graphs import let_a_cpu_capture
from support.huggingface.families import FAMILIES, make
from support.huggingface.pairs import OPTIONS, pair
from support.parity import assert_account_is_empty, greedy, mixed_prompts, next_turn
from support.tiny_models import ONE_LAYER, tiny_qwen3

CLOSE: dict[str, float] = {"rtol": 1e-4, "atol": 1e-4}
ASKED: dict[str, Any] = {"return_dict_in_generate": True, "output_hidden_states": True}
EARLY = {"eos_token_id": list(range(64))}
TWICE = {"input_ids": [0, 1, 1, 0], "attention_mask": [0, 1, 1, 0]}


def assert_same_states(ours: Any, theirs: Any, mask: Tensor) -> None:
    """Of all steps of ``generate``; masked tokens have zeros."""
    assert list(ours) == list(theirs)
    assert len(ours.hidden_states) == len(theirs.hidden_states)
    for step, (own, other) in enumerate(zip(ours.hidden_states, theirs.hidden_states, strict=True)):
        seen = mask != 0 if step == 0 else torch.ones(len(mask), 1, dtype=torch.bool)
        assert_same_layers(own, other, seen.repeat_interleave(len(other[0]) // len(mask), 0))


def assert_same_layers(ours: Any, theirs: Any, seen: Tensor) -> None:
    for own, other in zip(ours, theirs, strict=True):
        if other is None:
            assert own is None
            continue
        assert own.shape == other.shape
        torch.testing.assert_close(own[seen], other[seen], **CLOSE)
        assert not own[~seen].any()


CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": ("fast loop", {}),
    "rows end early": ("fast loop", EARLY),
    "with scores": ("fast loop", {"output_scores": True, "repetition_penalty": 1.2}),
    "one token": ("fast loop", {"max_new_tokens": 1}),
    "processors": ("processed loop", {"no_repeat_ngram_size": 2, **EARLY}),
    "two rows a request": ("processed loop", {"guidance_scale": 1.5}),
    "beams": ("compiled forward", {"num_beams": 2}),
}


@pytest.mark.core
@pytest.mark.parametrize("name", CALLS)
def test_generate_gives_huggingfaces_in_its_own_path(name, inputs):
    """Prompts of mixed lengths, in chunks."""
    plain, wrapped = pair({"prefill_tokens": 16}, eos_token_id=None)
    path, options = CALLS[name]
    for _ in range(2):
        theirs, ours = (greedy(model, inputs, **{"new_tokens": 7, **_named(options)}) for model in (plain, wrapped))
        assert torch.equal(ours.sequences, theirs.sequences)
        assert_same_states(ours, theirs, inputs["attention_mask"])
        del ours
        assert_account_is_empty(wrapped)
    assert wrapped.compiled.stats().generate_calls == {path: 2}


def _named(options: dict[str, Any]) -> dict[str, Any]:
    new = {"new_tokens": options["max_new_tokens"]} if "max_new_tokens" in options else {}
    return {**ASKED, **{name: value for name, value in options.items() if name != "max_new_tokens"}, **new}


def test_rows_that_share_their_prompt_have_the_states_of_all_of_it(models, inputs):
    inputs = {name: tensor[TWICE[name]] for name, tensor in inputs.items()}
    theirs, ours = (greedy(model, inputs, 4, **ASKED) for model in models)
    assert_same_states(ours, theirs, inputs["attention_mask"])


def test_a_conversation_goes_on_with_the_states_of_its_new_tokens(models, inputs):
    outs = [greedy(model, inputs, 4, **ASKED) for model in models]
    longer = [next_turn(inputs, out, torch.full((3, 2), 7)) for out in outs]
    mask = longer[0]["attention_mask"][:, -3:]  # the last token of the answer, and two more
    theirs, ours = (greedy(model, turn, 4, **ASKED) for model, turn in zip(models, longer, strict=True))
    assert [states.shape[1] for states, *_ in ours.hidden_states] == [3, 1, 1, 1]
    assert_same_states(ours, theirs, mask)


@pytest.mark.parametrize("options", [{}, {"no_repeat_ngram_size": 2}], ids=["fast loop", "processed loop"])
def test_embeddings_have_those_of_the_prompt_too(models, inputs, options):
    """A forward of their own computes them, before the loop begins."""
    mask, embed = inputs["attention_mask"], models[0].get_input_embeddings()
    embedded = {"inputs_embeds": embed(inputs["input_ids"]), "attention_mask": mask}
    theirs, ours = (model.generate(**embedded, max_new_tokens=4, **options, **ASKED) for model in models)
    assert_same_states(ours, theirs, mask)


def test_prefills_in_chunks_of_huggingfaces_give_those_of_the_last_chunk(models, seed):
    inputs = mixed_prompts([8, 8], 128, seed)
    theirs, ours = (greedy(model, inputs, 4, prefill_chunk_size=5, **ASKED) for model in models)
    assert [states.shape[1] for states, *_ in ours.hidden_states] == [3, 1, 1, 1]
    assert_same_states(ours, theirs, inputs["attention_mask"][:, -3:])
    whole = greedy(models[1], inputs, 4, **ASKED)
    torch.testing.assert_close(ours.hidden_states[1:], whole.hidden_states[1:], **CLOSE)


def test_calls_that_do_not_return_them_compute_none(models, inputs):
    wrapped = models[1]
    greedy(wrapped, inputs, 4, output_hidden_states=True)
    assert not any(key.wants for key in wrapped.compiled.model_runner().graph_manager.table.entries)
    greedy(wrapped, inputs, 4, **ASKED)
    assert any(key.wants for key in wrapped.compiled.model_runner().graph_manager.table.entries)


by_number = pytest.mark.skipif(
    not hasattr(output_capturing, "selected_hidden_states"), reason="this transformers counts layers otherwise"
)


@pytest.mark.core
@pytest.mark.parametrize(
    ("asked", "nothing"),
    [(True, False), *(pytest.param(chosen, [], marks=by_number) for chosen in (1, [0, -1], [9]))],
    ids=str,
)
def test_a_forward_gives_all_or_chosen_ones_or_none(asked, nothing, inputs):
    """More rows than a batch, prompts of mixed lengths in chunks, two of them equal."""
    plain, wrapped = pair({"prefill_tokens": 16, "max_batch_size": 2}, eos_token_id=None)
    inputs = {name: tensor[[0, 1, 1, 2]] for name, tensor in inputs.items()}
    for wanted in (asked, nothing):
        with torch.no_grad():
            theirs, ours = (model(**inputs, output_hidden_states=wanted, use_cache=False) for model in (plain, wrapped))
        assert list(ours) == list(theirs)
        assert (theirs.hidden_states is None) == (wanted is nothing)
        if wanted is asked:
            assert_same_layers(ours.hidden_states, theirs.hidden_states, inputs["attention_mask"] != 0)
    assert wrapped.compiled.stats().forward_calls == {"compiled": 2}


@torch.no_grad()
def test_a_forward_over_a_cache_gives_those_of_its_tokens(models, inputs):
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    caches: list[Any] = [None, models[1].compiled.new_cache()]
    for start, end in ((0, 5), (5, 8), (8, 9)):
        outs = [
            model(ids[:, start:end], mask[:, :end], past_key_values=cache, use_cache=True, output_hidden_states=True)
            for model, cache in zip(models, caches, strict=True)
        ]
        seen = mask[:, start:end] != 0
        assert_same_layers(outs[1].hidden_states, outs[0].hidden_states, seen)
        caches = [out.past_key_values for out in outs]
    assert models[1].compiled.stats().forward_calls == {"compiled": 3}


def test_states_of_embeddings_are_huggingfaces(models, inputs):
    embeddings = models[0].get_input_embeddings()(inputs["input_ids"]).detach()
    given = {"inputs_embeds": embeddings, "attention_mask": inputs["attention_mask"], "output_hidden_states": True}
    with torch.no_grad():
        theirs, ours = (model(**given) for model in models)
    assert_same_layers(ours.hidden_states, theirs.hidden_states, inputs["attention_mask"] != 0)


@pytest.mark.whole
@pytest.mark.usefixtures("without_inductor")
def test_compiled_steps_with_states_and_without_take_turns_and_nothing_is_compiled_again(inputs):
    plain = tiny_qwen3(**ONE_LAYER)
    wrapped = compiled_llm.wrap(tiny_qwen3(**ONE_LAYER), **{**OPTIONS, "mode": "compile", "progress": False})
    expected, states = greedy(plain, inputs, 6), greedy(plain, inputs, 6, **ASKED)
    for turn in range(3):
        assert torch.equal(greedy(wrapped, inputs, 6), expected)
        assert_same_states(greedy(wrapped, inputs, 6, **ASKED), states, inputs["attention_mask"])
        if turn == 0:
            graphs = wrapped.compiled.stats().graphs
    stats = wrapped.compiled.stats()
    assert (stats.graphs, stats.recompiles, stats.graph_breaks) == (graphs, 0, 0)
    assert graphs == 4, "a prefill and a decode step, each with states and without"


@pytest.mark.usefixtures("without_inductor")
def test_replayed_steps_give_the_states_of_each(monkeypatch, inputs):
    """A CUDA graph has its outputs at fixed addresses, and the next replay overwrites them."""
    let_a_cpu_capture(monkeypatch)
    plain = tiny_qwen3(**ONE_LAYER)
    wrapped = compiled_llm.wrap(tiny_qwen3(**ONE_LAYER), **{**OPTIONS, "mode": "compile", "progress": False})
    for _ in range(2):
        theirs, ours = (greedy(model, inputs, 12, **ASKED) for model in (plain, wrapped))
        assert torch.equal(ours.sequences, theirs.sequences)
        assert_same_states(ours, theirs, inputs["attention_mask"])
        del ours
    table = wrapped.compiled.cuda_graphs
    replayed = [row for row in table if row.states and row.replays]
    assert replayed
    assert {row.phase for row in replayed} == {"decode", "prefill"}
    assert "decode, hidden states" in str(table)


def test_memory_that_is_not_there(inputs, monkeypatch):
    """Of all columns, if rows cannot end early; else of the prompts, and the first token's states are theirs."""
    _, wrapped = pair(eos_token_id=None)
    monkeypatch.setattr(output_room, "free_bytes", lambda device: pytest.fail("nothing is kept"))
    greedy(wrapped, inputs, 3)
    column, width = 4 * 3 * 64 * (wrapped.config.num_hidden_layers + 1), inputs["input_ids"].shape[1]
    monkeypatch.setattr(output_room, "free_bytes", lambda device: column * (width + 7))
    message = r"output_hidden_states: 3 rows of 17 tokens take .* GiB are free; give fewer rows, max_new_tokens or lay"
    with pytest.raises(ValueError, match=message):
        greedy(wrapped, inputs, 9, **ASKED)
    assert len(greedy(wrapped, inputs, 8, **ASKED).hidden_states) == 8
    assert greedy(wrapped, inputs, 9, **ASKED, **EARLY).hidden_states
    monkeypatch.setattr(output_room, "free_bytes", lambda device: column * width - 1)
    with pytest.raises(ValueError, match="3 rows of 9 tokens take"):
        greedy(wrapped, inputs, 9, **ASKED, **EARLY)
    assert_account_is_empty(wrapped)


def test_stacked_hidden_states_are_huggingfaces_own(seed):
    """Each layer of Gemma 3n has several hidden states of a token: `[4, B, Q, hidden]`."""
    plain, wrapped = (make("Gemma3n", FAMILIES["Gemma3n"], seed) for _ in range(2))
    compiled_llm.wrap(wrapped, **OPTIONS)
    inputs = mixed_prompts([6, 6], 100, seed)
    found, expected = (greedy(model, inputs, 4, **ASKED) for model in (wrapped, plain))
    torch.testing.assert_close(found.hidden_states, expected.hidden_states, **CLOSE)
    with torch.no_grad():
        states = [model(**inputs, output_hidden_states=True).hidden_states for model in (wrapped, plain)]
    torch.testing.assert_close(*states, **CLOSE)
    assert wrapped.compiled.stats().slow_paths == {"output_hidden_states": 1, "forward: output_hidden_states": 1}
    with pytest.raises(ValueError, match=r"hidden_states: .* stacked"):
        compiled_llm.Engine(wrapped).submit([5, 6], hidden_states=[0])
    torch.testing.assert_close(greedy(wrapped, inputs, 4), greedy(plain, inputs, 4))
