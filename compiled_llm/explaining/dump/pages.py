"""The pages of a dump: an index, a page for each part of the model, and each file with numbered lines to link to."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pygments import highlight  # comes with rich
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer, TextLexer

from compiled_llm.explaining.dump.links import KERNELS, NODES, Part, SourceLink, lines_of, parts_of
from compiled_llm.explaining.page import render
from compiled_llm.explaining.report import Report
from compiled_llm.explaining.subject import head_rows, title_of
from compiled_llm.model.places import Place

GRAPH, INDUCTOR = "3_graph.py", "5_inductor.py"  # the files whose lines pages link to
_LONGEST_COLOURED = 2**20
_FORMATTER = HtmlFormatter(style="default", linenos="inline", linespans="L", wrapcode=False)
_COLOURS = {"light": _FORMATTER, "dark": HtmlFormatter(style="monokai")}


@dataclass
class DumpedProgram:
    """The files of one program in their folder: their names and what each is; ``links`` only of one graph."""

    name: str
    folder: Path
    files: dict[str, str] = field(default_factory=dict)
    links: list[SourceLink] = field(default_factory=list)


def link_to(page: Path, line: int = 0, *, seen_from: Path) -> str:
    """Return the address of a page, or of a line in it, as another page writes it."""
    address = quote(Path(os.path.relpath(page, seen_from.parent)).as_posix())
    return f"{address}#L-{line}" if line else address


class DumpPages:
    """The pages of a dump; ``index`` leads to all others, and each file is listed once."""

    def __init__(self, root: Path) -> None:
        self.index = root / "index.html"
        self._root = root / "pages"
        self._sources: dict[str, Path] = {}

    def write(self, programs: Sequence[DumpedProgram], report: Report) -> Path:
        """Write ``index.html`` and the pages it links to; returns its path."""
        for program in programs:
            for name, about in program.files.items():
                self._list(self._listing_of(program, name), program.folder / name, [program.name, name], about)
        subject = title_of(report.data)
        shown = {"subject": subject, "title": f"{subject}: from lines to kernels", "head": head_rows(report.data)}
        parts = {program.name: list(self._parts(program)) for program in programs}
        files = {"GRAPH": GRAPH, "INDUCTOR": INDUCTOR, "listing_of": self._listing_of}
        self._write(self.index, "dump_index", report=report, programs=programs, parts=parts, **shown, **files)
        return self.index

    def of_source(self, place: Place) -> Path | None:
        """Return the page that lists the file in which a line is; None if that cannot be read."""
        file = Path(place.file)
        if not place.file or not file.is_file():
            return None
        if place.file not in self._sources:
            page = self._sources[place.file] = self._root / "source" / f"{len(self._sources) + 1}_{file.name}.html"
            self._list(page, file, [file.name])
        return self._sources[place.file]

    def _parts(self, program: DumpedProgram) -> Iterator[tuple[Path, Part]]:
        lines: dict[str, tuple[Path, int]] = {}
        for name, names in ((GRAPH, NODES), (INDUCTOR, KERNELS)):
            if (file := program.folder / name).exists():
                listing, found = self._listing_of(program, name), lines_of(names, file.read_text(encoding="utf-8"))
                lines.update({thing: (listing, line) for thing, line in found.items()})
        for number, part in enumerate(parts_of(program.links), 1):
            name = re.sub(r"\W+", "-", part.modules[0]) or "around"
            page = self._root / program.folder.name / f"part_{number}_{name}.html"
            shown = {"title": part.title, "names": [program.name, part.title], "part": part, "lines": lines}
            self._write(page, "dump_part", source_of=self.of_source, short=_short, **shown)
            yield page, part

    def _listing_of(self, program: DumpedProgram, name: str) -> Path:
        return self._root / program.folder.name / f"{name}.html"

    def _list(self, page: Path, file: Path, names: Sequence[str], about: str = "") -> None:
        in_colour = file.suffix == ".py" and file.stat().st_size < _LONGEST_COLOURED
        lexer = (PythonLexer if in_colour else TextLexer)(stripnl=False, ensurenl=False)
        listing = highlight(file.read_text(encoding="utf-8", errors="replace"), lexer, _FORMATTER)
        colours = {name: colours.get_style_defs(".highlight") for name, colours in _COLOURS.items()}
        shown = {"title": names[-1], "names": names, "about": about}
        self._write(page, "dump_listing", file=file, listing=listing, **shown, **colours)

    def _write(self, page: Path, template: str, **values: Any) -> None:
        page.parent.mkdir(parents=True, exist_ok=True)
        text = render(f"{template}.html", index=self.index, to=partial(link_to, seen_from=page), **values)
        page.write_text(text, encoding="utf-8")


def _short(kernel: str) -> str:
    """Shorten a kernel's name, whose middle lists every fused operation."""
    name = kernel.rpartition(":")[0].removeprefix("torch.ops.").removesuffix(".default")
    return name if len(name) <= 40 else f"{name[:24]}…{name.rpartition('_')[2]}"
