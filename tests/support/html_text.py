"""The text and the links of a page of HTML."""

from __future__ import annotations

from html.parser import HTMLParser


class HtmlText(HTMLParser):
    """The words of a page or of a piece of one, those that are folded apart, and where it leads to."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.words, self.folded = "", ""
        self.links: list[str] = []
        self._within: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value for name, value in attrs if name in ("href", "src") and value is not None]
        if tag in ("details", "style"):
            self._within.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in self._within:
            self._within.remove(tag)

    def handle_data(self, data: str) -> None:
        if "style" not in self._within:
            if "details" in self._within:
                self.folded += data
            else:
                self.words += data
