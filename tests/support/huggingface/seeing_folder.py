"""A folder with a tiny model that reads images, its processor and an image: what the command line loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from support.huggingface.vision import IMAGE, make
from support.huggingface.word_processor import WORDS, as_file, painted

_HUGGINGFACE: Any = transformers
_IMAGES = getattr(_HUGGINGFACE, "CLIPImageProcessorPil", None) or _HUGGINGFACE.CLIPImageProcessor
TEMPLATE = (
    "{% for message in messages %}w1 {% for part in message['content'] %}{% if part['type'] == 'image' %}<image> "
    "{% else %}{{ part['text'] }} {% endif %}{% endfor %}w2 {% endfor %}{% if add_generation_prompt %}w3{% endif %}"
)
"""It reads parts of messages alone, as LLaVA's."""


def seeing_folder(folder: Path) -> Path:
    """A LLaVA of words ``w0`` to ``w119``, for which an image is 4 tokens; ``a.png`` is one."""
    model = make("Llava", 0)
    words = Tokenizer(models.WordLevel({**WORDS, "<image>": IMAGE, "<unk>": 124}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", extra_special_tokens={"image_token": "<image>"}
    )
    processor = _HUGGINGFACE.LlavaProcessor(
        image_processor=_IMAGES(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}),
        tokenizer=tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    (folder / "a.png").write_bytes(as_file(painted(1)))
    return folder
