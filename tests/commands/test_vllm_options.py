"""Whoever brings the options of `vllm serve` is told ours, in one line, which the documentation has, too."""

from __future__ import annotations

import functools
import re
import shlex
from typing import Any

import pytest
import typer

from compiled_llm.commands.app import app
from compiled_llm.commands.loading.source import Source
from compiled_llm.commands.serve import command
from compiled_llm.commands.serve.vllm_line import ALWAYS
from compiled_llm.commands.serve.vllm_options import VLLM_OPTIONS, instead_of
from support.commands.command_line import invoke
from support.docs.pages import rendered

_NAMES = """
--additional-config --aggregate-engine-logging --all2all-backend --allow-credentials
--allow-deprecated-quantization --allowed-headers --allowed-local-media-path --allowed-media-domains
--allowed-methods --allowed-origins --api-key --api-server-count --async-scheduling --attention-backend
--attention-config --block-size --calculate-kv-scales --chat-template --chat-template-content-format
--code-revision --collect-detailed-traces --compilation-config --config --config-format --convert
--cp-kv-cache-interleave-size --cpu-distributed-timeout-seconds --cpu-offload-gb --cpu-offload-params
--cudagraph-capture-sizes --cudagraph-metrics --data-parallel-address --data-parallel-backend
--data-parallel-external-lb --data-parallel-hybrid-lb --data-parallel-multi-port-external-lb --data-parallel-rank
--data-parallel-rpc-port --data-parallel-size --data-parallel-size-local --data-parallel-start-rank
--data-parallel-supervisor-port --dbo-decode-token-threshold --dbo-prefill-token-threshold --dcp-comm-backend
--dcp-kv-cache-interleave-size --decode-context-parallel-size --default-chat-template-kwargs --default-mm-loras
--device-ids --diffusion-config --disable-access-log-for-endpoints --disable-cascade-attn
--disable-chunked-mm-input --disable-custom-all-reduce --disable-fastapi-docs --disable-hybrid-kv-cache-manager
--disable-log-stats --disable-nccl-for-dp-synchronization --disable-sliding-window --disable-uvicorn-access-log
--distributed-executor-backend --distributed-timeout-seconds --download-dir --dp-supervisor-probe-failure-threshold
--dp-supervisor-probe-interval-s --dp-supervisor-probe-timeout-s --dtype --ec-transfer-config
--enable-auto-tool-choice --enable-chunked-prefill --enable-cumem-allocator --enable-dbo --enable-elastic-ep
--enable-ep-weight-filter --enable-eplb --enable-expert-parallel --enable-flash-late-interaction
--enable-flashinfer-autotune --enable-force-include-usage --enable-layerwise-nvtx-tracing --enable-log-deltas
--enable-log-outputs --enable-log-requests --enable-logging-iteration-details --enable-lora
--enable-mamba-cache-stochastic-rounding --enable-mfu-metrics --enable-mixed-moe-lora-format --enable-mm-embeds
--enable-offline-docs --enable-prefix-caching --enable-prompt-embeds --enable-prompt-tokens-details
--enable-request-id-headers --enable-return-routed-experts --enable-server-load-tracking --enable-sleep-mode
--enable-ssl-refresh --enable-tokenizer-info-endpoint --enable-tower-connector-lora --enforce-eager --eplb-config
--exclude-tools-when-tool-choice-none --expert-placement-strategy --fail-on-environ-validation --fingerprint-mode
--fingerprint-value --fully-sharded-loras --gdn-prefill-backend --generation-config --gpu-memory-utilization --grpc
--h11-max-header-count --h11-max-incomplete-event-size --headless --hf-config-path --hf-overrides --hf-token --host
--ignore-patterns --interleave-mm-strings --io-processor-plugin --ir-op-priority --jit-monitor-verbose
--kernel-config --kv-cache-dtype --kv-cache-dtype-skip-layers --kv-cache-memory-bytes --kv-cache-metrics
--kv-cache-metrics-sample --kv-events-config --kv-offloading-backend --kv-offloading-size --kv-sharing-fast-prefill
--kv-transfer-config --language-model-only --limit-mm-per-prompt --linear-backend --load-format --log-config-file
--log-error-stack --logits-processors --logprobs-mode --long-prefill-token-threshold --lora-dtype --lora-modules
--lora-target-modules --mamba-backend --mamba-block-size --mamba-cache-dtype --mamba-cache-mode
--mamba-cache-philox-rounds --mamba-ssm-cache-dtype --master-addr --master-port --max-cpu-loras
--max-cudagraph-capture-size --max-log-len --max-logprobs --max-long-partial-prefills --max-lora-rank --max-loras
--max-model-len --max-num-batched-tokens --max-num-partial-prefills --max-num-seqs --max-parallel-loading-workers
--media-io-kwargs --middleware --mm-encoder-attn-backend --mm-encoder-attn-dtype --mm-encoder-fp8-scale-path
--mm-encoder-fp8-scale-save-margin --mm-encoder-fp8-scale-save-path --mm-encoder-only --mm-encoder-tp-mode
--mm-processor-cache-gb --mm-processor-cache-type --mm-processor-kwargs --mm-shm-cache-max-object-size-mb
--mm-tensor-ipc --model --model-impl --model-loader-extra-config --moe-backend --nnodes --node-rank
--num-gpu-blocks-override --numa-bind --numa-bind-cpus --numa-bind-nodes --offload-backend --offload-group-size
--offload-num-in-group --offload-params --offload-prefetch-step --optimization-level --otlp-traces-endpoint
--override-attention-dtype --override-generation-config --performance-mode --pipeline-parallel-size --pooler-config
--port --prefill-context-parallel-size --prefill-schedule-interval --prefix-caching-hash-algo --profiler-config
--pt-load-map-location --quantization --quantization-config --ray-workers-use-nsight --reasoning-config
--reasoning-parser --reasoning-parser-plugin --renderer-num-workers --response-role --return-tokens-as-token-ids
--revision --root-path --runner --safetensors-load-strategy --safetensors-prefetch-block-size
--safetensors-prefetch-num-threads --scheduler-cls --scheduler-reserve-full-isl --scheduling-policy --seed
--served-model-name --show-hidden-metrics-for-version --shutdown-timeout --skip-mm-profiling --skip-tokenizer-init
--spec-method --spec-model --spec-tokens --specialize-active-lora --speculative-config --ssl-ca-certs
--ssl-cert-reqs --ssl-certfile --ssl-ciphers --ssl-keyfile --stream-interval --structured-outputs-config
--tensor-parallel-size --tokenizer --tokenizer-mode --tokenizer-revision --tokens-only --tool-call-parser
--tool-parser-plugin --tool-server --trust-remote-code --trust-request-chat-template --ubatch-size --uds
--use-fp64-gumbel --use-tqdm-on-load --uvicorn-log-level --video-pruning-rate --watermark --weight-transfer-config
--worker-cls --worker-extension-cls -ac -asc -cc -dc -dcp -dp -dpa -dpb -dpe -dph -dpl -dpm -dpn -dpp -dpr -ep -pcp
-pp -sc -tp
"""
OPTIONS = _NAMES.split()


@functools.cache
def own_options() -> frozenset[str]:
    command: typer.core.TyperGroup = typer.main.get_command(app)  # type: ignore[assignment]
    params = command.commands["serve"].params
    names = (name for param in params for name in (*param.opts, *param.secondary_opts))
    return frozenset(name for name in names if name.startswith("-"))


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("--enforce-eager", "--enforce-eager is an option of vLLM: give --mode eager"),
        ("--attention_backend=x", "--attention_backend is an option of vLLM: give --backend"),
        ("-tp 2", "-tp is an option of vLLM: a model runs on one GPU here; start a server for each GPU, with CUDA_"),
        ("--api-key secret", "--api-key is an option of vLLM: `ps` would show it to all users of this machine; "),
    ],
)
def test_an_option_of_vllm_is_answered_with_ours(typed: str, said: str) -> None:
    done = invoke("serve", "demo", *typed.split())
    assert (done.exit_code, done.stdout) == (2, "")
    line, here = done.stderr.splitlines()
    assert line.startswith(f"error: {said}")
    assert here.startswith("here the line is: compiled-llm serve demo")
    assert "secret" not in done.stderr


@pytest.mark.parametrize(
    ("typed", "refused", "here"),
    [
        (
            "Qwen/Qwen3-8B --tensor-parallel-size 1 --gpu-memory-utilization 0.9 --enable-auto-tool-choice "
            "--tool-call-parser hermes --reasoning-parser qwen3 --trust-remote-code --enable-prefix-caching "
            "--port 8001",
            ["--gpu-memory-utilization", "--tool-call-parser", "--reasoning-parser", "--trust-remote-code"],
            "Qwen/Qwen3-8B --kv-memory 0.9 --port 8001",
        ),
        ("--enforce_eager a -tp=4 --max-num-seqs 2", ["--enforce_eager", "-tp"], "--mode eager a --max-num-seqs 2"),
        (
            "--api-key a b --hf-token c --seed -1 --kv-cache-dtype fp8",
            ["--api-key", "--hf-token", "--seed", "--kv-cache-dtype"],
            "--kv-dtype fp8_e4m3",
        ),
        ("'my model' --swap-space 4 --system 'a b'", ["--swap-space"], "'my model' --system 'a b'"),
    ],
)
def test_all_options_of_vllm_are_refused_at_once_with_the_line_to_paste(
    typed: str, refused: list[str], here: str
) -> None:
    done = invoke("serve", *shlex.split(typed))
    assert done.exit_code == 2
    *errors, line = done.stderr.splitlines()
    assert [error.split()[1] for error in errors] == refused
    assert all(error.startswith("error: ") for error in errors)
    assert line == f"here the line is: compiled-llm serve {here}"


@pytest.mark.parametrize("typed", ["", "--enable-prefix-caching", "-tp 1 --block-size=16 --async_scheduling"])
def test_an_option_of_vllm_that_says_what_always_holds_is_taken(typed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.setattr(command, "locate", lambda *given: Source(given[0], given[0], is_local=False))
    monkeypatch.setattr(command, "run_with_api_server", lambda *given: started.append(given))
    for quiet in ([], ["--quiet"]):
        done = invoke("serve", "demo", *typed.split(), *quiet)
        assert done.exit_code == 0, done.stderr
        named = ", ".join(filter(None, re.split(r" (?=-)", typed.replace("=", " "))))
        warned = f"compiled_llm: options of vLLM that say what always holds: {named}\n"
        assert done.stderr == (warned if typed and not quiet else "")
    assert len(started) == 2


def test_what_always_holds_is_an_option_of_vllm() -> None:
    assert all(instead_of(name) is not None for names in ALWAYS for name in names.split())


def test_the_table_names_options_that_exist_and_none_that_serve_has() -> None:
    names = [name for several in VLLM_OPTIONS for name in several.split()]
    assert len(names) == len(set(names))
    assert not set(names) & own_options()
    commands_of_others = {"--revision"}  # of `hf download`
    for sentence in VLLM_OPTIONS.values():
        assert set(re.findall(r"--[a-z][\w-]*", sentence)) <= own_options() | commands_of_others, sentence


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_of_vllm_is_ours_or_is_answered(option: str) -> None:
    assert (option in own_options()) != (instead_of(option) is not None)


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("Qwen/Qwen2.5-1.5B-Instruct", None),
        ("--model Qwen/Qwen2.5-1.5B-Instruct", None),
        ("Qwen/Qwen2.5-1.5B-Instruct --host 127.0.0.1 --port 8000 --served-model-name a --max-model-len 4096", None),
        ("NousResearch/Meta-Llama-3-8B-Instruct --dtype auto", None),
        ("Qwen/Qwen3-8B --dtype half --max-num-seqs 16 --max_model_len 4096", None),
        ("NousResearch/Meta-Llama-3-8B-Instruct --dtype auto --api-key token-abc123", "--api-key is"),
        ("Qwen/Qwen3-8B --chat-template ./none.jinja", "--chat-template "),
        ("Qwen/Qwen3-8B --reasoning-parser qwen3", "--reasoning-parser is"),
        ("Qwen/Qwen3-8B --enable-auto-tool-choice --tool-call-parser hermes", "--tool-call-parser is"),
        ("Qwen/Qwen3-8B --tensor-parallel-size 4", "--tensor-parallel-size is"),
        ("Qwen/Qwen3-8B -tp 4", "-tp is"),
        ("Qwen/Qwen3-8B --gpu-memory-utilization 0.9", "--gpu-memory-utilization is"),
        ("Qwen/Qwen3-8B --trust-remote-code", "--trust-remote-code is"),
        ("Qwen/Qwen3-8B --enable-lora --lora-modules sql-lora=path", "--enable-lora is"),
        ("Qwen/Qwen3-8B --quantization awq", "--quantization is"),
        ("Qwen/Qwen3-8B --generation-config vllm", "--generation-config is"),
        ("Qwen/Qwen3-8B --no-enable-log-requests", "--no-enable-log-requests is"),
        ("Qwen/Qwen2-VL-7B-Instruct --limit-mm-per-prompt.image 2", "--limit-mm-per-prompt.image is"),
    ],
)
def test_lines_of_vllms_documentation_start_or_say_what_to_write(
    line: str, answer: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(command, "locate", lambda *given: Source(given[0], given[0], is_local=False))
    monkeypatch.setattr(command, "run_with_api_server", lambda *given: started.append(given))
    if answer is not None and "--chat-template" in answer:
        monkeypatch.undo()
    done = invoke("serve", *line.split())
    assert (done.exit_code, len(started)) == ((0, 1) if answer is None else (2, 0)), done.stderr
    if answer is not None:
        said, *_ = done.stderr.splitlines()
        assert said.startswith(f"error: {answer}")


def test_the_page_says_what_the_error_says() -> None:
    page = rendered("../how-to/from-vllm.md")
    for names, sentence in VLLM_OPTIONS.items():
        assert f"| {', '.join(f'`{name}`' for name in names.split())} | {sentence} |" in page
    same = re.search(r"## Options of `vllm serve`\n\n(.+) mean the same here", page)
    assert same is not None
    assert set(re.findall(r"`(--[\w-]+)`", same[1])) == (own_options() & set(OPTIONS)) - {"--uds"}
