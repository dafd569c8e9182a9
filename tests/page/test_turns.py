"""Turns of the page's own work, and what networks may hand in and ask for."""

import asyncio
import os
import threading
import time

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse

from sd_tpu.http import gate
from sd_tpu.http.access import Access
from sd_tpu.http.gate import Gate, Names
from sd_tpu.page import files
from sd_tpu.page.files import Uploads
from sd_tpu.page.turns import Turns
from sd_tpu.serving.scheduler import Busy


def test_whoever_asks_once_waits_for_one_call_of_whoever_asks_often():
    done = []

    async def main() -> None:
        turns = Turns(parallel=1, most=50)
        crowd = [asyncio.create_task(turns.call("crowd", done.append, n)) for n in range(50)]
        await asyncio.sleep(0)
        await turns.call("visitor", done.append, "mine")
        assert len(done) <= 3
        await asyncio.gather(*crowd)

    asyncio.run(main())
    assert sorted(map(str, done)) == sorted([*map(str, range(50)), "mine"])


def test_no_more_calls_go_on_at_a_time_than_there_are_turns():
    now, most = 0, 0
    lock = threading.Lock()

    def work() -> None:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.01)
        with lock:
            now -= 1

    async def main() -> None:
        turns = Turns(parallel=3, most=20)
        await asyncio.gather(*(turns.call("me", work) for _ in range(20)))

    asyncio.run(main())
    assert most == 3


def test_beyond_its_bound_a_network_is_refused_in_a_sentence_and_others_are_not():
    async def main() -> None:
        turns = Turns(parallel=1, most=2)
        asked = [asyncio.create_task(turns.call("crowd", time.sleep, 0.05)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(Busy, match="Too much is asked for from your network"):
            await turns.call("crowd", time.sleep, 0)
        await turns.call("visitor", time.sleep, 0)
        await asyncio.gather(*asked)
        await turns.call("crowd", time.sleep, 0)

    asyncio.run(main())


@pytest.mark.parametrize("failing", ["cancelled", "raises"])
def test_a_call_that_is_given_up_or_fails_gives_its_turn_back(failing):
    async def main() -> None:
        turns = Turns(parallel=1, most=9)
        first = asyncio.create_task(turns.call("me", time.sleep, 0.05))
        second = asyncio.create_task(
            turns.call("me", (lambda: 1 / 0) if failing == "raises" else (lambda: None))
        )
        await asyncio.sleep(0.01)
        if failing == "cancelled":
            second.cancel()
        with pytest.raises((asyncio.CancelledError, ZeroDivisionError)):
            await second
        await first
        await asyncio.wait_for(turns.call("me", time.sleep, 0), 5)

    asyncio.run(main())


# --- what is handed in ----------------------------------------------------------------------------


@pytest.fixture
def upload(tmp_path, monkeypatch):
    """Hands in so many bytes from an address; the answer's status."""
    monkeypatch.setattr(files, "upload_folder", lambda: tmp_path)
    monkeypatch.setattr(files, "UPLOAD_BYTES", 1000)
    monkeypatch.setattr(files, "LEAST", 1)
    monkeypatch.setattr(files, "ALL_UPLOADS", 1500)

    async def save(scope, receive, send) -> None:
        data = await Request(scope, receive).body()
        folder = tmp_path / str(len([*tmp_path.iterdir()]))
        folder.mkdir()
        (folder / "picture.png").write_bytes(data)
        await PlainTextResponse("taken")(scope, receive, send)

    served = Uploads(save)

    def post(
        size: int, address: str = "192.0.2.1", path: str = files.UPLOAD_PATH, root: str = ""
    ) -> int:
        async def ask() -> int:
            transport = httpx.ASGITransport(served, client=(address, 1), root_path=root)
            async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
                return (await client.post(path, content=bytes(size))).status_code

        return asyncio.run(ask())

    return post


def test_a_network_hands_in_no_more_than_its_bound_in_a_while(upload, monkeypatch):
    assert [upload(400) for _ in range(3)] == [200, 200, 429]
    assert upload(400, "192.0.2.2") == 200
    assert upload(400, path="/config") == 200
    assert upload(400, path="/draw/gradio_api/upload", root="/draw") == 429
    now = time.monotonic()
    monkeypatch.setattr(files.time, "monotonic", lambda: now + files.UPLOAD_SECONDS + 1)
    assert upload(400) == 200


def test_of_all_that_was_handed_in_the_oldest_goes_beyond_the_bound(upload, tmp_path):
    for number in range(6):
        assert upload(400, f"192.0.2.{number}") == 200
        time.sleep(0.01)
    there = {*tmp_path.glob("*/*")}
    assert sum(file.stat().st_size for file in there) <= 1500 + 400
    assert tmp_path / "5" / "picture.png" in there
    assert tmp_path / "0" / "picture.png" not in there


def test_finished_pictures_are_no_uploads(upload, tmp_path):
    finished = tmp_path / "pictures" / "hash" / "7-a-cat.png"
    finished.parent.mkdir(parents=True)
    finished.write_bytes(bytes(1500))
    os.utime(finished, (0, 0))
    for number in range(5):
        assert upload(400, f"192.0.2.{number}") == 200
    assert finished.is_file()


def test_small_files_count_for_what_their_folders_take(upload, monkeypatch):
    monkeypatch.setattr(files, "LEAST", 400)
    assert [upload(1) for _ in range(3)] == [200, 200, 429]


def test_a_network_has_so_many_requests_answered_at_a_time(monkeypatch):
    monkeypatch.setattr(gate, "NETWORK_REQUESTS", 2)
    release = []

    async def page(scope, receive, send) -> None:
        if scope["path"] == "/hold":
            await release[0].wait()
        await PlainTextResponse("page")(scope, receive, send)

    served = Gate(page, names=Names(), access=Access(), api=None, paths=())

    async def ask(path: str, address: str) -> int:
        transport = httpx.ASGITransport(served, client=(address, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return (await client.get(path)).status_code

    async def main() -> None:
        release.append(asyncio.Event())
        held = [asyncio.create_task(ask("/hold", "192.0.2.1")) for _ in range(2)]
        await asyncio.sleep(0.1)
        assert await ask("/", "192.0.2.1") == 429
        assert await ask("/", "192.0.2.2") == 200
        release[0].set()
        assert await asyncio.gather(*held) == [200, 200]
        assert await ask("/", "192.0.2.1") == 200

    asyncio.run(main())
