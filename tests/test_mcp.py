"""The tools for assistants, by the client of the Model Context Protocol's own SDK."""

import asyncio
import base64
from io import BytesIO

import httpx
import pytest
from mcp import ClientSession
from mcp.client.streamable_http import streamablehttp_client
from PIL import Image

from sd_tpu.pictures.images import read_png


def assist(address: str, work):
    """What an assistant gets to know that is connected to the page at an address."""
    async def connected():
        async with (streamablehttp_client(f"{address}gradio_api/mcp/") as (read, write, _),
                    ClientSession(read, write) as session):
            await session.initialize()
            return await work(session)

    return asyncio.run(connected())


def test_an_assistant_finds_tools_and_what_each_of_their_parameters_means(address):
    tools = {tool.name: tool for tool in assist(address, ClientSession.list_tools).tools}
    assert {"draw", "models", "samplers", "generate", "read_metadata"} == tools.keys()
    draw = tools["draw"]
    assert draw.description.startswith("Draws one picture of what a text describes")
    assert draw.inputSchema["required"] == ["prompt"]
    assert all(each["description"] for each in draw.inputSchema["properties"].values())


def test_an_assistant_draws_a_picture_that_it_sees_and_can_draw_again(address, page_engine):
    async def draw(session: ClientSession):
        listed = await session.call_tool("models", {})
        assert page_engine.offer.first in listed.content[0].text
        return await session.call_tool("draw", {"prompt": "a fox", "seed": 7, "steps": 2})

    answer = assist(address, draw)
    assert not answer.isError
    picture, where = answer.content
    assert Image.open(BytesIO(base64.b64decode(picture.data))).size == (32, 32)
    url = where.text.removeprefix("Image URL: ")
    made = read_png(httpx.get(url).content).pictures[0]
    assert (made.prompt, made.seed, made.steps) == ("a fox", 7, 2) and url.endswith("/7-a-fox.png")


@pytest.mark.parametrize(("asked", "sentence"), [
    ({"prompt": " "}, "There is no prompt yet"),
    ({"prompt": "a fox", "steps": 1000}, "Steps should be from 1 to 200, not 1000."),
    ({"prompt": "a fox", "model": "other"}, "There is no model 'other'"),
])
def test_an_assistant_is_told_in_a_sentence_what_is_wrong(address, asked, sentence):
    answer = assist(address, lambda session: session.call_tool("draw", asked))
    assert answer.isError and sentence in answer.content[0].text
