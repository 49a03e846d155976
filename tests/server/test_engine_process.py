"""Real processes: an engine process answers over its socket and over HTTP, and ends."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import compiled_llm
from compiled_llm.client import Client, EngineDeadError
from compiled_llm.engine.engine import Engine
from compiled_llm.requests.sampling_params import SamplingParams
from support.characters import character_tokenizer
from support.commands.foreign_folder import STANDARD, ForeignFolder, imported
from support.server.engine_processes import COMMAND, PATIENCE, started_engine_process, until
from support.server.under_load import OPTIONS, SOCKET_CLIENT, kill_client


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


def test_an_engine_process_answers_loses_a_client_and_ends(
    engine: Engine, model_folder: Path, path: Path, tmp_path: Path
) -> None:
    """With a length, a tokenizer and a template of the command; in a folder of another user, whose files do not run."""
    foreign = ForeignFolder(tmp_path / "foreign", imported() | STANDARD)
    command = ("env", "-C", str(foreign.path), COMMAND)
    (expected,) = engine.generate([[3, 4, 5]], greedy(30))
    weights, template = tmp_path / "weights", tmp_path / "chat.jinja"
    shutil.copytree(model_folder, weights, ignore=shutil.ignore_patterns("tokenizer*", "*.jinja"))
    template.write_text("Q: {{ messages[0]['content'] }}")
    own = ["--tokenizer", str(model_folder), "--chat-template", str(template), "--max-model-len", "1000"]
    with started_engine_process(weights, path, *OPTIONS, *own, command=command) as process:
        done = ask(path, "3,4,5", "--ids")  # waits until it is ready
        assert (done.returncode, done.stdout) == (0, f"{','.join(map(str, expected.token_ids))},\n"), done.stderr
        assert "the engine process is not ready" in done.stderr
        assert "30 tokens in" in done.stderr
        with Client(path) as client:
            assert client.generate([[3, 4, 5]], greedy(30))[0].token_ids == expected.token_ids
            kill_client(SOCKET_CLIENT, str(path))
            assert_nothing_is_left(client)
            with Client(path, tokenizer=True) as talks:
                chat = talks.submit([{"role": "user", "content": "hi"}], greedy(3)).result(PATIENCE)
                assert talks.tokenizer.decode(chat.prompt_token_ids) == "Q: hi"
            with pytest.raises(ValueError, match=r"max_tokens=998: .* more than max_model_len=1000"):
                client.generate([[3, 4, 5]], greedy(998))
            handle = client.submit([3, 4, 5], SamplingParams(ignore_eos=True, max_tokens=None))
            next(iter(handle))
            process.send_signal(signal.SIGTERM)
            ended = handle.result(PATIENCE)
            assert (ended.finish_reason, len(ended.token_ids)) == ("length", 997)
        assert process.wait(PATIENCE) == 0
    assert not path.exists()
    assert foreign.executed() == ""


@pytest.mark.whole
def test_a_length_that_the_model_has_no_positions_for_is_refused(model_folder: Path, path: Path) -> None:
    with started_engine_process(model_folder, path, *OPTIONS, "--max-model-len", "100000") as process:
        assert process.wait(PATIENCE) == 2
        assert process.stderr is not None
        last = process.stderr.read().splitlines()[-1]
    assert re.fullmatch(r"error: --max-model-len 100000: exceeds the model's \d+ positions", last), last


def ask(path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    asking = [COMMAND, "client", "--server", str(path), *arguments, "--max-tokens", "30"]
    return subprocess.run(asking, capture_output=True, text=True, timeout=PATIENCE)


@pytest.mark.whole
def test_one_that_listens_is_not_replaced_and_one_that_was_killed_is(
    engine: Engine, model_folder: Path, path: Path
) -> None:
    (expected,) = engine.generate(["Hello"], greedy(30))
    with started_engine_process(model_folder, path, *OPTIONS) as process, Client(path) as client:
        again = [COMMAND, "serve", str(model_folder), "--uds", str(path)]
        second = subprocess.run(again, capture_output=True, text=True, timeout=PATIENCE)
        assert second.returncode == 1
        assert "an engine process listens there already; stop it, or give another path" in second.stderr
        process.kill()
        process.wait(PATIENCE)
        until(lambda: client._session.lost)
        for call in (lambda: client.submit([3]), lambda: Client(path)):
            with pytest.raises(EngineDeadError, match="its engine process has gone; start one with"):
                call()
        with started_engine_process(model_folder, path, *OPTIONS):
            assert len(client.generate([[3, 4]], greedy(5))[0].token_ids) == 5
            done = ask(path, "--raw", "Hello")  # by the tokenizer that the engine process names
            text = f"{expected.text}\n".replace("\r", "\n")  # as a pipe of text is read
            assert (done.returncode, done.stdout) == (0, text), done.stderr
            with Client(path, tokenizer=True) as talks:
                assert talks.generate(["Hello"], greedy(30))[0].text == expected.text


@pytest.mark.whole
def test_a_model_that_cannot_be_loaded_ends_it_and_clients_hear_why(tmp_path: Path, path: Path) -> None:
    character_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with started_engine_process(tmp_path, path, *OPTIONS) as process:
        with pytest.raises(EngineDeadError, match=r"could not be made ready: .* cannot be loaded"):
            Client(path)
        assert process.wait(PATIENCE) == 1
        assert process.stderr is not None
        assert "cannot be loaded as a causal LM" in process.stderr.read()
    arguments = [COMMAND, "serve", str(tmp_path), "--port", "0", *OPTIONS]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 1
    assert "cannot be loaded as a causal LM" in done.stderr
    assert "error: serve: the engine process has ended before it was ready" in done.stderr
