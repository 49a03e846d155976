"""Real processes whose device fails: requests end with the cause, the engine process with a code, the rest goes on."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from compiled_llm.client import Client, EngineProcessError
from compiled_llm.requests.sampling_params import SamplingParams
from compiled_llm.server.engine_process.process import DEVICE_LOST
from support.server.engine_processes import PATIENCE, started_engine_process, until
from support.server.planted_device_loss import SCRIPT
from support.server.running_servers import serving

OPTIONS = ("--mode", "eager", "--warmup", "1", "--kv-memory", "20000 tokens")
TEXT = "/v1/completions"
LONG: dict[str, Any] = {"prompt": "a", "max_tokens": 900, "ignore_eos": True}
SAID = "the device has failed (an illegal memory access was encountered)"

pytestmark = pytest.mark.whole


def test_an_engine_process_ends_with_a_code_of_its_own(model_folder: Path, path: Path, tmp_path: Path) -> None:
    command = (sys.executable, SCRIPT, str(tmp_path / "now"))
    with started_engine_process(model_folder, path, *OPTIONS, command=command) as process, Client(path) as client:
        handles = [client.submit([3, 4, number], SamplingParams(max_tokens=900)) for number in range(3)]
        for handle in handles:
            next(iter(handle))
        (tmp_path / "now").touch()
        for handle in handles:
            with pytest.raises(EngineProcessError) as raised:
                handle.result(PATIENCE)
            assert str(raised.value).startswith(SAID)
        assert process.wait(PATIENCE) == DEVICE_LOST
        assert process.stderr is not None
        assert f"the engine process ends with exit code {DEVICE_LOST}: {SAID}" in process.stderr.read()
    assert not path.exists()


def test_an_api_server_starts_it_anew_three_times_an_hour(model_folder: Path, tmp_path: Path) -> None:
    now = tmp_path / "now"

    def fail(url: str) -> None:
        until(lambda: httpx.get(f"{url}/ready").status_code == 200)
        with httpx.stream("POST", url + TEXT, json={**LONG, "stream": True}, timeout=PATIENCE) as running:
            events = (line for line in running.iter_lines() if line)
            next(events)
            now.touch()
            *_, last = events
        error = json.loads(last.removeprefix("data: "))["error"]
        assert (error["type"], error["message"][: len(SAID)]) == ("server_error", SAID)

    with serving(model_folder, *OPTIONS, command=(sys.executable, SCRIPT, str(now))) as (process, url):
        for _ in range(3):
            fail(url)
            refused = httpx.post(url + TEXT, json={"prompt": "a"})
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
            assert httpx.get(f"{url}/health").status_code == 200
        until(lambda: httpx.get(f"{url}/ready").status_code == 200)
        assert httpx.post(url + TEXT, json={"prompt": "a", "max_tokens": 3}).status_code == 200
        fail(url)
        assert process.wait(PATIENCE) == 1


def test_an_answer_that_is_not_streamed_has_status_503_and_the_cause(model_folder: Path, tmp_path: Path) -> None:
    now = tmp_path / "now"
    with serving(model_folder, *OPTIONS, command=(sys.executable, SCRIPT, str(now))) as (_, url):
        until(lambda: httpx.get(f"{url}/ready").status_code == 200)
        now.touch()
        lost = httpx.post(url + TEXT, json=LONG, timeout=PATIENCE)
        assert lost.status_code == 503
        assert lost.json()["error"]["message"].startswith(SAID)
