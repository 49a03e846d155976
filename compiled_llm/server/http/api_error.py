"""Errors as OpenAI's API has them: a status, the parameter that is wrong, and why."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from compiled_llm.client.errors import EngineBusyError, EngineDeadError, EngineProcessError

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_PARAMETER = re.compile(r"^(?:SamplingParams: )?([\w.]+(?:\[\d+\][\w.]*)*)[=:]")
_MAX_ERRORS = 1000
_LONGEST = 1000  # characters of a sentence, or of a parameter's name
_BUSY_SECONDS, _LOADING_SECONDS = "1", "5"


class ApiError(Exception):
    """An error as a client is told of it: a ``status`` of HTTP, the wrong ``param``, a ``code`` for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code = status, code
        self.message, self.param = _shortened(message), None if param is None else _shortened(param)
        self.headers = dict(headers or {})

    def about(self, param: str) -> ApiError:
        """Return the same error about another field."""
        said = self.message.removeprefix(f"{self.param}: ")
        return ApiError(self.status, f"{param}: {said}", param, self.code, self.headers)

    @property
    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, self.headers)


def _shortened(text: str) -> str:
    """Return the beginning of a text that may repeat megabytes that a client has sent."""
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param, code)


def not_served(why: str) -> ApiError:
    return ApiError(404, f"this path is not served: {why}", code="not_served")


def unavailable(message: str, code: str = "unavailable", seconds: str = _LOADING_SECONDS) -> ApiError:
    return ApiError(503, message, code=code, headers={"Retry-After": seconds})


def of_exception(error: BaseException) -> ApiError:
    """Return an exception as a client is told of it; an unexpected one says nothing but that it was one."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, asyncio.CancelledError):  # only the end of the server cancels the task of a request
        return unavailable("the server ends, and does not wait for the answer any longer; ask again", "server_ends")
    if isinstance(error, EngineBusyError):
        return ApiError(429, _plain(error), code="queue_full", headers={"Retry-After": _BUSY_SECONDS})
    if isinstance(error, EngineDeadError):
        return unavailable("the process that runs the model has ended, and is started again", "engine_dead")
    if isinstance(error, EngineProcessError):
        return unavailable(_plain(error))
    if isinstance(error, UnicodeEncodeError):
        return invalid("half a character of UTF-16 is no text")
    if isinstance(error, RecursionError):
        return invalid("the body has too many levels, one inside the other", code="too_deep")
    if isinstance(error, ValueError):
        found = _PARAMETER.match(str(error))
        return invalid(_plain(error), None if found is None else found.group(1))
    return unexpected()


def unexpected() -> ApiError:
    return ApiError(500, "an error of the server; its log has it under the request's id", code="internal_error")


def _plain(error: BaseException) -> str:
    return str(error).removeprefix("SamplingParams: ")


def of_validation(error: RequestValidationError) -> ApiError:
    """Return the first thing that is wrong with a body; of the ways in which a union is wrong, the innermost."""
    found = [(_path(entry["loc"], error.body), entry) for entry in error.errors()[:_MAX_ERRORS]]
    outer = found[0][0] or ""
    param, first = max((entry for entry in found if (entry[0] or "").startswith(outer)), key=_depth)
    if first["type"] == "json_invalid":
        return invalid("the body is no JSON", code="invalid_json")
    if first["type"] == "extra_forbidden":
        return invalid(f"{param}: there is no such parameter", param, "unknown_parameter")
    if first["type"] == "missing":
        return invalid(f"{param or 'the body'}: is missing", param, "missing_required_parameter")
    return invalid(_of_value(param, first), param, first.get("ctx", {}).get("code", "invalid_value"))


def _depth(found: tuple[str | None, Any]) -> int:
    path = found[0] or ""
    return path.count(".") + path.count("[")


def _of_value(param: str | None, found: Mapping[str, Any]) -> str:
    message = str(found["msg"]).removeprefix("Value error, ")
    return message if param is None else f"{param}: {message[:1].lower()}{message[1:]}"


def _path(location: Sequence[int | str], body: object) -> str | None:
    """Return ``messages[0].role`` for a place in the body; other parts of the place name the type that was tried."""
    path, missing = "", len(location) - 1
    for number, part in enumerate(location[1:], start=1):
        if isinstance(part, int) and isinstance(body, list):
            path += f"[{part}]"
            body = body[part]
        elif isinstance(body, dict) and (part in body or number == missing):
            path += f".{part}"
            body = body.get(part)
    return path.removeprefix(".") or None


ANSWERED = (RequestValidationError, HTTPException, ApiError, EngineProcessError, ValueError, RecursionError)
"""Errors of endpoints that ``respond`` answers with."""


async def respond(request: Request, error: Exception) -> JSONResponse:
    if isinstance(error, RequestValidationError):
        return of_validation(error).response()
    if isinstance(error, HTTPException):
        said = str(error.detail)
        if error.status_code == 404 and said == "Not Found":  # Starlette's, of a path that no route has
            said = f"{request.method} {request.url.path}: is not served here; GET /openapi.json says what is"
        return ApiError(error.status_code, said, headers=error.headers).response()
    return of_exception(error).response()
