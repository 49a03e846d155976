"""What pages promise to list whole, they do: options, environment variables, the API, families."""

from __future__ import annotations

import dataclasses
import importlib.util
import re

import pytest
import torch

import compiled_llm
import compiled_llm_flashinfer.ops
import compiled_llm_ops
from compiled_llm.config import WrapConfig
from compiled_llm.env import Env
from support.docs.pages import CHECKOUT, DOCS, hooks, rendered
from support.huggingface import models_page, vision
from support.huggingface.families import FAMILIES, LATER, REFUSED
from support.huggingface.recurrent_families import KNOWN
from support.imports import sources
from support.tiny_models import tiny_qwen3


def test_every_option_is_documented_with_its_default() -> None:
    assert "(docs/reference/options.md)" in (CHECKOUT / "README.md").read_text()
    options = rendered("options.md")
    for field in dataclasses.fields(WrapConfig):
        row = re.search(rf"^\| `{field.name}` \| [^|]+ \| `(.+?)` \| (.{{20,}}) \|$", options, re.MULTILINE)
        assert row is not None, field.name
        assert eval(row[1]) == field.default


def test_every_environment_variable_is_documented() -> None:
    page = rendered("environment.md")
    assert len(dataclasses.fields(Env)) == len(re.findall(r"^\| `[A-Z_]+` \|", hooks().environment(), re.MULTILINE))
    read = set()
    for file in sources().values():
        read |= set(re.findall(r"(?:environ\.get\(|environ\[|getenv\()\s*[\"'](\w+)", file.read_text()))
    assert read >= {"COMPILED_LLM_CACHE", "XDG_CACHE_HOME"}
    for variable in read:
        assert f"`{variable}`" in page, variable


def test_a_field_that_the_docstring_leaves_out_is_an_error() -> None:
    @dataclasses.dataclass
    class Forgetful:
        """A class.

        Attributes:
            first: one.
        """

        first: int
        second: int

    with pytest.raises(ValueError, match="second"):
        hooks().described(Forgetful)


def test_api_pages_name_everything_public() -> None:
    reference = DOCS / "reference"
    packages = {"api": compiled_llm, "ops": compiled_llm_ops, "flashinfer": compiled_llm_flashinfer.ops}
    for pages, package in packages.items():
        page = "\n".join(page.read_text() for page in reference.glob(f"{pages}*.md"))
        for name in package.__all__:
            assert re.search(rf"^::: [\w.]+\.{name}$", page, re.MULTILINE), name
        for path in re.findall(r"^::: ([\w.]+)\.(\w+)$", page, re.MULTILINE):
            assert hasattr(importlib.import_module(path[0]), path[1]), path


def test_the_models_page_has_each_family_that_is_tested_and_what_was_compared() -> None:
    written = models_page.BETWEEN.search(models_page.PAGE.read_text())
    assert written is not None
    assert written[0] == models_page.tables(), "run `python tests/support/huggingface/models_page.py`"
    assert models_page.TESTED.keys() == FAMILIES.keys() | LATER.keys()
    assert models_page.RECURRENT.keys() == KNOWN.keys()
    assert models_page.WITH_IMAGES.keys() == vision.KNOWN.keys()
    assert models_page.REFUSED.keys() >= REFUSED.keys() - LATER.keys()


@pytest.mark.parametrize("family", sorted(models_page.REFUSED.keys() - REFUSED.keys()))
def test_what_the_models_page_says_is_refused_is_tried(family: str) -> None:
    tried = (CHECKOUT / "tests" / "huggingface" / "test_bad_input.py").read_text()
    assert f'"{models_page.class_of(family)}"' in tried


@pytest.mark.parametrize("example", models_page.EXAMPLES, ids=lambda example: example.hub)
def test_an_example_is_an_id_of_the_hub(example: models_page.Example) -> None:
    assert re.fullmatch(r"[\w.-]+/[\w.-]+", example.hub)


def test_stats_print_as_their_page_shows(without_inductor: None) -> None:
    """All but what is measured, numbers with a point; the call is that of the page."""
    model = compiled_llm.wrap(tiny_qwen3(eos_token_id=None), progress=False)
    inputs = {"input_ids": torch.arange(1, 24)[None]}
    model.generate(**inputs, max_new_tokens=40, do_sample=False)
    model.generate(**inputs, max_new_tokens=5, num_beams=2)
    with torch.no_grad():
        model(**inputs, labels=inputs["input_ids"])
    (shown,) = re.findall(r"^```text\n(.*?)^```$", (DOCS / "how-to" / "stats.md").read_text(), re.MULTILINE | re.DOTALL)
    assert without_measured(shown) == without_measured(str(model.compiled.stats()))


def without_measured(text: str) -> list[str]:
    return [re.sub(r"[\d,]+\.\d+", "0.0", line.rstrip()) for line in text.strip().splitlines()]


def test_what_does_not_fit_is_refused_as_the_page_about_memory_shows() -> None:
    model = compiled_llm.wrap(tiny_qwen3(), mode="eager", kv_memory="640 tokens", max_batch_size=4)
    with pytest.raises(ValueError, match="max_new_tokens=900") as refused:
        model.generate(torch.arange(1, 5)[None], max_new_tokens=900)
    (shown,) = re.findall(
        r"^```text\n(.*?)^```$", (DOCS / "how-to" / "memory.md").read_text(), re.MULTILINE | re.DOTALL
    )
    assert shown.split() == str(refused.value).split()


def test_every_field_of_stats_is_on_its_page() -> None:
    page = (DOCS / "how-to" / "stats.md").read_text()
    for name in (*(field.name for field in dataclasses.fields(compiled_llm.Stats)), "tokens_per_second"):
        assert f"`{name}`" in page, name
