"""The generator: an engine in a process of its own, with clients; the front, which answers HTTP; replicas on Ray."""

from compiled_llm.server.replicas.ray_app import ray_app

__all__ = ["ray_app"]
