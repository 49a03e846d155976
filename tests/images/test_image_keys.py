"""Hashes of pixels: another number anywhere, in any of the pieces that threads hash, makes another image."""

from __future__ import annotations

import os
import random
import signal
from time import sleep

import pytest
import torch
from torch import Tensor

from compiled_llm.engine.images.hashes import HASHES
from compiled_llm.engine.images.keys import digests_of

PIECE = 1 << 21
PATCHES, WIDTH = 2048, 1536
"""In bfloat16 three pieces, as many bytes as two of them and a half have."""


@pytest.fixture(scope="module")
def pixels() -> Tensor:
    return torch.randn(PATCHES, WIDTH, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)


def digests(pixels: Tensor, *grids: tuple[int, int, int]) -> list[bytes]:
    grid = torch.tensor(grids or [(1, 32, 64)])
    tokens = (grid.prod(dim=1) // 4).tolist()
    return [*digests_of({"pixel_values": pixels, "image_grid_thw": grid}, tokens)]


def test_any_number_any_place_and_any_size_of_a_image_makes_another_one(pixels, seed):
    assert pixels.nbytes == 3 * PIECE
    (own,) = digests(pixels)
    assert len(own) == 32
    assert digests(pixels.clone()) == [own]
    rng, found = random.Random(seed), {own}
    for piece in range(3):
        other = pixels.clone()
        other.view(torch.int16).view(-1)[piece * PIECE // 2 + rng.randrange(PIECE // 2)] ^= 1
        found.add(*digests(other))
    halves = pixels.view(torch.int16).view(-1).split(PIECE // 2)
    found.add(*digests(torch.cat([halves[1], halves[0], halves[2]]).view(torch.bfloat16).view(PATCHES, WIDTH)))
    found.add(*digests(pixels, (1, 64, 32)))
    found.add(*digests(pixels.view(torch.float16)))
    assert len(found) == 7, f"seed {seed}: two images have one hash"


def test_images_of_one_prompt_have_the_hashes_that_each_has_alone(pixels):
    sizes = (1, 32, 32), (1, 16, 64)
    first, second = pixels.split(PATCHES // 2)
    assert digests(pixels, *sizes) == [*digests(first, sizes[0]), *digests(second, sizes[1])]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes cannot be forked")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_has_threads_of_its_own(pixels):
    data = memoryview(bytes(2 * PIECE))
    before = [*HASHES.begun(data)]
    if (child := os.fork()) == 0:
        os._exit([*HASHES.begun(data)] != before)
    assert ended(child) == 0, "it waits for threads that it does not have"


def ended(child: int) -> int:
    """Return the exit status of a process, which is killed if it takes long."""
    for _ in range(300):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        sleep(0.1)
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
