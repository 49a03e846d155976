"""The application, which answers requests of HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import cached_property
from typing import Any

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from compiled_llm.compat.own_version import OWN_VERSION
from compiled_llm.features import feature
from compiled_llm.server.guard import Guard
from compiled_llm.server.http.api_error import ANSWERED, respond
from compiled_llm.server.http.body_route import BodyRouteMiddleware
from compiled_llm.server.late_routes import LateRoutes
from compiled_llm.server.openai import metrics, status, tokenize
from compiled_llm.server.openai.chat import endpoint as chat
from compiled_llm.server.openai.common.api_server import ApiServer
from compiled_llm.server.openai.common.engine_link import EngineLink
from compiled_llm.server.openai.completions import endpoint as completions
from compiled_llm.server.parts import PAGE
from compiled_llm.server.settings import ApiServerSettings


def application(settings: ApiServerSettings, link: EngineLink) -> FastAPI:
    app = _Application(title="compiled_llm", version=OWN_VERSION, lifespan=_lifespan, docs_url=None, redoc_url=None)
    app.state.api_server = api_server = ApiServer(settings, link)
    app.state.metrics = metrics.ApiServerMetrics(settings.figures)
    rooms = (chat, completions, tokenize, status, metrics)
    for room in rooms:
        app.include_router(room.router)
    page = feature(PAGE) if settings.page else None
    if page is not None:
        app.include_router(page.router)
    for kind in ANSWERED:
        app.add_exception_handler(kind, respond)
    routes = [route for room in rooms for route in room.router.routes]
    app.add_middleware(BodyRouteMiddleware, routes=routes, late=app.late_routes.of_path)
    if settings.otlp_traces_endpoint is not None:
        from compiled_llm.server.tracing import TracingMiddleware, tracer_provider

        app.add_middleware(TracingMiddleware, provider=tracer_provider(settings.otlp_traces_endpoint))
    app.add_middleware(
        Guard,
        settings=settings,
        metrics=app.state.metrics,
        body_bytes=api_server.body_bytes,
        keyless=() if page is None else page.PATHS,
    )
    if settings.cors_origins:  # outside the guard: a browser asks first, without a key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type"],
            expose_headers=["x-request-id"],
        )
    return app


class _Application(FastAPI):
    """An application that describes all of its routes, those that nobody has asked for, too."""

    @cached_property
    def late_routes(self) -> LateRoutes:
        return LateRoutes(self)

    def openapi(self) -> dict[str, Any]:
        self.late_routes.add_all()
        return super().openapi()


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Stay connected to the engine process while the server runs."""
    linking = asyncio.create_task(app.state.api_server.link.run())
    try:
        yield
    finally:
        linking.cancel()
        with suppress(asyncio.CancelledError):
            await linking
