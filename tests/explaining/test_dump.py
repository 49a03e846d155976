"""A dump holds every layer between a line of Python and its kernels, and leads from one to the next."""

from __future__ import annotations

import json
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import torch
from torch import fx

import compiled_llm
from compiled_llm.compilation import backend, programs
from compiled_llm.compilation.program_list import DECODE_MANY, PREFILL
from compiled_llm.compilation.tracing import layer_marks
from compiled_llm.explaining.dump import dump
from compiled_llm.explaining.dump.links import NODES, SourceLink, kernels_of, lines_of, parts_of
from compiled_llm.explaining.dump.pages import DumpPages, link_to
from compiled_llm.explaining.profile import timings
from compiled_llm.explaining.report import Report
from compiled_llm.explaining.tracing import Sandbox
from compiled_llm.model.places import Place
from support import planted_faults as planted
from support.compilation.left_uncompiled import leave_uncompiled
from support.compilation.unbuilt_kernels import leave_kernels_unbuilt
from support.html_text import HtmlText
from support.parity import greedy, mixed_prompts
from support.planted_faults import plant

depyf = pytest.importorskip("depyf")
pytestmark = pytest.mark.usefixtures("one_thread")

STAGES = ["1_bytecode.py", "2_guards.txt", "3_graph.py", "4_aten_graph.py", "5_inductor.py"]
PROGRAMS = ["prefill", "decode-batch-1", "decode-larger-batches"]
COMPILED = PROGRAMS[1]
"""The program that Inductor compiles without --whole, too."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dump") / "new" / "folder"


@pytest.fixture(scope="module")
def report(request: pytest.FixtureRequest, root: Path, one_thread: None) -> Report:
    """Of a model whose layer has a line of ours; ``wrap`` would compile it in regions, as it does models of many.

    Inductor writes its files before it builds what is in them, which takes most of the time and is left to --whole.
    So are its files of all programs but one.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs, "_LAYERS_IN_REGION_ON_CPU", 1)
        if not request.config.getoption("whole"):
            leave_kernels_unbuilt(patch)
            leave_uncompiled(patch, PREFILL, DECODE_MANY)
        return compiled_llm.explain(plant(planted.ItemLeftATensor), dump=root)


def lines_at(page: Path, links: list[str], stage: str) -> list[str]:
    """The text of the lines in a stage that links of a page lead to, with the line after each."""
    found = []
    for address, _, anchor in (link.partition("#") for link in links if stage in link):
        text = (page.parent / unquote(address)).read_text()
        lines = re.findall(r'<span id="(L-\d+)"><span class="linenos"> *\d+</span>(.*)\n', text)
        at = [name for name, _ in lines].index(anchor)
        found.append("\n".join(HtmlText(text).words for _, text in lines[at : at + 2]))
    return found


def row_of(root: Path, source: str, program: str = COMPILED) -> tuple[Path, HtmlText]:
    """The first row of a program's pages that shows a line of source, and the page."""
    rows = (
        (page, HtmlText(row))
        for page in sorted((root / "pages" / program).glob("part_*.html"))
        for row in re.findall(r"<tr>.*?</tr>", page.read_text(), re.DOTALL)
    )
    return next((page, row) for page, row in rows if source in row.words)


def test_every_stage_of_every_program_is_there(root, report, whole):
    assert report.clean
    assert report.data["notes"] == []
    for program in PROGRAMS:
        stages = STAGES if whole or program == COMPILED else STAGES[:3]
        assert sorted(path.name for path in (root / program).iterdir() if path.is_file()) == stages
        texts = [(root / program / stage).read_text() for stage in stages]
        signs = ["__compiled_fn_", "GuardManager", "amax", "torch.ops.aten.amax", "AsyncCompile"]
        assert [sign in text for sign, text in zip(signs[: len(stages)], texts, strict=True)] == [True] * len(stages)
        compile(texts[0], program, "exec")
        if len(stages) == 5:
            parts = [part in texts[3] for part in ("aten.embedding", "_attention", "sample_tokens")]
            assert parts == [True] * 3, "not in regions, as wrap would compile it"
    assert json.loads((root / "report.json").read_text()) == report.data
    assert "Every program is one graph" in (root / "report.html").read_text()


def test_every_link_leads_somewhere_and_every_page_back_to_the_index(root, report):
    index, pages, anchors, seen = root / "index.html", set(root.rglob("*.html")), {}, 0
    for page in pages:
        links = HtmlText("".join(line for line in page.open() if "href=" in line or "src=" in line)).links
        seen += len(links)
        addresses = {link: link.partition("#")[0] for link in links}
        places = {address: (page.parent / unquote(address)).resolve() for address in set(addresses.values())}
        assert page == index or index in places.values(), page
        for place in places.values():
            assert place.exists(), (page, place)
            if place.suffix == ".html" and place not in anchors:
                anchors[place] = {"", *re.findall(r'id="(L-\d+)"', place.read_text())}
        for link, address in addresses.items():
            assert link.partition("#")[2] in anchors.get(places[address], {""}), (page, link)
    assert seen > 300
    assert set(anchors) == pages, "no page is out of reach"


def test_a_line_leads_to_its_nodes_and_they_to_a_kernel(root, report):
    source = "scale = 1.0 + 0.01 * x.abs().amax(dim=-1, keepdim=True)"
    page, row = row_of(root, source)
    assert source in lines_at(page, row.links, "source/")[0]
    nodes = lines_at(page, row.links, "3_graph")
    signs = (".abs(", ".amax(", " * ", " + ")
    assert [sign in node.splitlines()[0] for sign, node in zip(signs, nodes, strict=True)] == [True] * 4
    kernels = lines_at(page, row.links, "5_inductor")
    assert any("amax" in kernel.splitlines()[1] for kernel in kernels), kernels


def test_a_library_kernel_is_linked_to_the_line_that_calls_it_alone(root, report):
    page, row = row_of(root, "attention_interface(")
    assert any("decode_attention" in kernel for kernel in lines_at(page, row.links, "5_inductor"))
    page, row = row_of(root, "k_embed = (k * cos)")
    rotation = lines_at(page, row.links, "5_inductor")
    assert rotation
    assert not any("decode_attention.default" in kernel for kernel in rotation)


def test_library_kernels_are_those_of_their_operator():
    provenance = {
        "preToPost": {"linear": ["mm_1", "view"], "norm": ["mean"]},
        "postToCppCode": {
            "mm_1": ["extern_kernels.mm:3"],
            "view": ["extern_kernels.mm:3"],
            "mean": ["extern_kernels.mm:3", "triton_red_fused_mean_0:2", "torch.ops.a.paged.default:4"],
        },
    }
    assert list(kernels_of("linear", provenance)) == ["extern_kernels.mm:3"]
    assert list(kernels_of("norm", provenance)) == ["triton_red_fused_mean_0:2"]


def test_lines_are_found_by_layer(root, report):
    index = (root / "index.html").read_text()
    assert index.count(">model.layers.0</a>") == len(PROGRAMS)
    assert index.count(">lm_head</a>") == len(PROGRAMS)
    assert "self_attn.q_proj" in row_of(root, "self.q_proj(")[1].words


@pytest.mark.whole
def test_inductor_knows_nodes_by_the_names_that_pages_show(tmp_path, monkeypatch, without_inductor):
    """Kernels are linked by these names. Layers that are traced once for all have others."""
    given: list[set[str]] = []

    def fill(graph: fx.Graph) -> None:
        layer_marks.fill(graph)
        given.append({node.name for node in graph.nodes if node.op.startswith("call")})

    monkeypatch.setattr(backend, "fill", fill)
    assert compiled_llm.explain(plant(*[planted.PrintDeleted] * 3), dump=tmp_path).clean
    graphs = [(tmp_path / program / "3_graph.py").read_text() for program in PROGRAMS]
    assert [names - lines_of(NODES, graph).keys() for names, graph in zip(given, graphs, strict=True)] == [set()] * 3
    assert (tmp_path / "index.html").read_text().count(">model.layers.0-2, alike</a>") == len(PROGRAMS)
    page, row = row_of(tmp_path, "self.q_proj(", "prefill")
    assert "This is model.layers.1." in HtmlText(page.read_text()).words
    (node,) = lines_at(page, row.links, "3_graph")
    assert re.search(r"layers\w*_1_\w*q_proj", node), node


def test_layers_are_alike_if_their_lines_are():
    here, there = Place("a.py", 1, "f"), Place("a.py", 2, "f")

    def lines(module: str, *places: Place) -> list[SourceLink]:
        return [SourceLink(module, place, ["add"], ["cpp_fused_add_0:1"]) for place in places]

    plain, other = [0, 1, 2, 4, 6, 7], [3, 5]
    order = sorted(plain + other)
    links = lines("", here) + lines("embed", here)
    for number in order:
        links += lines(f"layers.{number}.mlp", here, *([there] if number in other else []))
    links += lines("", there) + lines("tower.0", here)
    titles = ["around the model", "embed", "layers.0-2, 4, 6-7, alike", "layers.3, 5, alike", "tower.0"]
    found = parts_of(links)
    assert [part.title for part in found] == titles
    assert [len(part.links[part.shown]) for part in found] == [2, 1, 1, 2, 1]
    assert found[2].modules[found[2].shown] == "layers.4"


@pytest.mark.whole
def test_what_is_not_wrapped_can_be_timed(monkeypatch, without_inductor):
    monkeypatch.setattr(timings, "read_bandwidth", lambda device, dtype: 1e9)
    prefill, decode = compiled_llm.explain(plant(planted.ItemLeftATensor), timings=[1]).data["timings"]
    assert (prefill["program"], decode["program"], decode["rows"]) == ("prefill", "decode", 1)
    assert decode["measured"] == "operators"
    assert {kernel["name"]: kernel["launches"] for kernel in decode["kernels"]}["compiled_llm::decode_attention"] == 1


@pytest.mark.whole
def test_frames_of_a_broken_model_are_named_by_their_function_and_line(tmp_path):
    report = compiled_llm.explain(plant(planted.Print), dump=tmp_path / "dump")
    assert "programs that are one graph each" in " ".join(report.data["notes"])
    frames = tmp_path / "dump" / "frames"
    names = [path.name for path in frames.iterdir()]
    line = planted.Print.forward.__code__.co_firstlineno
    assert f"planted_faults.py:{line} in " in HtmlText((tmp_path / "dump" / "index.html").read_text()).words
    assert any(re.fullmatch(r"\d+_(Print_)?forward_1_1_bytecode.py", name) for name in names)
    assert any("torch.nn" in path.read_text() for path in frames.glob("graph_*.py"))


def test_a_folder_that_holds_something_is_refused_and_left_alone(tmp_path):
    (tmp_path / "mine").write_text("mine")
    for taken in (tmp_path, tmp_path / "mine"):
        with pytest.raises(ValueError, match="name a new or an empty folder"):
            compiled_llm.explain(plant(planted.PrintDeleted), dump=taken)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_folder_of_another_user_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(dump, "belongs_to_another", lambda folder: folder == tmp_path)
    with pytest.raises(ValueError, match="belongs to another user"):
        compiled_llm.explain(plant(planted.PrintDeleted), dump=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_names_of_files_and_sources_are_coloured_text_on_the_pages_and_nothing_else(tmp_path):
    source = tmp_path / '"><script>alert(1)<b>#?%41.py'
    source.write_text('def f():\n    """<script>alert(2)\n    </script>."""\n')
    page = DumpPages(tmp_path).of_source(Place(str(source), 1, "<script>"))
    assert page is not None
    address = link_to(page, 1, seen_from=tmp_path / "index.html")
    assert not set('"<>?') & set(address)
    assert (tmp_path / unquote(address.partition("#")[0])).resolve() == page
    text = page.read_text()
    assert "<script>" not in text
    assert '<span class="k">def</span>' in text
    lines = re.findall(r'<span id="L-\d+"><span class="linenos">\d+</span>(.*)\n', text)
    assert [HtmlText(line).words for line in lines] == source.read_text().splitlines()


# ---- without depyf, with one that fails, and under the user's own


def fails(*_: Any) -> Any:
    raise RuntimeError("something is new\nand strange")


def no_depyf(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "depyf", None)


def new_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(depyf, "decompile", fails)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (no_depyf, r"depyf is not installed.*pip install"),
        (new_torch, r"does not know this Python or torch \(RuntimeError: something is new\)"),
    ],
)
def test_without_a_depyf_that_works_bytecode_is_disassembled(spoil: Callable[..., None], said: str, monkeypatch):
    code = plant.__code__
    python, note = dump.readable(code)
    assert note == ""
    assert "def plant" in python
    spoil(monkeypatch)
    bytecode, note = dump.readable(code)
    assert re.search(said, note)
    assert note in bytecode
    assert "RETURN_VALUE" in bytecode


@pytest.mark.whole
def test_a_dump_is_whole_but_for_what_fails(tmp_path, monkeypatch):
    no_depyf(monkeypatch)
    monkeypatch.setattr(Sandbox, "inductor", fails)
    report = compiled_llm.explain(plant(planted.PrintDeleted), dump=tmp_path)
    assert report.clean
    assert len(report.data["notes"]) == 2
    for note in report.data["notes"]:
        assert note in " ".join(str(report).split())
        assert note in HtmlText((tmp_path / "index.html").read_text()).words
    files = sorted(path.name for path in (tmp_path / "prefill").iterdir())
    assert files == ["1_bytecode.txt", "2_guards.txt", "3_graph.py"]


@pytest.mark.whole
def test_all_works_under_the_users_own_depyf(tmp_path):
    inputs = mixed_prompts([4], 128, seed=0)
    expected = greedy(plant(planted.PrintDeleted), inputs, 6)
    own = tmp_path / "own"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # depyf warns that it is on
        with depyf.prepare_debug(str(own)):
            model = compiled_llm.wrap(plant(planted.PrintDeleted), progress=False)
            torch.testing.assert_close(greedy(model, inputs, 6), expected)
            assert model.compiled.explain().clean
            assert compiled_llm.explain(model, dump=tmp_path / "ours").clean
            report = compiled_llm.explain(plant(planted.Print))
            assert [entry["kind"] for entry in report.data["findings"] if not entry["follows"]] == ["graph break"]
            torch.testing.assert_close(greedy(model, inputs, 6), expected)
    assert [path.name for path in own.glob("full_code_for_decode_*.py")]
    assert sorted(path.name for path in (tmp_path / "ours" / "prefill").glob("*.*")) == STAGES
