"""Planted faults of latent attention: tokens differ from HuggingFace's, so the tests that compare them find these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RMSNorm

import compiled_llm
from compiled_llm.kinds.latent import Latent, Latents
from compiled_llm.kinds.latent_probe import Expansion
from compiled_llm.kinds.rows import NewestTokens, PackedTokens
from support.latent_models import RANK, latent_model, needs_latents
from support.parity import FEW_PAGES, greedy, mixed_prompts

pytestmark = needs_latents

Plant = Callable[[pytest.MonkeyPatch], None]


def pages_of_another_row(patch: pytest.MonkeyPatch) -> None:
    """Decode steps read the table of the row before."""
    attend = Latent.attend

    def other(self: Latent, rows: Any, *args: Any) -> Any:
        changed = rows._replace(starts=rows.starts.roll(1)) if isinstance(rows, NewestTokens) else rows
        return attend(self, changed, *args)

    patch.setattr(Latent, "attend", other)


def pages_of_another_row_in_chunks(patch: pytest.MonkeyPatch) -> None:
    """A chunk of a prompt reads its pages in another order."""
    attend = Latent.attend

    def other(self: Latent, rows: Any, *args: Any) -> Any:
        changed = rows._replace(indices=rows.indices.roll(1)) if isinstance(rows, PackedTokens) else rows
        return attend(self, changed, *args)

    patch.setattr(Latent, "attend", other)


def latents_without_their_norm(patch: pytest.MonkeyPatch) -> None:
    """Pages get what the layer's norm was given; new rows still attend to what is normed."""
    norm, update, before = DeepseekV3RMSNorm.forward, Latents.update, list[Tensor]()

    def noting(self: nn.Module, states: Tensor) -> Tensor:
        if states.shape[-1] == RANK:
            before.append(states)
        out: Tensor = norm(self, states)
        return out

    def taking(self: Latents, latent: Tensor, rope: Tensor, layer_idx: int, *args: Any, **options: Any) -> Any:
        update(self, before[-1].view_as(latent), rope, layer_idx)
        return latent, rope

    patch.setattr(DeepseekV3RMSNorm, "forward", noting)
    patch.setattr(Latents, "update", taking)


def the_wrong_half(patch: pytest.MonkeyPatch) -> None:
    """Values' part of the projection is taken for the beginning of each head, and that of keys for the end."""

    def swapped(self: Expansion, module: nn.Module) -> tuple[Tensor, Tensor]:
        weight: Any = module.get_submodule(self.projection).weight
        value, key = weight.unflatten(0, (-1, self.key + self.value)).split([self.value, self.key], dim=1)
        return key, value

    patch.setattr(Expansion, "halves", swapped)


@pytest.mark.parametrize(
    "plant", [pages_of_another_row, pages_of_another_row_in_chunks, latents_without_their_norm, the_wrong_half]
)
def test_tokens_show_a_planted_fault(plant: Plant, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = {**mixed_prompts([20, 33], 128, seed), "pad_token_id": 0}
    expected = greedy(latent_model(seed=seed), inputs, 12)
    model: Any = compiled_llm.wrap(latent_model(seed=seed), mode="eager", prefill_tokens=16, **FEW_PAGES)
    torch.testing.assert_close(greedy(model, inputs, 12), expected)
    plant(monkeypatch)
    assert not torch.equal(greedy(model, inputs, 12), expected)
