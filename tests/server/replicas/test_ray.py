"""Two replicas on Ray Serve, on this machine: the API, who answers what, and what happens if an engine process is
killed.

Run with Ray installed: ``tox -e ray``.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from compiled_llm.client import Client
from compiled_llm.server import ray_app
from support.server.engine_processes import PATIENCE, until
from support.server.running_servers import chat_tokenizer
from support.tiny_models import tiny_qwen3

ray = pytest.importorskip("ray", reason="needs the extra `ray`")
pytestmark = [
    pytest.mark.whole,
    pytest.mark.filterwarnings("ignore"),  # Ray's own are many
]

KEY = "a-key-of-sixteen-or-more"
CPUS = {"ray_actor_options": {"num_cpus": 0.5}}
PAGES = [[group, *[group * 7 + number for number in range(95)]] for group in range(8)]  # six pages each


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    model = tiny_qwen3(eos_token_id=1, num_hidden_layers=1, vocab_size=380, max_position_embeddings=4096)
    model.save_pretrained(folder)
    chat_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """Of a Ray of our own."""
    from ray import serve

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"port": port})
    yield port
    serve.shutdown()
    ray.shutdown()
    assert not engine_processes()


@pytest.fixture(scope="module")
def start(folder: Path, port: int, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., httpx.Client]:
    """Serve two replicas with these options; what was served before ends."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(KEY)

    def start(**options: Any) -> httpx.Client:
        from ray import serve

        replica_options = {**CPUS, **options.pop("replica_options", {})}
        app = ray_app(
            str(folder),
            replicas=2,
            replica_options=replica_options,
            api_server_options=CPUS,
            device="cpu",
            mode="eager",
            kv_memory="8000 tokens",
            max_num_seqs=4,
            quiet=True,
            api_key_file=keys,
            **options,
        )
        serve.run(app)
        client = httpx.Client(
            base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE, headers={"Authorization": f"Bearer {KEY}"}
        )
        until(lambda: client.get("/ready").status_code == 200)
        return client

    return start


@pytest.fixture(scope="module")
def client(start: Callable[..., httpx.Client]) -> httpx.Client:
    return start(max_longer=2)


def sockets() -> list[str]:
    """Of the engine processes."""
    command = ["ps", "-ewwo", "args"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return [line.partition("--uds ")[2].split()[0] for line in lines if "--leashed" in line and "/model0/tiny" in line]


def engine_processes() -> list[int]:
    lines = subprocess.run(["ps", "-ewwo", "pid,args"], capture_output=True, text=True, check=True).stdout.splitlines()
    return [int(line.split()[0]) for line in lines if "--leashed" in line and "/model0/tiny" in line]


def complete(client: httpx.Client, prompt: Any, **options: Any) -> httpx.Response:
    return client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 4, "ignore_eos": True, **options})


def cached(client: httpx.Client, prompt: list[int], **options: Any) -> int:
    response = complete(client, prompt, **options)
    assert response.status_code == 200, response.text
    return int(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def share_cached(client: httpx.Client) -> float:
    """How much of prompts is cached, if eight beginnings come again and again."""
    prompts = [[*beginning, *[300 + time] * 16] for time in range(3) for beginning in PAGES]
    return sum(cached(client, prompt) for prompt in prompts) / sum(map(len, prompts))


def test_the_openai_client_is_answered_as_by_the_command(client: httpx.Client) -> None:
    with openai.OpenAI(base_url=f"{client.base_url}/v1", api_key=KEY, max_retries=0) as talks:
        messages: Any = [{"role": "user", "content": "What?"}]
        whole = talks.chat.completions.create(model="tiny", messages=messages, max_tokens=8, temperature=0, n=2)
        assert len({choice.message.content for choice in whole.choices}) == 1
        stream = talks.chat.completions.create(
            model="tiny", messages=messages, max_tokens=8, temperature=0, stream=True
        )
        pieces = [chunk.choices[0].delta.content or "" for chunk in stream]
        assert "".join(pieces) == whole.choices[0].message.content
        assert [model.id for model in talks.models.list()] == ["tiny"]
        assert talks.responses.create(model="tiny", input="What?", max_output_tokens=16).status is not None
    assert client.post("/tokenize", json={"prompt": "What?"}).json()["count"] > 0
    assert client.get("/version").headers.get_list("x-request-id") != []
    assert len(client.get("/version").headers.get_list("x-request-id")) == 1
    assert "compiled_llm_http_requests" in client.get("/metrics").text


def test_one_request_may_have_several_prompts(client: httpx.Client) -> None:
    response = complete(client, [[5, 6], [7, 8], [9, 9]])
    assert len(response.json()["choices"]) == 3


def test_errors_are_those_of_the_command(client: httpx.Client) -> None:
    assert httpx.post(f"{client.base_url}/v1/completions", json={"prompt": "a"}).status_code == 401
    assert complete(client, "a", headers=None).status_code == 400
    assert complete(client, "a", model="another").json()["error"]["code"] == "model_not_found"
    assert complete(client, [5] * 10_000).json()["error"]["code"] == "context_length_exceeded"
    assert client.get("/ready", headers={"Host": "elsewhere"}).status_code == 403
    assert client.post("/v1/completions", content=b"{}", headers={"Content-Type": "text/plain"}).status_code == 415


def test_a_prompt_comes_to_the_replica_that_has_its_pages_unless_its_salt_is_another(client: httpx.Client) -> None:
    prompt = [9] * 96 + [10] * 8
    assert cached(client, prompt) == 0
    assert [cached(client, [*prompt, *[number] * 20]) for number in range(11, 17)] == [96, *[96] * 5]
    assert cached(client, prompt, cache_salt="another") == 0
    assert cached(client, prompt, cache_salt="another") == 96


def figures(name: str) -> dict[tuple[str, ...], float]:
    """In Ray's metrics, by who has it, a replica of ours or of API servers, and what else it is told apart by."""
    node = ray.nodes()[0]
    text = httpx.get(f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics", timeout=PATIENCE).text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    told_apart = ("replica", "state", "le", "by")
    return {
        tuple(sample.labels[label] for label in told_apart if label in sample.labels): sample.value
        for sample in samples
        if sample.name == f"ray_compiled_llm_{name}"
    }


def test_each_replica_has_its_figures_in_rays_metrics(client: httpx.Client) -> None:
    routed = Counter(figures("routed_total"))
    for _ in range(4):
        assert complete(client, [11] * 96 + [12] * 8).status_code == 200
    counted = ("prompt_tokens", "cached_tokens", "new_tokens", "steps")
    engine_processes = []
    for path in sockets():
        with Client(path) as talks:
            stats = talks.stats()
            engine_processes.append([getattr(stats, name) for name in counted])
    assert sum(cached for _, cached, *_ in engine_processes) >= 3 * 96

    def loss_reported() -> dict[tuple[str, ...], list[float]]:
        """By replicas; those that have ended stay for a while."""
        tables = [figures(f"{name}_total") for name in counted]
        return {replica: [table.get(replica, 0) for table in tables] for replica in figures("running")}

    def newly_routed(why: str) -> float:
        return sum(count for labels, count in (Counter(figures("routed_total")) - routed).items() if labels[-1] == why)

    until(lambda: all(entry in loss_reported().values() for entry in engine_processes))
    until(lambda: newly_routed("queue") >= 1 and newly_routed("pages") >= 3)
    replica = next(replica for replica, entry in loss_reported().items() if entry == max(engine_processes))
    assert {(*replica, state) for state in ("used", "free", "cached")} <= figures("pages").keys()
    assert {(*replica, "0.5"), (*replica, "+Inf")} <= figures("time_to_first_token_seconds_bucket").keys()
    assert figures("time_to_first_token_seconds_count")[replica] > 0


def test_more_is_cached_than_if_replicas_are_drawn(client: httpx.Client, start: Callable[..., httpx.Client]) -> None:
    ours = share_cached(client)
    drawn = share_cached(start(replica_options={"request_router_config": {}}))
    assert ours == pytest.approx(2 * 96 / (3 * 112), abs=0.001)  # all that can be: each beginning is computed once
    assert drawn < 0.9 * ours


def test_a_client_that_leaves_has_its_request_ended(client: httpx.Client) -> None:
    def counted(name: str) -> int:
        found = 0
        for path in sockets():
            with Client(path) as talks:
                found += getattr(talks.stats(), name)
        return found

    before = counted("new_tokens")
    body = {"prompt": [5, 6, 7], "max_tokens": 3900, "ignore_eos": True, "stream": True}
    with client.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()  # kept: httpx closes the connection with its iterator
        next(lines)
        assert counted("running") == 1
    until(lambda: counted("running") == 0)
    assert counted("new_tokens") < before + 3900


def test_replicas_may_be_as_many_as_ray_sees_fit() -> None:
    scaled = {"autoscaling_config": {"min_replicas": 1, "max_replicas": 2}, "ray_actor_options": {"num_cpus": 2}}
    assert ray_app("demo", replica_options=scaled, api_server_options=scaled) is not None


def test_if_an_engine_process_is_killed_its_requests_end_and_another_comes(client: httpx.Client) -> None:
    body = {"prompt": [5, 6, 7], "max_tokens": 3000, "ignore_eos": True, "stream": True}
    victims, last = engine_processes(), ""
    assert len(victims) == 2
    with client.stream("POST", "/v1/completions", json=body) as response:
        for line in response.iter_lines():
            last = line or last
            while victims:
                os.kill(victims.pop(), signal.SIGKILL)
    assert '"code":"unavailable"' in last
    statuses = {complete(client, "a").status_code for _ in range(5)}
    assert statuses <= {200, 503}
    until(lambda: complete(client, "a").status_code == 200)
    until(lambda: len(engine_processes()) == 2)


def test_a_replica_that_is_killed_takes_its_engine_process_along(client: httpx.Client) -> None:
    until(lambda: len(engine_processes()) == 2)
    victim = engine_processes()[0]
    listed = subprocess.run(["ps", "-o", "ppid=", str(victim)], capture_output=True, text=True, check=True).stdout
    os.kill(int(listed), signal.SIGKILL)
    until(lambda: victim not in engine_processes())
    until(lambda: complete(client, "a").status_code == 200)
