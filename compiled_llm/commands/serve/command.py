"""`compiled-llm serve`: an engine process. What imports torch is imported inside, while clients are told so."""

from __future__ import annotations

import logging
import math
import os
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import typer

from compiled_llm.commands.early_checks import check_driver, check_server_packages
from compiled_llm.commands.errors import readable_errors
from compiled_llm.commands.importing import importing
from compiled_llm.commands.loading.source import Source, locate
from compiled_llm.commands.options import shared
from compiled_llm.commands.options.choices import Device, Dtype, integers
from compiled_llm.commands.options.groups import OptionGroup, with_groups
from compiled_llm.commands.options.speculation import speculative_config_of
from compiled_llm.commands.serve import options
from compiled_llm.commands.serve.http import HttpFlags, run_with_api_server, usual_count
from compiled_llm.commands.serve.leash import end_with_parent
from compiled_llm.commands.serve.log import LogFormat, LogLevel, logger, show_log
from compiled_llm.commands.serve.serve_command import with_places
from compiled_llm.compilation.artifacts.profile import Profile
from compiled_llm.config import MAX_NUM_SEQS, KVScales, WrapConfig
from compiled_llm.engine.parts import GRAMMARS
from compiled_llm.execution.reporting.progress import Watcher, watched
from compiled_llm.features import check_has, feature
from compiled_llm.server.defaults import MAX_QUEUE, MM_ENCODER_CACHE_GB
from compiled_llm.server.image_limit import images_in
from compiled_llm.server.own_process import serve_arguments
from compiled_llm.server.parts import SERVED_IMAGES

if TYPE_CHECKING:
    from compiled_llm.engine.chunks.policies import MaxStep
    from compiled_llm.engine.engine import Engine
    from compiled_llm.huggingface.handle import CompiledModel
    from compiled_llm.protocol.messages import Ready
    from compiled_llm.server.engine_process.kept_profile import KeptProfile


_OF_SERVERS = "model", "same_model", "drain_seconds"  # and are not handed on as they are
_OF_WRAP = "mode", "backend", "kv_dtype", "batch_invariant"
_OF_ENGINES = "max_num_seqs", "max_model_len", "max_queue", "mm_encoder_cache_gb"


@dataclass(frozen=True, kw_only=True)
class ServeOptions(OptionGroup):
    """The options of an engine process."""

    model: shared.ModelPlace = None
    operations_uds: options.OperationsUds = None
    max_num_seqs: options.MaxNumSeqs = None
    max_model_len: options.MaxModelLen = None
    max_queue: options.MaxQueue = None
    max_step_ms: options.MaxStepMs = "auto"
    speculative_config: options.SpeculativeConfig = None
    limit_mm_per_prompt: options.LimitMmPerPrompt = None
    mm_encoder_cache_gb: options.MmEncoderCacheGb = MM_ENCODER_CACHE_GB
    pooling: options.Pooling = None
    drain_seconds: options.DrainSeconds = 30.0
    warmup: options.Warmup = ""
    profile: options.ProfilePath = None
    same_model: shared.SameModel = None
    tokenizer: shared.Tokenizer = None
    chat_template: shared.TemplateFile = None
    kv_memory: options.KvMemory = None
    mode: shared.RunningMode = "cuda-graphs"
    eager_first: shared.EagerFirst = True
    backend: shared.Backend = "auto"
    dtype: shared.WeightsDtype = Dtype.auto
    device: shared.OnDevice = Device.auto
    kv_dtype: shared.KeysAndValues = None
    kv_scales: shared.ScalesFile = None
    batch_invariant: shared.BatchInvariant = False
    artifacts: shared.Artifacts = None
    log_level: options.ShownLevel = LogLevel.info
    log_format: options.ShownFormat = LogFormat.text
    quiet: options.Quiet = False

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, Path):  # which processes of other folders are given, too
                object.__setattr__(self, name, _absolute(value))

    @property
    def place(self) -> str:
        """The model's; ValueError if it is not named, or twice."""
        return shared.model_of(self.model, self.same_model)

    @property
    def sizes(self) -> list[int]:
        """Those of ``--warmup``; ValueError if they are none."""
        return integers("--warmup", self.warmup)

    @property
    def log(self) -> tuple[str, str] | None:
        """The level and the format of the log; None for none."""
        return None if self.quiet else (self.log_level.value, self.log_format.value)

    @property
    def shows_progress(self) -> bool:
        """Whether stderr has progress, which is no JSON."""
        return not self.quiet and self.log_format != LogFormat.json

    @property
    def images(self) -> int:
        """How many images a request can have; ValueError if the limit is malformed."""
        return images_in(self.limit_mm_per_prompt)

    def wrap_options(self) -> dict[str, Any]:
        memory = {} if self.kv_memory is None else {"kv_memory": _number_or_text(self.kv_memory)}
        artifacts = {} if self.artifacts is None else {"artifacts": self.artifacts}
        scales = {} if self.kv_scales is None else {"kv_scales": KVScales.load(self.kv_scales)}
        options: dict[str, Any] = {name: getattr(self, name) for name in _OF_WRAP}
        options["eager_first"] = self.eager_first and not self.batch_invariant
        return {**options, "progress": self.shows_progress, **memory, **scales, **artifacts}

    def engine_options(self) -> dict[str, Any]:
        options = {name: getattr(self, name) for name in _OF_ENGINES}
        options["speculative_config"] = speculative_config_of(self.speculative_config)
        return {"tokenizer_eos": True, "max_step_ms": _step_limit(self.max_step_ms), **options}

    def prepare(self, engine: Engine, structured: bool) -> None:
        """Prepare the sizes that requests of earlier runs have used, or else those of ``--warmup``."""
        if self.profile is not None and self.profile.exists():
            engine.warmup(profile=self.profile, structured=structured)
            return
        if structured:
            engine.warmup(self.sizes[:1] or 1, structured=True)
        engine.warmup(self.sizes or "auto")

    def arguments(self) -> list[str]:
        """Return the arguments of an engine process for API servers, whose clients may wait by the thousand."""
        options = {name: value for name, value in vars(self).items() if name not in _OF_SERVERS}
        options |= {name: value.value for name, value in options.items() if isinstance(value, Enum)}
        options["max_queue"] = MAX_QUEUE if self.max_queue is None else self.max_queue
        return serve_arguments(self.place, options | {"warmup": self.warmup or None})


@with_groups
def serve(
    *,
    context: typer.Context,
    config: options.Config = None,
    uds: options.Uds = None,
    http: HttpFlags,
    served: ServeOptions,
    leashed: options.Leashed = False,
) -> None:
    """Serve a model with OpenAI's API, over HTTP, or over a Unix socket, until SIGTERM or Ctrl-C.

    `compiled-llm client` and `compiled-llm chat` ask it with --server, and so
    does `compiled_llm.client.Client` in Python over a socket. They can connect
    at once, and show what is loaded and compiled until requests are answered;
    over HTTP, /ready says so.

    Each option can also be set in the environment, as COMPILED_LLM_SERVE_PORT
    for --port. The environment overrides a file, and the command line both.
    """
    with readable_errors(), with_places(context):
        with_api_server = uds is None or http.given
        check_server_packages(http=with_api_server or served.operations_uds is not None)
        check_driver(served.device.value)
        place = served.place
        _check(served)
        source = locate(place, served.shows_progress, served.tokenizer, served.chat_template)
        path = None if uds is None else _absolute(uds)
        if with_api_server:
            if http.api_server_count is None:
                http = replace(http, api_server_count=usual_count(served.device.value))
            arguments = served.arguments()
            images = served.images
            run_with_api_server(http, source, path, arguments, served.drain_seconds, served.log, images)
        elif path is not None:
            _run(served, source, path, leashed)


def _check(served: ServeOptions) -> None:
    """Raise ValueError if something is impossible, before anything is loaded."""
    sizes = served.sizes
    WrapConfig.from_options(served.wrap_options())
    _step_limit(served.max_step_ms)
    speculative_config_of(served.speculative_config)
    if served.limit_mm_per_prompt is not None and served.images:
        check_has("images", "--limit-mm-per-prompt")
    if served.pooling is not None:
        check_has("pooling", "--pooling")
        if served.pooling != "last":
            raise ValueError(f"--pooling {served.pooling}: give last, or leave it out for what the model's folder says")
    if not 0 <= served.mm_encoder_cache_gb < math.inf:
        raise ValueError(f"--mm-encoder-cache-gb {served.mm_encoder_cache_gb:g}: must be 0 or more")
    most = MAX_NUM_SEQS if served.max_num_seqs is None else served.max_num_seqs
    if most < 1:
        raise ValueError(f"--max-num-seqs {most}: must be at least 1")
    if served.max_model_len is not None and served.max_model_len < 1:
        raise ValueError(f"--max-model-len {served.max_model_len}: must be at least 1")
    if wrong := [size for size in sizes if size > most]:
        raise ValueError(f"--warmup {wrong[0]}: there are {most} requests at once; raise --max-num-seqs")
    if served.drain_seconds < 0:
        raise ValueError(f"--drain-seconds {served.drain_seconds:g}: must be 0 or more")
    if (path := served.profile) is None:
        return
    if served.mode == "eager":
        raise ValueError(f"--profile {path}: --mode eager compiles and captures nothing")
    if not os.access(path.parent, os.W_OK):
        raise ValueError(f"--profile {path}: {path.parent} is no folder that you can write to; make it first")
    if path.exists():
        Profile.read(path)  # which tells before the model is loaded that it is damaged


def _run(served: ServeOptions, source: Source, uds: Path, leashed: bool) -> None:
    if leashed:
        end_with_parent()
    from compiled_llm.server.engine_process.engine_server import EngineServer
    from compiled_llm.server.engine_process.kept_profile import KeptProfile
    from compiled_llm.server.engine_process.process import run

    server = EngineServer(uds)
    kept = None if served.profile is None else KeptProfile(served.profile)
    operations = None
    if served.operations_uds is not None:
        from compiled_llm.server.engine_process.operations import Operations  # imports what serves HTTP

        operations = Operations(server, served.operations_uds, kept)
    if served.log is not None:
        show_log(*served.log)
    level = logging.DEBUG if leashed else logging.INFO  # an API server says it, once it is true of HTTP
    logger.log(level, "compiled_llm: listening at %s", uds)

    def prepare(report: Watcher) -> tuple[Engine, Ready]:
        with watched(report):
            engine, ready = _prepared(served, source, kept)
        logger.log(level, "compiled_llm: ready")
        return engine, ready

    run(server, prepare, served.drain_seconds, operations, kept)


def _prepared(served: ServeOptions, source: Source, kept: KeptProfile | None) -> tuple[Engine, Ready]:
    grammars = feature(GRAMMARS)
    worker = grammars.start_worker() if grammars else None
    with importing(served.shows_progress):
        import compiled_llm
        from compiled_llm.commands.loading.image_processor import load_processor, processor_place
        from compiled_llm.commands.loading.load import fetched, load
        from compiled_llm.server.engine_process.facts import ready_of

    source = fetched(source, progress=served.shows_progress)
    images = feature(SERVED_IMAGES) if served.images else None
    place = processor_place(source) if images else None
    loaded, tokenizer = load(
        source, served.dtype.value, served.device.value, served.shows_progress, sees=place is not None
    )
    model = compiled_llm.wrap(loaded, **served.wrap_options())
    options = {"watch_model": False, "grammar_worker": worker, **served.engine_options()}
    processor = None if images is None or place is None else images.processor_of(lambda: load_processor(place))
    engine = compiled_llm.Engine(model, tokenizer=tokenizer, processor=processor, **options)
    named = *source.tokenizer_place, source.chat_template
    ready = ready_of(model, engine, source.name, tokenizer, *named, served.pooling)
    if ready.images:
        logger.info(
            "compiled_llm: a request can have %d images (--limit-mm-per-prompt); up to %g GiB keep what the encoder "
            "makes of them (--mm-encoder-cache-gb)",
            served.images,
            served.mm_encoder_cache_gb,
        )
    if ready.pooled.silent is None:
        served.prepare(engine, bool(ready.form_ends))
    if ready.pooled.silent is not None or not isinstance(ready.pooled.embedding, str):
        engine.generate([[0, 0], [0]], pooled=True)  # compiles the program of all prompts that are pooled
    if kept is not None:
        kept.begin(cast("CompiledModel", model.compiled))
    return engine, ready


def _absolute(path: Path) -> Path:
    return path.expanduser().absolute()


def _step_limit(text: str) -> MaxStep:
    if text == "auto" or text == "none":
        return "auto" if text == "auto" else None
    with suppress(ValueError):
        if (limit := float(text)) > 0:
            return limit
    raise ValueError(f"--max-step-ms {text}: give milliseconds above 0, auto or none")


def _number_or_text(value: str) -> float | str:
    try:
        return float(value)
    except ValueError:
        return value
