"""The API of AUTOMATIC1111's web UI (A1111): `/sdapi/v1`, as its own documentation describes it.

What a program calls its requests with follows from the table of settings. What A1111 has and this
server has not is refused by name where it would change a picture.
"""

import base64
import contextlib
import dataclasses
import json
import re
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from io import BytesIO
from typing import Annotated, Any

import fastapi
import numpy as np
import psutil
import pydantic
from anyio.to_thread import run_sync
from fastapi import Depends
from PIL import Image

from sd_tpu.http.access import client_of
from sd_tpu.http.control import REFERENCE_MODULE, Control, modules, take_units
from sd_tpu.http.drawing import NOTHING, drawn, flag, png_of, refuse
from sd_tpu.http.hires import PARAMETERS, UPSCALERS, Hires
from sd_tpu.http.img2img import NUMBERS, PICTURES, Start, file_of
from sd_tpu.http.schema import Body, anything, field_of
from sd_tpu.pictures.images import (
    HASH,
    UPSCALER,
    a1111_name,
    a1111_sampler,
    fields_of,
    parse_parameters,
    read_parameters,
    read_text,
)
from sd_tpu.pictures.inputs import Input
from sd_tpu.request import ModelCatalog, Request, changed
from sd_tpu.sampling.samplers import SAMPLERS
from sd_tpu.sampling.schedule import SPACINGS
from sd_tpu.serving.arguments import ParameterError
from sd_tpu.serving.client import EngineClient
from sd_tpu.serving.job import BLURRED, Cancelled, Done, Event, ImageReady, Job, Progress
from sd_tpu.settings import (
    MAX_PROMPTS,
    MAX_SEED,
    RANDOM,
    SETTINGS,
    START,
    Number,
    Picture,
    RequestError,
    drawn_seed,
    shortened,
)

MAX_BATCHES = 100
MAX_STYLES = 20
MAX_PICTURES = 64  # of a request, whose answer holds them all
MAX_CLIENTS = 1000  # whose options are remembered
MODEL = SETTINGS["model"].a1111
_OPTIONS = {SETTINGS[name].a1111: name for name in ("model", "clip_skip")}
_FIXED = {"samples_format": "png"}  # options that are what they are
_SETTINGS = {
    setting.a1111: name
    for name, setting in SETTINGS.items()
    if name != "style" and setting.common and setting.a1111 not in _OPTIONS
}
_SETTINGS |= {"clip_skip": "clip_skip"}  # which is a parameter, too, with SD.Next
_START = {
    setting.a1111: name
    for name, setting in SETTINGS.items()
    if setting.section == START and isinstance(setting.kind, Number)
}
_COUNTS = {"batch_size": Number(int, 1, MAX_PROMPTS), "n_iter": Number(int, 1, MAX_BATCHES)}
# Parameters of A1111 alone, with the values that change no picture here; those of others are
# NOTHING.
_ABSENT: dict[str, tuple] = {
    "s_noise": (1,),
    "initial_noise_multiplier": (1,),
    "mask_round": (True,),
    "script_name": (*NOTHING, "None"),
    "refiner_checkpoint": (*NOTHING, "None", "none"),
    "seed_resize_from_h": (-1, 0),
    "seed_resize_from_w": (-1, 0),
    "vae_type": (*NOTHING, "Full"),
}
# Parameters that count only together with these, for models of other kinds or for A1111's files,
# and those that SillyTavern sends to itself.
_IDLE = {
    "comments",
    "distilled_cfg_scale",
    "do_not_save_grid",
    "do_not_save_samples",
    "force_task_id",
    "hr_distilled_cfg",
    "image_cfg_scale",
    "refiner_switch_at",
    "request_id",
    "s_tmax",
    "s_tmin",
    "subseed",
    "save_images",
    "url",
    "auth",
}
# Options that would change pictures, with their values that do not; all others are about files,
# memory, the page and extensions.
_ABSENT_OPTIONS: dict[str, tuple] = {
    **dict.fromkeys(
        (
            "always_discard_next_to_last_sigma",
            "enable_quantization",
            "eta_ddim",
            "eta_noise_seed_delta",
            "face_restoration",
            "forge_additional_modules",
            "img2img_color_correction",
            "img2img_extra_noise",
            "img2img_fix_steps",
            "no_dpmpp_sde_batch_determinism",
            "pad_cond_uncond",
            "pad_cond_uncond_v0",
            "rho",
            "s_churn",
            "s_min_uncond",
            "sdxl_crop_left",
            "sdxl_crop_top",
            "sgm_noise_multiplier",
            "sigma_max",
            "sigma_min",
            "skip_early_cond",
            "tiling",
            "token_merging_ratio",
            "token_merging_ratio_hr",
            "token_merging_ratio_img2img",
            "use_downcasted_alpha_bar",
            "use_old_emphasis_implementation",
            "use_old_karras_scheduler_sigmas",
            "use_old_scheduling",
        ),
        NOTHING,
    ),
    **dict.fromkeys(
        ("sd_vae", "sd_lora", "sd_hypernetwork", "k_sched_type"), (*NOTHING, "Automatic", "None")
    ),
    **dict.fromkeys(
        ("eta_ancestral", "initial_noise_multiplier", "inpainting_mask_weight", "s_noise"), (1,)
    ),
    **dict.fromkeys(("sd_vae_decode_method", "sd_vae_encode_method"), (*NOTHING, "Full")),
    "comma_padding_backtrack": (20,),
    "ddim_discretize": ("uniform",),
    "emphasis": (*NOTHING, "Original"),
    "enable_emphasis": (True,),
    "overlay_inpaint": (True,),
    "randn_source": ("GPU",),
    "sd_noise_schedule": (*NOTHING, "Default"),
    "upscaler_for_img2img": (*NOTHING, "None", UPSCALER),
}
_OWN = {
    *_COUNTS,
    "override_settings",
    "override_settings_restore_afterwards",
    "sampler_index",
    "send_images",
    "styles",
}
_OF_START = {*_START, *NUMBERS, *PICTURES, "include_init_images", *PARAMETERS}

Drawing = pydantic.create_model(  # ty: ignore[no-matching-overload]
    "Drawing",
    __base__=Body,
    **{
        **{parameter: field_of(SETTINGS[name]) for parameter, name in _SETTINGS.items()},
        "seed": field_of(SETTINGS["seed"], minimum=RANDOM),
        "sampler_name": anything("A sampler that /samplers lists."),
        "scheduler": anything("A schedule type that /schedulers lists."),
        **{
            name: anything(f"How many {what}.", int, minimum=1, maximum=_COUNTS[name].most)
            for name, what in (("batch_size", "pictures at once"), ("n_iter", "times"))
        },
        "override_settings": anything(
            f"Of /options, for this request: {', '.join(_OPTIONS)}.", "object"
        ),
        "override_settings_restore_afterwards": anything(
            "Whether the next does without.", "boolean"
        ),
        "send_images": anything("Whether pictures are in the answer.", "boolean"),
        "styles": anything(
            "Of /prompt-styles, one after the other.", "array", items={"type": "string"}
        ),
        "alwayson_scripts": anything(
            "What is followed: controlnet, with a unit among its args.", "object"
        ),
    },
)
Txt2Img = pydantic.create_model(  # ty: ignore[no-matching-overload]
    "Txt2Img",
    __base__=Drawing,
    **{
        "enable_hr": anything(
            "Whether the pictures are drawn again, larger, from what they became.", "boolean"
        ),
        "hr_scale": anything("So many times as large.", float, minimum=1, maximum=8),
        **{
            name: anything(
                "Or so many pixels; where one side is 0, it follows from the other.", int, minimum=0
            )
            for name in ("hr_resize_x", "hr_resize_y")
        },
        "hr_upscaler": anything(f"How they are enlarged: {UPSCALER}."),
        "hr_second_pass_steps": anything(
            "Steps that are taken then; 0 is that share of the steps that becomes noise.",
            int,
            minimum=0,
        ),
        "denoising_strength": anything(
            "How much of them becomes noise.", float, minimum=0, maximum=1
        ),
    },
)
Img2Img = pydantic.create_model(  # ty: ignore[no-matching-overload]
    "Img2Img",
    __base__=Drawing,
    **{
        "init_images": anything(
            "In base64: one for all pictures, or one for each.", "array", items={"type": "string"}
        ),
        "mask": anything("In base64; what is white in it is drawn anew."),
        **{parameter: field_of(SETTINGS[name]) for parameter, name in _START.items()},
        **{
            name: anything(description, int, minimum=0, maximum=NUMBERS[name].most)
            for name, description in (
                ("resize_mode", "Stretches, cuts or frames pictures of another size."),
                (
                    "inpainting_fill",
                    "What the mask shows at first: what is around it, or the picture.",
                ),
                ("inpainting_mask_invert", "Whether what is black is drawn anew instead."),
                ("inpaint_full_res", "Whether what the mask shows is drawn alone, and larger."),
                ("inpaint_full_res_padding", "With so many pixels around it."),
            )
        },
        "include_init_images": anything("Whether the answer repeats them.", "boolean"),
    },
)
Options = pydantic.create_model(  # ty: ignore[no-matching-overload]
    "Options",
    __base__=Body,
    **{parameter: field_of(SETTINGS[name]) for parameter, name in _OPTIONS.items()},
)
PngInfo = pydantic.create_model("PngInfo", __base__=Body, image=anything("A picture in base64."))
Client = Annotated[str, Depends(client_of)]


def make_router(engine: EngineClient) -> fastapi.APIRouter:
    """Return the routes for an engine."""
    router, clients = fastapi.APIRouter(), _Clients(engine)
    _offer_drawing(router, engine, clients)
    _offer_lists(router, engine)

    @router.get("/options")
    async def get_options(client: Client) -> dict:
        defaults = {parameter: SETTINGS[name].default for parameter, name in _OPTIONS.items()}
        return {**defaults, **clients.options(client), **_FIXED}

    @router.post("/options")
    async def set_options(asked: Options, client: Client) -> None:
        clients.remember(client, await run_sync(_options, asked.given(), engine))

    @router.post("/png-info")
    async def png_info(asked: PngInfo) -> dict:  # ty: ignore[invalid-type-form]
        return await run_sync(_png_info, asked.given().get("image"))

    @router.get("/memory")
    async def memory() -> dict:
        """Return the memory of the server's machine, in bytes."""
        ram = psutil.virtual_memory()
        return {
            "ram": {"free": ram.available, "used": ram.total - ram.available, "total": ram.total},
            "cuda": {"error": "It is not told here."},
        }

    return router


def make_control_router(engine: EngineClient) -> fastapi.APIRouter:
    """Return the routes of A1111's extension ControlNet for an engine."""
    router = fastapi.APIRouter()

    @router.get("/version")
    async def version() -> dict:
        return {"version": 3}

    @router.get("/model_list")
    async def model_list() -> dict:
        return {"model_list": [*engine.catalog.controlnets, *engine.catalog.ip_adapters]}

    @router.get("/module_list")
    async def module_list() -> dict:
        names = modules(*[REFERENCE_MODULE] if engine.catalog.takes_references else [])
        return {
            "module_list": names,
            "module_detail": {name: {"model_free": False, "sliders": []} for name in names},
        }

    return router


def _offer_drawing(router: fastapi.APIRouter, engine: EngineClient, clients: "_Clients") -> None:
    @router.post("/txt2img")
    async def txt2img(asked: Txt2Img, visitor: fastapi.Request, client: Client) -> fastapi.Response:
        return await draw(asked.given(), False, visitor, client)

    @router.post("/img2img")
    async def img2img(asked: Img2Img, visitor: fastapi.Request, client: Client) -> fastapi.Response:
        return await draw(asked.given(), True, visitor, client)

    async def draw(
        given: dict, begun: bool, visitor: fastapi.Request, client: str
    ) -> fastapi.Response:
        sends = flag(given, "send_images", True)
        repeats = flag(given, "include_init_images")
        task, options = await run_sync(_read, given, begun, engine, clients.options(client))
        if given.get("override_settings_restore_afterwards") is False:
            clients.remember(client, options)
        with clients.working(client, task):
            files = await task.draw(engine, visitor, client)
        parameters = {
            name: value for name, value in given.items() if repeats or name not in PICTURES
        }

        def answer() -> fastapi.Response:
            # In ASCII, so that half an emoji, which a prompt may end with, can be said again.
            return fastapi.Response(
                media_type="application/json",
                content=json.dumps(
                    {
                        "images": [base64.b64encode(file).decode() for file in files if sends],
                        "parameters": parameters,
                        "info": json.dumps(task.info(files)),
                    }
                ),
            )

        return await run_sync(answer)  # it takes a tenth of a second for each large picture

    @router.get("/progress")
    async def progress(client: Client, skip_current_image: bool = False) -> dict:
        """Return how far the client's first request is."""
        tasks = clients.tasks(client)
        progress = tasks[0].progress() if tasks else _progress()
        if tasks and not skip_current_image:
            progress["current_image"] = await run_sync(tasks[0].preview)
        progress["state"]["job_count"] = sum(task.batches - task.batch for task in tasks)
        return progress

    @router.post("/interrupt")
    async def interrupt(client: Client) -> dict:
        """End the client's first request, which is answered with the finished pictures."""
        for task in clients.tasks(client)[:1]:
            task.interrupted = True
            task.stop()
        return {}

    @router.post("/skip")
    async def skip(client: Client) -> dict:
        """Go on with the next of its batches."""
        for task in clients.tasks(client)[:1]:
            task.skipped = True
            task.stop()
        return {}


def _offer_lists(router: fastapi.APIRouter, engine: EngineClient) -> None:
    @router.get("/samplers")
    async def samplers() -> list[dict]:
        taken = engine.catalog.samplers("")
        return [{"name": a1111_name(key), "aliases": [key], "options": {}} for key in taken]

    @router.get("/schedulers")
    async def schedulers() -> list[dict]:
        names = {"automatic": "Automatic", **{key: key.capitalize() for key in SPACINGS}}
        return [
            {
                "name": name,
                "label": label,
                "aliases": None,
                "default_rho": -1,
                "need_inner_model": False,
            }
            for name, label in names.items()
        ]

    @router.get("/sd-models")
    def sd_models() -> list[dict]:
        return [
            {
                "title": name,
                "model_name": name,
                "filename": name,
                "hash": None,
                "sha256": None,
                "config": None,
            }
            for name in engine.catalog.models()
        ]

    @router.get("/loras")
    def loras() -> list[dict]:
        return [
            {"name": name, "alias": name, "path": path.name, "metadata": {}}
            for name, path in engine.adapters.loras().items()
        ]

    @router.get("/embeddings")
    def embeddings() -> dict:
        return {"loaded": {name: {} for name in engine.adapters.embeddings()}, "skipped": {}}

    @router.get("/upscalers")
    async def upscalers() -> list[dict]:
        """List the upscalers of hires fix."""
        return [
            {"name": name, "model_name": None, "model_path": None, "model_url": None, "scale": 4}
            for name in UPSCALERS
        ]

    @router.get("/prompt-styles")
    def prompt_styles() -> list[dict]:
        return [
            {"name": name, "prompt": prompt, "negative_prompt": negative}
            for name, (prompt, negative) in engine.catalog.styles.templates().items()
        ]

    for path in ("/latent-upscale-modes", "/sd-vae"):
        router.add_api_route(path, _nothing, response_model=list, name=path.strip("/"))


async def _nothing() -> list:
    """Return an empty list: there are none here."""
    return []


# --- tasks of clients ---------------------------------------------------------------------------


class _Task:
    """A request of a client: a batch of pictures drawn with many seeds, again and again."""

    def __init__(
        self,
        pictures: Sequence[Picture],
        batches: int,
        start: Start,
        prompt: str,
        hires: Hires | None = None,
    ):
        """Begin a task.

        Args:
            pictures: of the first batch.
            start: the start of all pictures.
            prompt: as it was written, which may stand for several.
            hires: how they are drawn again larger, if so.
        """
        self.picture, self.size, self.batches, self.batch = pictures[0], len(pictures), batches, 0
        self.interrupted = self.skipped = False
        self.comments: set[str] = set()
        self._pictures, self._start, self._prompt = pictures, start, prompt
        self._hires, self._passes, self._over = hires, 2 if hires else 1, 0
        self._job: Any = None  # the last `Job` that was begun
        self._progress = Progress(0, self.picture.steps, {})
        self._preview: Any = None
        self._since = time.time()

    async def draw(
        self, engine: EngineClient, visitor: fastapi.Request, client: str
    ) -> list[bytes]:
        """Draw the PNG files, or those that are finished when it is interrupted."""

        def has_drawn(request: Request, inputs: Sequence[Input]) -> AsyncIterator[Event]:
            return drawn(
                engine, request, visitor, client, previews=True, inputs=inputs, begun=self._begin
            )

        files, first_size = [], None
        for batch in range(self.batches):
            self.batch, self._over = batch, batch * self._passes
            request, inputs = await run_sync(self._request, engine.catalog), self._start.inputs
            pictures, end = await self._take(has_drawn(request, inputs))
            if self._hires and isinstance(end, Done):
                self._over += 1
                first_size = self.picture.width, self.picture.height
                request, starts = await run_sync(self._again, request, pictures)
                pictures, end = await self._take(has_drawn(request, [*inputs, *starts]))
            for index, pixels in sorted(pictures.items()):
                whole = await run_sync(self._start.finished, index, pixels)
                files.append(await png_of(engine, whole, self._job.request, index, first_size))
            if self.interrupted or (isinstance(end, Cancelled) and not self.skipped):
                break
            self.skipped = False
        return files

    async def _take(self, events: AsyncIterator[Event]) -> tuple[dict[int, np.ndarray], Event]:
        """Return the pictures by index, and the event that ended the job."""
        self._progress, made = Progress(0, self.picture.steps, {}), {}
        async for event in events:
            match event:
                case ImageReady(index, pixels, unsafe):
                    self.comments |= {str(BLURRED)} if unsafe else set()
                    made[index] = pixels
                case Progress():
                    self._progress = event
                    self._preview = next(iter(event.previews.values()), self._preview)
        return made, event

    def _again(
        self, request: Request, made: Mapping[int, np.ndarray]
    ) -> tuple[Request, list[Input]]:
        """Return the request for larger pictures, and the start pictures that it names."""
        starts = [Input.of_pixels(made[index]) for index in request.indices()]
        again = [
            dataclasses.replace(self._hires.again(picture), init_image=start.name)  # ty: ignore[missing-union-attribute, invalid-argument-type]
            for picture, start in zip(request.pictures, starts, strict=True)
        ]
        return Request(tuple(again)), starts

    def stop(self) -> None:
        """End the batch that is drawn."""
        if self._job:
            self._job.cancel()

    def progress(self) -> dict:
        """Return the answer of /progress."""
        share = (self._over + self._progress.step / self._progress.steps) / (
            self._passes * self.batches
        )
        seconds = time.time() - self._since
        return _progress(
            share,
            seconds * (1 / share - 1) if share else 0.0,
            skipped=self.skipped,
            interrupted=self.interrupted,
            job=f"Batch {self.batch + 1}",
            job_timestamp=time.strftime("%Y%m%d%H%M%S", time.localtime(self._since)),
            job_no=self.batch,
            sampling_step=self._progress.step,
            sampling_steps=self._progress.steps,
        )

    def preview(self) -> str | None:
        """Return the unfinished picture: a PNG in base64."""
        if self._preview is None:
            return None
        file = BytesIO()
        Image.fromarray(self._preview).save(file, "PNG")
        return base64.b64encode(file.getvalue()).decode()

    def info(self, files: list[bytes]) -> dict:
        """Return A1111's info about the pictures, most of which is in each file as well."""
        texts = [read_parameters(file) for file in files]
        made = [parse_parameters(text).picture(0) for text in texts]
        first = made[0] if made else self.picture
        return {
            **_a1111_settings(first),
            "sampler_name": a1111_name(first.sampler),
            "batch_size": self.size,
            "all_prompts": [picture.prompt for picture in made],
            "all_negative_prompts": [picture.negative_prompt for picture in made],
            "all_seeds": [picture.seed for picture in made],
            "sd_model_name": first.model,
            "index_of_first_image": 0,
            "infotexts": texts,
            "comments": sorted(self.comments),
        }

    def _request(self, catalog: ModelCatalog) -> Request:
        before = self.batch * self.size
        prompts = catalog.fill([self._prompt] * self.size, self.picture.seed + before)
        return Request(
            tuple(
                dataclasses.replace(
                    picture, prompt=prompt, seed=(picture.seed + before) % (MAX_SEED + 1)
                )
                for picture, prompt in zip(self._pictures, prompts, strict=True)
            )
        )

    def _begin(self, job: Job) -> None:
        self._job = job
        if self.interrupted or self.skipped:  # while it was submitted
            job.cancel()


def _progress(share: float = 0.0, seconds_left: float = 0.0, **state: Any) -> dict[str, Any]:
    """Return the answer of /progress; by default where nothing is drawn."""
    idle: dict[str, Any] = dict(skipped=False, interrupted=False, stopping_generation=False)
    idle |= dict(job="", job_timestamp="0", job_no=0, sampling_step=0, sampling_steps=0)
    return {
        "progress": share,
        "eta_relative": seconds_left,
        "current_image": None,
        "textinfo": None,
        "state": {**idle, **state},
    }


class _Clients:
    """The options of each client, and what it has under way; for one event loop."""

    def __init__(self, engine: EngineClient):
        self._engine = engine
        self._options: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._tasks: dict[str, list[_Task]] = {}

    def options(self, client: str) -> dict[str, Any]:
        """Return the options of this client's requests that name none."""
        return {MODEL: self._engine.catalog.first, **self._options.get(client, {})}

    def remember(self, client: str, options: Mapping[str, Any]) -> None:
        """Options that stay until they are changed."""
        self._options[client] = {**self._options.get(client, {}), **options}
        self._options.move_to_end(client)
        if len(self._options) > MAX_CLIENTS:
            self._options.popitem(last=False)

    def tasks(self, client: str) -> list[_Task]:
        """Return the client's tasks that are under way, the oldest first."""
        return self._tasks.get(client, [])

    @contextlib.contextmanager
    def working(self, client: str, task: _Task) -> Iterator[None]:
        """Count the task as under way meanwhile."""
        self._tasks.setdefault(client, []).append(task)
        try:
            yield
        finally:
            self._tasks[client].remove(task)
            if not self._tasks[client]:
                del self._tasks[client]


# --- reading requests ---------------------------------------------------------------------------


def _read(
    given: Mapping[str, Any], begun: bool, engine: EngineClient, remembered: Mapping[str, Any]
) -> tuple[_Task, dict[str, Any]]:
    """Read a request into a task and the options beside the client's own.

    Args:
        given: the body.
        begun: whether pictures have start pictures.
        engine: draws.
        remembered: the client's options.

    Raises:
        RequestError: the request cannot be served.
    """
    given = {name: value for name, value in given.items() if value is not None}
    units, given["alwayson_scripts"] = take_units(given.get("alwayson_scripts"))
    size, batches = (kind.check(given.get(name, 1), name) for name, kind in _COUNTS.items())
    options = _options(given.get("override_settings", {}), engine)
    known = _SETTINGS | (_START if begun else {})
    values = {_OPTIONS[parameter]: value for parameter, value in {**remembered, **options}.items()}
    values |= {name: given[parameter] for parameter, name in known.items() if parameter in given}
    values["seed"] = drawn_seed(given.get("seed", RANDOM))
    named = str(given.get("sampler_name") or given.get("sampler_index") or "")
    sampler, spacing = a1111_sampler(named, str(given.get("scheduler", "")))
    values |= {"sampler": sampler or None, "spacing": spacing or None}
    prompt, values["negative_prompt"] = _put_into(given.get("styles", []), values, engine)
    values["prompts"] = [prompt]
    start, first, hires = Start(({},)), Request.check(values, engine.catalog).picture(0), None
    _refuse_absent(given, begun, first.sampler)
    if begun:
        start = Start.read(given, first)
    else:
        hires = Hires.read(given, first, engine.catalog)
    control = Control.read(units, first, start)
    start = dataclasses.replace(start, inputs=(*start.inputs, *control.inputs))
    settings = start.settings if len(start.settings) > 1 else start.settings * size
    if len(settings) * batches > MAX_PICTURES:
        raise ParameterError(
            "{count} pictures were asked for; at most {limit} fit in an answer.",
            count=len(settings) * batches,
            limit=MAX_PICTURES,
        )
    request = Request.check(
        {**values, "prompts": values["prompts"] * len(settings)}, engine.catalog
    )
    begun_as = [
        changed(request.picture(index), {**overrides, **control.settings})
        for index, overrides in enumerate(settings)
    ]
    return _Task(begun_as, batches, start, prompt, hires), options


def _put_into(styles: Any, values: dict[str, Any], engine: EngineClient) -> tuple[str, str]:
    """Apply each of the styles to the prompt and the negative one; raises RequestError."""
    if not isinstance(styles, list) or len(styles) > MAX_STYLES:
        raise ParameterError(
            "styles should be a list of at most {limit} names, not {value}.",
            limit=MAX_STYLES,
            value=shortened(styles),
        )
    picture = Picture(
        **{
            name: SETTINGS[name].check(values.pop(name, ""))
            for name in ("prompt", "negative_prompt")
        }
    )
    for style in styles:
        picture = engine.catalog.styles.applied(
            dataclasses.replace(picture, style=SETTINGS["style"].check(style))
        )
    return picture.prompt, picture.negative_prompt


def _refuse_absent(given: Mapping[str, Any], begun: bool, sampler: str) -> None:
    """Raise ParameterError for parameters that would change these pictures and are not here.

    `begun` says whether they have start pictures.
    """
    known = {
        *_SETTINGS,
        *_IDLE,
        *_OWN,
        *_OF_START - ({"enable_hr"} if begun else {*PICTURES}),
        *_idle_here(given, begun, sampler),
    }
    idle = {**_ABSENT, "eta": (0,) if sampler == "ddim" else (1,)}
    asked = [
        name
        for name, value in given.items()
        if name not in known and value not in idle.get(name, NOTHING)
    ]
    for name in asked:
        if isinstance(given[name], Mapping) and given[name]:  # scripts by name
            asked[asked.index(name)] = f"{name} ({', '.join(sorted(map(str, given[name])))})"
    refuse(asked)


def _idle_here(given: Mapping[str, Any], begun: bool, sampler: str) -> set[str]:
    """Names of the parameters that change no picture together with the other ones."""
    idle = set() if given.get("script_name") else {"script_args"}
    if begun or not flag(given, "enable_hr"):
        idle |= {name for name in given if name.startswith("hr_")}
    if not SAMPLERS[sampler].stochastic:
        idle |= {"s_noise"} if sampler == "ddim" else {"s_noise", "eta"}
    if begun and not given.get("mask"):
        idle |= {"latent_mask", "mask_round"}
    if begun and (not given.get("mask") or "mask_blur" in given):
        idle |= {"mask_blur_x", "mask_blur_y"}
    return idle


def _options(given: Any, engine: EngineClient) -> dict[str, Any]:
    """Options that A1111 has and this server too; raises RequestError."""
    if not isinstance(given, Mapping):
        raise ParameterError(
            "The options should be values by name, not {value}.", value=shortened(given)
        )
    for name, value in _FIXED.items():
        if given.get(name, value) not in (value, *NOTHING):
            raise ParameterError(
                "Pictures are always sent as PNG here: {name} should be {known}.",
                name=name,
                known=value,
            )
    unknown = (
        name
        for name, values in _ABSENT_OPTIONS.items()
        if given.get(name) is not None and given[name] not in values
    )
    refuse(sorted(unknown), " the options")
    options = {
        parameter: SETTINGS[_OPTIONS[parameter]].check(value)
        for parameter, value in given.items()
        if parameter in _OPTIONS and value not in (None, "")
    }
    if MODEL in options:
        name = _model_called(engine.catalog.of_hash(options[MODEL]), engine.catalog.models())
        options[MODEL] = engine.catalog.defaults(name).model
    return options


def _model_called(name: str, known: Sequence[str]) -> str:
    """Return the model that A1111 names by its file, perhaps with folders and a hash behind it.

    Returns the name itself where it is none's or several models'.
    """
    if name in known:
        return name
    path = HASH.sub("", name).replace("\\", "/")
    stem = re.sub(r"(?i)\.(safetensors|ckpt)$", "", path)
    ways: Sequence[Callable[[str], str]] = (
        lambda each: each,
        lambda each: each.replace("/", "_"),
        lambda each: each.rpartition("/")[2],
    )
    for called in ways:
        matches = [each for each in known if called(each) in (stem, called(stem))]
        if len(matches) == 1:
            return matches[0]
    return name


def _png_info(image: Any) -> dict:
    """Read the text of a picture in base64, and the settings of it or of a grid's first picture.

    Settings that cannot be served have A1111's names of fields. Raises RequestError if it is no
    picture.
    """
    text = read_text(file_of(image))
    try:
        parameters = _a1111_settings(next(filter(None, parse_parameters(text).pictures)))
    except (RequestError, StopIteration):  # of none, a prompt that is empty
        parameters = fields_of(text)
    return {"info": text, "items": {"parameters": text} if text else {}, "parameters": parameters}


def _a1111_settings(picture: Picture) -> dict[str, Any]:
    """Return the settings by A1111's names, those of a start picture only where there is one."""
    known = _SETTINGS | (_START if picture.init_image else {})
    return {parameter: getattr(picture, name) for parameter, name in known.items()}
