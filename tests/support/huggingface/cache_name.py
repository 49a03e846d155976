"""The name that this version of transformers has for the cache: in outputs, and of models with attention."""

from __future__ import annotations

import dataclasses

from transformers.modeling_outputs import CausalLMOutputWithPast

_FIELDS = {field.name for field in dataclasses.fields(CausalLMOutputWithPast)}
CACHE = "cache" if "cache" in _FIELDS else "past_key_values"
"""Tests whose subject is not the name use `past_key_values`, which all versions take."""
