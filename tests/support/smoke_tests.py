"""Twenty things that a model does without any of the features that can be taken out, each in a moment.

``python -m support.smoke_tests FOLDER ASKS``, in ``tests/``, runs them over the packages of that folder, which Python
has to find first, and prints a traceback for each that fails. ``ASKS`` asks for what is not there.
"""

from __future__ import annotations

import functools
import gc
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import compiled_llm
from compiled_llm.compilation import backend as inductor
from compiled_llm.engine.admission.greedy import Greedy
from compiled_llm.engine.admission.policies import POLICIES
from compiled_llm.engine.engine import Engine
from compiled_llm.requests.sampling_params import SamplingParams
from compiled_llm.requests.structured_outputs import StructuredOutputsParams as StructuredOutputsParams
from support.compilation.explaining_less import explain_less
from support.engine.text_tokenizers import byte_level, decode
from support.engine.tiny_engines import greedy, huggingfaces, tiny, wrapped
from support.execution.stand_in_cuda_graphs import let_a_cpu_capture
from support.parity import assert_account_is_empty, mixed_prompts
from support.server.engine_processes import engine_in_thread
from support.server.running_servers import RunningServer, chat_tokenizer, running_server

PROMPT = [5, 17, 40, 8, 90, 33, 71, 12, 6]
"""Two pages and a token."""
ROWS = mixed_prompts([3, 9, 5], 128, 0)


@functools.cache
def model() -> PreTrainedModel:
    return wrapped(max_batch_size=12)


def both(plain: PreTrainedModel, **options: Any) -> None:
    """HuggingFace's tokens, with these options of `generate`."""
    torch.manual_seed(0)
    expected = plain.generate(**ROWS, pad_token_id=0, **options)
    torch.manual_seed(0)
    assert torch.equal(model().generate(**ROWS, pad_token_id=0, **options), expected)


@contextmanager
def engine(*options: Any, **of_wrap: Any) -> Iterator[Engine]:
    ours = wrapped(*options, **of_wrap) if options or of_wrap else model()
    with Engine(ours, tokenizer=None) as running:
        yield running
    assert_account_is_empty(ours)


@contextmanager
def server() -> Iterator[RunningServer]:
    own = wrapped(6000, tiny(vocab_size=380))
    with tempfile.TemporaryDirectory(prefix="uds-") as folder:
        path = Path(folder) / "socket"
        chat_tokenizer().save_pretrained(folder)
        with Engine(own, tokenizer=byte_level()) as running, engine_in_thread(running, path) as loop:
            loop.open(running, Path(folder))
            with running_server(path) as served:
                yield served


def greedy_tokens() -> None:
    both(tiny(), max_new_tokens=12, do_sample=False)


def sampled_tokens() -> None:
    """By seed, from the most likely token alone where that is all that is left."""
    torch.manual_seed(3)
    first = model().generate(**ROWS, max_new_tokens=12, do_sample=True, top_k=20, pad_token_id=0)
    torch.manual_seed(3)
    assert torch.equal(model().generate(**ROWS, max_new_tokens=12, do_sample=True, top_k=20, pad_token_id=0), first)
    both(tiny(), max_new_tokens=12, do_sample=True, top_k=1)


def beams() -> None:
    both(tiny(), max_new_tokens=8, num_beams=3, do_sample=False)


def drafts() -> None:
    plain, row = tiny(), torch.tensor([PROMPT + PROMPT])
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    expected = plain.generate(row, **options)
    assert torch.equal(model().generate(row, prompt_lookup_num_tokens=3, **options), expected)


def logits_of_a_forward() -> None:
    with torch.no_grad():
        torch.testing.assert_close(model()(**ROWS).logits[1], tiny()(**ROWS).logits[1], rtol=1e-4, atol=1e-4)


def a_conversation() -> None:
    row = torch.tensor([PROMPT])
    first = model().generate(row, max_new_tokens=4, do_sample=False, return_dict_in_generate=True, pad_token_id=0)
    cache = {"past_key_values": first.past_key_values}
    second = model().generate(first.sequences, max_new_tokens=4, do_sample=False, pad_token_id=0, **cache)
    assert second[0, len(PROMPT) :].tolist() == huggingfaces(PROMPT, 8)


def penalties() -> None:
    both(tiny(), max_new_tokens=12, do_sample=False, repetition_penalty=1.5, no_repeat_ngram_size=2)


def a_windowed_model() -> None:
    windows: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}
    expected = tiny(**windows).generate(**ROWS, max_new_tokens=12, do_sample=False, pad_token_id=0)
    ours = wrapped(plain=tiny(**windows))
    assert torch.equal(ours.generate(**ROWS, max_new_tokens=12, do_sample=False, pad_token_id=0), expected)


def one_compiled_program() -> None:
    """Inductor is left out, which takes long and knows of no feature."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inductor, "compile_with_inductor", lambda module, inputs, options: module.forward)
        ours = wrapped(mode="compile")
        row = torch.tensor([PROMPT])
        out = ours.generate(row, max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert out[0, len(PROMPT) :].tolist() == huggingfaces(PROMPT, 6)
    assert ours.compiled.stats().graph_breaks == 0


def captured_steps() -> None:
    with pytest.MonkeyPatch.context() as patch:
        let_a_cpu_capture(patch)
        ours = wrapped()
        for _ in range(2):
            out = ours.generate(torch.tensor([PROMPT]), max_new_tokens=12, do_sample=False, pad_token_id=0)
            assert out[0, len(PROMPT) :].tolist() == huggingfaces(PROMPT, 12)
        assert any(graph.replays for graph in ours.compiled.cuda_graphs)


def a_restored_model() -> None:
    ours = wrapped()
    compiled_llm.unwrap(ours)
    out = ours.generate(torch.tensor([PROMPT]), max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert out[0, len(PROMPT) :].tolist() == huggingfaces(PROMPT, 4)


def many_requests() -> None:
    prompts = [PROMPT[: 1 + length] for length in range(8)]
    with engine() as running:
        found = [output.token_ids for output in running.generate(prompts, greedy(12))]
    assert found == [huggingfaces(prompt, 12) for prompt in prompts]


def a_sampled_request() -> None:
    params = SamplingParams(temperature=0.9, top_p=0.9, min_p=0.01, seed=7, max_tokens=8, n=2, ignore_eos=True)
    with engine() as running:
        first, second = (
            [choice.token_ids for choice in running.submit(PROMPT, params).result(60).outputs] for _ in "ab"
        )
    assert first == second
    assert first[0] != first[1]


def a_prefix_hit() -> None:
    with engine(500) as running:
        for hit in (0, 8):
            output = running.submit(PROMPT, greedy(6)).result(60)
            assert (output.token_ids, output.cached_tokens) == (huggingfaces(PROMPT, 6), hit)


def preemption() -> None:

    with pytest.MonkeyPatch.context() as patch, engine(80) as running:
        patch.setitem(POLICIES, "auto", Greedy)
        handles = [running.submit([*PROMPT, row], greedy(40)) for row in range(3, 6)]
        assert [handle.result(60).token_ids for handle in handles] == [
            huggingfaces([*PROMPT, row], 40) for row in range(3, 6)
        ]
        assert running.stats().preemptions


def a_cancelled_request() -> None:
    with engine() as running:
        handle = running.submit(PROMPT, greedy(500))
        next(iter(handle))
        handle.cancel()
        assert running.submit(PROMPT, greedy(4)).result(60).token_ids == huggingfaces(PROMPT, 4)


def two_threads() -> None:
    found: dict[int, list[int]] = {}

    def call(row: int) -> None:
        out = model().generate(torch.tensor([[*PROMPT, row]]), max_new_tokens=8, do_sample=False, pad_token_id=0)
        found[row] = out[0, len(PROMPT) + 1 :].tolist()

    threads = [threading.Thread(target=call, args=(row,)) for row in (3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {row: huggingfaces([*PROMPT, row], 8) for row in (3, 4)}


def served_streams() -> None:
    """A stream, a chat, and what the server says of itself."""
    with server() as served:
        asked: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 8, "ignore_eos": True}
        whole = served.post("/v1/completions", prompt=PROMPT, **asked)["choices"][0]
        events = [*served.events("/v1/completions", prompt=PROMPT, **asked)]
        assert "".join(event["choices"][0]["text"] for event in events) == whole["text"]
        assert whole["finish_reason"] == "length"
        chat = served.post("/v1/chat/completions", messages=[{"role": "user", "content": "hi"}], **asked)
        assert chat["usage"]["completion_tokens"] == 8
        assert served.http.get("/metrics").status_code == 200


def stop_strings() -> None:
    ours = wrapped(2000, tiny(vocab_size=380))
    with Engine(ours, tokenizer=byte_level()) as running:
        text = decode(running.submit(PROMPT, greedy(30)).result(60).token_ids)
        stop = text[5:7]
        output = running.submit(PROMPT, greedy(30, stop=stop)).result(60)
    assert output.text == text[: text.index(stop)]
    assert output.outputs[0].stop_reason == stop


def what_is_said() -> None:
    with pytest.MonkeyPatch.context() as patch:
        explain_less(patch)
        assert "program" in str(compiled_llm.explain(model()))
    assert str(model().compiled.stats())
    assert {*compiled_llm.__all__} <= {*dir(compiled_llm)}


SMOKE: tuple[Callable[[], None], ...] = (
    *(greedy_tokens, sampled_tokens, beams, drafts, logits_of_a_forward, a_conversation, penalties, a_windowed_model),
    *(one_compiled_program, captured_steps, a_restored_model, many_requests, a_sampled_request, a_prefix_hit),
    *(preemption, a_cancelled_request, two_threads, served_streams, stop_strings, what_is_said),
)


def main(folder: str, asks: str) -> int:
    assert Path(compiled_llm.__file__).is_relative_to(folder), "another copy was imported"
    torch.set_num_threads(1)
    gc.freeze()  # collections of what was imported would take a twentieth of the time
    gc.set_threshold(20_000, 20, 50)
    failed = 0
    for smoke in SMOKE:
        try:
            smoke()
        except Exception:
            failed += 1
            print(f"---- {smoke.__name__}\n{traceback.format_exc()}")
    if asks:
        with pytest.raises(ValueError, match=r"^[^\n]+$"):
            eval(asks)
    return failed


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
