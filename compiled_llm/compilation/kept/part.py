"""Kept programs of one model: written into artifacts or this user's cache, and taken from there."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path as File
from typing import TYPE_CHECKING

from transformers import PreTrainedModel

from compiled_llm.compat.torch.triton import choose_cache
from compiled_llm.compilation.artifacts.made_for import made_for
from compiled_llm.compilation.kept.cache.program_cache import ProgramCache
from compiled_llm.compilation.kept.cache.stored_program import StoredProgram
from compiled_llm.compilation.kept.fingerprint.surroundings import versions
from compiled_llm.compilation.kept.kept_program import KeptProgram
from compiled_llm.compilation.kept.record import Recorder
from compiled_llm.compilation.kept.take import Taker
from compiled_llm.config import WrapConfig
from compiled_llm.env import Env
from compiled_llm.model.facts import ModelFacts
from compiled_llm.model.version.model_version import ModelVersion

if TYPE_CHECKING:
    from compiled_llm.compilation.kept import part as this
    from compiled_llm.compilation.kept_programs import KeptPart

    checked: KeptPart = this

logger = logging.getLogger("compiled_llm.graphs")

FOLDER = "kept"  # in artifacts
CACHE = "programs"  # in ``COMPILED_LLM_CACHE``

_written: list[File] = []
"""The folder of artifacts that this process writes; none if it writes none."""


@contextmanager
def recording(folder: File) -> Iterator[None]:
    """Write down the programs that are traced while the block runs, of models wrapped there, for a folder of artifacts.

    This process keeps all its builds in that folder, as ``artifacts.writing.variables`` says.
    """
    _written.append(folder)
    try:
        yield
    finally:
        _written.remove(folder)


def not_kept(folder: File) -> dict[str, str]:
    """Return why programs in a folder of artifacts are not kept, by their names."""
    refused = {}
    for program in _read(folder):
        if program.refused is not None:
            refused[program.name] = program.refused
    return refused


def of_model(facts: ModelFacts, config: WrapConfig, artifacts: File | None) -> tuple[Recorder | None, Taker | None]:
    """Return what writes a model's programs down, and what takes them as they were kept; None for what there is not.

    ``artifacts`` is the folder of checked ones that the model is wrapped with. Without any, programs lie in this user's
    cache, unless this process writes artifacts: then all are traced, so that their graphs get there.
    """
    version = facts.version
    if not (_written or artifacts is not None or Env.from_environ().keeps_programs):
        return None, None
    if (device := facts.model.device).type == "cuda":
        choose_cache(device.index or 0)  # before any of our kernels is built
    if _written:
        return Recorder(partial(_keep_in, _written[-1]), version), None
    if artifacts is not None:
        return None, taker(artifacts, version)
    cache = _cache_for(facts.model, facts.model_class, config)
    return (None, None) if cache is None else (Recorder(cache.keep, version), Taker(cache.read(), version))


def taker(folder: File, version: ModelVersion) -> Taker:
    """Return what takes the programs that are kept in a checked folder of artifacts."""
    return Taker([StoredProgram(program, folder) for program in _read(folder)], version)


def _cache_for(model: PreTrainedModel, model_class: type[PreTrainedModel], config: WrapConfig) -> ProgramCache | None:
    try:
        here = {**made_for(model, model_class, config), **versions(), "rows": config.max_batch_size}
        return ProgramCache(Env.from_environ().cache.absolute() / CACHE, here)
    except Exception as error:  # any: a config may hold what no JSON has, and the current folder may be gone
        logger.debug("compiled_llm: programs are not kept: %s: %s", type(error).__name__, error)
        return None


def _keep_in(folder: File, program: KeptProgram, files: Mapping[str, File]) -> None:
    """Write a program into a folder of artifacts, which has all that Inductor and Triton build."""
    if not all((folder / place).exists() for place in files):  # this process had it already
        program = KeptProgram(program.name, refused="a kernel lies in another folder")
    content = program.encoded()
    (folder / FOLDER).mkdir(mode=0o700, exist_ok=True)
    (folder / FOLDER / f"{hashlib.sha256(content).hexdigest()[:16]}.json").write_bytes(content)


def _read(folder: File) -> list[KeptProgram]:
    """Read the programs of a folder; one that this version does not understand is none."""
    found = []
    for path in sorted((folder / FOLDER).glob("*.json")):
        try:
            found.append(KeptProgram.decoded(path.read_bytes()))
        except ValueError:
            continue
    return found
