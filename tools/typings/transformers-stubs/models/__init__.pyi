"""Of the models of transformers, those that we import: pyright read 2,000 files of others in a quarter of its time."""

from transformers.models.auto import *  # noqa: F403
from transformers.models.llama import *  # noqa: F403
