"""Options of `vllm serve` that `compiled-llm serve` lacks, each with what to do instead, or why there is none."""

from __future__ import annotations

_ONE_GPU = "a model runs on one GPU here; start a server for each GPU, with CUDA_VISIBLE_DEVICES"
_RESPONSE_TEMPLATE = "leave it out: the tokenizer's response template says how calls and thinking are found in answers"

OURS = {
    "--enforce-eager": "--mode eager",
    "--gpu-memory-utilization": "--kv-memory {}",
    "--kv-cache-dtype fp8": "--kv-dtype fp8_e4m3",
    "--kv-cache-dtype fp8_e4m3": "--kv-dtype fp8_e4m3",
    "--shutdown-timeout": "--drain-seconds {}",
    "-asc": "--api-server-count {}",
    "--limit-mm-per-prompt.image": "--limit-mm-per-prompt '{{\"image\": {}}}'",
    "--language-model-only": "--limit-mm-per-prompt '{{\"image\": 0}}'",
    "-sc": "--speculative-config {}",
}
"""Our options for those of vLLM; ``{}`` is the value of vLLM's option."""

VLLM_OPTIONS: dict[str, str] = {
    # ---- what fits
    "--max-num-batched-tokens --max-num-partial-prefills --max-long-partial-prefills --long-prefill-token-threshold "
    "--prefill-schedule-interval": "give --max-step-ms: a step is bounded by its time, and not by its tokens",
    "--gpu-memory-utilization": "give --kv-memory, what pages may take: 0.8 is 0.8 of what the weights leave free",
    "--kv-cache-memory-bytes --num-gpu-blocks-override": "give --kv-memory, as in 8GiB or '20000 tokens'",
    "--kv-cache-dtype": "give --kv-dtype: fp8_e4m3 for 8 bits, or leave it out for the type of the weights",
    "--kv-cache-dtype-skip-layers --calculate-kv-scales": "--kv-dtype is that of all layers; give --kv-scales a "
    "file that KVScales.save has written, with what compiled_llm.kv_scales measures in Python",
    "--block-size": "a page has 16 tokens",
    "--swap-space --cpu-offload-gb --cpu-offload-params --offload-backend --offload-group-size --offload-num-in-group "
    "--offload-params --offload-prefetch-step --kv-offloading-backend --kv-offloading-size": "nothing is swapped: "
    "requests that lose their pages are computed again",
    "--scheduling-policy": "leave it out: a request with a smaller `priority` always runs first",
    "--scheduler-cls --scheduler-reserve-full-isl --watermark": "leave it out: there is one scheduler",
    "--disable-hybrid-kv-cache-manager --disable-sliding-window --kv-sharing-fast-prefill": "leave it out: the model's "
    "config says which tokens a layer looks at, and pages follow from that",
    "--async-scheduling": "leave it out: a step is always prepared while the one before it runs",
    "--prefix-caching-hash-algo": "leave it out: the prefix cache compares tokens, and no hashes of them",
    # ---- how it runs
    "--enforce-eager": "give --mode eager",
    "--compilation-config -cc --cudagraph-capture-sizes --max-cudagraph-capture-size --optimization-level "
    "--performance-mode": "give --mode, and --warmup with numbers of requests",
    "--attention-backend --attention-config -ac --override-attention-dtype --disable-cascade-attn": "give --backend",
    "--linear-backend --moe-backend --gdn-prefill-backend --kernel-config --ir-op-priority --use-fp64-gumbel "
    "--enable-flashinfer-autotune": "leave it out: what each kernel is good for decides which one runs",
    "--enable-chunked-prefill --no-enable-chunked-prefill": "leave it out: long prompts are computed in chunks",
    "--enable-prefix-caching": "leave it out: prompts that begin alike share pages; --salt-caches parts them by key",
    "--no-enable-prefix-caching": "prompts that begin alike always share pages; --salt-caches parts them by key",
    "-sc --spec-method --spec-model --spec-tokens --speculative-model": "give --speculative-config, whose method is "
    "ngram: no other model guesses",
    "--tensor-parallel-size -tp --pipeline-parallel-size -pp --decode-context-parallel-size -dcp "
    "--prefill-context-parallel-size -pcp --dcp-comm-backend --dcp-kv-cache-interleave-size "
    "--cp-kv-cache-interleave-size --nnodes -n --node-rank -r --master-addr --master-port --headless "
    "--distributed-executor-backend --distributed-timeout-seconds --cpu-distributed-timeout-seconds "
    "--disable-custom-all-reduce --ray-workers-use-nsight --max-parallel-loading-workers": _ONE_GPU,
    "--data-parallel-size -dp --data-parallel-size-local -dpl --data-parallel-rank -dpn --data-parallel-start-rank "
    "-dpr --data-parallel-address -dpa --data-parallel-rpc-port -dpp --data-parallel-backend -dpb "
    "--data-parallel-hybrid-lb -dph --data-parallel-external-lb -dpe --data-parallel-multi-port-external-lb -dpm "
    "--data-parallel-supervisor-port --dp-supervisor-probe-failure-threshold --dp-supervisor-probe-interval-s "
    "--dp-supervisor-probe-timeout-s --disable-nccl-for-dp-synchronization": f"{_ONE_GPU}, or `ray_app` for all",
    "--enable-expert-parallel -ep --enable-ep-weight-filter --enable-eplb --eplb-config --expert-placement-strategy "
    "--all2all-backend --enable-elastic-ep --enable-dbo --dbo-decode-token-threshold --dbo-prefill-token-threshold "
    "--ubatch-size": f"all experts are on one GPU: {_ONE_GPU}",
    "--kv-transfer-config --kv-events-config --ec-transfer-config --weight-transfer-config": "pages and weights stay "
    "in one process; --operations-uds takes new weights",
    "--device-ids": "set CUDA_VISIBLE_DEVICES",
    "--numa-bind --numa-bind-cpus --numa-bind-nodes": "start it by `numactl`",
    "--enable-sleep-mode --enable-cumem-allocator": "give --operations-uds: /sleep and /wake are there",
    # ---- which model
    "--quantization --quantization-config --allow-deprecated-quantization": "leave it out: the model's own config "
    "says how its weights are quantised",
    "--load-format --model-loader-extra-config --ignore-patterns --pt-load-map-location --use-tqdm-on-load "
    "--safetensors-load-strategy --safetensors-prefetch-block-size --safetensors-prefetch-num-threads": "leave it "
    "out: the model's files say what they are",
    "--trust-remote-code": "a model's own code is not run; load it in Python with trust_remote_code=True, and wrap it",
    "--revision --tokenizer-revision --code-revision": "download it with `hf download MODEL --revision REVISION`, and "
    "serve the folder that this names",
    "--download-dir": "set the environment variable HF_HOME, the folder that models are downloaded to",
    "--hf-token": "set the environment variable HF_TOKEN, or log in with `hf auth login`",
    "--hf-overrides --hf-config-path --config-format --rope-scaling": "change the model's own config.json",
    "--enable-lora --lora-modules --max-loras --max-cpu-loras --max-lora-rank --lora-dtype --lora-target-modules "
    "--fully-sharded-loras --default-mm-loras --specialize-active-lora --enable-mixed-moe-lora-format "
    "--enable-tower-connector-lora": "adapters are not chosen by name; serve the folder of one of them",
    "--task --runner --convert": "leave it out: the model's class and the files beside it say whether it embeds, ranks "
    "or labels texts, too",
    "--pooler-config": "give --pooling last, if no files of sentence-transformers beside the model say how to pool",
    "--diffusion-config -dc --enable-flash-late-interaction": "leave it out: models are causal LMs and classifiers",
    "--model-impl": "leave it out: models are HuggingFace's own",
    "--tokenizer-mode --skip-tokenizer-init --tokens-only --renderer-num-workers": "leave it out: texts and token ids "
    "are both answered, with HuggingFace's tokenizer",
    "--mamba-backend --mamba-block-size --mamba-cache-dtype --mamba-cache-mode --mamba-cache-philox-rounds "
    "--mamba-ssm-cache-dtype --enable-mamba-cache-stochastic-rounding": "models with a state in place of keys and "
    "values are not served",
    "--mm-processor-kwargs --media-io-kwargs --mm-encoder-only --mm-encoder-tp-mode --mm-encoder-attn-backend "
    "--mm-encoder-attn-dtype --mm-encoder-fp8-scale-path --mm-encoder-fp8-scale-save-margin "
    "--mm-encoder-fp8-scale-save-path --skip-mm-profiling --disable-chunked-mm-input": "leave it out: HuggingFace's "
    "processor and encoder see images, as the model's own files say",
    "--mm-processor-cache-gb --mm-processor-cache-type --mm-shm-cache-max-object-size-mb --mm-tensor-ipc": "leave it "
    "out: pages of images are kept as those of text",
    "--enable-mm-embeds --interleave-mm-strings --video-pruning-rate": "images are files in messages; neither "
    "embeddings nor videos are served",
    "--language-model-only": "give --limit-mm-per-prompt with 0 images: the vision tower is not loaded",
    # ---- what is answered
    "--tool-call-parser --tool-parser-plugin --enable-auto-tool-choice --exclude-tools-when-tool-choice-none "
    "--reasoning-parser --reasoning-parser-plugin --reasoning-config": _RESPONSE_TEMPLATE,
    "--tool-server": "tools are called by the program that asks, and not by the server",
    "--default-chat-template-kwargs": "requests give `chat_template_kwargs`; what holds for all of them is for "
    "--chat-template",
    "--chat-template-content-format --response-role --trust-request-chat-template": "leave it out: --chat-template or "
    "the tokenizer's own says how a chat is written",
    "--guided-decoding-backend --structured-outputs-config": "leave it out: xgrammar compiles all forms",
    "--generation-config --override-generation-config": "the model's own holds, and requests say what differs",
    "--seed": "a request gives a `seed` of its own",
    "--max-logprobs": "leave it out: requests may ask for 20",
    "--logprobs-mode": "leave it out: log-probabilities are those of the model, before settings change them",
    "--logits-processors --io-processor-plugin --worker-cls --worker-extension-cls": "a server runs no code but its "
    "own; in Python, `compiled_llm.Engine` takes logits processors",
    "--enable-prompt-embeds --enable-return-routed-experts --return-tokens-as-token-ids": "answers and prompts are "
    "texts or token ids; a request asks with `return_token_ids`",
    # ---- HTTP
    "--api-key": "`ps` would show it to all users of this machine; set COMPILED_LLM_API_KEY, or give --api-key-file",
    "--allowed-origins": "give --cors-origin, several times for several",
    "--allow-credentials --allowed-headers --allowed-methods": "leave it out: --cors-origin allows what its pages need",
    "--ssl-ca-certs --ssl-cert-reqs --ssl-ciphers --enable-ssl-refresh": "give --ssl-certfile and --ssl-keyfile; what "
    "needs more is for a proxy before the server",
    "--root-path --middleware --grpc --h11-max-header-count --h11-max-incomplete-event-size": "there is no such "
    "thing here; put a proxy before the server",
    "--disable-fastapi-docs --enable-offline-docs": "leave it out: the API's description is at /openapi.json alone",
    "--enable-tokenizer-info-endpoint --enable-server-load-tracking": "leave it out: there is no such endpoint; "
    "/metrics has the load",
    "--enable-request-id-headers --enable-force-include-usage --enable-prompt-tokens-details --fingerprint-mode "
    "--fingerprint-value": "leave it out: answers say so without being asked, or never do",
    "-asc": "give --api-server-count",
    "--shutdown-timeout": "give --drain-seconds",
    # ---- the log
    "--uvicorn-log-level": "give --log-level",
    "--disable-log-requests --disable-uvicorn-access-log --disable-access-log-for-endpoints": "give --log-level "
    "warning; health checks are in the log with --log-level debug alone",
    "--log-config-file --aggregate-engine-logging": "give --log-format and --log-level",
    "--enable-log-requests --enable-log-outputs --enable-log-deltas --max-log-len --log-error-stack": "leave it out: "
    "the log has a line a request, without its text",
    "--disable-log-stats --enable-logging-iteration-details --show-hidden-metrics-for-version --cudagraph-metrics "
    "--kv-cache-metrics --kv-cache-metrics-sample --enable-mfu-metrics --jit-monitor-verbose": "leave it out: figures "
    "are at /metrics, and not in the log",
    "--collect-detailed-traces --profiler-config --enable-layerwise-nvtx-tracing": "leave it out: "
    "`compiled-llm explain` shows where time goes",
    "--additional-config --fail-on-environ-validation": "it is about vLLM's own code; leave it out",
}
"""Options by their names there, with spaces between; each sentence stands on the documentation's page, too."""


def instead_of(option: str) -> str | None:
    """Return what to do instead of an option of vLLM, with dashes or underscores; None if it is none."""
    name, is_key, _ = option.replace("_", "-").partition(".")  # --compilation-config.mode is a key of a JSON object
    if is_key and name == "--limit-mm-per-prompt":
        return "give the whole object"
    answers = {each: said for names, said in VLLM_OPTIONS.items() for each in names.split()}
    return answers.get(name) or answers.get(name.replace("--no-", "--", 1))
