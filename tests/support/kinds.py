"""Kinds of layers, each with a tiny model that has them: what `tests/kinds` asks of all of them.

HuggingFace's tokens of a row are those of its prompt alone: left padding counts in its states, and in its blocks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from transformers import PreTrainedModel

import compiled_llm
from compiled_llm import kv_scales
from support.fp8_oracle import fp8_oracle
from support.huggingface.recurrent_families import recurrent_model
from support.indexed_models import block_model, indexed_model, needs_blocks, needs_indexers
from support.latent_models import WITHOUT_EXPERTS, latent_model, needs_latents
from support.parity import FEW_PAGES, alone
from support.tiny_models import tiny_qwen3
from support.uneven_heads import uneven_llama
from support.variant_models import variants_for, with_attention

WORKS = ""
"""In place of a sentence that refuses something."""

FP8 = "fp8_e4m3"

OPTIONS: dict[str, dict[str, Any]] = {
    "cascade": {"cascade": True},
    "fp8": {"kv_dtype": FP8},
    "batch_invariant": {"batch_invariant": True, "mode": "compile"},
    "variants": {"variants": {"no_change": "all"}},
    "check_pages": {"check_pages": "raise"},
    "large pages": {"page_size": 16},
}
"""Of `wrap`; each kind takes one, or says in a sentence that it does not. An engine has ``"mixed steps"``, too."""


@dataclass(frozen=True, eq=False)
class Kind:
    """A kind of layers.

    Attributes:
        name: of its tests.
        tiny_model: in float32; it goes on for ever. Takes a seed and what replaces parts of its config.
        small: what makes it quick to compile; two layers that are equal, and two that are not, are compiled, too.
        wrap_options: what it is wrapped with.
        answers: whether `wrap` takes an option, ``WORKS``, or the sentence that refuses it.
        hits: cached tokens of three prompts that begin alike, and of the second again.
        several: the sentence that refuses several new tokens of a row in a step.
        drafts: the sentence by which HuggingFace refuses them.
        original: caches that HuggingFace's own loop fills, ``static`` and ``dynamic`` ones.
        phases: of steps that are captured.
        codec: of its pages, if they are not of the model's type.
        marks: of its tests.
    """

    name: str
    tiny_model: Callable[..., PreTrainedModel]
    small: Mapping[str, Any] = field(default_factory=lambda: {"num_hidden_layers": 1})
    wrap_options: Mapping[str, Any] = field(default_factory=dict)
    answers: Mapping[str, str] = field(default_factory=dict)
    hits: Sequence[int] = (0, 40, 40, 44)
    several: str = WORKS
    drafts: str = WORKS
    original: frozenset[str] = frozenset()
    phases: tuple[str, ...] = ("decode", "prefill")
    codec: str | None = None
    marks: tuple[pytest.MarkDecorator, ...] = ()

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
def _scales(kind: Kind, seed: int, small: bool) -> Any:
    return kv_scales(kind.tiny_model(seed, **(kind.small if small else {})), [[*range(3, 120)]])


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


def _refused_by_latents() -> dict[str, str]:
    keep = r"attention layer 0 keeps latents \(multi-head latent attention\)"
    return {
        "cascade": rf"^wrap: cascade=True: {keep}, .*; wrap without cascade",
        "fp8": rf"^wrap: kv_dtype='fp8_e4m3': {keep}, .*; wrap without kv_dtype",
        "batch_invariant": rf"^wrap: batch_invariant=True: {keep}, .*; wrap without batch_invariant",
        "variants": rf"^wrap: variants: {keep}, which variants do not read; leave it out",
    }


FULL = Kind("full", _full)
WINDOWED = Kind("windowed", _windowed, {})
UNEVEN = Kind(
    "uneven",
    uneven_llama,
    answers={
        "fp8": r"^wrap: kv_dtype='fp8_e4m3': attention layer 0 .* pages of fp8 need one size; wrap without kv_dtype",
        "batch_invariant": r"^wrap: batch_invariant=True: .* attention layer 0: its keys have heads of size 16",
    },
)
LATENT = Kind(
    "latent",
    lambda seed, **config: latent_model(seed=seed, **{**WITHOUT_EXPERTS, **config}),
    {},
    answers=_refused_by_latents(),
    marks=(needs_latents,),
)
INDEXED = Kind(
    "latent with chosen tokens",
    lambda seed, **config: indexed_model(_SHARED, seed, **{**WITHOUT_EXPERTS, **_SHARING, **config}),
    {"num_hidden_layers": 1, "indexer_types": ["full"]},
    answers=_refused_by_latents(),
    original=frozenset({"static"}),
    phases=("decode",),
    marks=(needs_indexers,),
)
BLOCKS = Kind(
    "blocks",
    lambda seed, **config: block_model(seed, **{**_layers("full_attention", "minimax_m3_sparse"), **config}),
    _layers("minimax_m3_sparse"),
    answers={
        "batch_invariant": r"^wrap: batch_invariant=True: attention layer 1 reads blocks .*; wrap without batch",
        "variants": r"^wrap: variants: attention layer 1 reads what an indexer chooses, and variants read all keys",
        "large pages": r"^wrap: page_size=16: attention layer 1 reads blocks .*; wrap with a page_size that divides 8",
        "mixed steps": r"^mixed=True with a model whose indexers choose blocks: .*; leave mixed out",
    },
    several="an indexer chooses the blocks",
    original=frozenset({"static"}),
    phases=("decode",),
    marks=(needs_blocks,),
)
VARIANT = Kind(
    "variant",
    lambda seed, **config: with_attention("inkling", seed, **config),
    wrap_options=variants_for("inkling"),
    answers={
        "cascade": r"^variants=.* with cascade=True: there are no such kernels for variants; leave cascade out",
        "batch_invariant": r"^variants=.* with batch_invariant=True: there are no such kernels for variants; leave",
        "variants": r"^variants=.*: a layer has one variant, and '\w+' is for some of others",
    },
)
RECURRENT = Kind(
    "recurrent",
    lambda seed, **config: recurrent_model("Qwen3_5", seed, **config),
    {},
    answers={"batch_invariant": r"^wrap: batch_invariant=True: layer 0 .* is recurrent, .*; wrap without batch_invari"},
    hits=(0, 0, 40, 40),
    several="a step of recurrent layers has one",
    drafts="assisted generation is not supported with stateful models",
    original=frozenset({"dynamic", "static"}),
)
KINDS = (FULL, WINDOWED, UNEVEN, LATENT, INDEXED, BLOCKS, VARIANT, RECURRENT)
IN_FP8 = (Kind("full in fp8", _full, codec=FP8), Kind("windowed in fp8", _windowed, {}, codec=FP8))


def each(*kinds: Kind) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("kind", [pytest.param(kind, id=kind.name, marks=kind.marks) for kind in kinds])
