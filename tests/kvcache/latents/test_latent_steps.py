"""Compiled steps of models with latents: which may overlap, and that a process with artifacts compiles none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._dynamo.utils import counters
from transformers import PreTrainedModel

from compiled_llm.commands.compile import compiled_into
from compiled_llm.compilation import backend as inductor
from compiled_llm.compilation.artifacts.writing import unfinished
from compiled_llm.compilation.passes.arguments import arguments_of
from compiled_llm.compilation.passes.attention import PreparedInAttention
from compiled_llm.compilation.passes.invariant import InvariantProducts
from compiled_llm_ops import latent_decode
from compiled_llm_ops.contracts.latent import LatentDecode
from compiled_llm_ops.protocol import own_decode_ops
from support.characters import character_tokenizer
from support.compilation.passes_on_a_cpu import let_passes_run_on_a_cpu
from support.compilation.start_with_artifacts import answers
from support.compilation.traced import traced
from support.execution.stand_in_cuda_graphs import let_a_cpu_capture
from support.indexed_models import indexed_model, needs_indexers
from support.latent_models import WITHOUT_EXPERTS, latent_model, needs_latents
from support.ops.latent_rows import LatentRows
from support.parity import wrap_and_compare

pytestmark = [needs_latents, pytest.mark.usefixtures("one_thread")]


def decodes_in(graph: fx.Graph) -> list[LatentDecode]:
    target = torch.ops.compiled_llm.latent_decode.default
    return [arguments_of(node, LatentDecode) for node in graph.nodes if node.target is target]


# ---- overlap


@pytest.mark.whole
def test_decode_attention_to_latents_begins_before_the_previous_kernel_has_ended(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In captured steps with the passes for a GPU, which give HuggingFace's tokens."""
    graphs: list[fx.Graph] = []

    def noted(module: fx.GraphModule, inputs: Any, options: Any) -> Callable[..., Any]:
        module.recompile()
        graphs.append(module.graph)
        return module.forward

    let_a_cpu_capture(monkeypatch)
    let_passes_run_on_a_cpu(monkeypatch)
    monkeypatch.setattr(inductor, "compile_with_inductor", noted)
    wrap_and_compare(latent_model(seed=seed, **{**WITHOUT_EXPERTS, "num_hidden_layers": 1}), seed, mode="cuda-graphs")
    ((decode,),) = filter(None, map(decodes_in, graphs))
    assert decode.overlap


@pytest.mark.parametrize("written", [None, "starts", "lengths", "indices"])
def test_a_table_that_was_written_before_is_not_read_early(written: str | None, seed: int) -> None:
    def layer(*tensors: Tensor) -> Tensor:
        args = LatentDecode(*tensors, 0.1)  # type: ignore[arg-type]
        if written:
            getattr(args, written).add_(0)
        out = latent_decode(*args[:9])
        args.lengths.add_(1)
        return out

    module, _ = traced(layer, *LatentRows([3, 5, 9], seed=seed).decode_arguments()[:8])
    PreparedInAttention(own_decode_ops())(module.graph)
    (args,) = decodes_in(module.graph)
    assert args.overlap is (written is None)


def test_an_invariant_step_is_told_so_whatever_was_set_before(seed: int) -> None:
    def layer(*tensors: Tensor) -> Tensor:
        return latent_decode(*tensors, 0.1)  # type: ignore[arg-type]

    module, _ = traced(layer, *LatentRows([3, 5, 9], seed=seed).decode_arguments()[:8])
    for rewrite in (PreparedInAttention(own_decode_ops()), InvariantProducts()):
        rewrite(module.graph)
    (args,) = decodes_in(module.graph)
    assert args.invariant
    assert args.overlap


# ---- artifacts


@pytest.mark.whole
@pytest.mark.usefixtures("without_inductor")
@pytest.mark.parametrize(
    ("make", "graphs"), [(latent_model, 5), pytest.param(indexed_model, 4, marks=needs_indexers)], ids=["all", "chosen"]
)
def test_all_programs_of_a_model_with_latents_are_compiled_into_artifacts(
    make: Callable[..., PreTrainedModel], graphs: int, tmp_path: Path
) -> None:
    """Prefill of new rows (where tokens are not chosen) and of others, from embeddings, and two decode steps."""
    plain, model = (make(num_hidden_layers=1) for _ in range(2))
    counters.clear()  # of graphs that other tests have had compiled, some of which nothing keeps
    with unfinished(tmp_path / "artifacts") as folder:
        compiled_into(folder, model, character_tokenizer(), {"mode": "compile", "progress": False}, 64, [], None)
    assert model.compiled.stats().graphs == graphs
    assert answers(model) == answers(plain)
    assert model.compiled.stats().graphs == graphs
