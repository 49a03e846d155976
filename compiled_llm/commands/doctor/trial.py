"""Builds kernels and runs a tiny model here, and checks the tokens that it generates."""

from __future__ import annotations

import functools
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from compiled_llm.commands.doctor.checks import DoctorFinding, Outcome, essence, find_nvcc
from compiled_llm.execution.reporting.progress import ProgressDisplay

if TYPE_CHECKING:
    import torch

    from compiled_llm.config import Mode

PART = "kernel builds"
_PROMPT_TOKENS, _NEW_TOKENS = 40, 16

_CUDA_SOURCE = """
#include <cuda_bf16.h>
#include <vector>
__global__ void scale(__nv_bfloat16* x, float by) { x[threadIdx.x] = __float2bfloat16(by); }
std::vector<int> host_compiler_works() { return {1, 2, 3}; }
"""


def try_builds(cuda: bool) -> Iterator[DoctorFinding]:
    """Build kernels and run a tiny random model, showing on stderr what is done; stops at the first failure."""
    progress = ProgressDisplay(enabled=True)
    for name, doing, run in trials("cuda" if cuda else "cpu"):
        started = time.perf_counter()
        try:
            from compiled_llm.compat.torch.stages import compiling_stage  # imports torch

            with progress.task(doing, partial(compiling_stage, threading.get_ident())):
                outcome = run()
        except Exception as error:
            outcome = Outcome("failed", essence(error), _advice(str(error)))
        yield DoctorFinding(PART, name, *outcome, needed=True, seconds=time.perf_counter() - started)
        if outcome.status != "ok":
            return


def _advice(error: str) -> str:
    if "Python.h" in error:
        return "install Python's headers, for example with 'apt install python3-dev'"
    if "out of memory" in error.lower():
        return "see in nvidia-smi what else runs there"
    return "TORCH_LOGS=+inductor or FLASHINFER_JIT_VERBOSE=1 in the environment tells more"


def trials(device: str) -> Iterator[tuple[str, str, Callable[[], Outcome]]]:
    """Yield names, a text to show meanwhile, and what builds and runs something, and raises if it cannot."""
    if device == "cuda" and (compiler := find_nvcc()) is not None:
        yield "nvcc", "compiling a CUDA kernel", partial(build_with_nvcc, compiler)
    yield "Inductor", f"compiling a kernel for {device}", partial(build_with_inductor, device)
    trial = functools.cache(partial(Trial, device))
    yield "ops", "running a tiny model over pages", lambda: trial().run("eager")
    yield "compiled model", "compiling a tiny model", lambda: trial().run("compile")


def build_with_inductor(device: str) -> Outcome:
    """Compile a kernel that no cache holds; raises RuntimeError if it does not compile, or computes something else."""
    import torch

    from compiled_llm.compat.torch.inductor import keep_probes_from_current_folder

    keep_probes_from_current_folder()
    new = int.from_bytes(os.urandom(3), "big")  # a literal in the kernel's source

    def function(x: torch.Tensor) -> torch.Tensor:
        return (x * 2 + new).sum(dim=-1)

    x = torch.arange(64 * 64, device=device).view(64, 64)
    if not torch.equal(torch.compile(function, fullgraph=True, dynamic=False)(x), function(x)):
        raise RuntimeError("the kernel that Inductor compiled computes something wrong")
    return Outcome("ok", "a new Triton kernel" if device == "cuda" else "a new C++ kernel")


def build_with_nvcc(compiler: str) -> Outcome:
    """Compile CUDA and C++ with nvcc and its host compiler; raises RuntimeError if that fails."""
    command = [compiler, "-std=c++17", "-x", "cu", "-c", "-", "-o", "scale.o"]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command, cwd=folder, input=_CUDA_SOURCE, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError(f"nvcc fails:\n{done.stderr or done.stdout}")
    return Outcome("ok", "a CUDA kernel")


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

    def run(self, mode: Mode) -> Outcome:
        """Generate in a mode; raises RuntimeError if something does not build or run."""
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
        if wrong := self.wrong(tokens):
            said = (
                f"of {_NEW_TOKENS} tokens {len(wrong)} are not HuggingFace's, the first of them number {wrong[0] + 1}"
            )
            fix = "this is a bug of compiled_llm or of a library under it: report it with `compiled-llm doctor --json`"
            return Outcome("failed", said, fix)
        how = "not compiled" if mode == "eager" else f"{stats.graphs} graphs"
        return Outcome("ok", f"{how}, {_NEW_TOKENS} tokens, each HuggingFace's choice")

    def wrong(self, tokens: torch.Tensor) -> list[int]:
        """Return which new tokens of ``[1, T + G]`` HuggingFace would not generate, but for rounding."""
        import torch

        with torch.inference_mode():
            logits = self.model(input_ids=tokens[:, :-1]).logits[0, _PROMPT_TOKENS - 1 :].float()  # [G, V]
        ours = logits.gather(1, tokens[0, _PROMPT_TOKENS:, None])[:, 0]
        rounding = 1e-3 if self.model.dtype == torch.float32 else 0.1
        found: list[int] = (logits.amax(dim=-1) - ours > rounding * logits.std()).nonzero().flatten().tolist()
        return found
