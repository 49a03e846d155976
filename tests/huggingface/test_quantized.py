"""Quantised models: their modules multiply, and the result is that of the same model unwrapped, or a refusal."""

from __future__ import annotations

import importlib.util
import re
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import compiled_llm
from support.docs.pages import DOCS
from support.huggingface.pairs import OPTIONS
from support.huggingface.quantised_kinds import MODES, WAYS, Way
from support.parity import greedy, mixed_prompts
from support.tiny_models import tiny_llama

PAGE = DOCS / "reference" / "compatibility.md"
PROMPTS = mixed_prompts([5, 3], 128, seed=0)
UNPADDED = mixed_prompts([4, 4], 128, seed=0)
"""For numbers: the last bits that padding changes become whole steps where activations have eight bits."""


def installed(package: str) -> bool:
    try:
        return not package or importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # of the package around it
        return False


def cases() -> list[Any]:
    """Those of a package that is not here are skipped: transformers would import it in all other tests too."""
    return [pytest.param(way, mode, id=f"{way}, {mode}", marks=marks(way, mode)) for way in WAYS for mode in MODES]


def marks(way: Way, mode: str) -> list[pytest.MarkDecorator]:
    plain = [pytest.mark.whole] if way.plain and mode == "compile" else []  # as others' weights are
    return [*plain, pytest.mark.skipif(not installed(way.needs), reason=f"no {way.needs}")]


@cache
def unwrapped(way: Way) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of the model as it is, and last logits."""
    plain: Any = way.load()
    with torch.no_grad():
        return greedy(plain, PROMPTS, 8), plain(**UNPADDED).logits[:, -1]


@pytest.mark.usefixtures("without_inductor")
@pytest.mark.parametrize(("way", "mode"), cases())
def test_a_quantised_model_gives_huggingfaces_tokens_or_is_refused_by_the_name_of_the_module(
    way: Way, mode: str
) -> None:
    tokens, logits = unwrapped(way)
    model: Any = way.load()
    options = {**OPTIONS, "mode": mode}
    if way.refuses(mode):
        with pytest.raises(compiled_llm.UnsupportedModelError, match=f"wrap: \\S*({way.refused})"):
            compiled_llm.wrap(model, **options)
    else:
        compiled_llm.wrap(model, **options)
        torch.testing.assert_close(greedy(model, PROMPTS, 8), tokens)
        assert model.compiled.stats().generate_calls == {"fast loop": 1}
        with torch.no_grad():
            torch.testing.assert_close(model(**UNPADDED).logits[:, -1], logits, rtol=1e-4, atol=1e-4)
        compiled_llm.unwrap(model)
    torch.testing.assert_close(greedy(model, PROMPTS, 8), tokens)


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(way, id=str(way), marks=pytest.mark.skipif(not installed(way.needs), reason=f"no {way.needs}"))
        for way in WAYS
        if not (way.plain or way.refuses("eager"))
    ],
)
@torch.no_grad()
def test_rows_change_each_other_exactly_where_the_page_says_so(way: Way) -> None:
    """In the quantised model as it is."""
    model, rows = way.load(), mixed_prompts([9, 9, 9, 9], 128, seed=0)["input_ids"]
    alone = torch.cat([model(row[None]).logits for row in rows])
    assert torch.allclose(model(rows).logits, alone, rtol=1e-3, atol=1e-3) != way.by_call


def test_packed_weights_can_be_wrapped_again() -> None:
    """They cannot be compared, which what torch keeps of fake ops would do."""
    model: Any = WAYS[0].load()
    for _ in range(2):
        compiled_llm.wrap(model, **OPTIONS)
        greedy(model, PROMPTS, 2)
        compiled_llm.unwrap(model)


def test_the_page_has_a_row_for_each_way_to_quantise() -> None:
    section = PAGE.read_text().partition("## Quantised models")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| .+ \|$", section, re.MULTILINE)
    assert rows[1:] == [way.row for way in WAYS]


class Replacing(nn.Linear):
    """Multiplies by another weight that it puts in place of its own, as those of compressed-tensors do."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        own = self.weight.data
        self.weight.data = own * 1
        return super().forward(input)


def test_weights_that_are_replaced_while_the_model_is_tried_are_its_own_again() -> None:
    """On tensors without memory they lose their values, which then is a refusal."""
    model: Any = tiny_llama(num_hidden_layers=1)
    expected, weight = greedy(model, PROMPTS, 4), model.lm_head.weight
    model.lm_head.__class__ = Replacing
    with pytest.raises(compiled_llm.UnsupportedModelError, match="cannot be traced with packed tokens"):
        compiled_llm.wrap(model, **OPTIONS)
    assert model.lm_head.weight is weight
    torch.testing.assert_close(greedy(model, PROMPTS, 4), expected)


class Params4bit(nn.Parameter):
    """As that of bitsandbytes."""

    quant_state = None


class PackedLate(nn.Linear):
    """Gives its weight another form in the first call, as four bits of bitsandbytes on a CPU."""

    packed = False

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight: Any = self.weight
        if not getattr(weight, "packed", False):
            weight.data, weight.packed = weight.data.T.contiguous(), True
        return nn.functional.linear(input, self.weight.T)


def test_weights_that_a_first_call_packs_anew_are_packed_from_their_values() -> None:
    model: Any = tiny_llama(num_hidden_layers=1)
    expected = greedy(model, PROMPTS, 4)
    model.lm_head.weight = Params4bit(model.lm_head.weight.detach().clone())
    model.lm_head.__class__ = PackedLate
    compiled_llm.wrap(model, **OPTIONS)
    torch.testing.assert_close(greedy(model, PROMPTS, 4), expected)
