"""What works with which kind of layer: one table, with the sentence of each refusal."""

# `wrap`, engines and caches ask it; a page of the docs and the tests of refusals are made from it.

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from compiled_llm.kinds.kind import Layer


class Works(Enum):
    """What a feature does with a kind of layer that does not refuse it."""

    YES = "✓"
    ASKED = "by size"  # the backend is asked whether it has kernels for sizes like these
    ORIGINAL = "HuggingFace's"  # calls run HuggingFace's own code
    UNCAPTURED = "uncaptured"


class No(NamedTuple):
    """A refusal: why, after what the layer is, and the way out; by default wrapping without the option."""

    why: str
    way_out: str = "wrap without {feature}"


Cell = Works | No
FEATURES = (
    *("kv_dtype", "batch_invariant", "cascade", "mixed", "variants", "backend", "page_size"),
    *("window", "soft_cap", "captured_prefills", "drafts"),
    *("images", "left_padding", "prefix_cache", "crop", "dynamic_cache", "static_cache", "stepped_cache"),
)
"""Columns: options of `wrap` and `Engine`, then what layers, steps and caches have or do."""


@dataclass(frozen=True, eq=False)
class Support:
    """A row of the table: a kind, the beginning of its refusals, which names a layer, and its cells by feature."""

    kind: str
    what: str
    cells: Mapping[str, Cell]


class FoundKind(NamedTuple):
    """A kind of which a layer of a model is; ``layer`` has the sizes that refusals name."""

    support: Support
    number: int
    layer: Any


YES, ASKED, ORIGINAL, UNCAPTURED = Works
_NO_KERNEL = No("and there is no such kernel for them")
_NOT_TAKEN = No(
    "and engines do not take over what HuggingFace's cache keeps of that",
    "model.generate takes what the model's processor returns",
)
_UNWRAPPED = No("and there is no such kernel for them", "it stays usable unwrapped")


def _all(cell: Cell, *features: str) -> dict[str, Cell]:
    return dict.fromkeys(features, cell)


_PLAIN = {
    **_all(YES, "kv_dtype", "batch_invariant", "cascade", "mixed", "variants", "page_size", "crop"),
    **_all(YES, "captured_prefills", "drafts", "left_padding", "prefix_cache"),
    **_all(YES, "images", "dynamic_cache", "static_cache", "stepped_cache"),
    **_all(ASKED, "backend", "window", "soft_cap"),
}
FULL = Support("full attention", "attention layer {number} reads all keys", _PLAIN)
WINDOWED = Support("a sliding window", "attention layer {number} has a window", _PLAIN)
UNEVEN = Support(
    "values of another size than keys",
    "attention layer {number} has keys with heads of size {layer.head_dim}, and values with heads of size "
    "{layer.kind.value_head_dim}",
    {
        "kv_dtype": No("and such pages need one size"),
        "batch_invariant": _NO_KERNEL,
        **_all(YES, "cascade", "mixed", "variants", "page_size", "crop", "captured_prefills", "drafts"),
        **_all(YES, "left_padding", "prefix_cache"),
        **_all(YES, "images", "dynamic_cache", "static_cache", "stepped_cache"),
        **_all(ASKED, "backend", "window", "soft_cap"),
    },
)
LATENT = Support(
    "latents (MLA)",
    "attention layer {number} keeps latents (multi-head latent attention)",
    {
        **_all(_NO_KERNEL, "kv_dtype", "cascade"),
        **_all(_UNWRAPPED, "window", "soft_cap"),
        "variants": No("which variants do not read", "leave it out"),
        **_all(YES, "batch_invariant", "mixed", "page_size", "captured_prefills", "drafts"),
        **_all(YES, "crop", "left_padding", "prefix_cache"),
        **_all(YES, "images", "dynamic_cache", "static_cache", "stepped_cache"),
        "backend": ASKED,
    },
)
CHOSEN_LATENTS = Support(
    "latents of chosen tokens (DSA)",
    f"{LATENT.what}, of which an indexer chooses",
    {
        **LATENT.cells,
        "batch_invariant": _NO_KERNEL,
        "backend": No("which no plan knows"),
        "captured_prefills": UNCAPTURED,
        "images": _NOT_TAKEN,
        "static_cache": ORIGINAL,
    },
)
BLOCKS = Support(
    "chosen blocks (MiniMax-M3)",
    "attention layer {number} reads blocks of {layer.kind.together} tokens that an indexer chooses",
    {
        **_all(No("and there is no such kernel for that"), "batch_invariant", "backend"),
        "mixed": No("and takes new tokens of one request at a time", "leave mixed out"),
        "variants": No("and variants read all keys", "leave it out"),
        "page_size": No(
            "and pages must lie in one of them", "wrap with a page_size that divides {layer.kind.together}"
        ),
        "drafts": No("for the newest token alone", "leave drafts out, and feed in one token a step"),
        **_all(YES, "kv_dtype", "cascade", "prefix_cache", "crop", "dynamic_cache"),
        "stepped_cache": YES,
        **_all(ASKED, "window", "soft_cap"),
        "captured_prefills": UNCAPTURED,
        "images": _NOT_TAKEN,
        **_all(ORIGINAL, "left_padding", "static_cache"),
    },
)
VARIANT = Support(
    "variants",
    "attention layer {number} attends by a variant",
    {
        **_all(No("and there are no such kernels for variants"), "batch_invariant", "cascade"),
        "soft_cap": No("which has no cap beside its own function", "write the cap into that"),
        **_all(YES, "kv_dtype", "mixed", "variants", "page_size", "captured_prefills", "drafts"),
        **_all(YES, "left_padding", "prefix_cache", "crop"),
        **_all(YES, "images", "dynamic_cache", "static_cache", "stepped_cache"),
        **_all(ASKED, "backend", "window"),
    },
)
RECURRENT = Support(
    "recurrent layers",
    "layer {number} is recurrent",
    {
        "drafts": No("and a step computes its state after one", "leave drafts out, and feed in one token a step"),
        "crop": No(
            "and has no state from before the last token",
            "go on with a copy of the cache (copy.deepcopy) that was made there, or compute the text again",
        ),
        **_all(YES, "kv_dtype", "batch_invariant", "cascade", "mixed", "variants", "page_size"),
        **_all(YES, "captured_prefills", "backend", "window", "soft_cap", "left_padding", "prefix_cache"),
        **_all(YES, "images", "dynamic_cache", "static_cache"),
        **_all(ORIGINAL, "stepped_cache"),
    },
)
NO_ATTENTION = Support(
    "recurrent layers alone",
    "the model has no attention",
    {
        **RECURRENT.cells,
        **_all(No("which that is for"), "kv_dtype", "cascade", "variants"),
        **_all(ORIGINAL, "dynamic_cache", "static_cache"),
    },
)
BY_NAME = {"blocks": BLOCKS, "chosen": CHOSEN_LATENTS, "latent": LATENT, "variant": VARIANT, "uneven": UNEVEN}
"""Rows by the names of kinds, the first of which says why something does not work."""
KINDS = (FULL, WINDOWED, UNEVEN, LATENT, CHOSEN_LATENTS, BLOCKS, VARIANT, RECURRENT, NO_ATTENTION)


def kinds_of(layers: Sequence[Layer]) -> Iterator[FoundKind]:
    """Yield the kinds of each layer of a model."""
    yield from (FoundKind(RECURRENT, number, layer) for number, layer in enumerate(layers) if layer.states)
    if not any(layer.kind.attends for layer in layers):
        yield FoundKind(NO_ATTENTION, 0, layers[0])
    for number, layer in enumerate(layers):
        rows = [BY_NAME[name] for name in BY_NAME if name in layer.kind.names]
        rows += [WINDOWED] if layer.window_left >= 0 else []
        yield from (FoundKind(row, number, layer) for row in rows or [FULL] if layer.kind.attends)


def refusal(kinds: Iterable[FoundKind], feature: str, given: str) -> str | None:
    """Return the sentence by which the first of some kinds refuses a feature, as it was given; None if all take it."""
    for support, number, layer in kinds:
        if isinstance(cell := support.cells[feature], No):
            sentence = f"{support.what}, {cell.why}; {cell.way_out}"
            return f"{given}: {sentence.format(number=number, layer=layer, feature=feature)}"
    return None


def runs_original(kinds: Iterable[FoundKind], feature: str) -> bool:
    """Return whether HuggingFace's own code runs calls with a feature, for one of some kinds."""
    return any(found.support.cells[feature] is ORIGINAL for found in kinds)
