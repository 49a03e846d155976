"""The features that are parts, or are to become parts: what each consists of, and what still ties it to the rest."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from support.imports import CHECKOUT, PACKAGES

MOST_FILES = 3
"""Files of a feature in a package, if they are not one folder in each room."""


class Feature(NamedTuple):
    """A feature, as it is taken out."""

    word: str  # what names it in code, comments and docstrings, as a pattern that ignores case
    # all of it and nothing that others need: in the package, and in the ops if it has some, a folder or at most three
    # files
    files: tuple[str, ...]
    tests: tuple[str, ...]  # folders and files with its own tests, all of which fail without it
    line: str = ""  # its registration, ``FILE: TEXT``; the one line of that file that has the text goes with its files
    exports: str = ""  # its public names, which the ops export, ``FILE: PATTERN``; all lines that have it go
    asks: str = ""  # who asks for it, as Python: an error of one sentence
    lacks: str = ""  # why the rest does not run without it yet; nothing if it does


FEATURES = {
    # Ops of fp8 and of latents stay: they are used alone, and by FlashInfer's API.
    "fp8 pages": Feature(
        "fp8",
        ("compiled_llm/kinds/fp8.py",),
        ("kvcache/test_fp8_engines.py",),
        line='compiled_llm/features.py: "fp8_e4m3": ',
        asks="wrapped(kv_dtype='fp8_e4m3')",
    ),
    "latents": Feature(
        "latent",
        ("compiled_llm/kinds/latent.py", "compiled_llm/kinds/latent_probe.py"),
        ("kvcache/latents/test_latent_pages.py",),
        line='compiled_llm/features.py: "latents": ',
    ),
    "indexers": Feature(
        "indexe[rd]",
        ("compiled_llm/kinds/indexers",),
        ("kvcache/latents/test_indexed_models.py", "kvcache/latents/test_index_scores.py"),
        line='compiled_llm/features.py: "indexers": ',
    ),
    "variants": Feature(
        "(?<!in)variant",  # "invariant" is another feature
        ("compiled_llm/kinds/variant.py", "ops/compiled_llm_ops/variants"),
        ("huggingface/variants/test_variant_models.py", "ops/variants"),
        line='compiled_llm/features.py: "variants": ',
        exports='ops/compiled_llm_ops/__init__.py: (?<!in)variant|"flashinfer_arguments"',
        asks="wrapped(variants={'alibi': 'all'})",
    ),
    "recurrent layers": Feature(
        "recurrent",
        ("compiled_llm/kinds/recurrent", "ops/compiled_llm_ops/recurrent"),
        ("huggingface/recurrent/test_recurrent_generate.py", "model/test_recurrent.py", "ops/recurrent"),
        line='compiled_llm/features.py: "recurrent layers": ',
        exports="ops/compiled_llm_ops/__init__.py: causal_conv1d|gated_delta_rule|selective_scan",
    ),
    "packed weights": Feature(
        "PackedWeight|packed_linear|packed_weights|model.packed",
        ("compiled_llm/model/packed", "ops/compiled_llm_ops/packed"),
        ("huggingface/packed", "model/packed", "ops/test_packed_linear.py"),
        line='compiled_llm/features.py: "packed": ',
        exports="ops/compiled_llm_ops/__init__.py: packed_linear|Packed(Format|Weight)",
        asks="wrapped(packed=True)",
    ),
    "cascade": Feature(
        "cascade",
        ("compiled_llm/execution/cascade", "ops/compiled_llm_ops/attention/cascade"),
        ("engine/test_cascade_steps.py", "kvcache/test_shared_pages.py", "kvcache/test_shared_runs.py", "ops/cascade"),
        line='compiled_llm/features.py: "cascade": ',
        exports='ops/compiled_llm_ops/__init__.py: cascade|"SharedRun"',
        asks="wrapped(cascade=True)",
    ),
    "drafts": Feature(
        "draft|ngram",
        (
            *(
                "compiled_llm/compilation/drafts.py",
                "compiled_llm/execution/drafts",
                "compiled_llm/engine/drafts",
                "compiled_llm/huggingface/drafts.py",
            ),
            "ops/compiled_llm_ops/drafts",
        ),
        (
            "compilation/drafts",
            "execution/test_bounds_of_lengths.py",
            "execution/test_compiled_beside.py",
            "execution/test_drafts.py",
            "engine/test_speculation.py",
            "huggingface/test_prompt_lookup.py",
            "ops/drafts",
        ),
        line='compiled_llm/features.py: "drafts": ',
        exports="ops/compiled_llm_ops/__init__.py: drafts|NOT_ACCEPTED|NOT_DRAFTED|write_texts",
        asks="Engine(model(), speculative_config={'method': 'ngram'})",
    ),
    "emitted states": Feature(
        "emitted|hidden_states",
        (
            *("compiled_llm/execution/taps/emitted_steps.py", "compiled_llm/engine/emitted.py"),
            *("compiled_llm/huggingface/emitted.py", "compiled_llm/client/emitted.py"),
        ),
        (
            "engine/outputs/test_engine_emitted.py",
            "engine/outputs/test_engine_states.py",
            "huggingface/inside/test_hidden_states.py",
        ),
        'compiled_llm/features.py: "hidden_states": ',
        asks="Engine(model()).submit([5], hidden_states=[0])",
    ),
    "log-probabilities": Feature(
        "logprob",
        # The op stays, which others may call.
        ("compiled_llm/engine/logprobs", "compiled_llm/client/logprobs.py", "compiled_llm/server/logprobs"),
        (
            "engine/outputs/test_forgetting_state.py",
            "engine/outputs/test_logprobs.py",
            "engine/outputs/test_named_logprobs.py",
        ),
        'compiled_llm/features.py: "logprobs": ',
        asks="Engine(model()).submit([5], SamplingParams(logprobs=1))",
    ),
    "decisions": Feature(
        "decision|decide",
        ("compiled_llm/requests/decisions", "compiled_llm/server/decisions", "compiled_llm/compat/decisions.py"),
        ("decisions",),
        line='compiled_llm/features.py: "decisions": ',
        asks="Engine(model()).decide('state', {'a': {'type': 'noul'}})",
    ),
    "images": Feature(
        "images",
        (
            "compiled_llm/engine/images",
            "compiled_llm/huggingface/images.py",
            "compiled_llm/server/images",
            "compiled_llm/compat/images",
        ),
        ("images",),
        line='compiled_llm/features.py: "images": ',
        asks="Engine(model()).submit([{'role': 'user', 'content': [{'type': 'image', 'image': 'a.png'}]}])",
    ),
    "lm-eval": Feature(
        "lm[_-]eval",
        ("compiled_llm/integrations/lm_eval", "compiled_llm/commands/lm_eval.py"),
        ("integrations/test_lm_eval_command.py",),
        line='compiled_llm/features.py: "lm_eval": ',
    ),
    "pooling": Feature(
        "pooling|embed(?!d)|classif",
        (
            *("compiled_llm/compilation/pooling.py", "compiled_llm/engine/pooling", "compiled_llm/requests/pooling"),
            *("compiled_llm/huggingface/pooling", "compiled_llm/server/pooling", "compiled_llm/client/pooling.py"),
        ),
        ("pooling",),
        line='compiled_llm/features.py: "pooling": ',
        asks="Engine(model()).embed([5], pooling='last')",
    ),
    "TRL": Feature(
        "(?<!con)trl",  # of "control"
        ("compiled_llm/integrations/trl", "compiled_llm/trl.py", "compiled_llm/compat/training/trl.py"),
        ("integrations/test_trl_refusals.py",),
    ),
    "kept programs": Feature(
        "kept program",
        ("compiled_llm/compilation/kept", "compiled_llm/compat/torch/kept"),
        ("compilation/kept",),
        'compiled_llm/features.py: "kept programs": ',
    ),
    "structured outputs": Feature(
        "structured_output|grammar",
        ("compiled_llm/engine/grammars",),  # `generate` follows grammars of xgrammar's processor without it
        ("engine/grammars",),
        'compiled_llm/features.py: "structured_outputs": ',
        asks="StructuredOutputsParams(regex='a')",
    ),
    "chat page": Feature(
        "chat page",
        ("compiled_llm/server/chat_page",),
        ("server/api_server/chat_page/test_files.py",),
        'compiled_llm/features.py: "chat page": ',
    ),
    "replicas": Feature(
        "replica",
        ("compiled_llm/server/replicas",),
        ("server/replicas",),
        exports="compiled_llm/server/__init__.py: ray_app",
    ),
    "responses": Feature(
        "/v1/responses",
        ("compiled_llm/server/openai/responses",),
        ("server/api_server/openai/test_responses.py",),
        line='compiled_llm/features.py: "responses": ',
    ),
    # These are none yet.
    "artifacts": Feature(
        "artifact",
        ("compiled_llm/compilation/artifacts",),
        ("compilation/artifacts",),
        lacks="the way to programs asks artifacts first, and kept programs have their folders",
    ),
    "background compiling": Feature(
        "background",
        ("compiled_llm/execution/lifecycle/background_compilation.py",),
        ("execution/test_background_compilation.py",),
        lacks="who makes a runner makes it",
    ),
    "batch-invariant": Feature(
        "invarian",
        ("compiled_llm/model/weights/invariance.py", "ops/compiled_llm_ops/triton/invariant.py"),
        ("engine/invariance",),
        lacks="attention, passes and memory ask the config",
    ),
    "fused weights": Feature(
        "fused",
        ("compiled_llm/model/weights/fused_weights.py",),
        ("model/test_fused_weights.py",),
        lacks="a runner lays weights out, and programs and passes ask them",
    ),
    "generate_batch": Feature(
        "generate_batch|continuous batching",
        ("compiled_llm/huggingface/batch",),
        ("huggingface/test_generate_batch.py",),
        lacks="a wrapped model's methods and calls that join an engine are in one folder",
    ),
    "mixed steps": Feature(
        "mixed",
        ("compiled_llm/execution/prefill/mixed_steps.py",),
        ("engine/test_mixed_steps.py",),
        lacks="the runner packs rows that decode beside prompts",
    ),
    "traced hooks": Feature(
        "traced_hook|TracedHook",
        ("compiled_llm/huggingface/traced_hook.py", "compiled_llm/model/traced/hooks.py"),
        ("engine/outputs/test_engine_emitted.py",),
        lacks="facts of a model have them, and programs are traced with them",
    ),
}


class Parted(NamedTuple):
    """A copy of the packages without a feature."""

    folder: Path  # with the packages side by side, as on a Python path
    modules: frozenset[str]  # files that went, as the copy has their paths


def taken_out(feature: Feature, folder: Path) -> Parted:
    """Copy package and ops into a folder, without a feature's files and its line.

    As they are imported here: with their bytecode, which takes 2 s to compile.
    """
    for package in PACKAGES:
        spec = importlib.util.find_spec(package.name)
        assert spec is not None
        assert spec.origin is not None
        shutil.copytree(Path(spec.origin).parent, folder / package.name)
    before = files_in(folder)
    for file in feature.files:
        path = folder / file.removeprefix("ops/")
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for lines, most in ((feature.line, 1), (feature.exports, None)):
        if lines:
            leave_out(folder, lines, most)
    return Parted(folder, before - files_in(folder))


def python(parted: Parted, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own, which finds the copy first."""
    path = os.pathsep.join(map(str, (parted.folder, CHECKOUT / "tests")))
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
        cwd=CHECKOUT / "tests",
        capture_output=True,
        text=True,
        check=False,
    )


def leave_out(folder: Path, lines: str, most: int | None) -> None:
    """Take the lines of a file that match a pattern out of a copy: one at least, and ``most``."""
    file, pattern = lines.split(": ", 1)
    path = folder / file.removeprefix("ops/")
    before = path.read_text().splitlines(keepends=True)
    kept = [line for line in before if not re.search(pattern, line, re.IGNORECASE)]
    assert 1 <= len(before) - len(kept) <= (most or len(before)), f"{file} has lines with {pattern}"
    path.write_text("".join(kept))


def files_in(folder: Path) -> frozenset[str]:
    return frozenset(str(path.relative_to(folder)) for path in folder.rglob("*.py"))


def naming(feature: Feature, folder: Path) -> list[str]:
    """Return the lines of a copy that still name a feature, each with its file."""
    return [
        f"{path.relative_to(folder)}:{number}: {line.strip()}"
        for path in sorted(folder.rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(feature.word, line, re.IGNORECASE)
    ]


def is_part(feature: Feature) -> bool:
    """Whether a feature is, in each package, at most three files, or in each room one file or folder."""
    by_package = [[file for file in feature.files if file.startswith("ops/") is ops] for ops in (False, True)]
    return all(
        len(files) == len({file.split("/")[1] for file in files})
        or (len(files) <= MOST_FILES and all(file.endswith(".py") for file in files))
        for files in by_package
    ) and all((CHECKOUT / file).exists() for file in feature.files)
