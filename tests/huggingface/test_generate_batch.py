"""HuggingFace's `generate_batch`, its managers and what serves with them: over a wrapped model as over a bare one."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

import compiled_llm
from compiled_llm.compat.continuous_batching import RequestState, processors_of
from compiled_llm.engine.steps.request import Request
from compiled_llm.huggingface.batch import batch_settings
from compiled_llm.huggingface.batch.batch_answers import BatchAnswers
from compiled_llm.huggingface.batch.continuous_batching import EngineManager
from compiled_llm.requests.handle import RequestHandle
from compiled_llm.requests.listeners import tell
from support.engine.no_source import NoSource
from support.execution.failing_calls import fail_once
from support.parity import alone as tokens_alone, assert_account_is_empty
from support.tiny_models import tiny_qwen3

ENDS = [2, 5, 31, 77]
PROMPTS = [[5, 6, 7], [9, 10, 11, 12], [20] * 30]
OPTIONS: dict[str, Any] = {"mode": "eager", "page_size": 4, "kv_memory": "2000 tokens", "max_batch_size": 8}


def config(**options: Any) -> GenerationConfig:
    return GenerationConfig(**{"max_new_tokens": 9, "do_sample": False, "eos_token_id": ENDS, **options})


def sizes(**options: Any) -> ContinuousBatchingConfig:
    """Small ones, which HuggingFace's manager needs on a CPU."""
    return ContinuousBatchingConfig(**{"num_blocks": 32, "max_batch_tokens": 64, **options})


@pytest.fixture(scope="module")
def plain() -> PreTrainedModel:
    return tiny_qwen3(eos_token_id=ENDS)


@pytest.fixture
def wrapped() -> Iterator[Any]:
    model = compiled_llm.wrap(tiny_qwen3(eos_token_id=ENDS), progress=False, **OPTIONS)
    yield model
    if model.compiled.stats().pages is not None:
        assert_account_is_empty(model)


@pytest.fixture
def manager(wrapped: Any) -> Iterator[EngineManager]:
    with wrapped.continuous_batching_context_manager(config()) as manager:
        assert isinstance(manager, EngineManager)
        yield manager


def alone(plain: Any, prompt: list[int], new: int = 9) -> list[int]:
    return tokens_alone(plain, prompt, new, eos_token_id=ENDS, pad_token_id=0)


def tokens(outputs: dict[str, Any]) -> dict[str, list[int]]:
    return {request_id: output.generated_tokens for request_id, output in outputs.items()}


def results(manager: Any, count: int) -> list[Any]:
    """The next outputs, `count` of them finished."""
    found: list[Any] = []
    while sum(output.is_finished() for output in found) < count:
        output = manager.get_result(timeout=30)
        assert output is not None, found
        found.append(output)
    return found


# ---- what it returns


@pytest.mark.core
def test_generate_batch_returns_what_it_returns_over_a_bare_model(plain, wrapped):
    outputs = [
        model.generate_batch(
            inputs=PROMPTS, generation_config=config(), continuous_batching_config=sizes(), record_timestamps=True
        )
        for model in (plain, wrapped)
    ]
    timed = {"created_time", "lifespan", "timestamps"}
    bare, ours = (
        {name: {key: value for key, value in vars(each).items() if key not in timed} for name, each in output.items()}
        for output in outputs
    )
    assert list(ours.items()) == list(bare.items())
    assert [entry["generated_tokens"] for entry in ours.values()] == [alone(plain, prompt) for prompt in PROMPTS]
    for output in outputs[1].values():
        assert len(output.timestamps) == len(output.generated_tokens)
        times = [output.created_time, output.lifespan[0], *output.timestamps, output.lifespan[1]]
        assert times == sorted(times)
    assert wrapped.compiled.stats().generate_calls == {"engine": 1}
    assert wrapped.compiled.stats().forward_calls == {}


def test_a_limit_that_is_not_whole_ends_at_the_first_number_of_tokens_above_it(plain, wrapped):
    found = tokens(wrapped.generate_batch(PROMPTS, config(max_new_tokens=4.5), sizes()))
    assert list(found.values()) == [alone(plain, prompt, 5) for prompt in PROMPTS]


def test_children_have_huggingfaces_ids_in_huggingfaces_order(plain, wrapped):
    sampled = config(do_sample=True, num_return_sequences=3)
    bare, ours = (
        model.generate_batch(inputs=PROMPTS[:2], generation_config=sampled, continuous_batching_config=sizes())
        for model in (plain, wrapped)
    )
    assert list(ours) == list(bare)
    assert {output.status for output in ours.values()} == {output.status for output in bare.values()}
    with wrapped.continuous_batching_context_manager(sampled) as manager:
        manager.add_request(PROMPTS[0])
        found = {output.request_id: output for output in results(manager, 3)}
    assert found.keys() == {"req_0", "req_0__child#0", "req_0__child#1"}
    assert len({tuple(output.generated_tokens) for output in found.values()}) > 1
    assert all(output.prompt_ids == PROMPTS[0] for output in found.values())


def test_seeds_decide_draws(wrapped):
    def drawn(seed: int | None = None) -> dict[str, list[int]]:
        settings = config(do_sample=True, temperature=1.3, top_k=50, top_p=0.95)
        return tokens(wrapped.generate_batch(PROMPTS, settings, ContinuousBatchingConfig(seed=seed)))

    assert drawn(seed=1) == drawn(seed=1) != drawn(seed=2)
    torch.manual_seed(3)
    first = drawn()
    torch.manual_seed(3)
    assert drawn() == first != drawn()


def test_generate_with_a_paged_cache_is_generate_batch(plain, wrapped):
    prompts, options = torch.tensor([PROMPTS[0], [9, 10, 11]]), {"max_new_tokens": 6, "eos_token_id": -1}
    expected = plain.generate(prompts, attention_mask=torch.ones_like(prompts), do_sample=False, **options)
    wrapped.train()  # as HuggingFace's manager, ours calls eval()
    torch.testing.assert_close(wrapped.generate(prompts, cache_implementation="paged", **options)[0], expected)
    assert not wrapped.training
    assert wrapped.compiled.stats().generate_calls == {"engine": 1}


PROCESSING: dict[str, dict[str, Any]] = {
    "least tokens": {"min_new_tokens": 7, "min_length": 9},
    "words": {"bad_words_ids": [[token] for token in range(20, 60)] + [[60, 61]], "sequence_bias": {(9,): 4.0}},
    "suppressed": {"suppress_tokens": list(range(60, 100)), "begin_suppress_tokens": list(range(100, 128))},
    "forced": {"forced_eos_token_id": [2, 5]},
    "penalty": {"repetition_penalty": 1.2, "remove_invalid_values": True},
}


@pytest.mark.core
@pytest.mark.parametrize("name", PROCESSING)
def test_it_does_what_the_graph_does_whatever_huggingfaces_manager_drops(name, plain, wrapped):
    outputs = wrapped.generate_batch(PROMPTS, config(**PROCESSING[name]), sizes(return_logprobs=True))
    assert wrapped.compiled.stats().generate_calls == {"engine": 1}
    for prompt, output in zip(PROMPTS, outputs.values(), strict=True):
        ids = torch.tensor([prompt])
        options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0, "max_new_tokens": 9}
        expected = plain.generate(
            ids, eos_token_id=ENDS, output_scores=True, return_dict_in_generate=True, **options, **PROCESSING[name]
        )
        assert output.generated_tokens == expected.sequences[0, len(prompt) :].tolist()
        scores = torch.cat(expected.scores).log_softmax(dim=-1)
        chosen = scores.gather(1, expected.sequences[0, len(prompt) :, None])[:, 0]
        assert output.logprobs == pytest.approx(chosen.tolist(), abs=2e-5)


def test_settings_that_a_prompt_makes_impossible_are_in_its_output(wrapped):
    settings = config(forced_eos_token_id=2, min_length=12)  # which bars it in the last step after a short prompt
    with wrapped.continuous_batching_context_manager(settings) as manager:
        for prompt in (PROMPTS[0], PROMPTS[2]):
            manager.add_request(prompt)
        found = {output.request_id: output for output in results(manager, 2)}
    assert "MinLengthLogitsProcessor" in found["req_0"].error
    assert found["req_1"].generated_tokens[-1] in ENDS
    assert found["req_1"].error is None


# ---- a manager in one's own hands


def test_streamed_outputs_have_all_tokens_so_far_and_their_log_probabilities(plain, wrapped):
    with wrapped.continuous_batching_context_manager(
        config(), continuous_batching_config=sizes(return_logprobs=True)
    ) as manager:
        outputs = list(manager.request_id_iter(manager.add_request(PROMPTS[0], streaming=True, eos_token_id=-1)))
    whole = outputs[-1].generated_tokens
    assert [output.generated_tokens for output in outputs] == [whole[:count] for count in range(1, 10)]
    assert [len(output.logprobs) for output in outputs] == [*range(1, 10)]
    assert [output.is_finished() for output in outputs] == [False] * 8 + [True]
    assert whole[: len(alone(plain, PROMPTS[0]))] == alone(plain, PROMPTS[0])


def test_only_who_streams_hears_of_each_token(wrapped, monkeypatch):
    told, tell_of = list[BatchAnswers](), BatchAnswers._tell

    def telling(answers: BatchAnswers) -> None:
        told.append(answers)
        tell_of(answers)

    monkeypatch.setattr(BatchAnswers, "_tell", telling)
    outputs = wrapped.generate_batch(PROMPTS, config(max_new_tokens=30, eos_token_id=-1))
    assert [len(output.generated_tokens) for output in outputs.values()] == [30, 30, 30]
    assert len(told) <= 2 * len(PROMPTS)  # once it follows, and at its end


def test_nothing_more_comes_of_a_cancelled_request_and_others_go_on(plain, manager):
    long = manager.add_request([7, 8], max_new_tokens=900, eos_token_id=-1, streaming=True)
    manager.get_result(timeout=30)
    assert list(manager.batch_processor.scheduler.active_requests) == [long]
    manager.cancel_request(long)
    other = manager.add_request(PROMPTS[0])
    assert [output.generated_tokens for output in results(manager, 1) if output.request_id == other] == [
        alone(plain, PROMPTS[0])
    ]
    assert not manager.batch_processor.scheduler.has_pending_requests()


def test_what_is_wrong_with_a_request_is_in_its_output(plain, wrapped):
    outputs = wrapped.generate_batch([[], [500], PROMPTS[0]], config())
    assert [output.status.name for output in outputs.values()] == ["FAILED", "FAILED", "FINISHED"]
    errors = [output.error for output in outputs.values()]
    assert "empty" in errors[0]
    assert "from 0 to 127" in errors[1]
    assert outputs["req_2"].generated_tokens == alone(plain, PROMPTS[0])


def test_a_step_that_fails_is_in_the_output_and_the_manager_goes_on(plain, wrapped, manager, monkeypatch):
    fail_once(monkeypatch, wrapped.compiled.model_runner(), "run", MemoryError("planted"), after=3)
    manager.add_request(PROMPTS[0])
    (output,) = results(manager, 1)
    assert output.error == "MemoryError: planted"
    assert output.generated_tokens == alone(plain, PROMPTS[0])[: len(output.generated_tokens)]
    manager.add_request(PROMPTS[0])
    assert results(manager, 1)[0].generated_tokens == alone(plain, PROMPTS[0])


@pytest.mark.core
def test_a_manager_is_stopped_and_started_again(plain, wrapped):
    manager = wrapped.init_continuous_batching(config())
    for round_number in range(2):
        manager.start()
        assert manager.is_running()
        manager.add_request(PROMPTS[0])
        manager.stop()  # with the last request
        assert not manager.is_running()
        assert manager.add_request(PROMPTS[0]) is None
        output = manager.get_result()
        assert (output.request_id, output.generated_tokens) == (f"req_{round_number}", alone(plain, PROMPTS[0]))
    manager.destroy()
    manager.destroy()


def test_weights_change_while_a_manager_pauses(wrapped, manager):
    long = manager.add_request(PROMPTS[2], max_new_tokens=300, eos_token_id=-1, streaming=True)
    manager.get_result(timeout=30)
    other = tiny_qwen3(seed=9)
    with manager.pause():
        for parameter, wanted in zip(wrapped.parameters(), other.parameters(), strict=True):
            parameter.data.copy_(wanted)
    manager.cancel_request(long)
    manager.add_request(PROMPTS[2])
    last = results(manager, 1)[-1]
    assert last.generated_tokens == alone(other, PROMPTS[2])


def test_a_hard_stop_fails_what_runs_and_generate_beside_it_runs_on(plain, wrapped):
    with wrapped.continuous_batching_context_manager(config()) as manager:
        manager.add_request(PROMPTS[2], max_new_tokens=100, eos_token_id=-1)
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(alone, wrapped, PROMPTS[0], 60)
            manager.stop(hard_stop=True)
            assert answer.result(30) == alone(plain, PROMPTS[0], 60)
        assert "stopped before" in manager.get_result().error


def test_outputs_of_two_threads_come_in_order():
    """The thread that adds a request tells of it, and so does the engine's."""
    request = Request(prompt=np.array([5]), sampling=None, max_tokens=2, stop_token_ids=frozenset())
    seen: list[int] = []

    def finish() -> None:
        request.tokens.append(8)
        request.finish_reason = "length"
        tell([handle.listeners])

    class Router:
        def deliver_batch(self, outputs: list[Any]) -> None:
            if not engine.ident:
                engine.start()
                engine.join(0.2)
            seen.extend(len(output.generated_tokens) for output in outputs)

    engine = threading.Thread(target=finish)
    handle = RequestHandle([request], [5], NoSource())
    request.tokens.append(7)
    router: Any = Router()
    BatchAnswers([RequestState("a", [5], streaming=True)], handle, router, ended=lambda: None).follow()
    engine.join()
    assert seen == [1, 2]


# ---- kept managers


def test_a_kept_manager_goes_with_what_wraps_the_model(plain, wrapped):
    wrapped.generate_batch(PROMPTS, config(), persistent_manager=True)
    compiled_llm.unwrap(wrapped)
    outputs = wrapped.generate_batch(PROMPTS, config(), sizes(), persistent_manager=True)
    assert list(tokens(outputs).values()) == [alone(plain, prompt) for prompt in PROMPTS]
    compiled_llm.wrap(wrapped, progress=False, **OPTIONS)
    wrapped.generate_batch(PROMPTS, config(), sizes())
    assert wrapped.compiled.stats().slow_paths["kept_manager"] == 1
    wrapped.destroy_cached_continuous_batching_manager()


# ---- HuggingFace's own manager


@pytest.mark.parametrize("reason", ["processors", "inner_hooks"])
def test_huggingfaces_own_manager_does_what_ours_cannot(reason, plain, wrapped, caplog):
    caplog.set_level(logging.WARNING, logger="compiled_llm")
    batching = {"drop_unsupported_processors": reason == "inner_hooks"}
    settings = config(**({"no_repeat_ngram_size": 40} if reason == "processors" else {}))
    hook = wrapped.lm_head.register_forward_hook(lambda *_: None) if reason == "inner_hooks" else None
    with torch.inference_mode():  # HuggingFace's warm-up alone would make tensors that its thread cannot write to
        outputs = wrapped.generate_batch(PROMPTS, settings, sizes(**batching))
    if hook is not None:
        hook.remove()
    assert list(tokens(outputs).values()) == [alone(plain, prompt) for prompt in PROMPTS]
    stats = wrapped.compiled.stats()
    assert (stats.generate_calls, stats.slow_paths[reason]) == ({"original": 1}, 1)
    assert f"({reason} in docs/paths.md)" in caplog.text


SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"do_sample": True, "temperature": 0.8, "top_k": 40, "top_p": 0.9},
    {"do_sample": True, "min_p": 0.01, "suppress_tokens": [7, 8, 9]},
]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_log_probabilities_are_those_of_huggingfaces_manager(sampling, plain, wrapped):
    settings, several = config(**sampling), 2 if sampling else 1
    settings.num_return_sequences = several
    outputs = wrapped.generate_batch(PROMPTS, settings, sizes(return_logprobs=True, seed=3))
    assert wrapped.compiled.stats().generate_calls == {"engine": 1}
    assert len(outputs) in (3, 3 * several)  # transformers 5.17 returns the first of several alone
    processors = processors_of(plain, settings, [5], 9, ENDS)
    for output in outputs.values():
        text, start = torch.tensor([output.prompt_ids + output.generated_tokens]), len(output.prompt_ids)
        with torch.no_grad():
            logits = plain(text).logits[0, start - 1 : -1].float()
        expected = processors(text[:, :start].expand(len(logits), -1), logits).log_softmax(dim=-1)
        chosen = expected.gather(1, text[0, start:, None])[:, 0].tolist()
        assert output.logprobs == pytest.approx(chosen, abs=1e-5)
    if not sampling:
        theirs = tiny_qwen3(eos_token_id=ENDS).generate_batch(PROMPTS, settings, sizes(return_logprobs=True))
        for ours, their in zip(outputs.values(), theirs.values(), strict=True):
            assert ours.logprobs == pytest.approx(their.logprobs, abs=1e-5)


def test_a_hook_that_comes_later_is_in_the_output(wrapped, manager):
    hook = wrapped.model.register_forward_hook(lambda *_: None)
    manager.add_request(PROMPTS[0])
    assert "inner_hooks" in results(manager, 1)[0].error
    hook.remove()


# ---- settings


NEEDLESS = frozenset(
    {
        *("max_blocks_per_request", "use_async_batching", "q_padding_interval_size", "kv_padding_interval_size"),
        *("scheduler_type", "safety_margin", "auto_switch_to_flash", "max_queue_size", "max_cached_graphs"),
        *("cpu_offload_space", "cpu_offload_space_safety_threshold"),
        *("disable_nccl_graph_mixing", "cpu_group_timeout"),
    }
)
"""Its fields that tune what the engine does in another way: no text depends on them."""


def test_each_field_of_the_batching_config_is_honoured_or_has_a_word_said_of_it():
    fields = {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}
    groups = [batch_settings.HONOURED, batch_settings.DECIDED_BY_WRAP.keys(), NEEDLESS]
    assert fields <= set().union(*groups)
    assert sum(map(len, groups)) == len(set().union(*groups))


def test_what_has_no_effect_is_named_in_one_line(wrapped, caplog):
    caplog.set_level(logging.WARNING, logger="compiled_llm")
    batching = sizes(max_requests_per_batch=2, allow_block_sharing=False, scheduler_type="prefill_first")
    wrapped.init_continuous_batching(config(num_beams=2), batching)
    (line,) = (record.getMessage() for record in caplog.records)
    assert line.endswith(
        "num_blocks=32 (wrap's kv_memory decides); max_batch_tokens=64 (wrap's prefill_tokens decides); "
        "scheduler_type='prefill_first'; num_beams=2"
    )


def test_the_users_config_stays(wrapped):
    mine = GenerationConfig(max_new_tokens=3)
    wrapped.generate_batch(PROMPTS, mine)
    assert mine.eos_token_id is None


# ---- reinforcement learning


def rounds(model: Any, plain: Any, ask: Callable[[], dict[str, Any]], steps: int) -> None:
    """Answers, as TRL's GRPO asks for them, with everything that it does around; a step of training after each."""
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.3) for each in (model, plain)]
    for _ in range(steps):
        model.train()
        before = model.config._attn_implementation
        model.config._attn_implementation = "paged|sdpa"
        with torch.no_grad(), torch.inference_mode():
            answers = list(tokens(ask()).values())
            model.train()
        model.config._attn_implementation = before
        plain.eval()
        assert answers == [alone(plain, prompt) for prompt in PROMPTS]
        for each, optimizer in zip((model, plain), optimizers, strict=True):
            each.eval()  # the same loss for both
            ids = torch.tensor([PROMPTS[1]])
            each(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.drawn(most=1)
@pytest.mark.core
@pytest.mark.parametrize("persistent", [False, True])
def test_rounds_of_grpo_answer_with_the_weights_of_their_time(persistent, wrapped):
    def ask() -> dict[str, Any]:
        return wrapped.generate_batch(PROMPTS, config(), progress_bar=False, persistent_manager=persistent)

    rounds(wrapped, tiny_qwen3(eos_token_id=ENDS), ask, steps=5 if not persistent else 2)
    assert wrapped.compiled.stats().generate_calls.keys() == {"engine"}
    assert not persistent or [*ask()] == ["req_6", "req_7", "req_8"], "of one manager"
    wrapped.destroy_cached_continuous_batching_manager()


@pytest.mark.parametrize("cast", [False, True], ids=["all in bfloat16", "the head in float32"])
def test_a_model_that_was_converted_answers(cast, wrapped):
    plain = tiny_qwen3(eos_token_id=ENDS)
    for model in (plain, wrapped):
        model.to(torch.bfloat16)
        if cast:  # as cast_lm_head_to_fp32 of TRL
            model.lm_head.to(torch.float32)
            model.lm_head.register_forward_pre_hook(lambda _, args: (args[0].float(), *args[1:]))
    with torch.inference_mode():
        outputs = wrapped.generate_batch(PROMPTS, config(), sizes())
    assert list(tokens(outputs).values()) == [alone(plain, prompt) for prompt in PROMPTS]
    assert wrapped.compiled.stats().generate_calls == {"original" if cast else "engine": 1}


# ---- transformers serve


def test_transformers_serve_runs_over_it(plain, wrapped):
    utils = pytest.importorskip("transformers.cli.serving.utils")
    serving = utils.CBGenerateManager()

    class Processor:
        def decode(self, ids: list[int], **_: Any) -> str:
            return " ".join(map(str, ids))

    async def ask() -> str:
        serving.init_cb(wrapped, config())
        inputs = {"input_ids": PROMPTS[0]}
        text, _, _ = await serving.generate_non_streaming(wrapped, Processor(), inputs, config(), request_id="a")
        return text

    assert asyncio.run(ask()) == " ".join(map(str, alone(plain, PROMPTS[0])))
    assert serving.is_alive()
    assert not serving.scheduler.has_pending_requests()
    serving.stop()
