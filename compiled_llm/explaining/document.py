"""A page of HTML that needs nothing else: light and dark, wide and narrow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

_STYLE = """
:root { color-scheme: light dark; --text: #1f2328; --quiet: #59636e; --page: #fff; --panel: #f3f5f7; --line: #d1d9e0;
  --bad: #c4321f; --good: #116329; --link: #0550ae; --mark: #fff1a8 }
@media (prefers-color-scheme: dark) { :root { --text: #e6e6e6; --quiet: #9aa4af; --page: #16181c; --panel: #22262c;
  --line: #3a414a; --bad: #f0776a; --good: #6bc77d; --link: #79b8ff; --mark: #574d10 } }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 1.5rem auto; padding: 0 1rem;
  color: var(--text); background: var(--page) }
body.wide { max-width: 100rem }
h1 { font-size: 1.4rem; margin: .5rem 0; overflow-wrap: anywhere } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem }
h1 small, h2 small { font-size: 1rem; font-weight: normal; color: var(--quiet) }
a { color: var(--link) }
nav, .quiet, caption { color: var(--quiet) }
code, pre, .place { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; font-size: .875em }
.place { overflow-wrap: anywhere; color: var(--quiet) }
pre { background: var(--panel); padding: .5rem .75rem; margin: .5rem 0; overflow-x: auto; border-radius: 4px }
article { border-left: 4px solid var(--bad); padding-left: 1rem; margin: 1.5rem 0 }
article h2, article p { margin: .3rem 0 }
.advice, .clean { color: var(--good) } .clean { font-weight: bold }
.scroll { overflow-x: auto }
table { border-collapse: collapse; margin: .5rem 0 }
td, th { text-align: left; padding: .2rem 1.25rem .2rem 0; vertical-align: top; font-weight: normal }
th { color: var(--quiet) } tbody tr { border-top: 1px solid var(--line) }
.figure { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums }
td:first-child { overflow-wrap: anywhere; min-width: 9rem }
summary { cursor: pointer; margin: .5rem 0 }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1.25rem; margin: .5rem 0 }
dt { color: var(--quiet) } dd { margin: 0; overflow-wrap: anywhere }
@media (max-width: 40rem) { body { margin: .75rem auto; font-size: 15px } td, th { padding-right: .75rem } }
"""


def document(title: str, body: str, heading: str = "", wide: bool = False, style: str = "") -> str:
    """Return a whole page.

    Args:
        title: plain text, for the browser's tab.
        body: HTML.
        heading: HTML at the top of the page; the title if empty.
        wide: take more room than is good for reading sentences.
        style: more CSS.
    """
    body_class = ' class="wide"' if wide else ""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}{style}</style></head>\n"
        f"<body{body_class}>{heading or f'<h1>{escape(title)}</h1>'}\n{body}</body></html>\n"
    )


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table, which scrolls where it is too wide; all but the first column are figures."""
    first, *figures = columns
    head = f"<th>{escape(first)}</th>" + "".join(f"<th class=figure>{escape(column)}</th>" for column in figures)
    body = "".join(
        f"<tr><td>{escape(row[0])}</td>{''.join(f'<td class=figure>{escape(cell)}</td>' for cell in row[1:])}</tr>"
        for row in rows
    )
    return f"<div class=scroll><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def named_values(rows: Mapping[str, str]) -> str:
    """Return names and values, side by side."""
    return f"<dl>{''.join(f'<dt>{escape(name)}</dt><dd>{escape(value)}</dd>' for name, value in rows.items())}</dl>"
