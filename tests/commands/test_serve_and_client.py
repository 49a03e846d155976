"""`compiled-llm serve` and `client` say what is wrong before anything is loaded or sent, and `serve` what is risky."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, cast

import pytest

from compiled_llm.commands import early_checks
from compiled_llm.commands.loading.source import Source
from compiled_llm.commands.serve import http as serve_http
from compiled_llm.commands.serve.command import ServeOptions
from compiled_llm.commands.serve.http import HttpFlags
from compiled_llm.config import KVScales, WrapConfig
from compiled_llm.engine.engine import Engine
from compiled_llm.server.engine_process.socket_file import listen
from compiled_llm.server.restarts import Restarts
from support.commands.command_line import invoke


def failed(*arguments: str) -> tuple[int, str]:
    result = invoke(*arguments)
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    return result.exit_code, line


def test_a_process_on_a_leash_ends_with_whoever_holds_it() -> None:
    code = (
        "import time; from compiled_llm.commands.serve.leash import end_with_parent; end_with_parent(); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(30) == -signal.SIGTERM


def test_a_process_is_started_again_three_times_an_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    restarts = Restarts(3)
    assert [restarts.may() for _ in range(4)] == [True, True, True, False]
    now[0] = 3601.0
    assert restarts.may()


@pytest.mark.parametrize(
    ("device", "cores", "driver", "count"),
    [
        *(("auto", 3, True, 1), ("auto", 4, True, 2), ("cuda", 12, True, 3), ("auto", 128, True, 4)),
        *(("cpu", 128, True, 1), ("auto", 128, False, 1)),
    ],
)
def test_how_many_api_servers_there_are_follows_from_the_machine(
    device: str, cores: int, driver: bool, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve_http.os, "sched_getaffinity", lambda pid: range(cores))
    monkeypatch.setattr(serve_http, "has_driver", lambda: driver)
    assert serve_http.usual_count(device) == count


def test_a_path_that_is_taken_is_refused_before_the_model_is_loaded(path: Path) -> None:
    with listen(path):
        code, line = failed("serve", "demo", "--uds", str(path))
    said = f"error: --uds {path}: an engine process listens there already; stop it, or give another path"
    assert (code, line) == (1, said)


@pytest.mark.parametrize("arguments", [["serve", "demo", "--uds", "x"], ["client", "Hi", "--server", "x"]])
def test_the_extra_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    monkeypatch.setattr(early_checks.importlib.util, "find_spec", lambda _: None)
    code, line = failed(*arguments)
    assert (code, line) == (1, "error: this command needs msgspec: pip install '.[server]' in the checkout")
    assert "msgspec" in sys.modules


@pytest.mark.parametrize(
    ("options", "structured", "calls"),
    [
        ({}, False, [("auto",)]),
        ({}, True, [(1, "structured"), ("auto",)]),
        ({"warmup": "16,4"}, True, [([16], "structured"), ([16, 4],)]),
        ({"profile": "nowhere"}, False, [("auto",)]),
        ({"profile": "there", "warmup": "16"}, True, [("profile", "there", "structured")]),
    ],
)
def test_what_is_compiled_before_the_first_request(
    tmp_path: Path, options: dict[str, Any], structured: bool, calls: list[Any]
) -> None:
    (tmp_path / "there").touch()

    class Warmed:
        def warmup(self, *sizes: Any, profile: Path | None = None, structured: bool = False) -> None:
            named = [] if profile is None else ["profile", profile.name]
            made.append((*sizes, *named, *["structured"] * structured))

    made: list[Any] = []
    given = {"model": "demo", "max_num_seqs": 16, **options}
    if "profile" in given:
        given["profile"] = tmp_path / given["profile"]
    served = ServeOptions(**given)
    served.prepare(cast(Engine, Warmed()), structured)
    assert made == calls


def served_with(**options: Any) -> ServeOptions:
    return ServeOptions(model="demo", mode="compile", **options)


def test_a_server_may_keep_keys_and_values_in_8_bits(tmp_path: Path) -> None:
    assert served_with().wrap_options()["kv_dtype"] is None
    assert not [argument for argument in served_with().arguments() if argument.startswith("--kv-dtype")]
    scales = KVScales([[0.5]], [[2.0]])
    scales.save(tmp_path / "scales.json")
    served = served_with(kv_dtype="fp8_e4m3", kv_scales=tmp_path / "scales.json")
    assert served.wrap_options()["kv_dtype"] == "fp8_e4m3"
    assert "--kv-dtype=fp8_e4m3" in served.arguments()
    assert served.wrap_options()["kv_scales"] == scales
    assert f"--kv-scales={tmp_path / 'scales.json'}" in served.arguments()


def test_a_server_ends_answers_at_the_tokenizers_end_too() -> None:
    assert served_with().engine_options()["tokenizer_eos"] is True


def test_a_server_may_give_the_same_bits() -> None:
    """Its first answers wait for compiling: uncompiled ones would have other bits."""
    served = served_with(batch_invariant=True)
    config = WrapConfig.from_options(served.wrap_options())
    assert (config.batch_invariant, config.eager_first) == (True, False)
    assert "--batch-invariant" in served.arguments()


def test_a_key_comes_from_the_environment_or_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "keys").write_text("b" * 16)
    monkeypatch.setenv("COMPILED_LLM_API_KEY", "a" * 16)
    settings = HttpFlags(host="0.0.0.0").settings(Source("tiny", "tiny"), 1.0)
    assert (settings.api_keys, settings.is_local) == (("a" * 16,), False)
    code, line = failed("serve", "demo", "--api-key-file", str(tmp_path / "keys"))
    assert (code, "COMPILED_LLM_API_KEY has a key, too; keys come from one place" in line) == (2, True)
    monkeypatch.setenv("COMPILED_LLM_API_KEY", "short-one")
    code, line = failed("serve", "demo")
    assert (code, line.startswith("error: COMPILED_LLM_API_KEY: a key of 9 characters; ")) == (2, True)
    assert "short-one" not in line


def test_a_profile_that_cannot_be_kept_is_refused_at_once(path: Path, tmp_path: Path) -> None:
    (tmp_path / "damaged").write_text("{")
    for profile, options, said in (
        (tmp_path / "damaged", (), "is damaged, or is no profile; remove it, and have it saved again"),
        (tmp_path, (), "cannot be read: Is a directory"),
        (tmp_path / "no" / "where", (), f"{tmp_path / 'no'} is no folder that you can write to; make it first"),
        (tmp_path / "new", ("--mode", "eager"), "--mode eager compiles and captures nothing"),
    ):
        code, line = failed("serve", "demo", "--uds", str(path), "--profile", str(profile), *options)
        assert (code, line.startswith(f"error: --profile {profile}"), said in line) == (2, True, True), line
    assert not path.exists()
