"""No request within the limits stops the others: it is answered, and what it takes is bounded and given back."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from support.server import loop_recorder
from support.server.bombs import BOMBS, Bomb
from support.server.engine_processes import PATIENCE, until
from support.server.processes import children, forget_peak, memory_of
from support.server.running_servers import chat_tokenizer, serving
from support.tiny_models import tiny_qwen3

OPTIONS = ("--mode", "eager", "--warmup", "1,8", "--kv-memory", "30000 tokens")
TEXT = "/v1/completions"
STREAMS, TOKENS = 16, 600
MIB = 2**20
LEFT = 96 * MIB
"""What a server may have more after all bombs than before: what libraries do at their first use, and its pools."""


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of many positions, and a token so long that not even 8 MB of text have surely too many."""
    folder = tmp_path_factory.mktemp("served") / "tiny-model"
    positions = {"max_position_embeddings": 2**14}
    tiny_qwen3(eos_token_id=None, num_hidden_layers=1, vocab_size=384, **positions).save_pretrained(folder)
    tokenizer = chat_tokenizer()
    tokenizer.add_tokens(["=" * 400])
    tokenizer.save_pretrained(folder)
    return folder


@contextmanager
def recorded(folder: Path, notes: Path) -> Iterator[tuple[tuple[int, int], httpx.Client]]:
    """A server whose loops are captured from when it is ready, and somebody who asks it."""
    command = (sys.executable, loop_recorder.__file__)
    with (
        pytest.MonkeyPatch.context() as patch,
        httpx.Client(timeout=PATIENCE, verify=False) as http,
    ):
        patch.setenv(loop_recorder.FOLDER, str(notes))
        with serving(folder, *OPTIONS, command=command) as (process, url):
            http.base_url = url  # type: ignore[assignment]
            until(lambda: http.get("/ready").status_code == 200)
            for _ in range(3):
                assert http.post(TEXT, json={"prompt": "a", "max_tokens": 4}).status_code == 200
            for file in notes.iterdir():
                file.unlink()  # it has imported much
            (engine_process,) = children(process.pid)
            yield (process.pid, engine_process), http


def throw(http: httpx.Client, processes: tuple[int, int], bomb: Bomb) -> None:
    """Have a bomb answered, and see that it takes no more than it may."""
    body = bomb.body()
    for process in processes:
        forget_peak(process)
    before = [memory_of(process) for process in processes]
    answer = http.post(bomb.path, content=body, headers={"Content-Type": "application/json"})
    assert (answer.status_code, bomb.message in answer.text) == (bomb.status, True), (bomb.name, answer.text[:300])
    assert len(answer.content) < 2000 or bomb.status == 200
    for process, start in zip(processes, before, strict=True):
        taken = memory_of(process, peak=True) - start
        assert taken < 64 * MIB + 30 * len(body), f"{bomb.name}: {taken / MIB:.0f} MiB"


def assert_given_back(http: httpx.Client, processes: tuple[int, int], before: list[int]) -> None:
    until(lambda: [memory_of(process) < start + LEFT for process, start in zip(processes, before, strict=True)])
    until(lambda: "compiled_llm_running 0.0" in http.get("/metrics").text)
    assert "compiled_llm_waiting 0.0" in http.get("/metrics").text


@pytest.mark.slow
def test_no_request_takes_more_than_it_may_or_keeps_a_loop(model_folder: Path, tmp_path: Path) -> None:
    with recorded(model_folder, tmp_path) as (processes, http):
        before = [memory_of(process) for process in processes]
        for bomb in BOMBS:
            throw(http, processes, bomb)
            assert loop_recorder.noted(tmp_path) == [], bomb.name
        assert_given_back(http, processes, before)


def stream(http: httpx.Client, stop: threading.Event, gaps: list[float]) -> int:
    """Read streams until told to stop, each to its end; return how many there were."""
    count, body = 0, {"prompt": "a", "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
    while not stop.is_set():
        came, lines = time.monotonic(), []
        with http.stream("POST", TEXT, json={**body, "stream_options": {"include_usage": True}}) as response:
            for line in filter(None, response.iter_lines()):
                came, gap = time.monotonic(), time.monotonic() - came
                lines.append(line)
                gaps.append(gap)
        assert lines[-1] == "data: [DONE]"
        assert f'"completion_tokens":{TOKENS},' in lines[-2]
        count += 1
    return count


def health(http: httpx.Client, stop: threading.Event, gaps: list[float]) -> int:
    while not stop.is_set():
        came = time.monotonic()
        assert http.get("/health").status_code == 200
        gaps.append(time.monotonic() - came)
        time.sleep(0.01)
    return 1


@pytest.mark.whole
def test_sixteen_streams_go_on_among_bombs(model_folder: Path, tmp_path: Path) -> None:
    stop, waits = threading.Event(), {name: list[float]() for name in ("streams", "/health")}
    limits = httpx.Limits(max_connections=None)
    with (
        recorded(model_folder, tmp_path) as (processes, http),
        httpx.Client(base_url=http.base_url, timeout=PATIENCE, verify=False, limits=limits) as others,
        ThreadPoolExecutor(STREAMS + 1) as pool,
    ):
        jobs: list[tuple[Callable[..., int], str]] = [(stream, "streams")] * STREAMS + [(health, "/health")]
        running: list[Future[int]] = [pool.submit(job, others, stop, waits[name]) for job, name in jobs]
        before = [memory_of(process) for process in processes]
        try:
            until(lambda: len(waits["streams"]) > STREAMS)
            for bomb in BOMBS:
                for gaps in waits.values():
                    gaps.clear()
                throw(http, processes, bomb)
                longest = {name: round(1000 * max(gaps, default=0.0)) for name, gaps in waits.items()}
                print(f"{bomb.name}: waits of {longest} ms")
        finally:
            stop.set()
        assert all(job.result(PATIENCE) for job in running)
        assert_given_back(http, processes, before)
