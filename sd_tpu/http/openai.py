"""The image API of OpenAI: `/v1/images/generations`, `/v1/images/edits` and `/v1/models`.

Beside OpenAI's own parameters a request may have any setting of the table, by its name: with
OpenAI's client these go into `extra_body`. What OpenAI has and this server has not is refused by
name where it would change a picture.

What is transparent in an edit's mask, or without one in the picture itself, is drawn anew, all of
it unless a `strength` is given; without anything transparent the whole picture is changed. A model
that edits by reference pictures takes the pictures of an edit as these, unless there is a mask, or
a setting of start pictures such as a `strength`.
"""

import base64
import dataclasses
import json
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence
from io import BytesIO
from types import MappingProxyType
from typing import Annotated, Any

import fastapi
import numpy as np
import pydantic
from anyio.to_thread import run_sync
from fastapi import Depends
from fastapi.responses import Response, StreamingResponse
from PIL import Image
from starlette.datastructures import FormData, UploadFile

from sd_tpu.http.access import client_of
from sd_tpu.http.drawing import drawn, png_of, refuse
from sd_tpu.http.schema import Body, anything, field_of
from sd_tpu.pictures.images import MAX_FILE_BYTES, to_webp
from sd_tpu.pictures.inputs import Input
from sd_tpu.reading import composed
from sd_tpu.request import Request
from sd_tpu.serving.arguments import ParameterError
from sd_tpu.serving.client import Closing, EngineClient
from sd_tpu.serving.job import DrawingError, Event, ImageReady, Job, Progress
from sd_tpu.settings import (
    MAX_PROMPTS,
    MAX_REFERENCES,
    RANDOM,
    SETTINGS,
    START,
    Choice,
    Number,
    Upload,
    drawn_seed,
    shortened,
)

MAX_KEPT_BYTES = 1 << 28  # of pictures that are fetched by their addresses
KEPT_SECONDS = 3600.0
_FORMATS = ("png", "webp", "jpeg")
_KINDS = {
    "n": Number(int, 1, MAX_PROMPTS),
    "partial_images": Number(int, 0, 3),
    "output_compression": Number(int, 0, 100),
    "response_format": Choice({"b64_json": "", "url": ""}),
    "output_format": Choice(dict.fromkeys(_FORMATS, "")),
}
_DEFAULTS = {
    "n": 1,
    "partial_images": 0,
    "output_compression": 90,
    "response_format": "b64_json",
    "output_format": "png",
}
# What is OpenAI's alone, with the values of it that change no picture here.
_ABSENT = {
    "background": ("auto", "opaque"),
    "quality": ("auto", "standard"),
    "moderation": ("auto", "low"),
    "input_fidelity": ("low",),
}
_OPENAIS = [("style", "vivid")]  # what else is asked for is one of this server's
_IDLE = {"user", "safety_identifier"}
_OWN = {*_KINDS, "prompt", "size", "stream"}
_SETTINGS = {name: setting for name, setting in SETTINGS.items() if setting.common}
_START = {
    name: setting
    for name, setting in SETTINGS.items()
    if setting.section == START and not isinstance(setting.kind, Upload)
}
_ALL = 1.0  # the strength of an edit that keeps nothing of what is transparent
_UNCACHED = {"Cache-Control": "no-store"}

Generation = pydantic.create_model(  # ty: ignore[no-matching-overload]
    "Generation",
    __base__=Body,
    **{
        "prompt": field_of(SETTINGS["prompt"]),
        "n": anything("How many pictures.", int, minimum=1, maximum=MAX_PROMPTS),
        "size": anything('WIDTHxHEIGHT in pixels, or "auto".'),
        "response_format": anything(
            "Pictures, or addresses that hold for an hour.", enum=["b64_json", "url"]
        ),
        "output_format": anything("Of the files; only PNGs carry their settings.", enum=_FORMATS),
        "output_compression": anything(
            "The quality of WebP and JPEG.", int, minimum=0, maximum=100
        ),
        "stream": anything("Whether events are sent while pictures form.", "boolean"),
        "partial_images": anything("How many of these, at most.", int, minimum=0, maximum=3),
        **{name: field_of(setting) for name, setting in _SETTINGS.items() if name != "prompt"},
        "seed": field_of(SETTINGS["seed"], minimum=RANDOM),
    },
)
Edit = pydantic.create_model(  # ty: ignore[no-matching-overload]
    "Edit",
    __base__=Generation,
    **{
        "image": anything(
            "The picture that is changed; several are for a model that edits by them.",
            format="binary",
        ),
        "mask": anything(
            "Of the same size; what is transparent in it is drawn anew.", format="binary"
        ),
        "input_fidelity": anything("There is only the low one.", enum=["low"]),
        **{name: field_of(setting) for name, setting in _START.items()},
    },
)
_FORM = {
    "requestBody": {
        "required": True,
        "content": {"multipart/form-data": {"schema": Edit.model_json_schema()}},
    }
}
Client = Annotated[str, Depends(client_of)]


@dataclasses.dataclass(frozen=True)
class _Asked:
    """A request as it was read."""

    request: Request
    inputs: Sequence[Input]
    output_format: str
    output_compression: int
    partial_images: int
    by_address: bool
    stream: bool

    @property
    def kind(self) -> str:
        """Prefix of its events' names."""
        return "image_edit" if self.inputs else "image_generation"

    async def file(self, engine: EngineClient, pixels: np.ndarray, index: int) -> bytes:
        """Return the finished picture at `index` in the format that was asked for."""
        if self.output_format == "png":
            return await png_of(engine, pixels, self.request, index)
        return await run_sync(self.plain, pixels)

    def plain(self, pixels: np.ndarray) -> bytes:
        """Pixels [H, W, 3] uint8 as a file without settings."""
        if self.output_format == "webp":
            return to_webp(pixels, self.output_compression)
        file = BytesIO()
        Image.fromarray(pixels).save(file, self.output_format, quality=self.output_compression)
        return file.getvalue()


def make_router(engine: EngineClient, kept: "Kept") -> fastapi.APIRouter:
    """Return the routes for an engine, except for the one of the pictures that are `kept`."""
    router, begun = fastapi.APIRouter(), int(time.time())

    @router.post("/images/generations", response_model=None)
    async def generations(
        body: Generation, visitor: fastapi.Request, client: Client
    ) -> dict | Response:
        """Draw pictures of a prompt."""
        return await draw(await run_sync(_read, body.given(), engine), visitor, client)

    @router.post("/images/edits", response_model=None, openapi_extra=_FORM)
    async def edits(visitor: fastapi.Request, client: Client) -> dict | Response:
        """Draw on a picture, or change it."""
        async with visitor.form(max_files=MAX_REFERENCES + 1, max_fields=100) as form:
            given, files = await _read_form(form)
        return await draw(await run_sync(_read_edit, given, files, engine), visitor, client)

    async def draw(asked: _Asked, visitor: fastapi.Request, client: str) -> dict | Response:
        jobs: list[Job] = []
        events = drawn(
            engine,
            asked.request,
            visitor,
            client,
            inputs=asked.inputs,
            previews=asked.stream and asked.partial_images > 0,
            begun=jobs.append,
        )
        await anext(events)  # it waits, or else was refused, which has a status of its own
        asked = dataclasses.replace(asked, request=jobs[0].request)  # with its style applied
        if asked.stream:
            return StreamingResponse(
                _stream(asked, engine, events), headers=_UNCACHED, media_type="text/event-stream"
            )
        files: dict[int, bytes] = {}
        async for event in events:
            if isinstance(event, ImageReady):
                files[event.index] = await asked.file(engine, event.pixels, event.index)
        return {
            "created": int(time.time()),
            "output_format": asked.output_format,
            "size": _size(asked.request),
            "data": [_image(files[index], asked, kept, visitor) for index in sorted(files)],
        }

    @router.get("/models")
    def models() -> dict:
        """List the models that the server has."""
        return {"object": "list", "data": [_model(name) for name in engine.catalog.models()]}

    @router.get("/models/{name:path}")
    def model(name: str) -> dict:
        """Return one of the models."""
        if (name := composed(name)) not in engine.catalog.models():
            raise fastapi.HTTPException(404, f"There is no model {shortened(name)}.")
        return _model(name)

    def _model(name: str) -> dict:
        return {"id": name, "object": "model", "created": begun, "owned_by": "sd_tpu"}

    return router


def make_file_router(kept: "Kept") -> fastapi.APIRouter:
    """Return the route of pictures that were asked for by address."""
    router = fastapi.APIRouter()

    @router.get("/images/files/{name}", name="picture")
    async def picture(name: str) -> Response:
        """Return a finished picture, for an hour."""
        token, _, kind = name.partition(".")
        if (file := kept.find(token)) is None:
            raise fastapi.HTTPException(404, "The picture is no longer here.")
        return Response(file, media_type=f"image/{kind if kind in _FORMATS else 'png'}")

    return router


class Kept:
    """Pictures to be fetched by names that nobody can guess: for a while, and no more than fit."""

    def __init__(self):
        self._files: OrderedDict[str, tuple[float, bytes]] = OrderedDict()
        self._bytes = 0

    def add(self, file: bytes) -> str:
        """Keep a file; return its name."""
        self._forget(len(file))
        name = secrets.token_urlsafe(24)
        self._files[name] = time.monotonic(), file
        self._bytes += len(file)
        return name

    def find(self, name: str) -> bytes | None:
        """Return the file of this name, if it is still there."""
        self._forget(0)
        return self._files.get(name, (0.0, None))[1]

    def _forget(self, needed: int) -> None:
        while self._files:
            since, file = next(iter(self._files.values()))
            fits = self._bytes + needed <= MAX_KEPT_BYTES
            if fits and time.monotonic() - since < KEPT_SECONDS:
                return
            self._files.popitem(last=False)
            self._bytes -= len(file)


def _image(file: bytes, asked: _Asked, kept: Kept, visitor: fastapi.Request) -> dict:
    if asked.by_address:
        name = f"{kept.add(file)}.{asked.output_format}"
        # By the application itself: `visitor.url_for` asks the one that it may be mounted in.
        path = visitor.app.url_path_for("picture", name=name)
        return {"url": str(path.make_absolute_url(visitor.base_url))}
    return {"b64_json": base64.b64encode(file).decode()}


# --- the event stream ---------------------------------------------------------------------------


async def _stream(
    asked: _Asked, engine: EngineClient, events: AsyncIterator[Event]
) -> AsyncIterator[bytes]:
    """Yield partial pictures as they form and each finished one, as events.

    An error on the way is an event, too.
    """
    partial, begun = dict.fromkeys(asked.request.indices(), 0), False
    try:
        async for event in events:
            if not begun:  # comments, which also keep a proxy from thinking that nobody is here
                begun = isinstance(event, Progress)
                yield b": drawing\n\n" if begun else b": waiting\n\n"
            match event:
                case Progress(previews=previews):
                    for index, pixels in previews.items():
                        if partial[index] < asked.partial_images:
                            file = await run_sync(asked.plain, pixels)
                            yield _event(
                                "partial_image", asked, file, partial_image_index=partial[index]
                            )
                            partial[index] += 1
                case ImageReady(index, pixels):
                    tokens = await run_sync(_usage, engine, asked.request, index)
                    yield _event(
                        "completed", asked, await asked.file(engine, pixels, index), usage=tokens
                    )
    except (Closing, DrawingError) as error:
        usage = {
            "type": "error",
            "error": {"message": str(error), "type": "server_error", "param": None, "code": None},
        }
        yield f"event: error\ndata: {json.dumps(usage)}\n\n".encode()


def _event(kind: str, asked: _Asked, file: bytes, **more: Any) -> bytes:
    data = {
        "type": f"{asked.kind}.{kind}",
        "b64_json": base64.b64encode(file).decode(),
        "created_at": int(time.time()),
        "size": _size(asked.request),
        "quality": "auto",
        "background": "opaque",
        "output_format": asked.output_format,
        **more,
    }
    return f"event: {data['type']}\ndata: {json.dumps(data)}\n\n".encode()


def _usage(engine: EngineClient, request: Request, index: int) -> dict:
    """Tokens are those of the prompt; a picture has none here."""
    picture = request.picture(index)
    tokens = engine.count(picture.prompt, picture.model).tokens
    return {
        "input_tokens": tokens,
        "output_tokens": 0,
        "total_tokens": tokens,
        "input_tokens_details": {"text_tokens": tokens, "image_tokens": 0},
    }


# --- reading requests ---------------------------------------------------------------------------


async def _read_form(form: FormData) -> tuple[dict[str, Any], dict[str, list[bytes]]]:
    """Return the values of a form, of the types that JSON would have, and its files by name."""
    given, files = {}, {}
    for name, value in form.multi_items():
        if isinstance(value, UploadFile):
            files.setdefault(name.removesuffix("[]"), []).append(
                await value.read(MAX_FILE_BYTES + 1)
            )
        elif name == "stream":
            given[name] = {"true": True, "false": False}.get(value.lower(), value)
        else:
            setting = _KINDS.get(name) or getattr(SETTINGS.get(name), "kind", None)
            given[name] = setting.parse(value) if setting else value
    return given, files


def _read_edit(
    given: Mapping[str, Any], files: Mapping[str, list[bytes]], engine: EngineClient
) -> _Asked:
    """Read a request for edits; raises RequestError."""
    images, masks = files.get("image", []), files.get("mask", [])
    others = dict.fromkeys(files.keys() - {"image", "mask"}, "")
    model = SETTINGS["model"].check(given.get("model"))
    inputs = [Input(image) for image in images]
    masked = masks or (len(inputs) == 1 and inputs[0].transparency().getbbox())
    if inputs and not masked and not given.keys() & _START.keys() and engine.catalog.edits(model):
        begun = {"reference": " ".join(each.name for each in inputs)}
        return _read({**given, **others}, engine, begun, inputs)
    if len(images) != 1 or len(masks) > 1:
        raise ParameterError("image should be one picture, and mask at most one, as files.")
    start = inputs[0]
    clear = (Input(masks[0], "The mask") if masks else start).transparency()
    inputs, begun = [start], dict[str, Any](init_image=start.name)
    if clear.getbbox():
        inputs.append(Input.of_pixels(np.asarray(clear)))
        begun |= {"mask": inputs[1].name, "strength": _ALL}
    elif masks:
        raise ParameterError("Nothing in the mask is transparent: there is nothing to draw.")
    return _read({**given, **others}, engine, begun, inputs)


def _read(
    given: Mapping[str, Any],
    engine: EngineClient,
    begun: Mapping[str, Any] = MappingProxyType({}),
    inputs: Sequence[Input] = (),
) -> _Asked:
    """Read a request; raises RequestError.

    Args:
        given: the values.
        engine: draws.
        begun: settings of input pictures.
        inputs: these pictures.
    """
    given = {
        name: value
        for name, value in given.items()
        if value is not None and (name, value) not in _OPENAIS
    }
    known = {**_SETTINGS, **(_START if "init_image" in begun else {})}
    unknown = given.keys() - known.keys() - _ABSENT.keys() - _IDLE - _OWN
    asked = [name for name, idle in _ABSENT.items() if name in given and given[name] not in idle]
    refuse((*sorted(unknown), *asked))
    own: dict[str, Any] = {
        name: kind.check(given.get(name, _DEFAULTS[name]), name) for name, kind in _KINDS.items()
    }
    settings = {**begun, **{name: given[name] for name in known.keys() & given.keys()}}
    settings |= _read_size(given.get("size", "auto"))
    settings["seed"] = drawn_seed(given.get("seed", RANDOM))
    prompts = [settings.pop("prompt", "")] * own["n"]
    request = Request.check({**settings, "prompts": prompts}, engine.catalog)
    stream = given.get("stream", False)
    if not isinstance(stream, bool):
        raise ParameterError(
            "stream should be true or false, not {value}.", value=shortened(stream)
        )
    return _Asked(
        request,
        inputs,
        own["output_format"],
        own["output_compression"],
        own["partial_images"],
        own["response_format"] == "url",
        stream,
    )


def _read_size(size: Any) -> dict[str, int]:
    if size == "auto":
        return {}
    match = isinstance(size, str) and re.fullmatch(r"([0-9]{1,5})x([0-9]{1,5})", size)
    if not match:
        raise ParameterError(
            "size should be like 512x512 or auto, not {value}.", value=shortened(size)
        )
    return {"width": int(match[1]), "height": int(match[2])}


def _size(request: Request) -> str:
    return f"{request.common.width}x{request.common.height}"
