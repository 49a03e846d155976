"""``/``: a page that chats with the model, and shows the figures of ``/metrics``; its files come from here alone."""

from __future__ import annotations

import base64
import gzip
import hashlib
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, Response

if TYPE_CHECKING:
    from compiled_llm.server.chat_page import page as this
    from compiled_llm.server.parts import PagePart, RoutesPart

    checked: PagePart = this
    checked_for_routes: RoutesPart = this

router = APIRouter(include_in_schema=False)

_OWN, _VENDORED = (Path(__file__).with_name(folder) for folder in ("own", "vendored"))
SCRIPTS = "/page/{name}"
"""Where the page finds its scripts; like the page, they say nothing of the model, and need no key."""
_MODULES = (
    *("elements.js", "storage.js", "server.js", "math.js", "markdown.js", "settings.js", "messages.js", "state.js"),
    *("images.js", "chats.js", "undo.js", "answer.js", "chat.js", "figures.js"),
)

"""Each after those that it imports: a browser that meets one has its hash already."""
_HEADERS = {"Cache-Control": "no-cache", "Referrer-Policy": "no-referrer", "X-Content-Type-Options": "nosniff"}


_LIBRARIES = ("purify.min.js", "markdown-it.umd.min.js", "highlight.min.js", "temml.min.js")
PATHS = tuple(SCRIPTS.format(name=name) for name in (*_LIBRARIES, *_MODULES))


class Script(NamedTuple):
    """A file as it is sent; ``hash`` is of its SHA-256, ``kind`` an attribute of its element."""

    content: bytes
    packed: bytes
    hash: str
    kind: str


class Page(NamedTuple):
    """The page, and headers that bound what a browser lets it do."""

    html: str
    headers: dict[str, str]


@router.get("/", response_class=HTMLResponse)
async def page() -> HTMLResponse:
    """Return the page; it says nothing of the model, so that it needs no key."""
    return HTMLResponse(assembled().html, headers=assembled().headers)


@router.get(SCRIPTS)
async def script(name: str, request: Request) -> Response:
    """Return a script of the page, unless the browser has it as it is."""
    found = scripts().get(name)
    if found is None:
        return Response(status_code=404)
    headers = {**_HEADERS, "ETag": f'"{found.hash}"', "Vary": "Accept-Encoding"}
    if headers["ETag"] in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    if "gzip" not in request.headers.get("accept-encoding", ""):
        return Response(found.content, headers=headers, media_type="text/javascript")
    return Response(found.packed, headers={**headers, "Content-Encoding": "gzip"}, media_type="text/javascript")


@cache
def scripts() -> dict[str, Script]:
    """Return the scripts by name, in the order in which they run: the kept libraries, then our own."""
    kept = {name: _script(_VENDORED / name, "defer") for name in _LIBRARIES}
    return kept | {name: _script(_OWN / name, 'type="module"') for name in _MODULES}


@cache
def assembled() -> Page:
    """Return the page with its styles in it; browsers take those and the scripts alone, by their hashes."""
    style = _read("page.css")
    elements = (
        f'<script {script.kind} src="page/{name}" integrity="{script.hash}"></script>'
        for name, script in scripts().items()
    )
    html = _read("page.html").replace("/* styles */", style).replace("<!-- scripts -->", "\n".join(elements))
    policy = (
        "default-src 'none'",
        f"style-src '{_hash(style.encode())}'",
        "script-src " + " ".join(f"'{script.hash}'" for script in scripts().values()),
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",  # text becomes HTML in one place
        "trusted-types dompurify",
    )
    headers = {
        **_HEADERS,
        "Content-Security-Policy": "; ".join(policy),
        "Cross-Origin-Opener-Policy": "same-origin",
        "X-Frame-Options": "DENY",
    }
    return Page(html, headers)


def _script(file: Path, kind: str) -> Script:
    content = file.read_bytes()
    return Script(content, gzip.compress(content, mtime=0), _hash(content), kind)


def _read(name: str) -> str:
    return (_OWN / name).read_text(encoding="utf-8")


def _hash(content: bytes) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(content).digest()).decode()}"
