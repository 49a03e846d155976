"""Kinds of layers that keep a further key of each token, by which an indexer chooses what queries read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from compiled_llm.kinds.indexers.blocks import Blocks
from compiled_llm.kinds.indexers.chosen import ChosenTokens
from compiled_llm.kinds.kind import LayerKind

if TYPE_CHECKING:
    from compiled_llm.kinds import indexers as this
    from compiled_llm.kinds.registry import KindsPart

    checked: KindsPart = this

KINDS: Sequence[type[LayerKind]] = (ChosenTokens, Blocks)
