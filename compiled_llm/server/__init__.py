"""The engine process, which clients ask over a socket; API servers, which answer HTTP; replicas on Ray."""

from compiled_llm.server.replicas.ray_app import ray_app

__all__ = ["ray_app"]
