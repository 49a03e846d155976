"""Kinds of layers that keep a further key of each token, by which an indexer chooses what queries read."""

from __future__ import annotations

from compiled_llm.kinds.indexers.blocks import Blocks
from compiled_llm.kinds.indexers.chosen import ChosenTokens

KINDS = (ChosenTokens, Blocks)
