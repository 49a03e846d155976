"""What ``ray_app`` takes: the options of ``compiled-llm serve``, for engine processes or for API servers."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from inspect import signature
from pathlib import Path

import pytest

from compiled_llm.commands.serve.command import serve
from compiled_llm.server import ray_app
from compiled_llm.server.replicas.options import (
    MAX_QUEUE,
    OF_API_SERVERS,
    OF_ENGINE_PROCESSES,
    OF_RAY,
    Options,
)
from compiled_llm.server.replicas.ray_app import _with


def test_every_option_of_the_command_is_one_or_is_rays_to_have() -> None:
    parameters = signature(serve).parameters
    assert parameters.keys() == OF_ENGINE_PROCESSES | OF_API_SERVERS | OF_RAY | {"context", "model"}


def test_engine_processes_get_theirs_as_the_command_takes_them() -> None:
    options = Options("demo", {"mode": "eager", "warmup": [1, 8], "quiet": True, "kv_memory": None, "max_num_seqs": 8})
    assert options.arguments() == [
        *("serve", "demo", f"--max-queue={MAX_QUEUE}", "--drain-seconds=1"),
        *("--mode=eager", "--warmup=1,8", "--quiet", "--max-num-seqs=8"),
    ]
    assert options.max_requests == 8 + MAX_QUEUE
    for eager_first, last in ((True, "--drain-seconds=1"), (False, "--no-eager-first")):
        assert Options("demo", {"eager_first": eager_first}).arguments()[-1] == last


def test_api_servers_get_theirs(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("a" * 20)
    given = {"api_key_file": keys, "allowed_host": "llm.example", "served_model_name": ["a", "b"], "salt_caches": True}
    given |= {"escape_special_tokens": True, "stream_interval": 4}
    settings = Options("/models/tiny", given).settings()
    assert (settings.api_keys, settings.names, settings.salts_caches) == (("a" * 20,), ("a", "b"), True)
    assert (settings.escapes_special_tokens, settings.stream_interval) == (True, 4)
    assert "llm.example" in settings.hosts
    assert settings.behind_proxy
    assert Options("/models/tiny", {}).settings().names == ("tiny",)  # clients see no folders


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("port", "ray_app: port: is for one server"),
        ("max_row", "ray_app: max_row: there is no such option"),
        ("page_size", "ray_app: page_size=0: must be at least 1"),
        ("max_longer", "ray_app: max_longer=-1: must be at least 0"),
    ],
)
def test_an_option_that_is_none_is_refused_by_name(option: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ray_app("demo", **{option: -1 if option == "max_longer" else 0})


def test_a_replica_that_asks_for_more_of_ray_keeps_its_gpu() -> None:
    assert _with({"ray_actor_options": {"num_gpus": 1}}, {"ray_actor_options": {"memory": 5}}) == {
        "ray_actor_options": {"num_gpus": 1, "memory": 5}
    }


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_it_says_what_to_install() -> None:
    with pytest.raises(RuntimeError, match=r"ray_app: Ray Serve is not installed: pip install '.\[ray\]'"):
        ray_app("demo")


def test_to_import_it_takes_neither_ray_nor_torch() -> None:
    code = (
        "import sys, compiled_llm.server; print([name for name in ('ray', 'torch', 'fastapi') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
