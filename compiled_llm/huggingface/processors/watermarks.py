"""HuggingFace's watermark of green tokens, with each row's last token from the host."""

# Its processor seeds a generator with that token, row by row, and reads it from the device each time. The host knows it
# by then: tokens are read while the forward runs. (SynthID's processor reads nothing; the "selfhash" of this one reads
# what the device has just sorted.)

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import cast

from torch import LongTensor, Tensor
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation.logits_process import WatermarkLogitsProcessor


class WatermarkOfHost(WatermarkLogitsProcessor):
    """HuggingFace's processor over texts on the host."""

    texts: Iterator[Tensor]  # the rows of ``input_ids``, in order; each call takes them all

    def set_seed(self, input_seq: Tensor) -> None:
        """Seed the generator for the next row, without reading ``input_seq`` from the device."""
        super().set_seed(cast(LongTensor, next(self.texts)))


def with_watermarks_of_host(processors: Iterable[LogitsProcessor]) -> LogitsProcessorList:
    """Return the same processors, with watermarks replaced by those that do not read the device."""
    return LogitsProcessorList([_of_host(processor) for processor in processors])


def _of_host(processor: LogitsProcessor) -> LogitsProcessor:
    if type(processor) is not WatermarkLogitsProcessor or processor.seeding_scheme != "lefthash":
        return processor
    host_processor = copy.copy(processor)
    host_processor.__class__ = WatermarkOfHost
    return host_processor
