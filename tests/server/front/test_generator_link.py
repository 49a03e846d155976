"""A front's link to its generator says once that all is loaded, however often the connection is made again."""

from __future__ import annotations

import asyncio

from compiled_llm.client import AsyncClient
from compiled_llm.server.front.generator_link import GeneratorLink
from support.generators import PATIENCE, Loop


def test_all_is_loaded_once(generator: Loop) -> None:
    path, loaded = generator.generator._path, list[bool]()

    async def until_ready(link: GeneratorLink) -> None:
        while not link.is_ready:
            await asyncio.sleep(0.01)

    async def linking() -> None:
        link = GeneratorLink(lambda tokenizer: AsyncClient(path, tokenizer=tokenizer), lambda: loaded.append(True))
        running = asyncio.create_task(link.run())
        await until_ready(link)
        assert loaded == [True]
        link.model.client.close()
        while link.is_ready:
            await asyncio.sleep(0.01)
        await until_ready(link)
        running.cancel()

    asyncio.run(asyncio.wait_for(linking(), PATIENCE))
    assert loaded == [True]
