"""`compiled-llm compile`: artifacts, so that later processes compile nothing."""

# What imports torch is imported inside, once everything that compiles in this process keeps its work in the new folder.

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import Console

from compiled_llm.commands.early_checks import check_driver
from compiled_llm.commands.errors import readable_errors
from compiled_llm.commands.importing import importing
from compiled_llm.commands.loading.source import locate
from compiled_llm.commands.options import shared
from compiled_llm.commands.options.choices import Device, Dtype, integers
from compiled_llm.commands.options.speculation import speculative_config_of
from compiled_llm.compilation.artifacts.profile import Profile
from compiled_llm.compilation.kept_programs import KEPT
from compiled_llm.config import MAX_NUM_SEQS, WrapConfig
from compiled_llm.features import feature

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from compiled_llm import Engine
    from compiled_llm.compilation.artifacts.manifest import Manifest
    from compiled_llm.huggingface.handle import Wrapped

_PREPARED = "What it is compiled for"


def compile_ahead(
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="The new folder to write.")],
    model: shared.ModelPlace = None,
    max_num_seqs: Annotated[
        int,
        typer.Option(help="The most requests that run at once, as in `serve`.", rich_help_panel=_PREPARED),
    ] = MAX_NUM_SEQS,
    warmup: Annotated[
        str,
        typer.Option(
            metavar="ROWS",
            help="Build kernels for batches of these sizes: 1,8,64. The default is all up to --max-num-seqs; on a "
            "CPU it is 1 and 2, whose code runs all sizes.",
            rich_help_panel=_PREPARED,
        ),
    ] = "",
    profile: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="Put this profile into the folder, so that processes prepare the batch sizes that it names.",
            rich_help_panel=_PREPARED,
        ),
    ] = None,
    speculative_config: Annotated[
        str | None,
        typer.Option(
            metavar="JSON", help="Compile steps that guess tokens, too, as in `serve`.", rich_help_panel=_PREPARED
        ),
    ] = None,
    same_model: shared.SameModel = None,
    mode: shared.RunningMode = "cuda-graphs",
    backend: shared.Backend = "auto",
    dtype: shared.WeightsDtype = Dtype.auto,
    device: shared.OnDevice = Device.auto,
    kv_dtype: shared.KeysAndValues = None,
    batch_invariant: shared.BatchInvariant = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
) -> None:
    """Compile a model into a folder, so that later processes can start without compiling.

    Use it with `compiled-llm serve MODEL --artifacts DIR`, or in Python with
    `compiled_llm.wrap(model, artifacts=DIR)`. The folder is good for this kind of
    device, these versions and these options; anything else refuses it with a reason.
    """
    with readable_errors():
        options = {"mode": mode, "backend": backend, "kv_dtype": kv_dtype, "progress": not quiet}
        options |= {"batch_invariant": batch_invariant}
        sizes = _checked(options, max_num_seqs, warmup, profile)
        speculation = speculative_config_of(speculative_config)
        check_driver(device.value)
        target = output.expanduser().absolute()
        source = locate(shared.model_of(model, same_model), progress=not quiet)
        with importing(not quiet):
            from compiled_llm.compilation.artifacts.writing import check_new, unfinished, variables

        check_new(target)
        with unfinished(target) as folder:
            os.environ.update(variables(folder))  # this process does nothing else, and nothing is built yet
            from compiled_llm.commands.loading.load import fetched, load

            loaded, tokenizer = load(fetched(source, not quiet), dtype.value, device.value, progress=not quiet)
            kept = feature(KEPT)
            with nullcontext() if kept is None else kept.recording(folder):
                manifest = compiled_into(folder, loaded, tokenizer, options, max_num_seqs, sizes, profile, speculation)
            traced_again = {} if kept is None else kept.not_kept(folder)
        _tell(manifest, target, traced_again)


def _checked(options: dict[str, Any], max_num_seqs: int, warmup: str, profile: Path | None) -> list[int]:
    """Return the sizes of ``--warmup``; ValueError if nothing can be compiled by what was given."""
    if options["mode"] == "eager":
        raise ValueError("mode='eager' compiles nothing; give another one")
    WrapConfig.from_options(options)
    if max_num_seqs < 1:
        raise ValueError(f"--max-num-seqs {max_num_seqs}: must be at least 1")
    sizes = integers("--warmup", warmup)
    if wrong := [size for size in sizes if size > max_num_seqs]:
        raise ValueError(f"--warmup {wrong[0]}: there is room for {max_num_seqs} requests; raise --max-num-seqs")
    if profile is not None:
        Profile.read(profile)  # tells at once that it is damaged
    return sizes


def _tell(manifest: Manifest, target: Path, traced_again: Mapping[str, str]) -> None:
    """Say what lies in the folder, and why processes trace some programs themselves."""
    size = sum(entry.nbytes for entry in manifest.files.values())
    for program, reason in traced_again.items():
        typer.echo(f"compiled_llm: each process traces {program} itself: {reason}", err=True)
    typer.echo(f"compiled_llm: {len(manifest.files)} files, {size / 2**20:,.1f} MiB, in {target}", err=True)


def compiled_into(
    folder: Path,
    loaded: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    options: dict[str, Any],
    max_num_seqs: int,
    sizes: list[int],
    profile: Path | None,
    speculation: dict[str, Any] | None = None,
) -> Manifest:
    """Compile for batches of ``sizes``, or all if none is named, and for guesses by the settings of ``speculation``."""
    import compiled_llm
    from compiled_llm.compat.torch.inductor import uncached_graphs
    from compiled_llm.compilation.artifacts import stand_in_compiler
    from compiled_llm.compilation.artifacts.made_for import made_for
    from compiled_llm.compilation.artifacts.writing import PROFILE, seal
    from compiled_llm.compilation.graphs.captured_shapes import buckets_up_to
    from compiled_llm.execution.lifecycle.runner_lifecycle import prepare
    from compiled_llm.execution.prefill.embedded import EmbeddedTokens

    here = made_for(loaded, type(loaded), WrapConfig.from_options(options))
    model = cast("Wrapped", compiled_llm.wrap(loaded, max_batch_size=max_num_seqs, **options))
    if profile is not None:
        model.compiled.warming.read(profile).save(folder / PROFILE)
    engines: dict[str, Any] = {"max_num_seqs": max_num_seqs, "watch_model": False, "speculative_config": speculation}
    with compiled_llm.Engine(model, tokenizer=tokenizer, **engines) as engine:
        default = [1, min(2, max_num_seqs)] if model.device.type == "cpu" else buckets_up_to(max_num_seqs)
        engine.warmup(sizes or default)
        model_runner = model.compiled.model_runner()
        prepare(model_runner, [], [], [EmbeddedTokens.none(loaded)])
        model_runner.thread.call(model_runner.prepare_deferred, sizes or default)
        _run_some_requests(engine)
        model_runner.graph_manager.beside.wait()  # a thread may compile guesses of sizes that were not named
    with Console(stderr=True).status("waiting for kernels of attention that are built for later processes"):
        attention = model.compiled.config.backend_on(model.device.type)
        attention.backend.installation.wait_for_builds()
    if (left_out := uncached_graphs()) > 0:
        raise RuntimeError(
            f"compile: Inductor has compiled {left_out} graphs that it cannot keep; TORCHINDUCTOR_FX_GRAPH_CACHE and "
            "TORCHINDUCTOR_AUTOGRAD_CACHE must not be 0"
        )
    if model.device.type == "cpu":
        stand_in_compiler.write_to(folder)
    return seal(folder, here, max_num_seqs)


def _run_some_requests(engine: Engine) -> None:
    """Build kernels that no graph holds: those of settings that few requests use."""
    from compiled_llm.requests.sampling_params import SamplingParams

    drawn: dict[str, Any] = {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.1, "seed": 0}
    settings = [SamplingParams(temperature=0.0, max_tokens=3), SamplingParams(max_tokens=3, logprobs=2, **drawn)]
    for prompts in ([[1]], [[1, 2, 3], [1, 2]]):
        for params in settings:
            engine.generate(prompts, params)
