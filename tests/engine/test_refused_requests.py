"""What an engine cannot do is refused before anything changes, and said with the way out; the next request works."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BatchEncoding, GenerationConfig, PreTrainedModel

from compiled_llm.engine.engine import Engine
from compiled_llm.requests.sampling_params import SamplingParams
from support.engine.text_tokenizers import Numbers
from support.engine.tiny_engines import PATIENCE, greedy, tiny, wrapped

LONG = greedy(200)
IMAGE: Any = [{"role": "user", "content": [{"type": "image", "image": "cat.png"}, {"type": "text", "text": "What?"}]}]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return wrapped(640, page_size=16)


@pytest.fixture
def engine(engine: Engine) -> Iterator[Engine]:
    yield engine
    assert len(engine.generate([5, 6], SamplingParams(max_tokens=2))[0].token_ids) == 2


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ([], "it is empty"),
        ([5, 128], "from 0 to 127; got 5 to 128"),
        ([-1], "got -1 to -1"),
        ([1.5], r"token ids; got float64 of shape \[1\]"),
        ([True, False], "got bool"),
        ([[1, 2], [3]], "several sequences; engine.generate takes several prompts"),
        (torch.ones(2, 3, dtype=torch.long), r"got int64 of shape \[2, 3\]"),
        (torch.randn(3, 64), "embeddings are not served; give token ids"),
        (torch.randn(1, 3, 64, dtype=torch.bfloat16), "embeddings are not served; give token ids"),
        (np.ones((3, 64), dtype=np.float32), "embeddings are not served; give token ids"),
        (BatchEncoding({"input_ids": [5, 6]}), r"a BatchEncoding; give token ids \(\[\"input_ids\"\] of it\)"),
        ({"prompt": "x", "multi_modal_data": {"image": None}}, "it has an image, and Qwen3ForCausalLM reads text"),
        ({"prompt_token_ids": [5], "mm_processor_kwargs": {}}, "'mm_processor_kwargs' is not served; leave it out"),
        (
            {"prompt_token_ids": [5], "cache_salt": "a"},
            r"'cache_salt' is not served; give it to submit\(\.\.\., cache_",
        ),
        ({"prompt_embeds": torch.randn(3, 64)}, r"'prompt_embeds' is not served; .* model.generate\(inputs_embeds="),
        ({"prompt_token_ids": "x"}, "'prompt_token_ids' has to be the token ids of one prompt; got 'x'"),
        ({"prompt_token_ids": [[5]]}, r"'prompt_token_ids' has to be the token ids of one prompt; got \[\[5\]\]"),
        ({"prompt_token_ids": [5, 128]}, "from 0 to 127; got 5 to 128"),
        ({"prompt": [5, 6]}, r"'prompt' has to be text; got \[5, 6\]; token ids go into 'prompt_token_ids'"),
        ({"prompt": None}, "'prompt' has to be text; got None"),
        ({"prompt": "x"}, "text needs a tokenizer"),
        (None, "a NoneType; give token ids, text or the messages of a chat"),
        (5, "an int; give token ids, text or the messages of a chat"),
        (["a", "b"], "several texts; engine.generate takes several prompts"),
        ("text", "text needs a tokenizer"),
        ("\ud800", "half a character of UTF-16 is no text"),
        ([{"role": "user", "content": "\ud800"}], "half a character of UTF-16 is no text"),
        (IMAGE, "it has an image, and Qwen3ForCausalLM reads text alone"),
    ],
    ids=lambda value: None if isinstance(value, str) else type(value).__name__,
)
def test_prompts(engine, prompt, said):
    with pytest.raises(ValueError, match=f"prompt: .*{said}"):
        engine.submit(prompt)
    with pytest.raises(ValueError, match=f"prompt: .*{said}"):
        engine.generate([[5, 6], prompt])
    assert engine.stats().waiting == 0


def test_a_message_with_an_image_is_refused_whatever_the_tokenizer_would_do(model, one_thread):
    with Engine(model, tokenizer=Numbers()) as engine, pytest.raises(ValueError, match="reads text alone"):
        engine.submit(IMAGE)


@pytest.mark.parametrize("prompts", [None, 5, {"input_ids": [5]}, BatchEncoding({"input_ids": [[5]]})])
def test_what_is_no_list_of_prompts(engine, prompts):
    with pytest.raises(ValueError, match=r"prompt: got .*; give token ids"):
        engine.generate(prompts)


@pytest.mark.parametrize(
    ("length", "most", "said"),
    [
        (10, 1020, "max_tokens=1020: .*1024 positions; shorten the prompt, or give at most 1014"),
        (10, 800, "max_tokens=800: .*51 pages of 16 tokens, and there are 40; give fewer"),
        (1024, 1, "prompt: 1024 tokens leave no room for an answer in the model's 1024 positions; shorten it"),
        (700, None, "prompt: 700 tokens and an answer of one need 44 pages of 16 tokens, and there are 40; shorten it"),
    ],
)
def test_what_never_fits_is_refused_with_numbers(engine, length, most, said):
    with pytest.raises(ValueError, match=said):
        engine.submit([5] * length, SamplingParams(max_tokens=most))


def test_max_model_len_bounds_a_prompt_with_its_answer(model, one_thread):
    with pytest.raises(ValueError, match="max_model_len=1025: exceeds the model's 1024 positions"):
        Engine(model, max_model_len=1025)
    with Engine(model, max_model_len=40) as engine:
        assert engine.describe().max_tokens == 40
        for length, most, said in (
            (10, 31, "max_tokens=31: .* more than max_model_len=40; shorten the prompt, or give at most 30"),
            (40, None, "prompt: 40 tokens leave no room for an answer in max_model_len=40; shorten it"),
        ):
            with pytest.raises(ValueError, match=said):
                engine.submit([5] * length, SamplingParams(max_tokens=most))
        for most in (30, None):
            params = SamplingParams(max_tokens=most, ignore_eos=True)
            (output,) = engine.generate([[5] * 10], params)
            assert len(output.token_ids) == 30


@pytest.mark.parametrize(
    "call",
    [
        lambda engine: engine.submit([5], {"max_tokens": 3}),
        lambda engine: engine.generate([5], GenerationConfig(max_new_tokens=3)),
        lambda engine: engine.generate([[5]], [{}]),
    ],
)
def test_settings_of_another_kind(engine, call):
    with pytest.raises(ValueError, match=r"params: give SamplingParams\(\.\.\.\); got a (dict|GenerationConfig)"):
        call(engine)


def test_models_that_are_not_wrapped_and_params_for_other_prompts(engine):
    with pytest.raises(TypeError, match="not wrapped"):
        Engine(tiny())
    with pytest.raises(ValueError, match="one for all prompts"):
        engine.generate([[5], [6]], [SamplingParams()])


def test_names_of_generate():
    for name, here in {"max_new_tokens": "max_tokens", "do_sample": "temperature, which is 0 for greedy"}.items():
        with pytest.raises(ValueError, match=f"{name} is generate's name; give {here}"):
            SamplingParams(**{name: 1})


@pytest.mark.parametrize(
    "options",
    [
        *({"max_num_seqs": value} for value in (0, 1.5, "8", True)),
        *({"max_queue": value} for value in (0, 1.5, "8", True)),
        *({"max_step_ms": value} for value in (0, -1, float("nan"), "8", "Auto", object)),
        *({"grammar_timeout": value} for value in (0, -1, None, "x")),
        {"logprobs_mode": "raw_logits"},
    ],
    ids=str,
)
def test_options(model, options):
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=f"{name}={value!r}: give "):
        Engine(model, **options)


def test_sizes_to_warm_up(engine):
    for rows in ([0], [1.5], 300, [True]):
        with pytest.raises(ValueError, match="is not a whole number between 1 and max_num_seqs=256"):
            engine.warmup(rows)
    engine.warmup(2)


def train(model: PreTrainedModel) -> Callable[[], object]:
    mlp = model.model.layers[-1].mlp
    mlp.act_fn = torch.nn.Sequential(mlp.act_fn, torch.nn.Dropout(0.1))
    model.train()

    def undo() -> None:
        mlp.act_fn = mlp.act_fn[0]
        model.eval()

    return undo


def hook(model: PreTrainedModel) -> Callable[[], object]:
    return model.model.register_forward_hook(lambda *_: None).remove


@pytest.mark.parametrize(("change", "said"), [(train, r"call model.eval\(\) first"), (hook, "inner_hooks")])
def test_a_model_that_has_changed_ends_what_runs_and_takes_no_more(model, engine, change, said):
    handle = engine.submit([5, 6], LONG)
    next(iter(handle))
    with engine.paused(weights_stay=True):
        undo = change(model)
    try:
        with pytest.raises(RuntimeError, match=said):
            handle.result(PATIENCE)
        with pytest.raises(RuntimeError, match=said):
            engine.submit([5, 6])
    finally:
        undo()


CALLS: dict[str, Callable[[Engine], Any]] = {
    "submit": lambda engine: engine.submit([5]),
    "generate": lambda engine: engine.generate([5]),
    "describe": lambda engine: engine.describe(),
    "warmup": lambda engine: engine.warmup(),
    "sleep": lambda engine: engine.sleep(),
    "wake": lambda engine: engine.wake(),
    "update_weights": lambda engine: engine.update_weights("folder"),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_closed_engine(model, call):
    engine = Engine(model)
    engine.close()
    with pytest.raises(RuntimeError, match="the engine is closed"):
        CALLS[call](engine)


def test_an_engine_that_is_closed_while_a_request_comes(model, monkeypatch):
    engine = Engine(model)
    monkeypatch.setattr(engine, "_check_open", engine.close)
    for call in ("submit", "generate"):
        with pytest.raises(RuntimeError, match="closed"):
            CALLS[call](engine)


def test_waiting_where_the_engine_cannot_run(engine):
    def refused(call: Callable[[], Any]) -> str:
        with pytest.raises(RuntimeError) as caught:
            call()
        return str(caught.value)

    errors: list[str] = []
    with engine.paused(weights_stay=True):
        handle = engine.submit([5, 6], LONG)
        for wait in (handle.result, lambda: next(iter(handle))):
            assert "paused, or running, in this thread" in refused(wait)
        handle.when_changed(lambda: None if handle.done or errors else errors.append(refused(handle.result)))
    assert len(handle.result(PATIENCE).token_ids) == 200
    assert "paused, or running, in this thread" in errors[0]
    with engine.paused(weights_stay=True):
        assert handle.result().finish_reason == "length"  # without waiting


def test_how_far_a_handle_is(engine):
    with engine.paused(weights_stay=True):
        handle = engine.submit([5, 6], SamplingParams(n=2, max_tokens=3))
        assert repr(handle) == "<RequestHandle: 0, 0 tokens, waiting, waiting>"
    handle.result(PATIENCE)
    assert repr(handle) == "<RequestHandle: 3, 3 tokens, length, length>"
