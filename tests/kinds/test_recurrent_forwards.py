"""What recurrent layers of transformers call, and what they ask a cache, is what a cache of ours answers."""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap

import pytest

from compiled_llm.compat.cache_names import NAMES
from compiled_llm.kinds.recurrent.forwards import FUNCTIONS, keeps_states
from compiled_llm.kinds.recurrent.layers import RecurrentStates
from support.huggingface.recurrent_families import RECURRENT, recurrent_model

pytestmark = pytest.mark.core

HARMLESS = {"is_recording_past", "layers"}
"""Asked only of a cache that has states."""


@pytest.fixture(scope="module", params=RECURRENT)
def layers(request: pytest.FixtureRequest) -> list[type]:
    kinds = {type(module) for module in recurrent_model(request.param).modules()}
    return [kind for kind in kinds if keeps_states(kind)]


def test_functions_take_what_their_stand_ins_take(layers: list[type]) -> None:
    """Arguments in the same order, by the same names; a stand-in may take others by any name."""
    for layer in layers:
        module = importlib.import_module(layer.__module__)
        found = [name for name in FUNCTIONS if hasattr(module, name)]
        assert found, layer
        for name in found:
            theirs = [*inspect.signature(inspect.unwrap(getattr(module, name))).parameters.values()]
            ours = inspect.signature(getattr(RecurrentStates, FUNCTIONS[name])).parameters
            places = [own.name for own in ours.values() if own.kind is own.POSITIONAL_OR_KEYWORD][1:]
            for place, needed in enumerate(
                own for own in theirs if own.default is own.empty and own.kind is not own.VAR_KEYWORD
            ):
                renamed = place == 0 and needed.name == "hidden_states"
                assert places[place] == needed.name or renamed or needed.name in ("initial_state", "output_final_state")


def test_caches_are_asked_nothing_else(layers: list[type]) -> None:
    for layer in layers:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(layer.forward))))
        asked = {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in NAMES
        }
        assert asked
        assert asked - HARMLESS <= {*dir(RecurrentStates)}, layer
