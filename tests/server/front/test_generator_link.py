"""A front's link to its generator says when there is one and when there is none, whenever the connection is lost."""

from __future__ import annotations

import asyncio

from compiled_llm.client import AsyncClient
from compiled_llm.server.front.generator_link import GeneratorLink
from support.generators import PATIENCE, Loop


def test_it_says_what_has_changed(generator: Loop) -> None:
    path, said = generator.generator._path, list[bool]()

    async def until_ready(link: GeneratorLink) -> None:
        while not link.is_ready:
            await asyncio.sleep(0.01)

    async def linking() -> None:
        link = GeneratorLink(lambda tokenizer: AsyncClient(path, tokenizer=tokenizer), said.append)
        running = asyncio.create_task(link.run())
        await until_ready(link)
        assert said == [True]
        link.model.client.close()
        while link.is_ready:
            await asyncio.sleep(0.01)
        await until_ready(link)
        running.cancel()
        await asyncio.wait([running])

    asyncio.run(asyncio.wait_for(linking(), PATIENCE))
    assert said == [True, False, True, False]
