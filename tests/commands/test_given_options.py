"""`compiled-llm serve` takes options from a file and from the environment, and names the place of a wrong one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from compiled_llm.commands.serve import command
from support.commands.command_line import invoke


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What a server is started with: the options of HTTP, then the arguments of its engine process."""
    calls: list[Any] = []

    def start(http: Any, source: Any, path: Any, arguments: Any, *_: Any) -> None:
        calls.extend([http, arguments])

    monkeypatch.setattr(command, "run_with_api_server", start)
    return calls


FILE = """\
model: demo
port: 1
max-num-seqs: 16
max_step_ms: 2.5
warmup: [1, 8]
served-model-name: [a, b]
allowed-host: c
page: false
kv-memory: 8GiB
"""


def test_the_command_line_goes_before_the_environment_and_that_before_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, served: list[Any]
) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(FILE)
    monkeypatch.setenv("COMPILED_LLM_SERVE_MAX_NUM_SEQS", "32")
    monkeypatch.setenv("COMPILED_LLM_SERVE_PORT", "2")
    monkeypatch.setenv("COMPILED_LLM_SERVE_CORS_ORIGIN", "https://d.example,https://e.example")
    done = invoke("serve", "--config", str(file), "--port", "3")
    assert (done.exit_code, done.stderr) == (0, f"compiled_llm: the command line goes before {file}: port\n")
    http, arguments = served
    assert (http.port, http.served_model_name, http.allowed_host, http.page) == (3, ["a", "b"], ["c"], False)
    assert http.cors_origin == ["https://d.example", "https://e.example"]
    assert arguments[:2] == ["serve", "demo"]
    assert {"--max-num-seqs=32", "--max-step-ms=2.5", "--warmup=1,8", "--kv-memory=8GiB"} < set(arguments)


def test_a_model_that_is_typed_goes_before_that_of_a_file(tmp_path: Path, served: list[Any]) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("model: ./nothing\n")
    for typed in (["demo"], ["--model", "demo"]):
        done = invoke("serve", "--config", str(file), *typed)
        assert (done.exit_code, done.stderr) == (0, f"compiled_llm: the command line goes before {file}: model\n")
        assert served.pop()[:2] == ["serve", "demo"]


def test_an_engine_process_goes_by_its_arguments_alone(monkeypatch: pytest.MonkeyPatch, served: list[Any]) -> None:
    monkeypatch.setenv("COMPILED_LLM_SERVE_MAX_NUM_SEQS", "x")
    assert invoke("serve", "demo", "--leashed").exit_code == 0
    assert not [argument for argument in served[1] if argument.startswith("--max-num-seqs")]  # it has the default


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max-num-seq: 1", ", line 1: max-num-seq: there is no such option; did you mean max-num-seqs"),
        ("\nzebra: 1", ", line 2: zebra: there is no such option; there are allowed-host, allowed-local-media-path, "),
        ("same-model: a", ", line 1: same-model: there is no such option; "),
        ("config: a", ", line 1: config: there is no such option; "),
        ("port: 1\nport: 2", ", line 2: port: was given in line 1 already; leave one of them out"),
        ("max-num-seqs: 1\nmax_num_seqs: 1", ", line 2: max_num_seqs: was given in line 1 already"),
        ("enforce-eager: true", ", line 1: enforce-eager: there is no such option; it is one of vLLM: give --mode"),
        ("port: x", ", line 1: port x: "),
        ("dtype: int8", ", line 1: dtype int8: "),
        ("\nmode: fast", ", line 2: mode fast: choose one of 'eager', "),
        ("max-step-ms: fast", ", line 1: max-step-ms fast: give milliseconds above 0, auto or none"),
        ("max-num-seqs: 0", ", line 1: max-num-seqs 0: must be at least 1"),
        ("page: true\nkv_memory: much", ", line 2: kv_memory much: give a fraction of the free memory"),
        ("port: [1, 2]", ", line 1: port: give one value, and not 2"),
        ("port:", ", line 1: port: give a value"),
        ("port: {a: 1}", ", line 1: port: give a value"),
        ("a\nport: 1: 2", ", line 2: is no YAML: "),
        ("hello", ": give an option a line, as in `port: 8000`"),
    ],
)
def test_a_wrong_file_is_refused_with_its_line(text: str, said: str, tmp_path: Path, served: list[Any]) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    done = invoke("serve", "demo", "--config", str(file))
    (line,) = done.stderr.splitlines()
    assert (done.exit_code, line.startswith(f"error: --config {file}{said}"), served) == (2, True, []), line


def test_a_file_that_is_missing_and_a_variable_that_is_wrong_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, served: list[Any]
) -> None:
    done = invoke("serve", "demo", "--config", str(tmp_path / "none"))
    assert done.stderr == f"error: --config {tmp_path / 'none'}: cannot be read: No such file or directory\n"
    for variable, value, said in (
        ("COMPILED_LLM_SERVE_PORT", "http://10.0.0.1:80", "COMPILED_LLM_SERVE_PORT http://10.0.0.1:80: "),
        ("COMPILED_LLM_SERVE_MODE", "fast", "COMPILED_LLM_SERVE_MODE fast: choose one of "),
        ("COMPILED_LLM_SERVE_PROT", "1", "COMPILED_LLM_SERVE_PROT: there is no such option; did you mean COMPILED_"),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(variable, value)
            done = invoke("serve", "demo")
            assert (done.exit_code, done.stderr.startswith(f"error: {said}"), served) == (2, True, []), done.stderr


KUBERNETES = {
    "{}_SERVICE_HOST": "10.0.0.11",
    "{}_SERVICE_PORT": "8000",
    "{}_SERVICE_PORT_HTTP": "8000",
    "{}_PORT": "tcp://10.0.0.11:8000",
    "{}_PORT_8000_TCP": "tcp://10.0.0.11:8000",
    "{}_PORT_8000_TCP_PROTO": "tcp",
    "{}_PORT_8000_TCP_PORT": "8000",
    "{}_PORT_8000_TCP_ADDR": "10.0.0.11",
}
"""By Kubernetes' documentation, "Accessing the Service": of each service, in all containers that start after it."""


@pytest.mark.parametrize("service", ["COMPILED_LLM_SERVE", "COMPILED_LLM_SERVE_BIG_MODEL"])
def test_variables_that_kubernetes_makes_of_a_service_are_no_options(
    service: str, monkeypatch: pytest.MonkeyPatch, served: list[Any]
) -> None:
    for name, value in KUBERNETES.items():
        monkeypatch.setenv(name.format(service), value)
    monkeypatch.setenv("COMPILED_LLM_SERVE_MAX_NUM_SEQS", "32")
    done = invoke("serve", "demo")
    said = f"not read as options, since Kubernetes gives them of a service: {service}_PORT and 7 more"
    assert (done.exit_code, done.stderr) == (0, f"compiled_llm: {said}\n")
    http, arguments = served
    assert http.port is None
    assert "--max-num-seqs=32" in arguments
    assert invoke("serve", "demo", "--quiet").stderr == ""


def test_what_is_said_before_a_json_log_begins_is_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, served: list[Any]
) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("port: 1\nlog-format: json\n")
    monkeypatch.setenv("COMPILED_LLM_SERVE_PORT", "tcp://10.0.0.11:8000")
    done = invoke("serve", "demo", "--config", str(file), "--port", "3", "--max-num-seqs", "0")
    records = [json.loads(line) for line in done.stderr.splitlines()]
    assert all(record.pop("time") for record in records)
    assert records == [
        {"level": "info", "message": f"the command line goes before {file}: port"},
        {
            "level": "info",
            "message": "not read as options, since Kubernetes gives them of a service: COMPILED_LLM_SERVE_PORT",
        },
        {"level": "error", "message": "error: --max-num-seqs 0: must be at least 1"},
    ]
