"""A route of FastAPI's that reads the body of a request: once, within bounds, and in a thread if it is long."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import cached_property
from typing import Any, get_type_hints

import msgspec
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from compiled_llm.server.http.api_error import ANSWERED, invalid, respond
from compiled_llm.server.http.body_values import check_values
from compiled_llm.server.http.worker_thread import in_thread_if_long


class BodyRoute(APIRoute):
    """A route to ``endpoint(body, request)``: FastAPI describes it, and would read long bodies in the event loop."""

    @cached_property
    def answer(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        endpoint, kind = self.endpoint, get_type_hints(self.endpoint)["body"]

        async def answer(request: Request) -> Response:
            content = await request.body()
            body = await in_thread_if_long(lambda: _read(content, kind), len(content))
            response: Response = await endpoint(body, request)
            return response

        return answer

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        return self.answer


class BodyRouteMiddleware:
    """A short way to each ``BodyRoute``: FastAPI's routing makes some 200 more Python calls for each request."""

    def __init__(
        self, app: ASGIApp, routes: Sequence[BaseRoute], late: Callable[[str], Awaitable[Sequence[BaseRoute]]]
    ) -> None:
        """``app`` answers all other requests; ``routes`` are those that it has, too, and ``late`` those of a path."""
        self._app, self._late = app, late
        self._routes = _by_place(routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        place = (scope["path"], scope["method"]) if scope["type"] == "http" else ("", "")
        if (route := self._routes.get(place)) is None and place[0]:
            self._routes |= _by_place(await self._late(place[0]))
            route = self._routes.get(place)
        if route is None:
            await self._app(scope, receive, send)
            return
        scope["route"], request = route, Request(scope, receive, send)
        try:
            response = await route.answer(request)
        except ANSWERED as error:
            response = await respond(request, error)
        await response(scope, receive, send)


def _by_place(routes: Sequence[BaseRoute]) -> dict[tuple[str, str], BodyRoute]:
    found = [route for route in routes if isinstance(route, BodyRoute)]
    return {(route.path, method): route for route in found for method in route.methods or ()}


def _read(content: bytes, kind: type[BaseModel]) -> BaseModel:
    """Return a body as its model.

    Raises:
        ApiError: it is missing, is not JSON, or has too many values.
        RequestValidationError: something in it is wrong.
        RecursionError: it has too many levels.
    """
    if not content:
        raise invalid("the body: is missing", code="missing_required_parameter")
    check_values(content)
    try:
        found = decoded(content)
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise invalid("the body is no JSON", code="invalid_json") from None
    except ValueError:
        raise invalid("the body has a number of too many digits", code="invalid_json") from None
    try:
        return kind.model_validate(found)
    except ValidationError as error:
        wrong = [{**entry, "loc": ("body", *entry["loc"])} for entry in error.errors(include_url=False)]
        raise RequestValidationError(wrong, body=found) from None


def decoded(body: bytes) -> Any:
    """Return what ``json.loads`` does, or raise ValueError as it does; strict JSON takes a fraction of its time."""
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):  # NaN is none, nor is half a character; Python reads both
        return json.loads(body)
