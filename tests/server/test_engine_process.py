"""Real processes: an engine process of its own, clients that are killed, an engine process that is killed."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import compiled_llm
from compiled_llm.client import Client, EngineDeadError, EngineProcessError
from compiled_llm.engine.engine import Engine
from compiled_llm.requests.sampling_params import SamplingParams
from support.characters import character_tokenizer
from support.server.engine_processes import COMMAND, PATIENCE, started_engine_process, until
from support.tiny_models import tiny_qwen3

OPTIONS = ("--mode", "eager", "--warmup", "1", "--kv-memory", "20000 tokens")
LEAVING_CLIENT = """
import sys
from compiled_llm.client import Client
from compiled_llm.requests.sampling_params import SamplingParams
client = Client(sys.argv[1])
handles = [client.submit([3, 4, number], SamplingParams(max_tokens=900, ignore_eos=True)) for number in range(4)]
for handle in handles:
    next(iter(handle))
print("running", flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that goes on for ever, with a tokenizer of one token a character."""
    folder = tmp_path_factory.mktemp("served")
    tiny_qwen3(eos_token_id=None, num_hidden_layers=1).save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def engine(model_folder: Path) -> Engine:
    loaded = AutoModelForCausalLM.from_pretrained(model_folder)
    model = compiled_llm.wrap(loaded, mode="eager", progress=False, kv_memory="20000 tokens")
    return Engine(model, tokenizer=AutoTokenizer.from_pretrained(model_folder))


def greedy(tokens: int, **others: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, **others)


def assert_nothing_is_left(client: Client) -> None:
    until(lambda: client.stats().running == 0)
    pages = client.stats().pages
    assert pages is not None
    assert pages.used == 0
    assert pages.free + pages.cached == pages.total


def running_client(path: Path) -> subprocess.Popen[str]:
    """A client in a process of its own, whose requests run."""
    arguments = [sys.executable, "-c", LEAVING_CLIENT, str(path)]
    process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "running\n"
    return process


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def test_an_engine_process_answers_loses_a_client_and_ends(engine: Engine, model_folder: Path, path: Path) -> None:
    (expected,) = engine.generate([[3, 4, 5]], greedy(30))
    with started_engine_process(model_folder, path, *OPTIONS) as process:
        done = ask(path, "3,4,5", "--ids")  # waits until it is ready
        assert (done.returncode, done.stdout) == (0, f"{','.join(map(str, expected.token_ids))},\n"), done.stderr
        assert "the engine process is not ready" in done.stderr
        assert "30 tokens in" in done.stderr
        with Client(path) as client:
            assert client.generate([[3, 4, 5]], greedy(30))[0].token_ids == expected.token_ids
            leaving = running_client(path)
            until(lambda: client.stats().running == 4)
            kill(leaving)
            assert_nothing_is_left(client)
            handle = client.submit([3, 4], greedy(500))
            next(iter(handle))
            process.send_signal(signal.SIGTERM)
            assert handle.result(PATIENCE).finish_reason == "length"
        assert process.wait(PATIENCE) == 0
    assert not path.exists()


def ask(path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    asking = [COMMAND, "client", str(path), *arguments, "--max-tokens", "30"]
    return subprocess.run(asking, capture_output=True, text=True, timeout=PATIENCE)


@pytest.mark.whole
def test_text_comes_by_the_tokenizer_that_the_engine_process_names(
    engine: Engine, model_folder: Path, path: Path
) -> None:
    (expected,) = engine.generate(["Hello"], greedy(30))
    with started_engine_process(model_folder, path, *OPTIONS):
        done = ask(path, "Hello")
        assert (done.returncode, done.stdout) == (0, f"{expected.text}\n"), done.stderr
        with Client(path, tokenizer=True) as client:
            assert client.generate(["Hello"], greedy(30))[0].text == expected.text


@pytest.mark.whole
def test_an_engine_process_that_is_killed_is_missed_and_replaced(model_folder: Path, path: Path) -> None:
    with started_engine_process(model_folder, path, *OPTIONS) as process, Client(path) as client:
        handle = client.submit([3, 4], greedy(900))
        next(iter(handle))
        again = [COMMAND, "serve", str(model_folder), "--uds", str(path)]
        second = subprocess.run(again, capture_output=True, text=True, timeout=PATIENCE)
        assert second.returncode == 1
        assert "an engine process listens there already; stop it, or give another path" in second.stderr
        process.kill()
        with pytest.raises(EngineDeadError, match="has gone: its process has ended"):
            handle.result(PATIENCE)
        process.wait(PATIENCE)  # its connections are closed before its socket is
        for call in (lambda: client.submit([3]), lambda: Client(path)):
            with pytest.raises(EngineDeadError, match="its engine process has gone; start one with"):
                call()
        assert path.exists()
        with started_engine_process(model_folder, path, *OPTIONS):
            assert len(client.generate([[3, 4]], greedy(5))[0].token_ids) == 5


@pytest.mark.whole
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_second_signal_ends_it_at_once(model_folder: Path, path: Path, number: int) -> None:
    with started_engine_process(model_folder, path, *OPTIONS) as process, Client(path) as client:
        handle = client.submit([3, 4], greedy(900))
        next(iter(handle))
        process.send_signal(number)
        until(lambda: not path.exists())
        with pytest.raises(EngineProcessError, match="the engine process was told to end"):
            client.submit([3], greedy(1)).result(PATIENCE)
        process.send_signal(number)
        with pytest.raises(EngineDeadError):
            handle.result(PATIENCE)
        assert process.wait(PATIENCE) == 128 + number


@pytest.mark.whole
def test_what_does_not_end_in_time_is_ended(model_folder: Path, path: Path) -> None:
    with (
        started_engine_process(model_folder, path, *OPTIONS, "--drain-seconds", "0") as process,
        Client(path) as client,
    ):
        handle = client.submit([3, 4], greedy(900))
        next(iter(handle))
        process.send_signal(signal.SIGTERM)
        with pytest.raises(EngineProcessError, match="the request has not ended 0 s later"):
            handle.result(PATIENCE)
        assert process.wait(PATIENCE) == 0


@pytest.mark.whole
def test_before_it_is_ready_the_first_signal_ends_it(model_folder: Path, path: Path) -> None:
    with started_engine_process(model_folder, path, *OPTIONS) as process, Client(path, wait=False) as client:
        process.send_signal(signal.SIGTERM)
        with pytest.raises(EngineDeadError):
            client.wait_until_ready()
        assert process.wait(PATIENCE) == 128 + signal.SIGTERM
    assert not path.exists()


@pytest.mark.whole
def test_a_model_that_cannot_be_loaded_ends_it_and_clients_hear_why(tmp_path: Path, path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with started_engine_process(tmp_path, path, *OPTIONS) as process:
        with pytest.raises(EngineDeadError, match=r"could not be made ready: .* cannot be loaded"):
            Client(path)
        assert process.wait(PATIENCE) == 1
        assert process.stderr is not None
        assert "cannot be loaded as a causal LM" in process.stderr.read()


@pytest.mark.whole
def test_two_hundred_streams_at_once_get_what_the_engine_gives(engine: Engine, model_folder: Path, path: Path) -> None:
    prompts = [[3 + number % 90, 5, 3 + number // 2] for number in range(200)]
    expected = [output.token_ids for output in engine.generate(prompts, greedy(40))]
    with started_engine_process(model_folder, path, *OPTIONS), Client(path) as client:

        async def stream(prompt: list[int]) -> list[int]:
            return [token async for token in client.submit(prompt, greedy(40))]

        async def all_of_them() -> list[list[int]]:
            return await asyncio.gather(*map(stream, prompts))

        assert asyncio.run(all_of_them()) == expected
        assert_nothing_is_left(client)


@pytest.mark.whole
def test_clients_that_are_killed_leave_nothing_in_twenty_rounds(model_folder: Path, path: Path) -> None:
    with started_engine_process(model_folder, path, *OPTIONS), Client(path) as client:
        kept = client.submit([9, 8, 7], greedy(900))
        for _ in range(20):
            kill(running_client(path))
            if kept.done:
                kept = client.submit([9, 8, 7], greedy(900))
        assert kept.refused is None
        kept.cancel()
        assert_nothing_is_left(client)
        assert client.stats().connections == 1


@pytest.mark.whole
def test_the_demo_model_writes_what_it_writes_in_process(demo_model_dir: Path, path: Path) -> None:
    asked: Any = [{"role": "user", "content": "What is the capital of France?"}]
    loaded = AutoModelForCausalLM.from_pretrained(demo_model_dir)
    model = compiled_llm.wrap(loaded, mode="eager", progress=False, kv_memory="20000 tokens")
    with Engine(model, tokenizer=AutoTokenizer.from_pretrained(demo_model_dir)) as engine:
        (expected,) = engine.generate(asked, greedy(24))
    with started_engine_process("demo", path, *OPTIONS), Client(path, tokenizer=True) as client:
        assert "".join(client.stream(asked, greedy(24))) == expected.text
        assert expected.text is not None
        assert "Paris" in expected.text
