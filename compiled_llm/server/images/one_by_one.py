"""A processor that makes of each image what the model reads before the next image is decoded."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from compiled_llm.engine.apart.unwanted import UnwantedError
from compiled_llm.engine.images.image_files import UnreadError, as_read_by
from compiled_llm.server.defaults import MOST_IMAGE_PIXELS
from compiled_llm.server.images.deferred_image import DeferredImage
from compiled_llm.server.images.turns import Turns

if TYPE_CHECKING:
    from compiled_llm.engine.parts import MultimodalProcessor

logger = logging.getLogger("compiled_llm.server")

_TRIED = ((64, 96), (160, 64))
"""Sizes of the images with which it is tried whether a processor's outputs can be joined."""


ProcessedImages = MutableMapping[str, object]
"""What an image processor returns, by its inputs' names in the model."""
_Process = Callable[[Sequence[object]], ProcessedImages]


class _ImageProcessor(Protocol):
    def __call__(self, images: object, *arguments: object, **options: object) -> ProcessedImages: ...


def reading_one_by_one(processor: MultimodalProcessor, turns: Turns) -> MultimodalProcessor:
    """Return a copy of a processor of HuggingFace's that reads deferred images in turns; itself if it has no part."""
    image_processor = getattr(processor, "image_processor", None)
    if image_processor is None:
        return processor
    own = copy.copy(processor)
    vars(own)["image_processor"] = _OneByOne(image_processor, turns)
    return own


class _OneByOne:
    """HuggingFace's image processor, called for one image after the other where it makes of them the same."""

    def __init__(self, image_processor: _ImageProcessor, turns: Turns) -> None:
        self._image_processor = image_processor
        self._turns = turns
        self._lock = threading.Lock()
        self._joints: dict[bool, Joints | None] = {}  # by whether images are nested

    def __getattr__(self, name: str) -> object:
        if name == "_image_processor":  # of a copy that is being made
            raise AttributeError(name)
        return getattr(self._image_processor, name)

    def __call__(self, images: object, *arguments: object, **options: object) -> ProcessedImages:
        flat, nested = _flat(images)
        deferred = [image for image in flat if isinstance(image, DeferredImage)]
        if not flat or len(deferred) < len(flat):
            return self._image_processor(images, *arguments, **options)

        def process(given: Sequence[object]) -> ProcessedImages:
            return self._image_processor([[*given]] if nested else [*given], *arguments, **options)

        if len(flat) > 1 and (joints := self._joints_of(process, nested)) is not None:
            outputs = [self._read([image], process) for image in deferred]
            if (joined := _joined(outputs, joints)) is not None:
                return joined
        return self._read(deferred, process)

    def _read(self, images: Sequence[DeferredImage], process: _Process) -> ProcessedImages:
        """Call the processor for images that are decoded at once, in one turn; UnreadError if that cannot be."""
        pixels = sum(image.pixels for image in images)
        if pixels > MOST_IMAGE_PIXELS:
            raise UnreadError from ValueError(
                f"prompt: its images have {pixels:,} pixels, and the model's processor reads them all together, which "
                f"{MOST_IMAGE_PIXELS:,} may be; make them smaller"
            )
        try:
            with self._turns.turn(images[0].asker, pixels):
                return process([as_read_by(self._image_processor, image.decoded()) for image in images])
        except UnwantedError as error:
            raise UnreadError from error

    def _joints_of(self, process: _Process, nested: bool) -> Joints | None:
        with self._lock:
            if nested not in self._joints:
                joints = self._joints[nested] = _found_joints(process)
                if joints is None:
                    name = type(self._image_processor).__name__
                    logger.info("compiled_llm: %s reads the images of a request together, not one by one", name)
            return self._joints[nested]


def _flat(images: object) -> tuple[Sequence[object], bool]:
    """Return the images of one prompt, and whether they are nested in a list of prompts; of more prompts, the lists."""
    given = images if isinstance(images, (list, tuple)) else [images]
    if len(given) == 1 and isinstance(given[0], (list, tuple)):
        return given[0], True
    return given, False


# ---- outputs of one image each, as one of all

Joint = Callable[[Sequence[Any]], object]
_JOINTS: tuple[Joint, ...] = (
    lambda values: _concatenated(values, 0),
    lambda values: _concatenated(values, 1),
    lambda values: [[own for value in values for own in value[0]]],
)
Joints = Mapping[str, Joint]
"""How values of one image each are joined, by their names."""


def _found_joints(process: _Process) -> Joints | None:
    """Return what joins a processor's outputs, by two images of noise; None if they come out otherwise together."""
    noise = np.random.default_rng(0)
    images = [Image.fromarray(noise.integers(0, 256, (*size, 3), dtype=np.uint8)) for size in _TRIED]
    try:
        together, alone = dict(process(images)), [dict(process([image])) for image in images]
    except Exception:  # whatever a processor says of such images; of those that are asked for it says it again
        return None
    found = {name: _joint([output.get(name) for output in alone], value) for name, value in together.items()}
    joints = {name: joint for name, joint in found.items() if joint is not None}
    return joints if len(joints) == len(found) else None


def _joint(values: Sequence[object], expected: object) -> Joint | None:
    return next((joint for joint in _JOINTS if _equal(_tried(joint, values), expected)), None)


def _joined(outputs: Sequence[ProcessedImages], joints: Joints) -> ProcessedImages | None:
    """Return outputs of one image each as one of all; None if they have no common shape."""
    joined = {name: _tried(joint, [output[name] for output in outputs]) for name, joint in joints.items()}
    if any(value is None for value in joined.values()):
        return None
    outputs[0].update(joined)
    return outputs[0]


def _tried(joint: Joint, values: Sequence[object]) -> object:
    try:
        return joint(values)
    except (RuntimeError, ValueError, TypeError, IndexError):
        return None


def _concatenated(values: Sequence[Any], axis: int) -> object:
    if all(isinstance(value, Tensor) for value in values):
        return torch.cat(list(values), axis)
    if all(isinstance(value, np.ndarray) for value in values):
        return np.concatenate(list(values), axis)
    if axis == 0 and all(isinstance(value, list) for value in values):
        return [own for value in values for own in value]
    return None


def _equal(one: object, other: object) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other)
