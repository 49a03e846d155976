"""An embedding is the last hidden state of a text alone, whoever runs beside it and whatever of it is there already."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch

from compiled_llm.compilation import backend as inductor
from compiled_llm.config import WrapConfig
from compiled_llm.engine import model_check
from compiled_llm.engine.admission.greedy import Greedy
from compiled_llm.engine.admission.policies import POLICIES
from compiled_llm.engine.engine import Engine
from compiled_llm.requests.sampling_params import SamplingParams
from support.engine.text_tokenizers import byte_level
from support.engine.tiny_engines import greedy, tiny, wrapped
from support.execution.stand_in_cuda_graphs import let_a_cpu_capture
from support.parity import alone
from support.pooling import assert_alike, last_states

LENGTHS = (3, 9, 4, 45, 1, 8, 16, 17, 5)
"""Around pages of 4 tokens and chunks of 16; one is longer than two chunks."""


def drawn(seed: int, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    print(f"seed {seed}")
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 380, (length,), generator=generator).tolist() for length in lengths]


@pytest.fixture(scope="module")
def plain() -> Any:
    return tiny(vocab_size=380, max_position_embeddings=256)


def test_a_batch_of_mixed_lengths_is_huggingface_s_twice_with_what_the_first_has_left(engine, plain, seed):
    prompts = drawn(seed)
    expected = last_states(plain, prompts)
    before = engine.stats().cached_tokens
    for _ in range(2):
        found = engine.embed(prompts)
        assert_alike(found, expected)
        torch.testing.assert_close(found.norm(dim=1), torch.ones(len(prompts)))
    assert engine.stats().cached_tokens > before


def test_beside_answers_both_are_as_alone(engine, plain, seed):
    prompts = drawn(seed + 1)
    alone = [output.token_ids for output in engine.generate(prompts[:3], greedy(24))]
    answers = [engine.submit(prompt, greedy(24)) for prompt in prompts[:3]]
    vectors = [engine.submit(prompt, pooled=True) for prompt in prompts]
    outputs = [handle.result(60) for handle in vectors]
    assert [handle.result(60).token_ids for handle in answers] == alone
    assert all(output.token_ids == [] for output in outputs)
    found = torch.tensor([list(output.outputs[0].pooled) for output in outputs])
    torch.testing.assert_close(found, last_states(plain, prompts), rtol=1e-4, atol=1e-4)


def test_a_text_that_loses_its_pages_begins_again(plain, seed, monkeypatch):
    monkeypatch.setitem(POLICIES, "auto", Greedy)
    (text, *prompts) = drawn(seed + 2, (70, 6, 7, 5))
    ours = wrapped(112, tiny(vocab_size=380, max_position_embeddings=256), prefill_tokens=8)
    with Engine(ours) as running:
        answers = [running.submit(prompt, greedy(40)) for prompt in prompts]
        vector = running.submit(text, pooled=True, priority=1)
        found = torch.tensor([list(vector.result(60).outputs[0].pooled)])
        assert [handle.result(60).finish_reason for handle in answers] == ["length"] * 3
        assert vector.requests[0].preemptions
    assert_alike(found, last_states(plain, [text]))


def test_hooks_for_hidden_states_leave_the_prefix_cache_as_it_is(monkeypatch):
    """HuggingFace's first step that gives some marks the model."""
    monkeypatch.setattr(model_check, "_SECONDS", 0.0)  # it is looked at in each step
    prompt = [7, 3] * 10
    with Engine(wrapped()) as running:
        running.generate([prompt], greedy(3))
        for _ in range(2):
            running.generate([[1], [2]], pooled=True)
        assert running.generate([prompt], greedy(3))[0].cached_tokens == 16


def test_texts_of_another_salt_are_computed(engine):
    prompt = [7, 3] * 10
    for salt, cached in (("one", 0), ("one", 16), ("two", 0)):
        output = engine.submit(prompt, pooled=True, cache_salt=salt).result(60)
        assert output.cached_tokens == cached


def test_texts_begin_with_the_folder_s_prompts(engine, plain):
    ids = byte_level()("Find: a cat")["input_ids"]
    assert_alike(engine.embed("a cat", prompt_name="query"), last_states(plain, [ids]))
    assert_alike(engine.embed(["a cat"]), last_states(plain, [byte_level()("a cat")["input_ids"]]))
    with pytest.raises(ValueError, match=r"^prompt_name='answer': .* has 'query', 'document'$"):
        engine.embed("a cat", prompt_name="answer")


def test_fewer_numbers_are_the_first_ones_and_of_length_1(engine, plain):
    expected = last_states(plain, [[5, 6, 7]])[:, :10]
    found = engine.embed([5, 6, 7], 10)
    assert_alike(found, expected)
    assert found.norm().item() == pytest.approx(1)
    for wrong in (0, 65, True, 1.5):
        with pytest.raises(ValueError, match=r"^dimensions=.*: embeddings of this model have 1 to 64"):
            engine.embed([5, 6, 7], wrong)


def test_texts_may_come_from_any_iterable(engine):
    texts = [[3, 4, 5], [6, 7]]
    assert torch.equal(engine.embed(each for each in texts), engine.embed(texts))
    with pytest.raises(ValueError, match="prompt: got a NoneType"):
        engine.embed(None)


def test_no_texts_have_no_embeddings(engine):
    assert engine.embed([]).shape == (0, 64)


def test_a_vector_has_no_answer(engine):
    with pytest.raises(ValueError, match=r"^pooled=True: .* has no answer and no other outputs"):
        engine.submit([5], SamplingParams(max_tokens=3), pooled=True)
    with pytest.raises(ValueError, match=r"^pooled=True: .* has no answer and no other outputs"):
        engine.generate([[5]], pooled=True, hidden_states=[0])
    with pytest.raises(ValueError, match=r"^prompt: it is empty"):
        engine.embed("")
    with pytest.raises(ValueError, match=r"^prompt: 300 tokens"):
        engine.embed([[5] * 300])


def test_numbers_that_are_none_are_an_error():
    broken = tiny()
    broken.model.norm.weight.data[0] = float("nan")
    with Engine(wrapped(plain=broken)) as running, pytest.raises(RuntimeError, match=r"^texts\[0\]: .*NaN"):
        running.embed([[5, 6]], pooling="last")


@pytest.mark.whole
def test_programs_compute_no_logits(monkeypatch):
    graphs: list[Any] = []

    def kept(module: Any, inputs: Any, options: Any) -> Any:
        read = deepcopy(module.graph)
        read.eliminate_dead_code()  # as what compiles it does
        given = [node for node in read.nodes if node.op == "placeholder" and node.users]
        graphs.append(sum(getattr(node.meta["example_value"], "shape", None) == (131, 64) for node in given))
        return module.forward

    monkeypatch.setattr(inductor, "compile_with_inductor", kept)
    ours = wrapped(mode="compile", plain=tiny(vocab_size=131))
    with Engine(ours) as running:
        assert running.embed([[5, 6, 7], [8]], pooling="last").shape == (2, 64)
        assert graphs == [1], "the embeddings, and no lm_head"
        running.generate([[5, 6, 7]], greedy(2))
        assert graphs[1] == 2
    assert ours.compiled.stats().graph_breaks == 0


@pytest.mark.parametrize("most", [None, 24])
def test_vectors_come_from_captured_steps_beside_those_of_answers(plain, seed, most, monkeypatch):
    """With a bound, steps of one kind leave what they give in one place, and vectors are narrower than logits."""
    let_a_cpu_capture(monkeypatch)
    monkeypatch.setattr(WrapConfig, "graph_budget", property(lambda self: (None, most)))
    ours = wrapped(800, tiny(vocab_size=380, max_position_embeddings=256), prefill_tokens=16)
    prompts = drawn(seed + 3, (3, 4, 5))
    expected = [alone(plain, prompt, 6) for prompt in prompts]
    with Engine(ours) as running:
        for rows in (3, 1, 3, 1):  # one runs in the step of three, while its own is captured
            for _ in range(2):
                running.reset_prefix_cache()
                answers = running.generate(prompts[:rows], greedy(6))
                assert [answer.token_ids for answer in answers] == expected[:rows]
                running.reset_prefix_cache()
                assert_alike(running.embed(prompts[:rows], pooling="last"), last_states(plain, prompts[:rows]))
    pooled = [row for row in ours.compiled.cuda_graphs if row.states]
    assert [row.replays > 0 for row in pooled] == [True, True]
    assert not any(row.failures for row in ours.compiled.cuda_graphs)
