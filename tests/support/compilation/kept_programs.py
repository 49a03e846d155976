"""Run in a process of its own: a small model with programs that are kept, or taken; prints JSON.

The folder stands for one of artifacts, without copy and checksums; in place of a cache it has a link to Inductor's own,
so that kernels that other tests have built are not built again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

import torch

import compiled_llm
from compiled_llm.compilation.kept import part
from compiled_llm.compilation.programs import Programs
from support.huggingface.families import FAMILIES, make
from support.parity import FEW_PAGES, mixed_prompts
from support.tiny_models import ONE_LAYER, tiny_llama, tiny_qwen3

NEW_TOKENS = 4
SAID = "seen: "
"""Begins the line of what was seen."""
Lengths = Sequence[Sequence[int]]
ONE_AND_TWO: Lengths = ((7,), (7, 3), (5,))
KEPT_FAMILIES = (
    *("Cohere", "DeepseekV3", "GPT2LMHead", "GPTNeoX", "Gemma2", "Gemma3", "Glm4", "GptOss", "Granite", "Llama"),
    *("Mistral", "Mixtral", "OPT", "Olmo2", "Olmoe", "Phi3", "Qwen2", "Qwen3", "Qwen3Moe", "SmolLM3", "Starcoder2"),
)
LARGER = {
    "DeepseekV3": {"head_dim": 16, "kv_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
}
"""Sizes for which there are kernels."""


def run(model: Any, lengths: Lengths) -> dict[str, Any]:
    """Answer prompts of these lengths; return the tokens, and a hash of them and of each logit."""
    bits, answers = hashlib.sha256(), []
    vocabulary = min(128, model.config.get_text_config().vocab_size)
    for own in lengths:
        prompts = mixed_prompts([*own], vocabulary, seed=0)
        batch = {name: tensor.to(model.device) for name, tensor in prompts.items()}
        options: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
        out = model.generate(**batch, **options, output_logits=True, return_dict_in_generate=True)
        answers.append(out.sequences.tolist())
        for tensor in (out.sequences, *out.logits):
            bits.update(tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return {"answers": answers, "bits": bits.hexdigest()}


def result_of(
    way: str,
    family: str,
    folder: Path,
    environment: Mapping[str, str] = MappingProxyType({}),
    device: str = "cpu",
    lengths: Lengths = ONE_AND_TWO,
) -> dict[str, Any]:
    """Run this file in a fresh process, and return what it prints."""
    (found,) = _results(way, family, folder, [environment], device, lengths)
    return found


def results_in_turn(
    way: str, family: str, folder: Path, environments: Sequence[Mapping[str, str]], lengths: Lengths = ONE_AND_TWO
) -> list[dict[str, Any]]:
    """Run this file in one process after the other, forked from one that imports what all do: on a CPU."""
    return _results(way, family, folder, environments, "cpu", lengths)


def _results(
    way: str,
    family: str,
    folder: Path,
    environments: Sequence[Mapping[str, str]],
    device: str,
    lengths: Lengths,
) -> list[dict[str, Any]]:
    asked = [way, family, str(folder), device, json.dumps(lengths)]
    program = [sys.executable, __file__, json.dumps([*map(dict, environments)]), *asked]
    paths = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        program, env={**os.environ, **paths}, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line.removeprefix(SAID)) for line in done.stdout.splitlines() if line.startswith(SAID)]


@contextmanager
def taking(folder: Path) -> Iterator[None]:
    """Let programs of models wrapped in the block be taken from a folder."""
    made = Programs.__init__

    def init(self: Programs, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        self._taker = part.taker(folder, self._version)

    with mock.patch.object(Programs, "__init__", init):
        yield


def wait_for_writing() -> None:
    """Wait until this process has written what it keeps."""
    for thread in threading.enumerate():
        if thread.name == "compiled_llm kept programs":
            thread.join()


@contextmanager
def traces_counted() -> Iterator[list[object]]:
    from torch._dynamo import convert_frame

    compile_frame, counted = convert_frame._compile, list[object]()

    def counting(*args: Any, **kwargs: Any) -> Any:
        counted.append(args[0])
        return compile_frame(*args, **kwargs)

    with mock.patch.object(convert_frame, "_compile", counting):
        yield counted


def made(family: str, device: str) -> Any:
    own = {"Llama": tiny_llama, "Qwen3": tiny_qwen3}
    if device == "cpu":
        return own[family](**ONE_LAYER) if family in own else make(family, FAMILIES[family], 0)
    if family in own:
        return own[family](head_dim=64, eos_token_id=None).to(device, torch.bfloat16)
    return make(family, {**FAMILIES[family], **LARGER.get(family, {})}, 0).to(device, torch.bfloat16)  # type: ignore[arg-type]


def said_by(
    family: str,
    how: AbstractContextManager[object] | None = None,
    device: str = "cpu",
    lengths: Lengths = ONE_AND_TWO,
) -> dict[str, Any]:
    """Wrap a model in a context, run it, and return what it said and how its programs and CUDA graphs were made."""
    pages = FEW_PAGES if device == "cpu" else {**FEW_PAGES, "page_size": 16}
    with how or nullcontext(), traces_counted() as traces:
        model = compiled_llm.wrap(made(family, device), **pages)
        said = run(model, lengths)
        model.compiled.model_runner().catch_up(lambda: False)  # captures that calls have begun, and not waited for
    stats = model.compiled.stats()
    return {**said, "traces": len(traces), "programs": stats.programs, "CUDA graphs": stats.cuda_graphs}


def main(way: str, family: str, place: str, device: str, lengths: str) -> None:
    folder = Path(place)
    logger, refusals = logging.getLogger("compiled_llm.graphs"), list[str]()
    logger.setLevel(logging.DEBUG)
    logger.addFilter(lambda record: refusals.append(record.getMessage()) or record.levelno >= logging.WARNING)
    how = {"keep": part.recording, "take": taking}.get(way)
    seen = said_by(family, how and how(folder), device, json.loads(lengths))
    late = [name for name in ("torch._inductor.compile_fx", "torch._inductor.select_algorithm") if name in sys.modules]
    seen |= {"imported": late, "not kept": part.not_kept(folder)}
    seen["refusals"] = [said for said in refusals if "kept" in said]
    seen["processes"] = len(" ".join(file.read_text() for file in Path("/proc/self/task").glob("*/children")).split())
    print(SAID + json.dumps(seen))


def mains(environments: str, *asked: str) -> None:
    """Call `main` in each environment: but for the last one, which has this process, in a process of its own."""
    *others, last = json.loads(environments)
    for environment in others:
        if (child := os.fork()) == 0:
            os.environ.update(environment)
            return main(*asked)
        if status := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            sys.exit(status)
    os.environ.update(last)
    return main(*asked)


if __name__ == "__main__":
    mains(*sys.argv[1:])
