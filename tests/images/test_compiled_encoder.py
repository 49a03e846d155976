"""The encoder as a program of ours: HuggingFace's features, for images of any sizes by one program."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._inductor.codecache import CppPythonBindingsCodeCache
from transformers import PreTrainedModel

from compiled_llm.compat.images.vision_encoders import window_patches
from compiled_llm.compilation import backend, options
from compiled_llm.compilation.passes.patches import multiply_patches
from compiled_llm.engine.images.encoder import attention, encoder_graphs, grid_inputs
from compiled_llm.engine.images.encoder.compiled_encoder import CompiledEncoder, own_encoder, slower_encoder
from compiled_llm.engine.images.encoder.encoder_graphs import EncoderGraphs
from compiled_llm.engine.images.encoder.encoder_step import PROGRAM
from compiled_llm.execution.model_runner import ModelRunner
from compiled_llm.execution.reporting.slow_paths import Reason
from support.compilation.kept_programs import wait_for_writing
from support.execution.stand_in_cuda_graphs import StandInGraphCapture, let_a_cpu_capture
from support.huggingface.vision import make
from support.images import seeing

FAMILIES = ["Qwen2VL", "Qwen2_5_VL", "Qwen3VL"]
WINDOWS = "Qwen2_5_VL"
Sizes = list[tuple[int, int]]
SIZES: list[Sizes] = [[(1, 1)], [(4, 6)], [(1, 5), (3, 3)], [(2, 2), (7, 1), (1, 1), (5, 4)]]
"""Rows and columns of tokens of the images of a launch."""


def images(sizes: Sizes, seed: int) -> tuple[Tensor, Tensor]:
    """What a processor makes of them, a token of two by two patches."""
    grid = torch.tensor([[1, 2 * rows, 2 * columns] for rows, columns in sizes])
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(int(grid.prod(dim=1).sum()), 96, generator=generator), grid


def features(model: Any, sizes: Sizes, seed: int) -> list[Any]:
    """Of each image, and of each layer that has its own."""
    pixels, grid = images(sizes, seed)
    with torch.no_grad():
        made = model.get_image_features(pixels, grid, return_dict=True)
    return [made["pooler_output"], *made.get("deepstack_features", ())]


class Encoder:
    """Ours, of a tiny model, and HuggingFace's beside it."""

    def __init__(self, family: str, seed: int, **options: Any) -> None:
        self.model, self.plain = seeing(family, seed=seed, **options), make(family, seed)
        self.runner: ModelRunner = self.model.compiled.model_runner()
        self.inner: Any = self.model.model
        own = own_encoder(self.model, self.runner)
        assert own is not None
        self.own: CompiledEncoder = own

    def prepare(self) -> None:
        with torch.no_grad():
            self.runner.thread.call(self.own.prepare, self.inner.visual)

    def features(self, sizes: Sizes, seed: int) -> list[Any]:
        found: list[Any] = self.runner.thread.call(features, self.own.inside(self.inner), sizes, seed)
        return found

    def assert_like_huggingfaces(self, sizes: Sizes, seed: int) -> None:
        torch.testing.assert_close(self.features(sizes, seed), features(self.plain.model, sizes, seed))


@pytest.mark.parametrize("family", FAMILIES)
def test_features_are_huggingfaces(family, seed):
    encoder = Encoder(family, seed)
    for sizes in SIZES:
        encoder.assert_like_huggingfaces(sizes, seed)


def test_windows_have_more_than_one_token_and_do_not_reach_over_a_image(seed):
    assert window_patches(make(WINDOWS).model.visual) == 16
    encoder = Encoder(WINDOWS, seed)
    together, alone = encoder.features([(3, 5), (4, 4)], seed), encoder.features([(3, 5)], seed)
    torch.testing.assert_close(together[0][0], alone[0][0])


def test_layers_attend_to_all_images_in_one_call(seed, monkeypatch):
    """HuggingFace knows that a function can by "flash" in its name; without, it reads lengths on the host."""
    calls, attend = list[int](), attention.segment_attention

    def noted(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, *others: Any) -> Tensor:
        calls.append(len(starts) - 1)
        return attend(query, key, value, starts, *others)

    monkeypatch.setattr(attention, "segment_attention", noted)
    Encoder(WINDOWS, seed).features([(4, 4), (2, 2)], seed)
    assert calls == [5, 2], "windows, and images"


def test_positions_of_other_patches_would_be_found(seed, monkeypatch):
    encoder, of_grid = Encoder("Qwen2VL", seed), grid_inputs.of_grid

    def flipped(*given: Any) -> dict[str, Tensor]:
        read = of_grid(*given)
        return {**read, "position_ids": read["position_ids"].flip(0)}

    monkeypatch.setattr(grid_inputs, "of_grid", flipped)
    with pytest.raises(AssertionError):
        encoder.assert_like_huggingfaces([(4, 6)], seed)


# ---- compiled, and captured


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch, seed: int, whole: bool) -> Encoder:
    """With graphs of two sizes, made on a CPU; Inductor compiles the program, for half a minute, with --whole alone."""
    let_a_cpu_capture(monkeypatch)
    if not whole:
        monkeypatch.setattr(backend, "compile_with_inductor", lambda module, inputs, options: module.forward)
    convolutions: list[int] = []

    def multiplied(graph: fx.Graph) -> None:
        multiply_patches(graph)
        convolutions.append(len(graph.find_nodes(op="call_function", target=torch.conv3d)))

    monkeypatch.setattr(options, "multiply_patches", multiplied)
    encoder = captured_encoder(seed, monkeypatch)
    assert convolutions == [0], "cuDNN allocates memory, which no capture on CUDA survives"
    return encoder


def captured_encoder(seed: int, monkeypatch: pytest.MonkeyPatch) -> Encoder:
    encoder = Encoder(WINDOWS, seed, mode="cuda-graphs", eager_first=False)
    monkeypatch.setattr(encoder_graphs, "GraphCapture", lambda device: StandInGraphCapture(encoder.model))
    monkeypatch.setattr(encoder_graphs, "TOKENS", (8, 24))
    encoder.prepare()
    return encoder


@pytest.mark.whole  # Inductor compiles the program
@pytest.mark.slow
def test_a_program_that_was_kept_is_captured_too(seed, monkeypatch, tmp_path):
    CppPythonBindingsCodeCache.cache_clear()  # other tests may have loaded the same kernels, of folders that are gone
    monkeypatch.setenv("COMPILED_LLM_KEEP_PROGRAMS", "1")
    monkeypatch.setenv("COMPILED_LLM_CACHE", str(tmp_path))
    let_a_cpu_capture(monkeypatch)
    for way in ("traced", "kept"):
        encoder = captured_encoder(seed, monkeypatch)
        encoder.assert_like_huggingfaces([(4, 6)], seed)
        assert encoder.model.compiled.stats().programs[PROGRAM.name] == way
        assert EncoderGraphs.of(encoder.runner).replays == 1
        wait_for_writing()
    moved(encoder.model)
    encoder.assert_like_huggingfaces([(4, 6)], seed)
    assert EncoderGraphs.of(encoder.runner).replays == 1, "they read the weight where it was"


def moved(model: PreTrainedModel) -> None:
    """Let a weight of the encoder lie elsewhere, as it is."""
    weight: Any = model.model.visual.merger.mlp[0].weight
    weight.data = weight.data.clone()


def test_where_options_bound_graphs_none_are_captured_and_it_is_said(seed, monkeypatch):
    let_a_cpu_capture(monkeypatch)
    encoder = Encoder(WINDOWS, seed, mode="cuda-graphs", eager_first=False, max_graphs=4)
    assert slower_encoder(encoder.runner) == Reason("encoder_graphs")
    assert "max_graphs or graph_memory bound" in str(Reason("encoder_graphs"))


def test_one_program_has_all_sizes_and_graphs_those_that_they_hold(captured, seed):
    graphs, programs = EncoderGraphs.of(captured.runner), captured.runner.graph_manager.programs
    for sizes, replays in (([(4, 6)], 1), ([(1, 5)], 2), ([(2, 2), (1, 1)], 3), ([(5, 5)], 3), ([(1, 1)] * 9, 3)):
        captured.assert_like_huggingfaces(sizes, seed)
        assert graphs.replays == replays, sizes
    assert graphs.nbytes > 0
    moved(captured.model)
    captured.assert_like_huggingfaces([(4, 6)], seed)
    assert graphs.replays == 3, "they read the weight where it was"
    assert programs.graph_counts()[PROGRAM.name] == 1
