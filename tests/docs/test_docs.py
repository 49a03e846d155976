"""The Python of README and docs runs, and prints what it says.

All blocks of a page share one namespace and run in order, on the CPU and in `mode="eager"` unless they name a mode,
whose programs run as Python; of the demo model, as Dynamo leaves their graphs.
They find nothing but what the line at the top of the page makes if it is pasted, `model` and `tokenizer`; pages without
that line load a model themselves. The model that they name, and the demo model, is a tiny one here; with `--whole`,
pages that name the demo model run with that one, too. What a line prints is compared where the line says so:
`print(x)  # -> 3`. A block that cannot run here has a line before it: `<!-- skip: the reason -->`; `ALLOWED_SKIPS` says
how many there may be. If the reason is `needs PACKAGE`, the block runs where that is installed (`tox -e quantised`).
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import compiled_llm
from support.compilation.explaining_less import explain_less
from support.docs.pages import DOCS, HUB_ID, PAGES, beginning_of, blocks_of, run, short
from support.docs.tiny_chat import loaded, served, tiny_chat_model
from support.huggingface.vision import make
from support.huggingface.word_processor import qwen_processor
from support.tiny_gguf import write_gguf
from support.tiny_models import tiny_llama

ALLOWED_SKIPS = 6
GGUF = Path("models") / "SmolLM2-135M-Instruct.Q4_1.gguf"
WITH_CODE = [page for page in PAGES if blocks_of(page)]
WITH_DEMO = [
    page
    for page in WITH_CODE
    if any("compiled_llm.demo()" in code for code in (beginning_of(page), *(block.code for block in blocks_of(page))))
]


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_chat_model(tmp_path_factory.mktemp("docs") / "tiny")


@pytest.fixture
def model_folder(request: pytest.FixtureRequest) -> Path:
    """What pages find as the demo model, by the name of a fixture."""
    # Of the demo model's many layers, equal ones are left out of graphs: untraced, it would not run.
    request.getfixturevalue("untraced" if request.param == "tiny_folder" else "without_inductor")
    folder: Path = request.getfixturevalue(request.param)
    return folder


@pytest.fixture
def namespace(
    page: Path, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, Any]]:
    """What the blocks of a page find: what its top says, once it is pasted."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / HUB_ID).parent.mkdir()
    (tmp_path / HUB_ID).symlink_to(model_folder)  # from_pretrained takes a folder of that name before it asks the hub
    if GGUF.name in page.read_text():
        (tmp_path / GGUF).parent.mkdir()
        write_gguf(tmp_path / GGUF, tiny_llama(eos_token_id=None))
    if "AutoProcessor" in page.read_text():
        monkeypatch.setattr(
            "transformers.AutoModelForImageTextToText.from_pretrained", lambda *_, **__: make("Qwen3VL")
        )
        monkeypatch.setattr("transformers.AutoProcessor.from_pretrained", lambda _: qwen_processor())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    explain_less(monkeypatch)
    wrap = compiled_llm.wrap
    # No page waits for artifacts to be compiled: tests/compilation/test_artifacts.py does.
    monkeypatch.setattr(
        *(compiled_llm, "wrap"), lambda model, artifacts=None, **options: wrap(model, **{"mode": "eager", **options})
    )
    monkeypatch.setattr(compiled_llm, "demo", lambda: loaded(model_folder))
    found = {"__name__": "__main__"}
    exec(beginning_of(page), found)
    threads = torch.get_num_threads()
    with served(model_folder, monkeypatch) if "compiled-llm serve" in page.read_text() else nullcontext():
        yield found
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("page", "model_folder"),
    [
        *(pytest.param(page, "tiny_folder", id=short(page)) for page in WITH_CODE),
        *(
            pytest.param(
                *(page, "demo_model_dir"),
                id=f"{short(page)}-demo",
                marks=[pytest.mark.whole, pytest.mark.timeout(3600)],
            )
            for page in WITH_DEMO
        ),
    ],
    indirect=["model_folder"],
)
def test_python_of_a_page_runs_and_prints_what_it_says(page: Path, namespace: dict[str, Any]) -> None:
    for block in blocks_of(page):
        if block.skip is not None and not has_what_it_needs(block.skip):
            continue
        lines = iter(run(block, page, namespace))
        for expected in block.prints:
            assert expected in lines, f"{short(page)}, line {block.line}: {expected!r} is not printed, or not in order"


def has_what_it_needs(reason: str) -> bool:
    _, needs, package = reason.partition("needs ")
    return bool(needs) and importlib.util.find_spec(package) is not None


def test_no_python_is_overlooked() -> None:
    """Blocks in lists or with other fences would not be collected."""
    for page in PAGES:
        fences = re.findall(r"^.*(?:```|~~~)\s*\{?\.?(?:python|py)\b.*$", page.read_text(), re.MULTILINE)
        assert len(fences) == len(blocks_of(page)), f"{short(page)}: {fences}"
        arrows = page.read_text().count("# ->")
        assert arrows == sum(len(block.prints) for block in blocks_of(page)), (
            f"{short(page)}: '# ->' is for print lines"
        )


def test_few_blocks_are_skipped() -> None:
    skipped = [f"{short(page)}:{block.line} {block.skip}" for page in PAGES for block in blocks_of(page) if block.skip]
    print(*skipped, sep="\n")
    assert len(skipped) <= ALLOWED_SKIPS


def test_most_pages_have_code_that_runs() -> None:
    names = {short(page) for page in WITH_CODE}
    assert "README.md" in names
    # A notebook's code has a test of its own; chats, deploying and vLLM's options are commands alone.
    without = {f"docs/how-to/{name}.md" for name in ("chatting", "deploy", "from-vllm", "notebook", "troubleshooting")}
    assert {short(page) for page in (DOCS / "how-to").glob("*.md")} - names == without
