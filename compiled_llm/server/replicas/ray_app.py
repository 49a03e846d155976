"""``compiled_llm.server.ray_app``: an application of Ray Serve; Ray is imported when it is called."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from compiled_llm.server.replicas.options import Options, Routing

if TYPE_CHECKING:
    from fastapi import FastAPI
    from ray.serve import Application

    from compiled_llm.server.settings import ApiServerSettings

REPLICA = "engine"
_MAX_OF_AN_API_SERVER = 2**16
"""Requests that Ray gives an API server at once: replicas say how many they take, and answer others with 429."""
_ROUTER = "compiled_llm.server.replicas.ray_router.LeadingPagesRouter"


def ray_app(
    model: str,
    *,
    replicas: int = 1,
    api_servers: int = 1,
    num_gpus: float | None = None,
    max_longer: int = 32,
    least_share: float = 0.25,
    page_size: int = 16,
    max_leading: int = 1024,
    max_pages: int = 100_000,
    replica_options: Mapping[str, Any] | None = None,
    api_server_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> Application:
    """Return an application for ``ray.serve.run``: OpenAI's API over several replicas of a model.

    API servers, which answer HTTP, make tokens of prompts. A prompt goes to the replica that has its leading pages in
    its prefix cache, unless that has many more requests than another.

    Args:
        model: ``demo``, a folder, a GGUF file or a hub id, under which each machine of the cluster has it.
        replicas: engine processes, each with an engine of its own.
        api_servers: processes that answer HTTP; each remembers for itself which replica has which pages.
        num_gpus: of a replica; 1 unless given, 0 with ``device="cpu"``.
        max_longer: by how many requests the queue of a prompt's replica may be longer than the shortest one, before
            another replica answers.
        least_share: of a prompt's pages that a replica has to have, to be chosen for them. With 0, a beginning that
            all prompts have would bring them all to one replica.
        page_size: tokens of the pages that are compared.
        max_leading: pages of a prompt that are compared.
        max_pages: that an API server remembers.
        replica_options: further options of the replicas' ``serve.deployment``: ``autoscaling_config``,
            ``ray_actor_options``, ...
        api_server_options: those of the API servers'.
        **options: of ``compiled-llm serve``, with underscores: ``mode``, ``max_num_seqs``, ``served_model_name``,
            ``api_key_file``, ``allowed_host``, ...; not where to listen, which Ray is told.

    Raises:
        RuntimeError: Ray Serve is not installed.
        ValueError: an option is impossible.

    Examples:
        >>> from ray import serve  # doctest: +SKIP
        >>> serve.run(ray_app("Qwen/Qwen3-8B", replicas=4), blocking=True)  # doctest: +SKIP
    """
    told = Options(model, options)
    told.check()
    routing = Routing(max_longer, least_share, page_size, max_leading, max_pages)
    routing.check()
    settings, serve = told.settings(), _serve()
    from compiled_llm.server.replicas.ray_replica import Replica

    gpus = (0 if options.get("device") == "cpu" else 1) if num_gpus is None else num_gpus
    replica: dict[str, Any] = {
        "num_replicas": replicas,
        "ray_actor_options": {"num_cpus": 1, "num_gpus": gpus},
        "max_ongoing_requests": told.max_requests,
        "logging_config": {"enable_access_log": False},  # API servers have one
        "request_router_config": {"request_router_class": _ROUTER, "request_router_kwargs": routing._asdict()},
    }
    api_server = {"num_replicas": api_servers, "max_ongoing_requests": _MAX_OF_AN_API_SERVER}
    engine_processes = serve.deployment(Replica, name=REPLICA, **_with(replica, replica_options)).bind(told.arguments())
    ingress = serve.ingress(_application(settings))()
    return serve.deployment(ingress, name="api-server", **_with(api_server, api_server_options)).bind(engine_processes)


def _with(options: Mapping[str, Any], given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return options of a deployment, with those that a user gives before ours."""
    given, ours = dict(given or {}), dict(options)
    if "autoscaling_config" in given:
        del ours["num_replicas"]  # Ray takes either a number or a range
    if "ray_actor_options" in given:  # a user who gives memory still wants the GPU
        given["ray_actor_options"] = {**ours.get("ray_actor_options", {}), **given["ray_actor_options"]}
    return {**ours, **given}


def _serve() -> Any:
    if importlib.util.find_spec("ray") is None or importlib.util.find_spec("ray.serve") is None:
        raise RuntimeError("ray_app: Ray Serve is not installed: pip install '.[ray]' in the checkout")
    from ray import serve

    return serve


def _application(settings: ApiServerSettings) -> Callable[[], FastAPI]:
    """Return a function that makes the application of an API server, in that server's process."""

    def build() -> FastAPI:
        from ray import serve

        from compiled_llm.server.app import application
        from compiled_llm.server.openai.common.engine_link import EngineLink
        from compiled_llm.server.replicas.ray_replicas import ServeReplicas
        from compiled_llm.server.replicas.replica_client import ReplicaClient

        replicas = ServeReplicas(serve.get_deployment_handle(REPLICA))
        escapes = settings.escapes_special_tokens
        return application(settings, EngineLink(lambda given: ReplicaClient(replicas, given), escapes=escapes))

    return build
