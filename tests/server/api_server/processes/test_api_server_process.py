"""Real processes: the command, its engine process, and clients over HTTP."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import compiled_llm
from compiled_llm.engine.engine import Engine
from compiled_llm.requests.sampling_params import SamplingParams
from support.server.engine_processes import COMMAND, PATIENCE, until
from support.server.running_servers import is_refused, serving

OPTIONS = ("--mode", "eager", "--warmup", "1,8", "--kv-memory", "20000 tokens")
MESSAGES: Any = [{"role": "user", "content": "the quick fox"}]
TEXT = "/v1/completions"
LONG = {"prompt": "a", "max_tokens": 900, "ignore_eos": True, "stream": True}

pytestmark = pytest.mark.whole


def in_process(folder: Path, prompt: Any, **settings: Any) -> str:
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    model = compiled_llm.wrap(loaded, mode="eager", progress=False, kv_memory="20000 tokens")
    with Engine(model, tokenizer=AutoTokenizer.from_pretrained(folder)) as engine:
        return engine.generate([prompt], SamplingParams(**settings))[0].text or ""


def status(url: str, path: str) -> int:
    return httpx.get(url + path).status_code


def engine_processes(socket: str) -> list[int]:
    """The processes of engine processes that listen at a path."""
    found = subprocess.run(
        ["pgrep", "-f", "--", f"--uds {socket} --leashed"], capture_output=True, text=True, check=False
    )
    return [int(number) for number in found.stdout.split()]


def test_the_command_serves_its_engine_process_is_replaced_and_it_drains(model_folder: Path, path: Path) -> None:
    with serving(model_folder, "--uds", str(path), *OPTIONS) as (process, url):
        assert status(url, "/health") == 200
        until(lambda: status(url, "/ready") == 200)
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        assert [model.id for model in client.models.list()] == ["tiny-model"]
        answer = client.chat.completions.create(model="tiny-model", messages=MESSAGES, seed=3, max_tokens=30)
        assert answer.choices[0].message.content == in_process(model_folder, MESSAGES, seed=3, max_tokens=30)
        assert not api_server_has_torch(process.pid)
        with httpx.stream("POST", url + TEXT, json=LONG, timeout=PATIENCE) as running:
            events = (line for line in running.iter_lines() if line)
            next(events)
            (engine_process,) = engine_processes(str(path))
            subprocess.run(["kill", "-9", str(engine_process)], check=True)
            *_, last = events
            assert '"code":"engine_dead"' in last
        assert httpx.post(url + TEXT, json={"prompt": "a"}).status_code == 503
        until(lambda: status(url, "/ready") == 200)
        again = client.chat.completions.create(model="tiny-model", messages=MESSAGES, seed=3, max_tokens=30)
        assert again.choices[0].message.content == answer.choices[0].message.content
        with httpx.stream("POST", url + TEXT, json={**LONG, "max_tokens": 300}, timeout=PATIENCE) as running:
            events = (line for line in running.iter_lines() if line)
            next(events)
            process.send_signal(signal.SIGTERM)
            *_, last = events
            assert last == "data: [DONE]"
        assert process.wait(PATIENCE) == 0
        assert not engine_processes(str(path))
        assert not path.exists()


def api_server_has_torch(pid: int) -> bool:
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


def test_an_api_server_that_is_killed_leaves_no_engine_process(model_folder: Path, path: Path) -> None:
    with serving(model_folder, "--uds", str(path), *OPTIONS) as (process, url):
        until(lambda: status(url, "/ready") == 200)
        process.kill()
        until(lambda: not engine_processes(str(path)))


def test_the_next_api_server_removes_what_a_killed_one_has_left(
    model_folder: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(folder))

    def sockets() -> list[Path]:
        return sorted(folder.glob("compiled-llm-*/engine process"))

    with serving(model_folder, *OPTIONS) as (killed, url), serving(model_folder, *OPTIONS) as (lives, _):
        until(lambda: status(url, "/ready") == 200 and len(sockets()) == 2)
        killed.kill()
        killed.wait()
        with serving(model_folder, *OPTIONS) as (next_one, url):
            until(lambda: status(url, "/ready") == 200)
            assert len(list(folder.glob("compiled-llm-*"))) == 2, "that of the one that lives is still there"
            for process in (lives, next_one):
                process.send_signal(signal.SIGINT)
                assert process.wait(PATIENCE) == 0
    assert not list(folder.glob("compiled-llm-*"))


PATIENT = """
from compiled_llm.__main__ import main
from compiled_llm.server.engine_process import starter
starter._PATIENCE = 1e6
main()
"""


@pytest.mark.parametrize("seconds", [0, 1])
def test_an_engine_process_that_does_not_end_is_ended_by_the_second_ctrl_c(
    model_folder: Path, path: Path, seconds: int
) -> None:
    command = (sys.executable, "-c", PATIENT)
    with serving(model_folder, "--uds", str(path), *OPTIONS, command=command) as (process, url):
        until(lambda: status(url, "/ready") == 200)
        (engine_process,) = engine_processes(str(path))
        os.kill(engine_process, signal.SIGSTOP)
        process.send_signal(signal.SIGINT)
        until(lambda: is_refused(url))
        time.sleep(seconds)  # in one of them the API server has ended, and waits for its engine process
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 0
        assert not engine_processes(str(path))


IMPATIENT = """
from compiled_llm.__main__ import main
from compiled_llm.server.openai.common import engine_link
engine_link._SILENT_SECONDS = 12
main()
"""


def test_an_engine_process_that_is_stopped_is_not_ready_and_not_killed(model_folder: Path, path: Path) -> None:
    command = (sys.executable, "-c", IMPATIENT)
    with serving(model_folder, "--uds", str(path), *OPTIONS, command=command) as (_, url):
        until(lambda: status(url, "/ready") == 200)
        (engine_process,) = engine_processes(str(path))
        with httpx.stream("POST", url + TEXT, json=LONG, timeout=PATIENCE) as running:
            events = (line for line in running.iter_lines() if line)
            next(events)
            os.kill(engine_process, signal.SIGSTOP)
            *_, last = events
            assert "has said nothing for 12 s" in last
        assert httpx.get(f"{url}/ready").json()["ready"] is False
        os.kill(engine_process, signal.SIGCONT)
        until(lambda: status(url, "/ready") == 200)
        assert httpx.post(url + TEXT, json={"prompt": "a", "max_tokens": 1}).status_code == 200
        assert engine_processes(str(path)) == [engine_process]


def test_an_engine_process_that_reads_nothing_keeps_no_event_loop_waiting(model_folder: Path, path: Path) -> None:
    long = {"prompt": [3, 300] * 400, "max_tokens": 1}
    with serving(model_folder, "--uds", str(path), *OPTIONS) as (_, url), ThreadPoolExecutor(200) as pool:
        until(lambda: status(url, "/ready") == 200)
        (engine_process,) = engine_processes(str(path))
        os.kill(engine_process, signal.SIGSTOP)
        asked = [pool.submit(httpx.post, url + TEXT, json=long, timeout=PATIENCE) for _ in range(200)]
        until(lambda: "compiled_llm_http_open 201.0" in httpx.get(f"{url}/metrics", timeout=PATIENCE).text)
        assert status(url, "/health") == 200
        os.kill(engine_process, signal.SIGCONT)
        assert {request.result().status_code for request in asked} == {200}


def test_the_second_ctrl_c_ends_requests_and_shows_no_traceback(model_folder: Path, tmp_path: Path) -> None:
    arguments = [COMMAND, "serve", str(model_folder), "--port", "0", *OPTIONS]
    log = tmp_path / "log"
    with (
        log.open("w") as stderr,
        subprocess.Popen(arguments, stderr=stderr, start_new_session=True) as process,
    ):
        until(lambda: "compiled_llm: ready" in log.read_text())
        url = re.findall(r"at (http://\S+)/v1", log.read_text())[0]
        assert status(url, "/ready") == 200, "it says so once it is"
        with httpx.stream("POST", url + TEXT, json=LONG, timeout=PATIENCE) as running:
            events = (line for line in running.iter_lines() if line)
            next(events)
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the engine process has it, too
            until(lambda: is_refused(url))
            os.killpg(process.pid, signal.SIGINT)
            with suppress(httpx.HTTPError):
                list(events)
        assert process.wait(PATIENCE) == 0
    assert "Traceback" not in log.read_text()
    assert "requests that may end first: 1; a second signal ends them" in log.read_text()


def test_a_model_that_cannot_be_loaded_ends_the_command(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    done = subprocess.run(
        [COMMAND, "serve", str(tmp_path), "--port", "0", *OPTIONS], capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 1
    assert "cannot be loaded as a causal LM" in done.stderr
    assert "error: serve: the engine process has ended before it was ready" in done.stderr


def test_a_port_that_is_taken_and_one_that_is_open_to_all(model_folder: Path) -> None:
    with serving(model_folder, *OPTIONS) as (_, url):
        arguments = [COMMAND, "serve", str(model_folder), "--port", url.rpartition(":")[2]]
        taken = subprocess.run(arguments, capture_output=True, text=True, timeout=PATIENCE)
        assert (taken.returncode, "cannot listen there: Address already in use" in taken.stderr) == (1, True)
        everywhere = subprocess.run([*arguments, "--host", "0.0.0.0"], capture_output=True, text=True, timeout=PATIENCE)
        assert (everywhere.returncode, "give --api-key-file" in everywhere.stderr) == (2, True)


def test_the_demo_model_says_what_it_says_in_process(demo_model_dir: Path) -> None:
    asked: Any = [{"role": "user", "content": "What is the capital of France?"}]
    expected = in_process(demo_model_dir, asked, temperature=0.0, max_tokens=24)
    with serving("demo", *OPTIONS) as (_, url):
        until(lambda: status(url, "/ready") == 200)
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
        options: Any = {"model": "demo", "messages": asked, "temperature": 0, "max_tokens": 24}
        whole = client.chat.completions.create(**options).choices[0].message.content
        stream = client.chat.completions.create(**options, stream=True)
        streamed = "".join(choice.delta.content or "" for chunk in stream for choice in chunk.choices)
        assert whole == streamed == expected
        assert "Paris" in expected


def test_two_hundred_streams_at_once_and_those_that_leave(model_folder: Path) -> None:
    prompts = [[3 + number % 90, 5, 3 + number // 2] for number in range(200)]
    loaded = AutoModelForCausalLM.from_pretrained(model_folder)
    model = compiled_llm.wrap(loaded, mode="eager", progress=False, kv_memory="20000 tokens")
    with Engine(model, tokenizer=AutoTokenizer.from_pretrained(model_folder)) as engine:
        params = SamplingParams(temperature=0, max_tokens=40)
        expected = [output.text for output in engine.generate(prompts, params)]

    async def stream(client: openai.AsyncOpenAI, prompt: list[int]) -> str:
        chunks = await client.completions.create(
            model="tiny-model", prompt=prompt, max_tokens=40, temperature=0, stream=True
        )
        return "".join([choice.text async for chunk in chunks for choice in chunk.choices])

    async def leave(client: openai.AsyncOpenAI, prompt: list[int]) -> None:
        chunks = await client.completions.create(model="tiny-model", prompt=prompt, max_tokens=900, stream=True)
        async for _ in chunks:
            break
        await chunks.close()

    async def all_of_them(url: str) -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=PATIENCE) as client:
            leaving = asyncio.gather(*(leave(client, prompt) for prompt in prompts[:40]))
            answers = await asyncio.gather(*(stream(client, prompt) for prompt in prompts))
            await leaving
            return answers

    with serving(model_folder, *OPTIONS) as (_, url):
        until(lambda: status(url, "/ready") == 200)
        assert asyncio.run(all_of_them(url)) == expected
        until(lambda: "compiled_llm_running 0.0" in httpx.get(f"{url}/metrics").text)
        assert 'compiled_llm_pages{state="used"} 0.0' in httpx.get(f"{url}/metrics").text
