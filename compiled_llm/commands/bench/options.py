"""The options that commands of `compiled-llm bench` share."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer


class Decoding(str, Enum):
    """What `--decoding` takes."""

    greedy = "greedy"
    sampled = "sampled"
    both = "both"

    @property
    def ways(self) -> list[bool]:
        """Whether tokens are sampled, once for each way that is asked for."""
        return {"greedy": [False], "sampled": [True], "both": [False, True]}[self.value]


class ServerMode(str, Enum):
    """What `bench serve --mode` takes."""

    eager = "eager"
    compile = "compile"
    reduce_overhead = "reduce-overhead"
    cuda_graphs = "cuda-graphs"
    piecewise = "piecewise"


ModelName = Annotated[
    str,
    typer.Option(
        "--model",
        help="`demo` (SmolLM2-135M), a folder, a GGUF file, a hub id, or random weights in the shape of `qwen3-0.6b`, "
        "`qwen3-8b` or `tiny`.",
    ),
]
ContenderNames = Annotated[
    str,
    typer.Option(
        "--contenders",
        help="Comma-separated: hf-eager, hf-static, compiled-llm:eager, compiled-llm:compile, "
        "compiled-llm:reduce-overhead, compiled-llm:cuda-graphs, compiled-llm:pieces, "
        "compiled-llm:cuda-graphs:flashinfer (which decodes with FlashInfer, too), vllm, sglang, `ours` (wrap's own "
        "mode: cuda-graphs, on a CPU compile); `all`; or `default`: on CUDA all but pieces and FlashInfer's, "
        "HuggingFace and ours on a CPU.",
    ),
]
EngineNames = Annotated[
    str,
    typer.Option(
        "--contenders",
        help="Comma-separated: hf-batch (HuggingFace's generate_batch; offline only), compiled-llm:engine (as it is by "
        "default), compiled-llm:engine:eager and so on (modes by name), vllm; `all`; or `default`: on CUDA all but "
        "modes by name, on a CPU the engine.",
    ),
]
ServerNames = Annotated[
    str,
    typer.Option(
        "--contenders",
        help="Comma-separated: compiled-llm:engine (in process), compiled-llm:socket, "
        "compiled-llm:socket-busy-poll (by a client that does not sleep), compiled-llm:http, "
        "vllm (its server over HTTP); `all`; or `default`: all, on a CPU without vllm.",
    ),
]
GraphNames = Annotated[
    str,
    typer.Option(
        "--contenders",
        help="Comma-separated: compiled-llm:eager, compiled-llm:compile, compiled-llm:reduce-overhead, "
        "compiled-llm:cuda-graphs, compiled-llm:pieces (the engine in each mode), vllm; or `default`: all.",
    ),
]
Runs = Annotated[int, typer.Option("--runs", min=1, help="Timed runs of each workload, after warming up.")]
Json = Annotated[Path | None, typer.Option("--json", help="Write all figures to this file, after each result.")]
Markdown = Annotated[Path | None, typer.Option("--markdown", help="Write the tables to this file.")]
Plot = Annotated[Path | None, typer.Option("--plot", help="Draw a PNG; needs matplotlib (the extra `bench`).")]
Patience = Annotated[
    float,
    typer.Option(min=0.1, help="Seconds in which something has to come while requests wait; else it has failed."),
]
Commit = Annotated[str | None, typer.Option("--commit", help="The commit to record, whatever git says.")]
Verbose = Annotated[bool, typer.Option("--verbose", help="Write a line to stderr for each step.")]
VLLM = Annotated[
    str | None,
    typer.Option("--vllm", envvar="COMPILED_LLM_VLLM", help="A Python that has vLLM: 'env PYTHONPATH=... python3'."),
]
SGLang = Annotated[str | None, typer.Option("--sglang", envvar="COMPILED_LLM_SGLANG", help="A Python that has SGLang.")]
