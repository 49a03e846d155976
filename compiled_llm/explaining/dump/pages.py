"""The pages of a dump: an index, a page for each part of the model, and each file with numbered lines to link to."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TypeAlias
from urllib.parse import quote

from pygments import highlight  # comes with rich
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer, TextLexer

from compiled_llm.explaining.document import document, named_values
from compiled_llm.explaining.dump.links import Part, SourceLink, lines_of_kernels, lines_of_nodes, parts_of
from compiled_llm.explaining.report import Report
from compiled_llm.explaining.subject import head_rows, title_of
from compiled_llm.model.places import Place

GRAPH, INDUCTOR = "3_graph.py", "5_inductor.py"
"""The files whose lines pages link to."""
_LEGEND = (
    "<p>Part by part, the tables count the <b>lines</b> of Python that compute something, the <b>nodes</b> that these "
    f"became in Dynamo's graph ({GRAPH}), and the <b>kernels</b>, or calls into a library, that compute the nodes "
    f"({INDUCTOR}). A kernel may compute for several parts. Of layers that are alike, the middle one is counted and "
    "shown.</p>"
)
_LONGEST_COLOURED = 2**20

_Linker: TypeAlias = Callable[[str, str, Path], str]
"""Takes a name, the text to show, and the page that it stands on; returns a link to the name's line, if it has one."""

_LIGHT = HtmlFormatter(style="default", linenos="inline", linespans="L", wrapcode=False)
_LISTING_STYLE = f"""
{_LIGHT.get_style_defs(".highlight")}
@media (prefers-color-scheme: dark) {{ {HtmlFormatter(style="monokai").get_style_defs(".highlight")} }}
.highlight, .highlight pre {{ background: var(--page); padding: 0; line-height: 1.4 }}
.highlight .linenos {{ display: inline-block; width: 2.75em; padding-right: 1em; text-align: right; left: 0;
  color: var(--quiet); background: var(--page); position: sticky; user-select: none }}
.highlight span:target, .highlight span:target .linenos {{ background: var(--mark) }}
.highlight .s1 {{ color: inherit }} /* Inductor's kernels are strings */
"""
_PART_STYLE = """
table.links { table-layout: fixed; width: 100% } .links td { overflow-wrap: anywhere; min-width: 0 }
.links td:nth-child(n+3) { font: .875em/1.7 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace }
.links th:nth-child(1) { width: 16% } .links th:nth-child(2) { width: 40% }
@media (max-width: 40rem) { .links thead { display: none } .links tr { display: block; padding: .5rem 0 }
  .links td { display: block; padding: 0 } .links td:empty { display: none }
  .links td::before { content: attr(data-of) " "; color: var(--quiet) } }
"""


@dataclass
class DumpedProgram:
    """The files of one program.

    Attributes:
        folder: where the files lie.
        files: their names and what each is, in order.
        links: lines, nodes and kernels; empty if there is not one graph.
    """

    name: str
    folder: Path
    files: dict[str, str] = field(default_factory=dict)
    links: list[SourceLink] = field(default_factory=list)


def link_to(page: Path, seen_from: Path, line: int = 0) -> str:
    """Return the address of a page, or of a line in it, as another page writes it."""
    address = quote(Path(os.path.relpath(page, seen_from.parent)).as_posix())
    return f"{address}#L-{line}" if line else address


class DumpPages:
    """Writes the pages of a dump; each file is listed once.

    Attributes:
        index: the page that leads to all others.
    """

    def __init__(self, root: Path) -> None:
        self.index = root / "index.html"
        self._root = root / "pages"
        self._sources: dict[str, Path] = {}

    def write(self, programs: Sequence[DumpedProgram], report: Report) -> Path:
        """Write ``index.html`` and the pages it links to; returns its path."""
        verdict = "Nothing stands in the way: every program is one graph." if report.clean else "Not all is well."
        body = [
            named_values(head_rows(report.data)),
            f'<p>{verdict} <a href="report.html">The report</a>.</p>',
            *(f"<p>{escape(note)}</p>" for note in report.data["notes"]),
            _LEGEND if any(program.links for program in programs) else "",
            *map(self._program, programs),
        ]
        title = title_of(report.data)
        heading = f"<h1>{escape(title)} <small>from lines to kernels</small></h1>"
        self.index.write_text(document(f"{title}: from lines to kernels", "\n".join(body), heading), encoding="utf-8")
        return self.index

    def _program(self, program: DumpedProgram) -> str:
        """Return a program's files and parts as tables, whose pages are written meanwhile."""
        files = "".join(
            f"<tr><td>{_link(self._listed(program, name), self.index, name)}</td><td>{escape(what)}</td></tr>"
            for name, what in program.files.items()
        )
        heading = f"<h2>{escape(program.name)}</h2><table><tbody>{files}</tbody></table>"
        if not program.links:
            return heading
        columns = "".join(f"<th class=figure>{name}</th>" for name in ("lines", "nodes", "kernels"))
        parts = "".join(self._parts(program))
        return (
            f"{heading}<div class=scroll><table><thead><tr><th>part</th>{columns}</tr></thead>"
            f"<tbody>{parts}</tbody></table></div>"
        )

    def _parts(self, program: DumpedProgram) -> Iterator[str]:
        """Yield the row of each part, and write its page: its lines, their nodes, and the kernels of these."""
        node = self._linker(program, GRAPH, lines_of_nodes)
        kernel = self._linker(program, INDUCTOR, lines_of_kernels)
        head = "<thead><tr><th>module</th><th>line</th><th>nodes</th><th>kernels</th></tr></thead>"
        for number, part in enumerate(parts_of(program.links), 1):
            name = re.sub(r"\W+", "-", part.modules[0]) or "around"
            page = self._root / program.folder.name / f"part_{number}_{name}.html"
            rows = "".join(self._row(link, page, node, kernel) for link in part.links[part.shown])
            body = f"{_layers(part, page, node)}<table class=links>{head}<tbody>{rows}</tbody></table>"
            self._write(page, body, _PART_STYLE, program.name, part.title)
            figures = "".join(f"<td class=figure>{figure}</td>" for figure in part.figures())
            yield f"<tr><td>{_link(page, self.index, part.title)}</td>{figures}</tr>"

    def _linker(self, program: DumpedProgram, name: str, lines_of: Callable[[str], dict[str, int]]) -> _Linker:
        """Return what makes links from a page to the names in a file of the dump."""
        file = program.folder / name
        lines = lines_of(file.read_text(encoding="utf-8")) if file.exists() else {}

        def linked(name: str, shown: str, page: Path) -> str:
            if name not in lines:
                return f"<code>{escape(shown)}</code>"
            return _link(self._listed(program, file.name), page, shown, lines[name], name)

        return linked

    def _row(self, link: SourceLink, page: Path, node: _Linker, kernel: _Linker) -> str:
        cells = {
            "module": escape(link.module.removeprefix(link.layer).removeprefix(".")),
            "line": self._line(link.place, page),
            "nodes": " ".join(node(name, name, page) for name in link.nodes),
            "kernels": " ".join(kernel(name, _short(name), page) for name in link.kernels),
        }
        return f"<tr>{''.join(f'<td data-of={name}>{cell}</td>' for name, cell in cells.items())}</tr>"

    def _line(self, place: Place, page: Path) -> str:
        listing = self.of_source(place)
        if listing is None:
            return escape(str(place))
        link = _link(listing, page, f"{Path(place.file).name}:{place.line}", place.line, str(place))
        return f"{link}<br><code>{escape(place.source)}</code>"

    def of_source(self, place: Place) -> Path | None:
        """Return the page that lists the file in which a line is; None if that cannot be read."""
        file = Path(place.file)
        if not place.file or not file.is_file():
            return None
        if place.file not in self._sources:
            page = self._sources[place.file] = self._root / "source" / f"{len(self._sources) + 1}_{file.name}.html"
            self._list(page, file, f'<p class="place">{escape(place.file)}</p>', file.name)
        return self._sources[place.file]

    def _listed(self, program: DumpedProgram, name: str) -> Path:
        """Return the page that lists a file of the dump, and says what it is."""
        page = self._root / program.folder.name / f"{name}.html"
        if not page.exists():
            file = program.folder / name
            about = f"<p>{escape(program.files[name])} ({_link(file, page, 'the file')})</p>"
            self._list(page, file, about, program.name, name)
        return page

    def _list(self, page: Path, file: Path, about: str, *names: str) -> None:
        in_colour = file.suffix == ".py" and file.stat().st_size < _LONGEST_COLOURED
        lexer = (PythonLexer if in_colour else TextLexer)(stripnl=False, ensurenl=False)
        text = file.read_text(encoding="utf-8", errors="replace")
        self._write(page, about + highlight(text, lexer, _LIGHT), _LISTING_STYLE, *names)

    def _write(self, page: Path, body: str, style: str, *names: str) -> None:
        """Write a page whose first line leads back to the index; the last name is its own."""
        page.parent.mkdir(parents=True, exist_ok=True)
        here = "".join(f" / {escape(name)}" for name in names)
        heading = f"<nav>{_link(self.index, page, 'All stages')}{here}</nav><h1>{escape(names[-1])}</h1>"
        page.write_text(document(names[-1], body, heading, wide=True, style=style), encoding="utf-8")


def _layers(part: Part, page: Path, node: _Linker) -> str:
    """Return which layer is shown, and where each of those that are alike begins."""
    if len(part.modules) == 1:
        return ""
    begin = " ".join(
        node(links[0].nodes[0], module.rpartition(".")[2], page)
        for module, links in zip(part.modules, part.links, strict=True)
    )
    return f"<p>This is {escape(part.modules[part.shown])}. Where each layer begins in the graph: {begin}.</p>"


def _link(page: Path, seen_from: Path, shown: str, line: int = 0, title: str = "") -> str:
    about = f' title="{escape(title)}"' if title else ""
    return f'<a href="{link_to(page, seen_from, line)}"{about}>{escape(shown)}</a>'


def _short(kernel: str) -> str:
    """Shorten a kernel's name, whose middle lists every fused operation."""
    name = kernel.rpartition(":")[0].removeprefix("torch.ops.").removesuffix(".default")
    return name if len(name) <= 40 else f"{name[:24]}…{name.rpartition('_')[2]}"
