"""The tools for assistants, by the client of the Model Context Protocol's own SDK."""

import asyncio
import base64
import threading
from io import BytesIO

import httpx
import pytest
from mcp import ClientSession
from mcp.client.streamable_http import streamablehttp_client
from PIL import Image
from starlette.middleware import Middleware

from sd_tpu import http
from sd_tpu.http.access import Access
from sd_tpu.http.gate import Gate, Names
from sd_tpu.page import build, close, launch
from sd_tpu.pictures.images import read_png
from tests.support.serving import until


def assist(address: str, work, **headers: str):
    """What an assistant gets to know that is connected to the page at an address."""

    async def connected():
        async with (
            streamablehttp_client(f"{address}gradio_api/mcp/", headers) as (read, write, _),
            ClientSession(read, write) as session,
        ):
            await session.initialize()
            return await work(session)

    return asyncio.run(connected())


def test_an_assistant_finds_tools_and_what_each_of_their_parameters_means(address):
    tools = {tool.name: tool for tool in assist(address, ClientSession.list_tools).tools}
    assert {"draw", "models", "samplers", "generate", "read_metadata"} == tools.keys()
    draw = tools["draw"]
    assert draw.description.startswith("Draw one picture of what a text describes")
    assert draw.inputSchema["required"] == ["prompt"]
    assert all(each["description"] for each in draw.inputSchema["properties"].values())


def test_an_assistant_draws_a_picture_that_it_sees_and_can_draw_again(address, page_engine):
    async def draw(session: ClientSession):
        listed = await session.call_tool("models", {})
        assert page_engine.catalog.first in listed.content[0].text
        return await session.call_tool("draw", {"prompt": "a fox", "seed": 7, "steps": 2})

    answer = assist(address, draw)
    assert not answer.isError
    picture, where = answer.content
    assert Image.open(BytesIO(base64.b64decode(picture.data))).size == (32, 32)
    url = where.text.removeprefix("Image URL: ")
    made = read_png(httpx.get(url).content).pictures[0]
    assert (made.prompt, made.seed, made.steps) == ("a fox", 7, 2) and url.endswith("/7-a-fox.png")


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"prompt": " "}, "There is no prompt yet"),
        ({"prompt": "a fox", "steps": 1000}, "Steps should be from 1 to 200, not 1000."),
        ({"prompt": "a fox", "model": "other"}, "There is no model 'other'"),
    ],
)
def test_an_assistant_is_told_in_a_sentence_what_is_wrong(address, asked, sentence):
    answer = assist(address, lambda session: session.call_tool("draw", asked))
    assert answer.isError and sentence in answer.content[0].text


def test_whoever_gives_a_key_has_turns_of_its_own_and_the_same_through_every_door(slow_engine):
    access = Access(("first", "second"))
    page = build(slow_engine)
    address = launch(
        page,
        mcp_server=True,
        middleware=[
            Middleware(
                Gate,
                names=Names(),
                access=access,
                api=http.create_api(slow_engine, access),
                paths=http.API_PATHS,
            )
        ],
    )
    try:
        for key in ("first", "second", "neither"):
            httpx.post(
                f"{address}gradio_api/call/draw",
                headers={"authorization": f"Bearer {key}"},
                json={"data": [key, "", 1, None, None, 100, None, ""]},
            ).raise_for_status()
        asked = {"prompt": "first", "steps": 100}
        threading.Thread(
            target=assist,
            daemon=True,
            kwargs=dict(
                address=address,
                work=lambda session: session.call_tool("draw", asked),
                authorization="Bearer first",
            ),
        ).start()
        threading.Thread(
            target=httpx.post,
            daemon=True,
            args=[f"{address}sdapi/v1/txt2img"],
            kwargs=dict(json=asked, auth=("any", "first"), timeout=60),
        ).start()
        until(lambda: len(slow_engine.jobs()) == 5)
        names = {}
        for job in slow_engine.jobs():
            names.setdefault(job.request.pictures[0].prompt, set()).add(job.client)
            job.cancel()
        assert all(len(each) == 1 for each in names.values())
        assert len(set.union(*names.values())) == 3
    finally:
        close(page)
