"""Recurrent layers: what they keep of rows besides pages, and how they compute packed rows."""

from __future__ import annotations

from compiled_llm.kinds.recurrent import layers

STATES = [layers]
