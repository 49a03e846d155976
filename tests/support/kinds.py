"""Kinds of layers, each with a tiny model that has them: what `tests/kinds` asks of all of them.

HuggingFace's tokens of a row are those of its prompt alone: left padding counts in its states, and in its blocks.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from transformers import PreTrainedModel

import compiled_llm
from compiled_llm import KVScales, kv_scales
from compiled_llm.kinds import support as table
from compiled_llm.kinds.support import Cell, No, Support
from support.fp8_oracle import fp8_oracle
from support.huggingface.recurrent_families import recurrent_model
from support.indexed_models import block_model, indexed_model, needs_blocks, needs_indexers
from support.latent_models import WITHOUT_EXPERTS, latent_model, needs_latents
from support.parity import FEW_PAGES, alone
from support.tiny_models import tiny_qwen3
from support.uneven_heads import uneven_llama
from support.variant_models import variants_for, with_attention

FP8 = "fp8_e4m3"

OPTIONS: dict[str, dict[str, Any]] = {
    "cascade": {"cascade": True},
    "kv_dtype": {"kv_dtype": FP8},
    "batch_invariant": {"batch_invariant": True, "mode": "compile"},
    "variants": {"variants": {"no_change": "all"}},
    "page_size": {"page_size": 16},
}
"""Features of the table of support that are options of `wrap`."""


@dataclass(frozen=True, eq=False)
class Kind:
    """A kind of layers."""

    name: str  # of its tests
    support: Support  # its row of the table of support
    # in float32; it goes on for ever. Takes a seed and what replaces parts of its config
    tiny_model: Callable[..., PreTrainedModel]
    # what makes it quick to compile; two layers that are equal, and two that are not, are compiled, too
    small: Mapping[str, Any] = field(default_factory=lambda: {"num_hidden_layers": 1})
    wrap_options: Mapping[str, Any] = field(default_factory=dict)  # what it is wrapped with
    hits: Sequence[int] = (0, 40, 40, 44)  # cached tokens of three prompts that begin alike, and of the second again
    codec: str | None = None  # of its pages, if they are not of the model's type
    marks: tuple[pytest.MarkDecorator, ...] = ()  # of its tests

    def __str__(self) -> str:
        return self.name

    def __call__(self, feature: str) -> Cell:
        """What the table of support says."""
        return self.support.cells[feature]

    def refusal(self, feature: str) -> str:
        """The pattern of the sentence that refuses a feature."""
        cell = self(feature)
        assert isinstance(cell, No)
        sentence = f": {self.support.what}, {cell.why}; {cell.way_out}".replace("{feature}", feature)
        return re.sub(r"\\\{[\w\\.]+\\\}", r"\\d+", re.escape(sentence)) + "$"

    def plain(self, seed: int, small: bool = False) -> PreTrainedModel:
        """HuggingFace's model, whose answers are expected; nothing changes it."""
        return _plain(self, seed, small)

    def wrapped(self, seed: int, small: bool = False, model: PreTrainedModel | None = None, **options: Any) -> Any:
        """A new model, or a given one, wrapped on a few pages."""
        if model is None:
            model = self.tiny_model(seed, **(self.small if small else {}))
        given = {"mode": "eager", "prefill_tokens": 16, **FEW_PAGES, **self.wrap_options, **options}
        if self.codec:
            given |= {"kv_dtype": self.codec, "kv_scales": _scales(self, seed, small)}
        return compiled_llm.wrap(model, **given)

    def alone(self, prompt: Sequence[int], new: int, seed: int, small: bool = False) -> list[int]:
        """What HuggingFace adds to a prompt alone."""
        return _alone(self, tuple(prompt), -(-new // 12) * 12, seed, small)[:new]


@functools.cache
def _plain(kind: Kind, seed: int, small: bool) -> PreTrainedModel:
    model = kind.tiny_model(seed, **(kind.small if small else {}))
    return fp8_oracle(model, _scales(kind, seed, small)) if kind.codec else model


@functools.cache
def _scales(kind: Kind, seed: int, small: bool) -> KVScales:
    """Others for each layer and head, keys and values, and no powers of two."""
    measured = kv_scales(kind.tiny_model(seed, **(kind.small if small else {})), [[*range(3, 120)]])
    keys, values = (
        [[scale * (more + 0.1 * (layer + head)) for head, scale in enumerate(heads)] for layer, heads in enumerate(own)]
        for more, own in zip((1.1, 1.3), (measured.keys, measured.values), strict=True)
    )
    return KVScales(keys, values)


@functools.cache
def _alone(kind: Kind, prompt: tuple[int, ...], new: int, seed: int, small: bool) -> list[int]:
    return alone(kind.plain(seed, small), list(prompt), new, pad_token_id=0)


def _full(seed: int, **config: Any) -> PreTrainedModel:
    return tiny_qwen3(seed, eos_token_id=None, **config)


def _windowed(seed: int, **config: Any) -> PreTrainedModel:
    """One layer sees all, and one six tokens."""
    windows = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
    return _full(seed, **{**windows, **config})


def _layers(*types: str) -> dict[str, Any]:
    """Of MiniMax-M3, without experts."""
    return {"num_hidden_layers": len(types), "layer_types": [*types], "mlp_layer_types": ["dense"] * len(types)}


_SHARED, _SHARING = "GlmMoeDsa, shared choices", {"indexer_types": ["full", "shared"]}
"""A layer has an indexer, and one reads the tokens that the other's has chosen."""


FULL = Kind("full", table.FULL, _full)
WINDOWED = Kind("windowed", table.WINDOWED, _windowed, {})
UNEVEN = Kind("uneven", table.UNEVEN, uneven_llama)
LATENT = Kind(
    "latent",
    table.LATENT,
    lambda seed, **config: latent_model(seed=seed, **{**WITHOUT_EXPERTS, **config}),
    {},
    marks=(needs_latents,),
)
INDEXED = Kind(
    "latent with chosen tokens",
    table.CHOSEN_LATENTS,
    lambda seed, **config: indexed_model(_SHARED, seed, **{**WITHOUT_EXPERTS, **_SHARING, **config}),
    {"num_hidden_layers": 1, "indexer_types": ["full"]},
    marks=(needs_indexers,),
)
BLOCKS = Kind(
    "blocks",
    table.BLOCKS,
    lambda seed, **config: block_model(seed, **{**_layers("full_attention", "minimax_m3_sparse"), **config}),
    _layers("minimax_m3_sparse"),
    marks=(needs_blocks,),
)
VARIANT = Kind(
    "variant",
    table.VARIANT,
    lambda seed, **config: with_attention("inkling", seed, **config),
    wrap_options=variants_for("inkling"),
)
RECURRENT = Kind(
    "recurrent",
    table.RECURRENT,
    lambda seed, **config: recurrent_model("Qwen3_5", seed, **config),
    {},
    hits=(0, 0, 40, 40),
)
NO_ATTENTION = Kind("no attention", table.NO_ATTENTION, lambda seed, **config: recurrent_model("Mamba2", seed))
KINDS = (FULL, WINDOWED, UNEVEN, LATENT, INDEXED, BLOCKS, VARIANT, RECURRENT)
ONE_OF_THEM = (pytest.mark.drawn(most=1),)
IN_FP8 = (
    Kind("full in fp8", table.FULL, _full, codec=FP8, marks=ONE_OF_THEM),
    Kind("windowed in fp8", table.WINDOWED, _windowed, {}, codec=FP8, marks=ONE_OF_THEM),
)


def each(*kinds: Kind) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("kind", [pytest.param(kind, id=kind.name, marks=kind.marks) for kind in kinds])
