"""Routes of parts that nothing is imported of before a request asks for them."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import FastAPI
from starlette.routing import BaseRoute

from compiled_llm.features import LATE_ROUTES, feature, has, needed
from compiled_llm.server.daemon_threads import in_thread
from compiled_llm.server.parts import ROUTES


class LateRoutes:
    """The routes that an application gets with the first request for their paths, or for its description."""

    def __init__(self, app: FastAPI) -> None:
        self._app = app
        self._features = {path: name for path, name in LATE_ROUTES.items() if has(name)}

    async def of_path(self, path: str) -> Sequence[BaseRoute]:
        """Return the routes of the part that serves a path, which the application has now; none if no part does."""
        if (name := self._features.get(path)) is None:
            return ()
        await in_thread(lambda: feature(ROUTES.named(name)))  # imports it
        return self._added(name)

    def add_all(self) -> None:
        for name in set(self._features.values()):
            self._added(name)

    def _added(self, name: str) -> Sequence[BaseRoute]:
        router = needed(ROUTES.named(name)).router
        if name in self._features.values():  # no other request was quicker
            self._features = {path: other for path, other in self._features.items() if other != name}
            self._app.include_router(router)
        return router.routes
