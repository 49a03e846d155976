"""Options beside each other and over each kind of layer: what works, and what is refused by which words.

Written onto the page of compatibility by running this file, from `tests/`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

from compiled_llm.kinds import support
from compiled_llm.kinds.support import FEATURES, No
from support.engine.random_requests import CHOOSING, KEEPING_STATES, KINDS

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "compatibility.md"
BETWEEN = re.compile(
    r"(?<=<!-- written by tests/support/engine/option_table.py -->\n\n).+?(?=\n<!-- end -->)", re.DOTALL
)
OF_SUPPORT = re.compile(r"(?<=<!-- table of support -->\n\n).+?(?=\n<!-- end -->)", re.DOTALL)

OPTIONS: dict[str, dict[str, Any]] = {
    "kv_dtype": {"kv_dtype": "fp8_e4m3"},
    "batch_invariant": {"batch_invariant": True, "mode": "compile"},
    "cascade": {"cascade": True},
    "mixed": {"mixed": True},
}
"""In this order, an option leaves the answers of those before it as they are; ``mixed`` is one of ``Engine``."""

SAID = {name: f"{name}={options[name]!r}".replace("'", '"') for name, options in OPTIONS.items()}

NAMES = {
    "GPT2LMHead": "learned positions",
    "Gemma2": "soft caps, windows in some layers",
    "Gemma3": "windows in all layers",
    "GptOss": "sinks",
    "Qwen2Moe": "experts",
    "values that are no keys": "values of another size than keys",
    "latents": "latents (MLA)",
    "chosen tokens": "latents of chosen tokens (DSA)",
    "chosen blocks": "chosen blocks (MiniMax-M3)",
    "recurrent layers": "recurrent layers beside attention",
    "recurrent and attending": "layers that recur and attend",
    "recurrent layers alone": "recurrent layers alone",
}
LAYERS = {**KINDS, **CHOOSING, **KEEPING_STATES}
assert NAMES.keys() == LAYERS.keys()

REFUSED_TOGETHER = {
    ("batch_invariant", "cascade"): "batch_invariant=True with cascade=True",
    ("batch_invariant", "mixed"): "mixed=True with a model that is wrapped with batch_invariant=True",
}
EXPERTS = {
    ("batch_invariant", "GptOss"): "batch_invariant=True: GptOssForCausalLM multiplies by fused_experts",
    ("batch_invariant", "Qwen2Moe"): "batch_invariant=True: Qwen2MoeForCausalLM multiplies by fused_experts",
}
ROWS = {
    "GPT2LMHead": (support.FULL,),
    "Gemma2": (support.WINDOWED,),
    "Gemma3": (support.WINDOWED,),
    "GptOss": (support.WINDOWED,),
    "Qwen2Moe": (support.FULL,),
    "values that are no keys": (support.UNEVEN,),
    "latents": (support.LATENT,),
    "chosen tokens": (support.CHOSEN_LATENTS,),
    "chosen blocks": (support.BLOCKS,),
    "recurrent layers": (support.RECURRENT,),
    "recurrent and attending": (support.RECURRENT,),
    "recurrent layers alone": (support.RECURRENT, support.NO_ATTENTION),
}
"""Of the table of support."""
REFUSED_KINDS = EXPERTS | {
    (option, kind): f"{option}=.*{row.what.split('{')[0]}.*{cell.why}"
    for kind, rows in ROWS.items()
    for option in OPTIONS
    for row in reversed(rows)
    if isinstance(cell := row.cells[option], support.No)
}
"""What errors say, by options and kinds of layers, as patterns."""


class Cell(NamedTuple):
    """Two options over a kind of layers."""

    first: str
    second: str
    kind: str

    def __str__(self) -> str:
        return f"{self.first} and {self.second}, {NAMES[self.kind]}"

    @property
    def refusals(self) -> list[str]:
        """What the error may say; empty if the two work."""
        together = [REFUSED_TOGETHER[self[:2]]] if self[:2] in REFUSED_TOGETHER else []
        return together + [REFUSED_KINDS[name, self.kind] for name in self[:2] if (name, self.kind) in REFUSED_KINDS]

    @property
    def alone(self) -> list[str]:
        """The later of the two that works by itself, if one does; batch invariance, which is traced, comes early."""
        return [name for name in self[:2] if (name, self.kind) not in REFUSED_KINDS][-1:]


CELLS = [Cell(*pair, kind) for pair in combinations(OPTIONS, 2) for kind in LAYERS]

USUAL = [
    Cell("kv_dtype", "batch_invariant", "Gemma3"),
    Cell("kv_dtype", "cascade", "Gemma2"),
    Cell("kv_dtype", "mixed", "GptOss"),
    Cell("batch_invariant", "cascade", "Gemma2"),
    Cell("batch_invariant", "mixed", "GPT2LMHead"),
    Cell("cascade", "mixed", "values that are no keys"),
    Cell("cascade", "mixed", "Qwen2Moe"),
    Cell("cascade", "mixed", "recurrent and attending"),
    Cell("kv_dtype", "cascade", "chosen blocks"),
    Cell("cascade", "mixed", "latents"),
    Cell("kv_dtype", "mixed", "chosen tokens"),
    Cell("kv_dtype", "cascade", "recurrent layers alone"),
    Cell("kv_dtype", "batch_invariant", "recurrent layers"),
]
"""Each pair and each kind, of which a run draws some; the others run with `--whole`."""


def lines() -> Iterator[str]:
    yield f"| | {' | '.join(f'`{said}`' for said in SAID.values())} |"
    yield "|---" + "|:-:" * len(OPTIONS) + "|"
    for row, name in enumerate(OPTIONS):
        refused = [tuple(sorted((name, other), key=[*OPTIONS].index)) in REFUSED_TOGETHER for other in OPTIONS]
        marks = ["" if column <= row else "refused" if no else "✓" for column, no in enumerate(refused)]
        yield f"| `{SAID[name]}` | {' | '.join(marks)} |"
    for kind, name in NAMES.items():
        marks = ["refused" if (option, kind) in REFUSED_KINDS else "✓" for option in OPTIONS]
        yield f"| {name} | {' | '.join(marks)} |"


def table() -> str:
    return "\n".join([*lines(), ""])


FEATURE_NAMES = {option: f"`{said}`" for option, said in SAID.items()} | {
    "variants": "`variants`",
    "backend": '`backend="flashinfer"`',
    "page_size": "any `page_size`",
    "window": "sliding windows",
    "soft_cap": "soft caps",
    "captured_prefills": "prefills in CUDA graphs",
    "drafts": "drafts: `speculative_config`, and `prompt_lookup_num_tokens` in the fast loop",
    "images": "images in an engine",
    "left_padding": "`model(...)` of left-padded rows without `position_ids`",
    "prefix_cache": "the prefix cache",
    "crop": "`crop` of a kept cache",
    "dynamic_cache": "`generate` over a `DynamicCache`",
    "static_cache": "`generate` over a `StaticCache`",
    "stepped_cache": "`model(...)` over a `DynamicCache`",
}


def lines_of_support() -> Iterator[str]:
    yield f"| | {' | '.join(row.kind for row in support.KINDS)} |"
    yield "|---" + "|:-:" * len(support.KINDS) + "|"
    for feature in FEATURES:
        cells = [row.cells[feature] for row in support.KINDS]
        marks = ["refused" if isinstance(cell, No) else cell.value for cell in cells]
        yield f"| {FEATURE_NAMES[feature]} | {' | '.join(marks)} |"


def written(page: str) -> str:
    """The page with the tables as they are."""
    support_table = "\n".join([*lines_of_support(), ""])
    return OF_SUPPORT.sub(lambda _: support_table, BETWEEN.sub(lambda _: table(), page))


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
