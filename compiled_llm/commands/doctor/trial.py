"""Builds kernels and runs a tiny model here, and checks the tokens that it generates."""

from __future__ import annotations

import functools
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compiled_llm.commands.doctor.finding import DoctorFinding, essence
from compiled_llm.commands.doctor.machine import find_nvcc
from compiled_llm.execution.reporting.progress import ProgressDisplay

if TYPE_CHECKING:
    import torch

    from compiled_llm.config import Mode

_PART = "kernel builds"
_PROMPT_TOKENS, _NEW_TOKENS = 40, 16

_CUDA_SOURCE = """
#include <cuda_bf16.h>
#include <vector>
__global__ void scale(__nv_bfloat16* x, float by) { x[threadIdx.x] = __float2bfloat16(by); }
std::vector<int> host_compiler_works() { return {1, 2, 3}; }
"""


class WrongTokensError(RuntimeError):
    """A wrapped model generated tokens that HuggingFace would not have."""


def try_builds(cuda: bool) -> Iterator[DoctorFinding]:
    """Build kernels and run a tiny random model, showing on stderr what is done; stops at the first failure."""
    progress = ProgressDisplay(enabled=True)
    for name, doing, run in _steps("cuda" if cuda else "cpu"):
        started = time.perf_counter()
        try:
            from compiled_llm.compat.torch.stages import compiling_stage  # imports torch

            with progress.task(doing, functools.partial(compiling_stage, threading.get_ident())):
                result = run()
        except Exception as error:
            yield DoctorFinding(_PART, name, "failed", essence(error), _advice(error), needed=True)
            return
        yield DoctorFinding(_PART, name, "ok", result, needed=True, seconds=time.perf_counter() - started)


def _steps(device: str) -> list[tuple[str, str, Callable[[], str]]]:
    """Return names, a text to show meanwhile, and a function that returns what came out, and raises if it is wrong."""
    trial = functools.cache(functools.partial(Trial, device))
    steps: list[tuple[str, str, Callable[[], str]]] = [
        ("Inductor", f"compiling a kernel for {device}", functools.partial(build_with_inductor, device)),
        ("ops", "running a tiny model over pages", lambda: trial().run("eager")),
        ("compiled model", "compiling a tiny model", lambda: trial().run("compile")),
    ]
    if device == "cuda" and (compiler := find_nvcc()) is not None:
        steps.insert(0, ("nvcc", "compiling a CUDA kernel", functools.partial(build_with_nvcc, compiler)))
    return steps


def _advice(error: Exception) -> str:
    text = str(error)
    if isinstance(error, WrongTokensError):
        return "this is a bug of compiled_llm or of a library under it: report it with `compiled-llm doctor --json`"
    if "Python.h" in text:
        return "install Python's headers, for example with 'apt install python3-dev'"
    if "out of memory" in text.lower():
        return "see in nvidia-smi what else runs there"
    return "TORCH_LOGS=+inductor or FLASHINFER_JIT_VERBOSE=1 in the environment tells more"


def build_with_inductor(device: str) -> str:
    """Compile a kernel that no cache holds; raises RuntimeError if it does not compile, or computes something else."""
    import torch

    from compiled_llm.compat.torch.inductor import keep_probes_from_current_folder

    keep_probes_from_current_folder()
    new = int.from_bytes(os.urandom(3), "big")  # a literal in the kernel's source

    def function(x: torch.Tensor) -> torch.Tensor:
        return (x * 2 + new).sum(dim=-1)

    x = torch.arange(64 * 64, device=device).view(64, 64)
    compiled = torch.compile(function, fullgraph=True, dynamic=False)
    if not torch.equal(compiled(x), function(x)):
        raise RuntimeError("the kernel that Inductor compiled computes something wrong")
    return "a new Triton kernel" if device == "cuda" else "a new C++ kernel"


def build_with_nvcc(compiler: str) -> str:
    """Compile CUDA and C++ with nvcc and its host compiler; raises RuntimeError if that fails."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "scale.cu"
        source.write_text(_CUDA_SOURCE)
        command = [compiler, "-std=c++17", "-c", str(source), "-o", str(source.with_suffix(".o"))]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError(f"nvcc fails:\n{done.stderr or done.stdout}")
    return "a CUDA kernel"


class Trial:
    """A tiny random model, wrapped in several modes and compared with HuggingFace's own forward."""

    def __init__(self, device: str) -> None:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=128,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=128,  # what most models have, so that FlashInfer's kernels are theirs too
            max_position_embeddings=256,
            initializer_range=0.15,  # large enough that logits differ
            pad_token_id=0,
            eos_token_id=None,
        )
        with torch.random.fork_rng(devices=[]):  # leaves the caller's random numbers as they are
            torch.manual_seed(0)
            model: Any = LlamaForCausalLM(config)
            self.prompt = torch.randint(3, 128, (1, _PROMPT_TOKENS), device="cpu").to(device)
        dtype = torch.float32
        if device != "cpu":
            dtype = torch.bfloat16 if torch.cuda.get_device_capability() >= (8, 0) else torch.float16
        self.model = model.eval().to(device, dtype)

    def run(self, mode: Mode) -> str:
        """Generate in a mode; raises RuntimeError if something does not build or run, or if the tokens are wrong."""
        import torch

        import compiled_llm

        wrapped = compiled_llm.wrap(self.model, mode=mode, max_batch_size=1, kv_memory="256 tokens", progress=False)
        try:
            asked = {"input_ids": self.prompt, "attention_mask": torch.ones_like(self.prompt)}
            tokens = wrapped.generate(**asked, max_new_tokens=_NEW_TOKENS, do_sample=False)
            stats = wrapped.compiled.stats()
        finally:
            compiled_llm.unwrap(wrapped)
        if stats.generate_calls != {"fast loop": 1}:
            raise RuntimeError(f"generate did not take the fast loop: {stats.generate_calls}, {stats.slow_paths}")
        self.check(tokens)
        how = "not compiled" if mode == "eager" else f"{stats.graphs} graphs"
        return f"{how}, {_NEW_TOKENS} tokens, each HuggingFace's choice"

    def check(self, tokens: torch.Tensor) -> None:
        """Raise WrongTokensError if HuggingFace would not generate the tokens ``[1, T + G]``, but for rounding."""
        import torch

        with torch.inference_mode():
            logits = self.model(input_ids=tokens[:, :-1]).logits[0, _PROMPT_TOKENS - 1 :].float()  # [G, V]
        ours = logits.gather(1, tokens[0, _PROMPT_TOKENS:, None])[:, 0]
        rounding = 1e-3 if self.model.dtype == torch.float32 else 0.1
        wrong = (logits.amax(dim=-1) - ours > rounding * logits.std()).nonzero().flatten().tolist()
        if wrong:
            raise WrongTokensError(
                f"of {_NEW_TOKENS} tokens {len(wrong)} are not HuggingFace's, the first of them number {wrong[0] + 1}"
            )
