"""Each promise of `test_kinds.py` sees three faults, each planted in a copy of the package.

A fault is a text that stands once in package or ops, in whatever file, and what stands there in its place.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import compiled_llm
import compiled_llm_ops

TESTS = Path(__file__).with_name("test_kinds.py")


class Fault(NamedTuple):
    """Found by a case of a test."""

    case: str  # of a test of `test_kinds.py`
    old: str  # what stands there
    new: str  # what is planted


TOKENS: dict[str, Fault] = {
    "a window is one token too wide": Fault(
        "test_tokens_in_generate[read at once-windowed]",
        "else (distance >= 0) & (distance <= window_left)",
        "else (distance >= 0) & (distance <= window_left + 1)",
    ),
    "a later chunk of a prompt begins without a state": Fault(
        "test_tokens_in_generate[read at once-recurrent]",
        "states=(spare[0] if start else read, write if",
        "states=(read, write if",
    ),
    "a request that lost its pages forgets its answer": Fault(
        "test_tokens_in_an_engine[uneven-]",
        "known, row = request.text, Row(self._pool, 0)",
        "known, row = request.prompt, Row(self._pool, 0)",
    ),
}
CAPTURED: dict[str, Fault] = {
    "a replay reads the tokens of an earlier prefill": Fault(
        "test_captured_steps_give_the_same_tokens[full]",
        "staging.upload([(as_bytes(chunk.packed), filled), (",
        "staging.upload([(",
    ),
    "a later chunk overwrites what an earlier one gave": Fault(
        "test_captured_steps_give_the_same_tokens[windowed]",
        "logits, tokens = logits.clone(), tokens.clone()",
        "logits, tokens = logits.clone(), tokens",
    ),
    "a step that is repeated counts no positions": Fault(
        "test_captured_steps_give_the_same_tokens[variant]",
        "            row.position_at_most += 1\n            row.length_at_most += 1\n        self.repeats += 1",
        "            row.length_at_most += 1\n        self.repeats += 1",
    ),
}
COMPILED: dict[str, Fault] = {
    "equal layers read the weights and pages of the first": Fault(
        "test_traced_steps_give_the_same_tokens[latent-compile]",
        'vars(layer)["_tensors"] = self.tensors(number, own)',
        'vars(layer)["_tensors"] = self.tensors(self.like[number], own)',
    ),
    "layers of other windows count as equal": Fault(
        "test_traced_steps_give_the_same_tokens[windowed-compile]",
        "self.like = _first_equal(descriptions)",
        "self.like = [0] * len(descriptions)",
    ),
    "a compiled program has one number of rows built in": Fault(
        "test_traced_steps_give_the_same_tokens[full-compile]",
        "torch._dynamo.mark_dynamic(column, 0)",
        "torch._dynamo.mark_static(column, 0)",
    ),
}
LOGITS: dict[str, Fault] = {
    "logits of other columns, where tokens are masked": Fault(
        "test_logits_are_huggingfaces[full]",
        "np.searchsorted(distinct, packed[kept] % new)",
        "np.searchsorted(distinct, (packed[kept] + 1) % new)",
    ),
    "queries of a chunk do not see their own tokens": Fault(
        "test_logits_are_huggingfaces[blocks]",
        "starts, lengths = rows.indptr[rows.token_rows], rows.token_positions + 1",
        "starts, lengths = rows.indptr[rows.token_rows], rows.token_positions.clamp(min=1)",
    ),
    "a query reads the bias of the one before": Fault(
        "test_logits_are_huggingfaces[variant]",
        "tensor.flatten(0, 1) if name in self.per_query",
        "tensor.flatten(0, 1).roll(1, 0) if name in self.per_query",
    ),
}
CACHES: dict[str, Fault] = {
    "tokens are read in another order": Fault(
        "test_a_cache_that_is_read_out_is_huggingfaces[full]",
        "memory.index_select(0, pages).permute(1, 2, 0, 3, 4).flatten(2, 3)",
        "memory.index_select(0, pages).permute(1, 2, 3, 0, 4).flatten(2, 3)",
    ),
    "fp8 is read without its scales": Fault(
        "test_a_cache_that_is_read_out_is_huggingfaces[full in fp8]",
        "(scaled(states.view(self.dtype), scale).to(",
        "(scaled(states.view(self.dtype), None).to(",
    ),
    "index keys of other tokens are written back": Fault(
        "test_huggingfaces_caches_are_read_in_and_written_back[latent with chosen tokens-dynamic]",
        "add_index_keys(original, keys[:, known:], index)",
        "add_index_keys(original, keys[:, : keys.shape[1] - known], index)",
    ),
}
BEAMS_AND_DRAFTS: dict[str, Fault] = {
    "a page is written that rows share": Fault(
        "test_beams[latent]", "return begun > 0 and self._pool.is_shared(", "return False and self._pool.is_shared("
    ),
    "beams go on in the order that they were in": Fault(
        "test_beams[recurrent]",
        "generate_loop.select(batch_indices.tolist())",
        "generate_loop.select(sorted(batch_indices.tolist()))",
    ),
    "a draft that was rejected stays": Fault(
        "test_drafts[latent with chosen tokens]",
        "        self.shrink(extra)\n        self.position_at_most -= extra",
        "        self.shrink(max(0, extra - 1))\n        self.position_at_most -= max(0, extra - 1)",
    ),
}
PREFIX_HITS: dict[str, Fault] = {
    "no token is left to compute": Fault(
        "test_prompts_that_begin_alike_begin_with_cached_pages[uneven]",
        "texts = self._texts(ids[:-1])",
        "texts = self._texts(ids)",
    ),
    "a page is found whatever is before it": Fault(
        "test_prompts_that_begin_alike_begin_with_cached_pages[full]",
        "            above = page\n        return nodes, pages",
        "            above = (salt,)\n        return nodes, pages",
    ),
    "a state is kept for the page before": Fault(
        "test_prompts_that_begin_alike_begin_with_cached_pages[recurrent]",
        "self._keep_state(nodes[-1], state)",
        "self._keep_state(nodes[-2], state)",
    ),
}
REFUSALS: dict[str, Fault] = {
    "fp8 of values that have another size than keys": Fault(
        "test_what_a_kind_refuses_is_refused_by_its_sentence[uneven-kv_dtype]",
        '"variant": VARIANT, "uneven": UNEVEN}',
        '"variant": VARIANT}',
    ),
    "pages that are larger than blocks": Fault(
        "test_what_a_kind_refuses_is_refused_by_its_sentence[blocks-page_size]",
        "layer.kind.together % config.page_size == 0",
        "layer.kind.together >= config.page_size // 2",
    ),
    "a cache of recurrent layers that is cropped": Fault(
        "test_what_a_kind_refuses_is_refused_by_its_sentence[recurrent-crop]",
        "(FoundKind(RECURRENT, number, layer) for",
        "(FoundKind(FULL, number, layer) for",
    ),
}
FAULTS = TOKENS | CAPTURED | COMPILED | LOGITS | CACHES | BEAMS_AND_DRAFTS | PREFIX_HITS | REFUSALS


PACKAGES = [Path(path) for package in (compiled_llm, compiled_llm_ops) for path in package.__path__]


def test_each_fault_can_be_planted() -> None:
    texts = [path.read_text() for folder in PACKAGES for path in folder.rglob("*.py")]
    moved = {name for name, fault in FAULTS.items() if sum(text.count(fault.old) for text in texts) != 1}
    assert not moved, "plant them where they belong now"


@pytest.mark.slow
@pytest.mark.whole
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str, tmp_path: Path, seed: int) -> None:
    fault = FAULTS[name]
    for package in PACKAGES:
        shutil.copytree(package, tmp_path / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    (file,) = (path for path in tmp_path.rglob("*.py") if fault.old in path.read_text())
    file.write_text(file.read_text().replace(fault.old, fault.new))
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    asked = [f"{TESTS}::{fault.case}", "-q", "--whole", f"--seed={seed}", "-p", "no:cacheprovider"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *asked],
        cwd=tmp_path,  # Python imports from there first
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == pytest.ExitCode.TESTS_FAILED, run.stdout[-2000:] + run.stderr[-2000:]
    assert "1 failed" in run.stdout
    print(*[line for line in run.stdout.splitlines() if line.startswith("E  ")][:3], sep="\n")
