"""Recurrent layers: what they keep of rows besides pages, and how they compute packed rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from compiled_llm.kinds.recurrent import layers

if TYPE_CHECKING:
    from compiled_llm.kinds import recurrent as this
    from compiled_llm.kinds.registry import StateLayers, StatesPart

    checked: StatesPart = this

STATES: Sequence[StateLayers] = [layers]
