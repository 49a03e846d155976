"""Bounds of images that a server is told: which there are, and which are impossible."""

from __future__ import annotations

from pathlib import Path

import pytest

from compiled_llm.server.image_limit import images_in
from compiled_llm.server.settings import ApiServerSettings


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"max_body_bytes": 2**27}, "--max-body-bytes 134217728: must be from 1 to 67108864"),
        ({"max_image_bytes": 0}, "--max-image-bytes 0"),
        ({"max_image_pixels": 2**40}, "--max-image-pixels"),
        ({"allowed_local_media_path": Path("/none")}, "there is no such folder"),
        ({"allowed_media_domains": ("http://a.example",)}, "--allowed-media-domains http"),
    ],
)
def test_impossible_settings_are_refused(wrong, words):
    with pytest.raises(ValueError, match=words):
        ApiServerSettings(names=("a",), **wrong)


def test_bodies_are_longer_where_images_are_read():
    settings = ApiServerSettings(names=("a",))
    assert [settings.body_bytes(images) for images in (False, True)] == [2**23, 2**25]
    assert ApiServerSettings(names=("a",), max_body_bytes=9).body_bytes(True) == 9


@pytest.mark.parametrize(("limit", "count"), [('{"image": 4}', 4), ('{"image": 0, "video": 0}', 0), ("{}", 16)])
def test_the_limit_is_written_as_vllm_s(limit, count):
    assert images_in(limit) == count


@pytest.mark.parametrize(
    "limit", ["4", '{"image": -1}', '{"image": true}', '{"video": 1}', "{", '{"image": {"count": 1}}']
)
def test_other_limits_are_refused(limit):
    with pytest.raises(ValueError, match="--limit-mm-per-prompt"):
        images_in(limit)
