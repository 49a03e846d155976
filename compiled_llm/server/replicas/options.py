"""Options of ``compiled-llm serve`` for replicas, parted between engine processes and API servers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from compiled_llm.config import MAX_NUM_SEQS
from compiled_llm.server.defaults import MAX_QUEUE
from compiled_llm.server.image_limit import images_in
from compiled_llm.server.own_process import serve_arguments
from compiled_llm.server.settings import ApiServerSettings, settings_of

OF_ENGINE_PROCESSES = frozenset(
    {
        "artifacts",
        "backend",
        "batch_invariant",
        "device",
        "dtype",
        "kv_dtype",
        "kv_memory",
        "kv_scales",
        "log_format",
        "log_level",
        "max_model_len",
        "max_queue",
        "max_num_seqs",
    }
    | {"chat_template", "eager_first", "max_step_ms", "mode", "profile", "quiet", "speculative_config", "tokenizer"}
    | {"limit_mm_per_prompt", "mm_encoder_cache_gb", "pooling", "warmup"}
)
_SAFETY_OF_API_SERVERS = {"allowed_host", "api_key_file", "client_seconds", "cors_origin", "salt_caches"}
OF_API_SERVERS = frozenset(
    {"allowed_local_media_path", "allowed_media_domains", "max_body_bytes", "max_image_bytes", "max_image_pixels"}
    | {
        "escape_special_tokens",
        "otlp_traces_endpoint",
        "page",
        "request_seconds",
        "served_model_name",
        "stream_interval",
    }
    | _SAFETY_OF_API_SERVERS
)
_PLACE = {"host", "operations_uds", "port", "ssl_certfile", "ssl_keyfile", "uds"}
OF_RAY = frozenset(_PLACE | {"config", "drain_seconds", "leashed", "max_connections", "api_server_count", "same_model"})
"""Those of one server, and operations on it: where it listens, and in how many processes, is Ray's to say here."""


class Routing(NamedTuple):
    """The way prompts are routed: the arguments of ``ray_app`` that the router gets."""

    max_longer: int
    least_share: float
    page_size: int
    max_leading: int
    max_pages: int

    def check(self) -> None:
        """Raise ValueError if one is impossible: an error in a router would keep requests waiting."""
        for name, value in self._asdict().items():
            least = 0 if name in ("max_longer", "least_share") else 1
            if value < least:
                raise ValueError(f"ray_app: {name}={value}: must be at least {least}")


class Options(NamedTuple):
    """Options of ``compiled-llm serve``, with underscores."""

    model: str
    given: Mapping[str, Any]

    def check(self) -> None:
        """Raise ValueError if one is no option, or none here."""
        for name in self.given:
            if name in OF_RAY:
                raise ValueError(
                    f"ray_app: {name}: is for one server; Ray is told where to listen by serve.start(...), and how "
                    "many API servers there are by api_server_options"
                )
            if name not in OF_ENGINE_PROCESSES | OF_API_SERVERS:
                known = ", ".join(sorted(OF_ENGINE_PROCESSES | OF_API_SERVERS))
                raise ValueError(f"ray_app: {name}: there is no such option; there are {known}")

    def arguments(self) -> list[str]:
        """Return the command of a replica's engine process, but for its socket."""
        given = {"max_queue": MAX_QUEUE, "drain_seconds": 1}
        given |= {name: value for name, value in self.given.items() if name in OF_ENGINE_PROCESSES}
        return serve_arguments(self.model, given)

    @property
    def max_requests(self) -> int:
        """How many requests a replica has at most: those that run and those that wait; others are refused."""
        return int(self.given.get("max_num_seqs") or MAX_NUM_SEQS) + int(self.given.get("max_queue") or MAX_QUEUE)

    def settings(self) -> ApiServerSettings:
        """Return the settings of API servers; ValueError if the file of keys has none, or short ones."""
        given = {name: value for name, value in self.given.items() if name in OF_API_SERVERS}
        images = images_in(self.given.get("limit_mm_per_prompt"))
        return settings_of(given, Path(self.model).name, behind_proxy=True, limit_mm_per_prompt=images)
