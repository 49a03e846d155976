"""Options of `vllm serve` that `compiled-llm serve` lacks, each with what to do instead, or why there is none."""

from __future__ import annotations

from collections.abc import Sequence

_ONE_GPU = "a model runs on one GPU here; start a server for each GPU, with CUDA_VISIBLE_DEVICES"
_RESPONSE_TEMPLATE = "leave it out: the tokenizer's response template says how calls and thinking are found in answers"
_REVISION = "download it with `hf download MODEL --revision REVISION`, and serve the folder that this names"

VLLM_OPTIONS: dict[tuple[str, ...], str] = {
    # ---- what fits
    ("--max-num-batched-tokens",): "give --max-step-ms: a step is bounded by its time, and not by its tokens",
    ("--gpu-memory-utilization",): "give --kv-memory, what pages may take: 0.8 is 0.8 of what the weights leave free",
    ("--kv-cache-memory-bytes", "--num-gpu-blocks-override"): "give --kv-memory, as in 8GiB or '20000 tokens'",
    ("--kv-cache-dtype",): "keys and values have the dtype of the weights, which --dtype decides",
    ("--block-size",): "a page has 16 tokens",
    ("--swap-space", "--cpu-offload-gb"): "nothing is swapped: requests that lose their pages are computed again",
    ("--scheduling-policy",): "leave it out: a request with a smaller `priority` always runs first",
    # ---- how it runs
    ("--enforce-eager",): "give --mode eager",
    ("--compilation-config", "--cudagraph-capture-sizes"): "give --mode, and --warmup with numbers of requests",
    ("--attention-backend",): "give --backend",
    ("--enable-chunked-prefill", "--no-enable-chunked-prefill"): "leave it out: long prompts are computed in chunks",
    ("--enable-prefix-caching",): "leave it out: prompts that begin alike share pages; --salt-caches parts them by key",
    ("--no-enable-prefix-caching",): "prompts that begin alike always share pages; --salt-caches parts them by key",
    ("--speculative-config", "--speculative-model"): "no tokens are guessed before the model computes them",
    ("--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp"): _ONE_GPU,
    ("--data-parallel-size", "-dp", "--enable-expert-parallel", "--distributed-executor-backend"): _ONE_GPU,
    ("--enable-sleep-mode",): "give --operations-uds: /sleep and /wake are there",
    # ---- which model
    ("--model",): "give the model without it, as in `compiled-llm serve demo`",
    ("--quantization",): "leave it out: the model's own config says how its weights are quantised",
    ("--load-format",): "leave it out: the model's files say what they are",
    (
        "--trust-remote-code",
    ): "a model's own code is not run; load it in Python with trust_remote_code=True, and wrap it",
    ("--revision", "--tokenizer-revision", "--code-revision"): _REVISION,
    ("--download-dir",): "set the environment variable HF_HOME, the folder that models are downloaded to",
    ("--hf-overrides", "--rope-scaling"): "change the model's own config.json",
    (
        "--enable-lora",
        "--lora-modules",
        "--max-loras",
    ): "adapters are not chosen by name; serve the folder of one of them",
    ("--task", "--runner"): "leave it out: models are causal LMs, and continue texts",
    ("--model-impl",): "leave it out: models are HuggingFace's own",
    ("--tokenizer", "--tokenizer-mode"): "the tokenizer is that of the model's folder; save another one there",
    # ---- what is answered
    ("--chat-template",): "the chat template is the tokenizer's own; save another one in the model's folder",
    ("--tool-call-parser", "--enable-auto-tool-choice", "--reasoning-parser"): _RESPONSE_TEMPLATE,
    ("--guided-decoding-backend", "--structured-outputs-config"): "leave it out: xgrammar compiles all forms",
    ("--generation-config", "--override-generation-config"): "defaults are OpenAI's; requests say what differs",
    ("--seed",): "a request gives a `seed` of its own",
    ("--max-logprobs",): "leave it out: requests may ask for 20",
    # ---- HTTP
    ("--api-key",): "`ps` would show it to all users of this machine; set COMPILED_LLM_API_KEY, or give --api-key-file",
    ("--allowed-origins",): "give --cors-origin, several times for several",
    ("--uvicorn-log-level",): "give --log-level",
    ("--disable-log-requests", "--disable-uvicorn-access-log"): "give --log-level warning",
}
"""Options by their names there; each sentence stands on the documentation's page, too."""


def check_none_of_vllm(arguments: Sequence[str]) -> None:
    """Raise ValueError if there is one of vLLM's options among the arguments of a command line."""
    for given in (argument.partition("=")[0] for argument in arguments):
        if given.startswith("-") and (said := instead_of(given)) is not None:
            raise ValueError(f"{given} is an option of vLLM: {said}")


def instead_of(option: str) -> str | None:
    """Return what to do instead of an option of vLLM, with dashes or underscores; None if it is none."""
    name = option.replace("_", "-")
    return next((said for names, said in VLLM_OPTIONS.items() if name in names), None)
