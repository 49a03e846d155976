"""Writes what a model says to stdout, as it comes."""

from __future__ import annotations

import sys

from transformers import TextStreamer

from compiled_llm.commands.printable import printable


class TextWriter(TextStreamer):
    """On a terminal, control characters are spelled out; a file or pipe gets the text as it is."""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Write the next part of the text."""
        super().on_finalized_text(printable(text) if sys.stdout.isatty() else text, stream_end)
