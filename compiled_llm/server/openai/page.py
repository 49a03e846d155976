"""``/``: a page that chats with the model and shows the figures of ``/metrics``, in one file that fetches no other."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from pathlib import Path
from typing import NamedTuple

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

router = APIRouter(include_in_schema=False)

_ASSETS = Path(__file__).with_name("assets")
_SCRIPTS = ("markdown.js", "server.js", "figures.js", "chat.js")


class Page(NamedTuple):
    """The page, and headers that bound what a browser lets it do."""

    html: str
    headers: dict[str, str]


@router.get("/", response_class=HTMLResponse)
async def page() -> HTMLResponse:
    """Return the page; it says nothing of the model, so that it needs no key."""
    return HTMLResponse(assembled().html, headers=assembled().headers)


@cache
def assembled() -> Page:
    """Return the page with its styles and scripts in it; browsers run those alone, by their hashes."""
    style = _read("page.css")
    script = "\n".join(map(_read, _SCRIPTS))
    html = _read("page.html").replace("/* styles */", style).replace("/* scripts */", script)
    policy = (
        "default-src 'none'",
        f"style-src '{_hash(style)}'",
        f"script-src '{_hash(script)}'",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",  # no text becomes HTML
        "trusted-types 'none'",
    )
    headers = {
        "Content-Security-Policy": "; ".join(policy),
        "Cache-Control": "no-cache",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
    }
    return Page(html, headers)


def _read(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
