"""Contenders of this process: HuggingFace's ``generate`` as it is, and this package in each mode."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar, get_args

import torch
from transformers import GenerationConfig, PreTrainedModel

import compiled_llm
from compiled_llm.commands.bench.timing import SAMPLING, CallTiming, TokenClock, Workload, timed
from compiled_llm.commands.loading.load import load
from compiled_llm.config import Mode, WrapConfig
from compiled_llm.kvcache.cuda_virtual_memory import mapped_bytes
from compiled_llm_ops.backends import backend_named

_WARM_TOKENS = 16


def loaded(name: str, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    return load(name, dtype, device, progress=False)[0]


@dataclass
class Setup:
    """The model of all contenders of a run, and all that will be asked of it; ``log`` takes a line on what is done."""

    name: str
    device: torch.device
    dtype: torch.dtype
    workloads: Sequence[Workload]
    log: Callable[[str], object] = lambda line: None
    load: Callable[[str, torch.dtype, torch.device], PreTrainedModel] = loaded
    _model: PreTrainedModel | None = None

    def model(self) -> PreTrainedModel:
        """Return the model, which contenders share; raises ValueError if a workload is longer than it allows."""
        if self._model is None:
            self.log(f"{self.name}: loading the model")
            self._model = model = self.load(self.name, self.dtype, self.device).eval()
            model.config.eos_token_id = None
            model.generation_config = GenerationConfig(pad_token_id=0)  # no row ends by itself
            longest = max(work.prompt + work.new for work in self.workloads)
            most = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", longest)
            if longest > most:
                raise ValueError(
                    f"{self.name} has {most} positions; {longest} tokens of prompt and output are too many"
                )
        return self._model

    def drop_model(self) -> None:
        """Give the model's memory back, for another process, or because a failure may have changed the model."""
        self._model = None
        self.free_memory()

    def free_memory(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            # Not for the device: CUDA refuses that while a thread captures, as an engine's does.
            torch.cuda.current_stream(self.device).synchronize()


class BenchSession:
    """A model of this process, wrapped or not; ``options`` are further ones of ``generate``."""

    def __init__(self, setup: Setup, model: PreTrainedModel, **options: Any) -> None:
        self.setup = setup
        self.options = options
        self.model: Any = model
        self.versions: dict[str, str] = {}
        self.vocabulary = int(model.config.get_text_config(decoder=True).vocab_size)
        self._numbers = itertools.count()
        if setup.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(setup.device)

    def prepare(self, workload: Workload) -> None:
        """Run until nothing is compiled or captured any more."""
        if hasattr(self.model, "compiled"):
            self.model.compiled.warmup([workload.batch])
        else:
            workload = replace(workload, new=min(_WARM_TOKENS, workload.new))
        self.run(workload)

    def run(self, workload: Workload) -> CallTiming:
        clock = TokenClock()
        prompts = workload.prompts(self.vocabulary, next(self._numbers))
        ids = torch.tensor(prompts, device=self.setup.device)
        sampling = {"do_sample": True, **SAMPLING} if workload.sampled else {"do_sample": False}
        options = {"max_new_tokens": workload.new, "streamer": clock, **sampling, **self.options}

        def generate() -> None:
            out = self.model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)
            wanted = (workload.batch, workload.prompt + workload.new)
            if tuple(out.shape) != wanted:
                raise RuntimeError(f"{tuple(out.shape)} tokens came back instead of {wanted}")

        return timed(generate, clock, workload.new, self.setup.synchronize)

    def memory(self) -> dict[str, int]:
        """Return bytes on the device by what they are for, and the most that was allocated at once."""
        found = dict(self.model.compiled.stats().memory) if hasattr(self.model, "compiled") else {}
        if self.setup.device.type == "cuda":
            found["peak"] = torch.cuda.max_memory_allocated(self.setup.device) + mapped_bytes(self.setup.device)
        return found


class Contender:
    """HuggingFace as it is: nothing compiled, a cache that grows, its own attention."""

    name = "hf-eager"

    def obstacle(self, setup: Setup) -> str | None:
        """Return why it cannot take part here, or None; what a model lacks, ``opened`` says."""
        return None

    def opened(self, setup: Setup) -> AbstractContextManager[BenchSession]:
        return nullcontext(BenchSession(setup, setup.model()))


C = TypeVar("C", bound=Contender)


class Ours(Contender):
    """The wrapped model; ``options`` are those of ``wrap``."""

    def __init__(self, mode: Mode, backend: str = "auto") -> None:
        self.mode: Mode = mode
        self.backend = backend
        self.options: dict[str, Any] = {"mode": mode, "backend": backend}
        self.name = f"compiled-llm:{mode}" + ("" if backend == "auto" else f":{backend}")

    def obstacle(self, setup: Setup) -> str | None:
        if self.backend != "auto" and setup.device.type not in backend_named(self.backend).devices:
            return f"backend {self.backend} runs on CUDA only"
        runs = WrapConfig(mode=self.mode).mode_on(setup.device.type)
        return None if runs == self.mode else f"a CPU has no CUDA graphs: this mode is compiled-llm:{runs} there"

    @contextmanager
    def opened(self, setup: Setup) -> Iterator[BenchSession]:
        rows = max(work.batch for work in setup.workloads)
        with wrapped(setup, rows, **self.options) as model:
            yield BenchSession(setup, model)


@contextmanager
def wrapped(setup: Setup, rows: int, **options: Any) -> Iterator[PreTrainedModel]:
    """Wrap the model for the block, with pages for the largest workload and a page to spare in each row."""
    page = WrapConfig.page_size
    model = setup.model()
    tokens = max(work.batch * (-(-(work.prompt + work.new) // page) + 1) * page for work in setup.workloads)
    compiled_llm.wrap(model, max_batch_size=rows, kv_memory=f"{tokens} tokens", progress=False, **options)
    try:
        yield model
    finally:
        compiled_llm.unwrap(model)
        setup.free_memory()


ALL: list[Contender] = [
    Contender(),
    *map(Ours, get_args(Mode)),
    *(Ours("cuda-graphs", backend) for backend in ("flashinfer", "triton")),
]
"""In the order in which they run; the first that runs is what the others are compared with."""


def choose(names: str, device_type: str, known: Sequence[C]) -> list[C]:
    """Return contenders by their comma-separated names, in the order of ``known``; ValueError if there is none."""
    ours = f"compiled-llm:{WrapConfig().mode_on(device_type)}"
    there = [contender.name for contender in known]
    listed = [name.strip() for name in names.split(",") if name.strip()]
    wanted = there if names == "all" else [ours if name == "ours" else name for name in listed]
    if unknown := [name for name in wanted if name not in there]:
        raise ValueError(f"--contenders: no {', '.join(unknown)}; there are {', '.join(there)}, ours and all")
    return [contender for contender in known if contender.name in wanted]
