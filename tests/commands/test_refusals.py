"""The impossible is refused at once and in one line, and leaves nothing behind."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from compiled_llm.commands.errors import as_typed
from compiled_llm.commands.printable import printable
from support.commands.command_line import invoke
from support.compilation.artifact_folders import compiled, made_up

REFUSED = {
    "generate x --model /no/such/model": [
        ("--max-new-tokens 0", "--max-new-tokens 0: must be at least 1"),
        ("--temperature -1", "--temperature -1.0: must be 0 or more; 0 takes the most likely token"),
        ("--temperature 0 --sample", "--sample draws tokens, and --temperature 0 takes the most likely"),
        ("--temperature nan", "--temperature nan"),
        ("--temperature inf", "--temperature inf"),
        ("--top-k -1", "--top-k -1"),
        ("--top-k 99999999999", "--top-k 99999999999"),
        ("--top-p 0", "--top-p 0.0: must be above 0 and at most 1"),
        ("--top-p 1.5", "--top-p 1.5"),
        ("--min-p -0.1", "--min-p -0.1"),
        ("--min-p 1.1", "--min-p 1.1: must be from 0 to 1"),
        ("--repetition-penalty 0", "--repetition-penalty 0.0"),
        ("--seed -1", "--seed -1"),
        (f"--seed {2**64}", "must be from 0 to 2**64 - 1"),
        ("--stop=", "--stop ''"),
        ("--system x", "--system is a part of the chat template: give --chat as well"),
        ("--mode nosuch", "--mode nosuch: choose one of 'eager'"),
        ("--backend nosuch", "--backend nosuch: choose one of 'auto'"),
        ("there", "PROMPT is one argument: quote it, as in 'x there'"),
        ("--greedy --temperature 1.5", "--greedy draws nothing, so it does not go with --temperature"),
        ("--greedy --top-k 9", "--greedy draws nothing, so it does not go with --top-k"),
        ("--greedy --top-p 0.9", "--greedy draws nothing, so it does not go with --top-p"),
        ("--greedy --min-p 0.1", "--greedy draws nothing, so it does not go with --min-p"),
        ("--greedy --seed 3", "--greedy draws nothing, so it does not go with --seed"),
        ("--mode eager --artifacts NEW", "hold compiled code, and --mode eager runs none"),
        ("--kv-scales NEW --kv-dtype fp8_e4m3", "new: cannot be read: No such file or directory"),
        ("--batch-invariant --mode eager", "error: --batch-invariant with --mode eager: "),
        ("", "model '/no/such/model': there is no such"),
        ("--model nosuch.gguf", "model 'nosuch.gguf': there is no such"),
        (f"--model {__file__}", "is a file, but not a .gguf"),
    ],
    "chat": [
        ("demo --server x", "MODEL and --server were both given: the server at x has its model"),
        ("--server x --model demo", "--model and --server were both given: the server at x has its model"),
        ("--server x --mode eager", "--mode and --server were both given: the server at x has its model"),
        ("--server ftp://x", "--server ftp://x: give http://, https://, or the path of a socket"),
        ("--temperature -1", "--temperature -1.0: must be 0 or more; 0 takes the most likely token"),
        ("--temperature 0 --sample", "--sample draws tokens, and --temperature 0 takes the most likely"),
        ("--max-tokens 0", "--max-new-tokens 0: must be at least 1"),
        ("--mode fast", "--mode fast: choose one of"),
        ("--kv-scales ./none --kv-dtype fp8_e4m3", "none: cannot be read: No such file or directory"),
        ("./nothing", "model './nothing': there is no such file or folder"),
        (f"--seed {2**63}", "SamplingParams: seed="),
    ],
    "serve": [
        ("", "name a model: a folder, a GGUF file, a hub id, or `demo`"),
        ("a --model b", "MODEL a and --model b were both given; leave one of them out"),
        ("demo --tokenizer ./none", "--tokenizer ./none: there is no such folder; name one, or a hub id"),
        ("demo --chat-template none", "/none: cannot be read: No such file or directory"),
    ],
    "explain": [
        ("", "name a model: a folder, a GGUF file, a hub id, or `demo`"),
        ("--model ./nothing", "model './nothing': there is no such file or folder"),
    ],
    "serve demo --uds NEW": [
        ("--max-num-seqs 0", "--max-num-seqs 0: must be at least 1"),
        ("--max-model-len 0", "--max-model-len 0: must be at least 1"),
        ("--warmup 8,300", "--warmup 300: there are 256 requests at once; raise --max-num-seqs"),
        ("--warmup x", "--warmup 'x': give comma-separated integers"),
        ("--drain-seconds -1", "--drain-seconds -1: must be 0 or more"),
        ("--kv-memory much", "--kv-memory much: give a fraction of the free memory"),
        ("--mode fast", "--mode fast"),
        ("--mode eager --artifacts NEW", "hold compiled code, and --mode eager runs none"),
        ("--kv-scales ./none --kv-dtype fp8_e4m3", "none: cannot be read: No such file or directory"),
        ("--batch-invariant --backend reference", "--batch-invariant with --backend reference: "),
    ],
    "serve demo": [
        ("--host 0.0.0.0", "--host 0.0.0.0: other machines could use the model; give --api-key-file, or"),
        ("--api-server-count 0", "--api-server-count 0: must be from 1 to 64"),
        ("--api-server-count 65", "--api-server-count 65: must be from 1 to 64"),
        ("--stream-interval 0", "--stream-interval 0: must be from 1 to 1024 tokens"),
        ("--stream-interval 1025", "--stream-interval 1025: must be from 1 to 1024 tokens"),
        ("--allowed-host http://a", "--allowed-host http://a: give a name or an address alone"),
        ("--allowed-host a --allowed-host b:80", "--allowed-host b:80: give a name or an address alone"),
        ("--cors-origin page.example", "--cors-origin page.example: give it as browsers do"),
        ("--cors-origin https://page.example/", "--cors-origin https://page.example/: give it as browsers do"),
        ("--port 70000", "--port 70000: must be from 0 to 65535"),
        ("--ssl-certfile cert.pem", "--ssl-certfile and --ssl-keyfile: give both, or neither"),
        ("--api-key-file /dev/null", "--api-key-file /dev/null: the file has no key; write one a line"),
    ],
    "serve ./nothing --uds NEW": [("", "model './nothing': there is no such")],
    "client --server NEW": [
        ("Hi there", "PROMPT is one argument: quote it, as in 'Hi there'"),
        ("''", "the prompt is empty"),
        ("Hi --raw --system Brief", "--system is a part of the chat template: leave out --raw"),
        ("1,2 --ids --system Brief", "--system is a part of the chat template: leave out --ids"),
        ("1,2 --ids --chat", "--ids: token ids are no chat"),
        ("Hi --temperature -1", "--temperature -1.0: must be 0 or more; 0 takes the most likely token"),
        ("Hi --greedy --top-p 0.9", "--greedy draws nothing, so it does not go with --top-p"),
        ("Hi --api-key-file x", "--api-key-file x: a socket takes no key, since only your user may open it"),
        ("Hi --server http://x:y", "--server http://x:y: Port could not be cast"),
        ("Hi --server http://x?y", "--server http://x?y: give a URL such as http://localhost:8000"),
        ("Hi --server http://x --api-key-file /dev/null", "--api-key-file /dev/null: the file has no key"),
        ("Hi --max-tokens 0", "--max-new-tokens 0: must be at least 1"),
    ],
    "compile demo -o NEW": [
        ("--mode eager", "--mode eager compiles nothing; give another one"),
        ("--mode quick", "--mode quick: choose one of"),
        ("--batch-invariant --backend reference", "--batch-invariant with --backend reference: "),
        ("--max-num-seqs 0", "--max-num-seqs 0: must be at least 1"),
        ("--max-num-seqs 4 --warmup 1,8", "--warmup 8: there is room for 4 requests; raise --max-num-seqs"),
    ],
    "explain x": [
        ("--timings 1,y", "--timings '1,y': give comma-separated integers"),
        ("--timings 0", "--timings '0': each must be at least 1"),
    ],
    "bench latency": [
        ("--contenders nosuch", "no nosuch; there are hf-eager"),
        ("--batches 1,x", "--batches '1,x': give comma-separated integers"),
        ("--batches 0", "--batches '0': each must be at least 1"),
        ("--new 1", "at least 2 are needed"),
        ("--model /no/such/folder --new 4", "there is no such file or folder"),
    ],
    "bench serve": [
        ("--prompts 9-4", "--prompts '9-4': give a range of tokens"),
        ("--concurrency 0", "--concurrency '0': each must be at least 1"),
    ],
}


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [(command, *refused) for command, table in REFUSED.items() for refused in table],
)
def test_the_impossible_is_refused_in_one_line(command: str, arguments: str, message: str, tmp_path: Path) -> None:
    given = [str(tmp_path / "new") if word == "NEW" else word for word in shlex.split(f"{command} {arguments}")]
    done = invoke(*given)
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert message in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("generate x --max-new-tokens y", "--max-new-tokens"),
        ("generate x --dtype int8", "--dtype"),
        ("generate --temprature 1 x", "--temperature"),
        (
            "nosuch",
            "no command 'nosuch'; there are generate, chat, serve, compile, client, explain, doctor, lm-eval, bench",
        ),
        ("gen", "no command 'gen'; did you mean generate?"),
        ("dcotor", "did you mean doctor?"),
        ("bench nosuch", "nosuch"),
        ("bench lat", "did you mean latency?"),
        ("bench latency --runs 0", "--runs"),
        ("explain x --device tpu", "--device"),
    ],
)
def test_an_argument_that_is_none_is_named_and_the_one_that_was_meant(arguments: str, message: str) -> None:
    done = invoke(*arguments.split())
    assert done.exit_code == 2
    assert message in done.output
    assert "Traceback" not in done.output


@pytest.mark.parametrize(
    ("message", "typed"),
    [
        ("wrap: no compiler; install one, or wrap with mode='eager'", "no compiler; install one, or use --mode eager"),
        ("backend=''; choose one of 'auto'", "--backend ''; choose one of 'auto'"),
        ("max_new_tokens=50: with a prompt of 3", "--max-new-tokens 50: with a prompt of 3"),
        ("load it with dtype=torch.bfloat16, or move it", "load it with --dtype bfloat16, or move it"),
        ("operations_uds='a': a file lies there", "--operations-uds a: a file lies there"),
        ("device='cuda', but torch sees none", "--device cuda, but torch sees none"),
        ("page_size=0: must be positive; device_map={}", "page_size=0: must be positive; device_map={}"),
    ],
)
def test_options_are_named_as_they_are_typed(message: str, typed: str) -> None:
    assert as_typed(message) == typed


def test_what_turns_the_direction_of_text_is_spelled_out() -> None:
    """Else a name or an answer would read otherwise than it is."""
    assert printable("a\u202eb\u2066c\u2069") == "a\\u202eb\\u2066c\\u2069"
    assert printable("\x1b[2J \u05d0 \u200f\n") == "\\x1b[2J \u05d0 \u200f\n"


# ---- artifacts and profiles


def test_a_profile_that_is_none_is_refused_at_once(model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "profile").write_text("{}")
    arguments = ["compile", str(model_folder), "-o", str(tmp_path / "artifacts"), "--profile"]
    for name, message in (("profile", "is damaged, or is no profile"), ("none", "cannot be read: No such file")):
        done = invoke(*arguments, str(tmp_path / name))
        assert done.exit_code == 2
        assert f"--profile {tmp_path / name} {message}" in done.output
    assert [path.name for path in tmp_path.iterdir()] == ["profile"]


def test_a_folder_that_exists_is_not_written_over(model_folder: Path, tmp_path: Path) -> None:
    folder = made_up(tmp_path / "artifacts")
    for target, message in ((folder, "exists already"), (tmp_path / "no" / "where", "there is no folder")):
        done = invoke("compile", str(model_folder), "-o", str(target))
        assert done.exit_code == 2
        assert message in done.output
    assert list(tmp_path.iterdir()) == [folder]


def test_a_model_that_cannot_be_loaded_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    done = compiled(tmp_path / "model", tmp_path / "artifacts", "--device", "cpu")
    assert done.returncode in (1, 2)
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == [tmp_path / "model"]


def test_generate_says_why_artifacts_are_refused(model_folder: Path, tmp_path: Path) -> None:
    folder = made_up(tmp_path / "artifacts")
    arguments = ["generate", "Hi", "--model", str(model_folder), "--device", "cpu", "--artifacts"]
    for given, message in (
        (folder, "option mode 'compile' there, 'cuda-graphs' here"),
        (tmp_path / "nowhere", "cannot be read: No such file or directory"),
    ):
        done = invoke(*arguments, str(given))
        assert (done.exit_code, message in done.output) == (2, True), done.output
        assert ("was made for something else: " in done.output) == (given == folder)
