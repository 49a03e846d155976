"""Which files of package and ops name a feature outside of its own files, and the list of them that is kept.

`compiled_llm_flashinfer` is left out: FlashInfer's API over the ops names what it offers.

``PYTHONPATH=. python support/named_features.py``, in ``tests/``, writes the list anew, with the reasons that stand in
it; with the name of a feature it prints the lines that name it.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from support.imports import CHECKOUT, sources

LIST = Path(__file__).with_suffix(".txt")
WORDS = {
    "fp8": "fp8",
    "recurrent": "recurrent",
    "latent": "latent",
    "variant": "(?<!in)variant",  # "invariant" is another feature
    "cascade": "cascade",
    "logprobs": "log[_-]?prob",
    "hidden_states": "hidden_states|emitted",
    "structured_outputs": "structured(?!_decision| trace)|grammar",  # a body's type, and a log of torch's
    "pooling": "(?<!un)pooled|pooling(?!_)",  # a CUDA graph's memory has no pool, or is outside of it
    "drafts": "draft|speculat|guess",
}
"""What names a feature, in code, comments and docstrings, as a pattern that ignores case."""


def named_in() -> dict[str, dict[str, list[str]]]:
    """Return the lines that name each feature, by file from the checkout, without the files whose path does."""
    own = {name: path for name, path in sources().items() if name.partition(".")[0] != "compiled_llm_flashinfer"}
    files = {str(path.relative_to(CHECKOUT)): path.read_text().splitlines() for path in own.values()}
    return {
        feature: {
            file: lines
            for file, text in sorted(files.items())
            if not named(word, file)
            and (lines := [f"{at}: {line}" for at, line in enumerate(text, 1) if named(word, line)])
        }
        for feature, word in WORDS.items()
    }


def named(word: str, text: str) -> bool:
    return re.search(word, text, re.IGNORECASE) is not None


def kept() -> dict[str, dict[str, str]]:
    """Return each feature's files that the list has, with the reason of a file that came later, or nothing."""
    found: dict[str, dict[str, str]] = {}
    feature = ""
    for line in filter(None, LIST.read_text().splitlines()):
        if line.startswith("  "):
            file, _, reason = line.strip().partition("  # ")
            found[feature][file] = reason
        else:
            feature = line.partition(":")[0]
            found[feature] = {}
    return found


def written(features: dict[str, dict[str, str]]) -> str:
    """Return the list's text: a feature with the number of its files, then each file with its reason."""
    lines: list[str] = []
    for feature, files in features.items():
        lines += [
            f"{feature}: {len(files)}",
            *(f"  {file}  # {why}" if why else f"  {file}" for file, why in files.items()),
            "",
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    for asked in sys.argv[1:]:
        for name, found in named_in()[asked].items():
            print(name, *found, sep="\n    ")
    if sys.argv[1:]:
        sys.exit()
    before = kept()
    now = {name: {file: before.get(name, {}).get(file, "") for file in files} for name, files in named_in().items()}
    LIST.write_text(written(now))
