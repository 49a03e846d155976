"""A model as servers take it: by name, or for random weights a folder with a tokenizer that is made up, too."""

from __future__ import annotations

import itertools
import string
import tempfile
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers import models as tokenizer_models
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from compiled_llm.commands.bench import models
from compiled_llm.commands.bench.contender import Setup

_END = "<end>"


class ModelFolder:
    """Writes random weights once for all servers; the folder goes with this."""

    def __init__(self) -> None:
        """Write nothing yet."""
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def location(self, setup: Setup) -> str:
        """Return what a server is told to load."""
        if not models.is_random(setup.name):
            return setup.name
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="compiled_llm_bench_")
            setup.log(f"{setup.name}: writing the model for servers")
            write(setup, Path(self._folder.name) / setup.name)
        return str(Path(self._folder.name) / setup.name)


def write(setup: Setup, folder: Path) -> None:
    """Write the model of random weights, and a tokenizer of as many tokens."""
    model = setup.model()
    model.save_pretrained(folder)
    made_up_tokenizer(int(models.SHAPES[setup.name]["vocab_size"])).save_pretrained(folder)


def made_up_tokenizer(vocabulary: int) -> PreTrainedTokenizerBase:
    """Return a byte-level tokenizer, as Qwen's: bytes, then words that nobody has written, and the end token last."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = itertools.chain.from_iterable(itertools.product(string.ascii_lowercase, repeat=n) for n in (1, 2, 3, 4))
    words = ("Ġ" + "".join(word) for word in letters)
    tokens = [*alphabet, *itertools.islice(words, vocabulary - len(alphabet) - 1), _END]
    tokenizer = Tokenizer(tokenizer_models.BPE({token: number for number, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(_END, special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=_END)
