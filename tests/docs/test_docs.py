"""README and docs are true: their Python runs, their links lead somewhere, and lists that should be whole are.

All blocks of a page share one namespace and run in order, on the CPU and in `mode="eager"` unless they name a mode.
They find `name` (a folder with a tiny model that never stops), `tokenizer`, and `model`, wrapped. What a line prints is
compared where the line says so: `print(x)  # -> 3`. A block that cannot run here has a line before it:
`<!-- skip: the reason -->`; `ALLOWED_SKIPS` says how many there may be.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import importlib.util
import io
import json
import re
import sys
from collections.abc import Iterator
from importlib.metadata import metadata, requires
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import compiled_llm
import compiled_llm_ops
from compiled_llm.config import WrapConfig
from compiled_llm.env import Env
from support.families import FAMILIES, REFUSED
from support.tiny_models import tiny_qwen3

CHECKOUT = Path(__file__).parents[2]
DOCS = CHECKOUT / "docs"
PAGES = [CHECKOUT / "README.md", *sorted(DOCS.rglob("*.md"))]
ALLOWED_SKIPS = 0

_BLOCK = re.compile(r"(?:^<!-- skip: (?P<skip>.+?) -->\n+)?^```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
_PRINTS = re.compile(r"^ *print\(.*\)  # -> (.+)$", re.MULTILINE)


class Block(NamedTuple):
    """A piece of Python on a page."""

    line: int
    code: str
    skip: str | None

    @property
    def prints(self) -> list[str]:
        return _PRINTS.findall(self.code)


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(text.count("\n", 0, match.start("code")), match["code"], match["skip"]) for match in _BLOCK.finditer(text)
    ]


def short(page: Path) -> str:
    return str(page.relative_to(CHECKOUT))


WITH_CODE = [page for page in PAGES if blocks_of(page)]


# ---- the Python of a page runs, and prints what it says


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, with a tokenizer of one token a character."""
    folder = tmp_path_factory.mktemp("docs") / "tiny"
    tiny_qwen3(eos_token_id=None).save_pretrained(folder)
    vocabulary = ["<pad>", "<s>", "</s>", "<unk>", *map(chr, range(32, 127))]
    vocabulary += [f"<{i}>" for i in range(len(vocabulary), 128)]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(vocabulary)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>").save_pretrained(folder)
    return folder


@pytest.fixture
def namespace(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the blocks of a page find."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    wrap = compiled_llm.wrap
    monkeypatch.setattr(compiled_llm, "wrap", lambda model, **options: wrap(model, **{"mode": "eager", **options}))
    model = AutoModelForCausalLM.from_pretrained(tiny_folder)
    return {
        "__name__": "__main__",
        "name": str(tiny_folder),
        "tokenizer": AutoTokenizer.from_pretrained(tiny_folder),
        "model": compiled_llm.wrap(model, progress=False),
    }


def run(block: Block, page: Path, namespace: dict[str, Any]) -> list[str]:
    """Run a block, with the page's own line numbers in tracebacks; return what it printed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile("\n" * block.line + block.code, str(page), "exec"), namespace)
    return printed.getvalue().splitlines()


@pytest.mark.parametrize("page", WITH_CODE, ids=short)
def test_python_of_a_page_runs_and_prints_what_it_says(page: Path, namespace: dict[str, Any]) -> None:
    for block in blocks_of(page):
        if block.skip is not None:
            continue
        lines = iter(run(block, page, namespace))
        for expected in block.prints:
            assert expected in lines, f"{short(page)}, line {block.line}: {expected!r} is not printed, or not in order"


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
    assert {short(page) for page in (DOCS / "how-to").glob("*.md")} - names == {"docs/how-to/troubleshooting.md"}


# ---- links


def anchors_of(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+?) *$", without_code(page.read_text()), re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles}


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def links_of(page: Path) -> Iterator[tuple[Path, str]]:
    """Each link with the folder that it starts from; pages that are put together from others count as links."""
    text = without_code(page.read_text())
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"\w+:", link):
            yield page.parent, link
    for path in re.findall(r'^--8<-- "(.+)"$', text, re.MULTILINE):
        yield CHECKOUT, path


@pytest.mark.parametrize("page", [*PAGES, CHECKOUT / "CONTRIBUTING.md", CHECKOUT / "CHANGELOG.md"], ids=short)
def test_links_lead_somewhere(page: Path) -> None:
    for folder, link in links_of(page):
        path, _, anchor = link.partition("#")
        target = (folder / path).resolve() if path else page
        assert target.exists(), f"{short(page)}: {link}"
        if target.suffix == ".md" and target.is_relative_to(DOCS):
            assert not anchor or anchor in anchors_of(target), f"{short(page)}: {link}"


def test_every_page_is_in_the_navigation_and_every_entry_is_a_page() -> None:
    navigation = (CHECKOUT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    listed = re.findall(r": (\S+\.md)$", navigation, re.MULTILINE)
    assert sorted(listed) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


def test_nothing_is_fetched_from_elsewhere_to_read_a_page() -> None:
    assert re.search(r"^  font: false", (CHECKOUT / "mkdocs.yml").read_text(), re.MULTILINE)
    for file in (*DOCS.rglob("*.css"), *DOCS.rglob("*.svg"), *PAGES):
        assert not re.search(r"(src=|url\(|@import|!\[[^]]*\]\()\s*[\"']?(https?:)?//", file.read_text()), short(file)


# ---- what pages promise to list whole


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    """The tables that mkdocs puts into pages."""
    spec = importlib.util.spec_from_file_location("docs_hooks", DOCS / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rendered(hooks: ModuleType, page: str) -> str:
    markdown: str = hooks.on_page_markdown((DOCS / "reference" / page).read_text())
    assert "<!-- table" not in markdown
    return markdown


def test_every_option_is_documented_with_its_default(hooks: ModuleType) -> None:
    assert "(docs/reference/options.md)" in (CHECKOUT / "README.md").read_text()
    options = rendered(hooks, "options.md")
    for field in dataclasses.fields(WrapConfig):
        row = re.search(rf"^\| `{field.name}` \| [^|]+ \| `(.+?)` \| (.{{20,}}) \|$", options, re.MULTILINE)
        assert row is not None, field.name
        assert eval(row[1]) == field.default


def package_sources() -> list[Path]:
    folders = [Path(str(package.__file__)).parent for package in (compiled_llm, compiled_llm_ops)]
    return sorted(file for folder in folders for file in folder.rglob("*.py"))


def test_every_environment_variable_is_documented(hooks: ModuleType) -> None:
    page = rendered(hooks, "environment.md")
    assert len(dataclasses.fields(Env)) == len(re.findall(r"^\| `[A-Z_]+` \|", hooks.environment(), re.MULTILINE))
    read = set()
    for file in package_sources():
        read |= set(re.findall(r"(?:environ\.get\(|environ\[|getenv\()\s*[\"'](\w+)", file.read_text()))
    assert read >= {"COMPILED_LLM_CACHE", "XDG_CACHE_HOME"}
    for variable in read:
        assert f"`{variable}`" in page, variable


def test_a_field_that_the_docstring_leaves_out_is_an_error(hooks: ModuleType) -> None:
    @dataclasses.dataclass
    class Forgetful:
        """A class.

        Attributes:
            first: one.
        """

        first: int
        second: int

    with pytest.raises(ValueError, match="second"):
        hooks.described(Forgetful)


def test_api_pages_name_everything_public() -> None:
    api, ops = ((DOCS / "reference" / page).read_text() for page in ("api.md", "ops.md"))
    for page, package in ((api, compiled_llm), (ops, compiled_llm_ops)):
        for name in package.__all__:
            assert re.search(rf"^::: [\w.]+\.{name}$", page, re.MULTILINE), name
    for page in (api, ops):
        for path in re.findall(r"^::: ([\w.]+)\.(\w+)$", page, re.MULTILINE):
            assert hasattr(importlib.import_module(path[0]), path[1]), path


def test_every_tested_family_is_on_the_compatibility_page() -> None:
    page = (DOCS / "reference" / "compatibility.md").read_text()
    for family in (*FAMILIES, *REFUSED):
        assert re.search(rf"[ ,]{family.removesuffix('LMHead')}[ ,]", page), family


# ---- versions: the page, what pip is told, and what the matrix has shown

# The first release after the newest that passed, by how many of its numbers count.
NEXT = {"torch": 2, "transformers": 1, "flashinfer-python": 2}


@pytest.fixture(scope="module")
def matrix() -> dict[str, Any]:
    results: dict[str, Any] = json.loads((DOCS / "matrix.json").read_text())
    return results


def shown(matrix: dict[str, Any], package: str) -> list[Version]:
    """The versions that passed, oldest first."""
    versions = {result["versions"].get(package) for result in matrix.values() if result["result"] == "passed"}
    return sorted(Version(Version(version).public) for version in versions if version)


def range_of(package: str) -> SpecifierSet:
    named = (Requirement(text) for text in requires("compiled-llm") or [])
    return next(requirement.specifier for requirement in named if requirement.name == package)


def test_matrix_has_one_row_a_result_and_each_says_what_came_of_it(hooks: ModuleType, matrix: dict[str, Any]) -> None:
    page = rendered(hooks, "compatibility.md")
    rows = re.findall(r"^\| `([\w-]+)` \|(?: [^|]*\|){4} (.+) \| [\d-]{10} \|$", page, re.MULTILINE)
    assert [name for name, _ in rows] == list(matrix)
    for name, text in rows:
        result = matrix[name]
        if result["result"] == "passed":
            assert result["passed"] > 0
            assert text.startswith(f"{result['passed']} passed"), name
        else:
            assert re.match(r"\*\*failed\*\*: `.+`|(failed|not run): .+", text), name


ENDS = {
    "torch": {"torch211", "torch215"},
    "transformers": {"transformers-oldest", "transformers-newest"},
    "flashinfer-python": {"flashinfer06", "flashinfer07"},
    "python": {"py310", "py312", "py313"},
}
"""The environments that show both ends of a range."""


def require_results(package: str, matrix: dict[str, Any]) -> None:
    if missing := sorted(ENDS[package] - set(matrix)):
        pytest.skip(f"the matrix has not been run for {', '.join(missing)}")


@pytest.mark.parametrize("package", NEXT)
def test_ranges_end_where_the_matrix_has_ended(package: str, matrix: dict[str, Any]) -> None:
    require_results(package, matrix)
    versions, allowed = shown(matrix, package), range_of(package)
    assert all(version in allowed for version in versions)
    (lowest,) = (Version(bound.version) for bound in allowed if bound.operator == ">=")
    assert versions[0].release[: len(lowest.release)] == lowest.release
    numbers = list(versions[-1].release[: NEXT[package]])
    following = ".".join(map(str, [*numbers[:-1], numbers[-1] + 1]))
    assert following not in allowed


def test_pythons_that_are_named_have_been_shown(matrix: dict[str, Any]) -> None:
    require_results("python", matrix)
    minors = {version.release[:2] for version in shown(matrix, "python")}
    named = metadata("compiled-llm").get_all("Classifier") or []
    classified = re.findall(r"^Programming Language :: Python :: (\d+)\.(\d+)$", "\n".join(named), re.MULTILINE)
    assert {(int(major), int(minor)) for major, minor in classified} == minors
    oldest = ".".join(map(str, min(minors)))
    assert metadata("compiled-llm")["Requires-Python"] == f">={oldest}"


def test_page_names_the_ranges_that_pip_is_told() -> None:
    page = (DOCS / "reference" / "compatibility.md").read_text()
    ranges = {"Python": SpecifierSet(metadata("compiled-llm")["Requires-Python"])}
    titles = {"PyTorch": "torch", "transformers": "transformers", "FlashInfer (extra `cuda`)": "flashinfer-python"}
    ranges.update({title: range_of(package) for title, package in titles.items()})
    for title, allowed in ranges.items():
        row = re.search(rf"^\| {re.escape(title)} \| `(.+)` \|$", page, re.MULTILINE)
        assert row is not None, title
        assert SpecifierSet(row[1]) == allowed, title


# ---- error messages: those on the page exist, and those that exist are on the page

# The modules whose messages reach somebody who calls wrap or generate.
# Where errors are raised that a user meets; a `Runner`'s are met by whoever writes a loop of their own.
SPEAKING = ("config.py", "model/*.py", "kvcache/*.py", "execution/[!r]*.py", "execution/runtime.py", "huggingface/*.py")
# Only for people who write a loop of their own, or said by another message on the page.
UNLISTED = {
    "a row cannot have room for ",
    "a row of ",
    " tokens cannot forget ",
    "step: the rows have no next tokens; give them as forced tokens",
}


def messages_on_the_page() -> list[list[str]]:
    """Each as the pieces between what depends on the call."""
    text = (DOCS / "how-to" / "troubleshooting.md").read_text()
    return [
        [piece for piece in message.split("…") if len(piece) > 1]
        for message in re.findall(r"^`(.+)`\n:   ", text, re.MULTILINE)
    ]


def pieces_of(node: ast.expr) -> list[str]:
    """The constant pieces of a string or f-string."""
    values = node.values if isinstance(node, ast.JoinedStr) else [node]
    return [part.value for part in values if isinstance(part, ast.Constant) and isinstance(part.value, str)]


def strings_in(tree: ast.AST) -> list[list[str]]:
    found = (pieces_of(node) for node in ast.walk(tree) if isinstance(node, (ast.JoinedStr, ast.Constant)))
    return [pieces for pieces in found if pieces]


def shows(listed: list[str], actual: list[str]) -> bool:
    """Whether each piece on the page is part of the message, in order."""
    rest = "\0".join(actual)
    for piece in listed:
        _, found, rest = rest.partition(piece)
        if not found:
            return False
    return True


def test_every_message_on_the_troubleshooting_page_exists() -> None:
    actual = [pieces for file in package_sources() for pieces in strings_in(ast.parse(file.read_text()))]
    listed = messages_on_the_page()
    assert len(listed) > 40
    for message in listed:
        assert any(shows(message, pieces) for pieces in actual), message


def test_every_message_is_on_the_troubleshooting_page() -> None:
    listed, missing = messages_on_the_page(), []
    package = Path(str(sys.modules["compiled_llm"].__file__)).parent
    for source in (file for pattern in SPEAKING for file in sorted(package.glob(pattern))):
        for node in ast.walk(ast.parse(source.read_text())):
            if not (isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args):
                continue
            if getattr(node.exc.func, "id", "").startswith("_"):  # it builds the error elsewhere
                continue
            pieces = pieces_of(node.exc.args[0])
            if max(map(len, pieces), default=0) < 12 or UNLISTED.intersection(pieces):
                continue
            if not any(shows(message, pieces) for message in listed):
                missing.append(f"{source.relative_to(package)}, line {node.lineno}: {'…'.join(pieces)}")
    assert missing == []
