"""The page's endpoints for programs, whose docstrings are their documentation.

Assistants find them as tools by the Model Context Protocol (MCP).
"""

import inspect
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import gradio as gr
from anyio.to_thread import run_sync

from sd_tpu.gallery.runs import Runs
from sd_tpu.gallery.status import refusal
from sd_tpu.http.access import visitor_network
from sd_tpu.language import ENGLISH
from sd_tpu.page.files import uploaded
from sd_tpu.pictures.images import read_png
from sd_tpu.request import Request
from sd_tpu.sampling.samplers import SAMPLERS
from sd_tpu.serving.catalog import Catalog
from sd_tpu.settings import OVERRIDABLE, RANDOM, SETTINGS, Choice, RequestError, Setting, drawn_seed

# Between messages of a run: gradio_client fetches all files with each of them
# (decision 0025).
PAUSE_SECONDS = 0.5
MAX_OPENED = 32  # models whose files are looked at to list them; there may be thousands
# What came later comes last: programs may give the others by position.
_LATER = [SETTINGS[name] for name in ("model", "height", "width", "style", "clip_skip")]
_BASIC, _EXPERT = (
    [
        setting
        for name, setting in OVERRIDABLE.items()
        if setting.expert is expert and name != "seed" and setting not in _LATER and setting.common
    ]
    for expert in (False, True)
)
_EXPERT += _LATER
_GENERATE = """Draw a picture of each prompt; yield what is finished and what is happening.

Args:
    prompts: One to eight texts; no picture is made of an empty one.
    seed: Of the first picture, the next one has seed + 1; -1 draws a seed.
{basic}
    overrides: What single pictures have instead of these settings, in the order of the prompts:
        null, or an object with any of {names}.
{expert}

Returns:
    PNG files in the places of their prompts, null where there is none (yet); the seed that was
    given or drawn; and a sentence that says what is happening."""


def add_endpoints(runs: Runs) -> None:
    """Add the endpoints to the page that is being built."""
    models_here, parameters = runs.backend.engine.catalog, _parameters()

    async def generate(visitor, *given):
        asked = dict(zip([parameter.name for parameter in parameters[1:]], given, strict=True))
        async for answer in _answers(runs, asked, visitor):
            yield answer

    # What Gradio asks of a function to tell programs of it.
    generate.__signature__ = inspect.Signature(  # ty: ignore[missing-attribute]
        parameters, return_annotation=tuple[list[dict], int, str]
    )
    generate.__annotations__ = {each.name: each.annotation for each in parameters}
    generate.__doc__ = _GENERATE.format(
        names=", ".join(OVERRIDABLE),
        basic="\n".join(map(_explained, _BASIC)),
        expert="\n".join(map(_explained, _EXPERT)),
    )

    async def draw(
        visitor: gr.Request,
        prompt: str,
        negative_prompt: str = "",
        seed: int = RANDOM,
        width: int | None = None,
        height: int | None = None,
        steps: int | None = None,
        guidance: float | None = None,
        model: str = "",
    ) -> dict:
        """Draw one picture of what a text describes; its name begins with its seed.

        Describe what is to be seen: the subject first, then its surroundings, light and style,
        such as "a red fox in deep snow, evening light, watercolour". The same prompt, settings and
        seed give the same picture again; another seed gives another picture of the same prompt.

        Args:
            prompt: What to draw, in English.
            negative_prompt: What the picture should not show, such as "text, blur".
            seed: A whole number from 0, for a picture that can be made again; -1 draws one.
            width: In pixels; the model's own size by default.
            height: In pixels; the model's own size by default.
            steps: More steps take longer and add detail; the model's own number by default.
            guidance: Higher follows the prompt more closely; the model's own by default.
            model: A name that `models` lists; the first of them by default.

        Returns:
            A PNG file that carries its settings.
        """
        asked = dict(
            prompts=[prompt],
            negative_prompt=negative_prompt,
            seed=seed,
            width=width,
            height=height,
            steps=steps,
            guidance=guidance,
            model=model,
        )
        async for answer in _answers(runs, asked, visitor):
            (picture,), _, sentence = answer
        if not picture:
            raise gr.Error(sentence, print_exception=False)
        return picture

    def samplers() -> list[dict]:
        """List the samplers: their keys for /generate, their names and their spacings."""
        return [
            {"key": key, "label": sampler.label, "spacings": list(sampler.spacings)}
            for key, sampler in SAMPLERS.items()
        ]

    def models() -> list[dict]:
        """List the models, each with its default size, steps and guidance, and its samplers.

        These are null where there are too many models to look at. The first is taken where none is
        named.
        """
        return _listed(models_here)

    def read_metadata(picture: gr.FileData) -> dict[str, Any]:
        """Read the prompts, the seed and the settings that a picture carries, ours or A1111's.

        Args:
            picture: A PNG, JPEG, WebP, AVIF or GIF file.

        Returns:
            prompts (a list), own, and the settings in common, named as in /generate.
        """
        try:
            return read_png(uploaded(picture["path"])).values()  # ty: ignore[not-subscriptable]
        except (RequestError, TypeError, KeyError) as error:
            raise gr.Error(str(error), print_exception=False) from error

    gr.api(generate, api_name="generate", concurrency_limit=None, api_description=generate.__doc__)
    gr.api(samplers, api_name="samplers", queue=False)
    gr.api(read_metadata, api_name="read_metadata", api_description=inspect.getdoc(read_metadata))
    gr.api(draw, api_name="draw", concurrency_limit=None, api_description=draw.__doc__)
    gr.api(models, api_name="models", queue=False)


def _listed(catalog: Catalog) -> list[dict]:
    """Return the models, with defaults of those that are opened for them.

    Models that cannot be read are left out.
    """
    listed = []
    for number, name in enumerate(catalog.models()):
        try:
            opened = number < MAX_OPENED
            own = catalog.defaults(name) if opened else None
            samplers = list(catalog.samplers(name)) if opened else None
        except RequestError:
            continue
        listed.append(
            {
                "model": name,
                **{
                    key: getattr(own, key, None) for key in ("width", "height", "steps", "guidance")
                },
                "samplers": samplers,
            }
        )
    return listed


def _parameters() -> list[inspect.Parameter]:
    """Return the parameters of /generate; programs may rely on their order."""
    required = inspect.Parameter.empty
    typed = [
        ("visitor", gr.Request, required),
        ("prompts", list[str], required),
        ("seed", int, RANDOM),
        *((setting.name, setting.kind.type | None, None) for setting in _BASIC),
        ("overrides", list[dict | None] | None, None),
        *((setting.name, setting.kind.type | None, None) for setting in _EXPERT),
    ]
    return [
        inspect.Parameter(
            name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=annotation
        )
        for name, annotation, default in typed
    ]


def _explained(setting: Setting) -> str:
    """Return a parameter's line of documentation."""
    default = (
        setting.kind.shown(setting.default)
        if setting.expert
        else setting.caption_empty or "the model's own"
    )
    keys = " A key that /samplers lists." if isinstance(setting.kind, Choice) else ""
    return f"    {setting.name}: {setting.label}; {default} by default. {setting.help}{keys}"


async def _answers(
    runs: Runs, asked: dict[str, Any], visitor: gr.Request
) -> AsyncIterator[tuple[list[dict | None], int, str]]:
    """Yield the pictures so far, the seed and a sentence, to a program.

    Changes within PAUSE_SECONDS come together; the end comes at once.
    """
    asked["seed"] = drawn_seed(RANDOM if asked["seed"] is None else asked["seed"])
    network = visitor_network(visitor)
    try:
        request = await run_sync(Request.check, asked, runs.backend.engine.catalog)
        run = await run_sync(
            partial(
                runs.start,
                request,
                program=getattr(visitor.state, "client", network),  # by its key
                address=network,
                seed=int(asked["seed"]),
            )
        )
    except RequestError as error:
        raise gr.Error(ENGLISH.translate(refusal(error)), print_exception=False) from error
    assert run is not None  # there is nothing that it could keep instead
    pictures: list[dict | None] = [None] * len(run.request.prompts)
    yielded_at = -PAUSE_SECONDS
    async for snapshot in run.stream(str(visitor.session_hash)):
        sentence = ENGLISH.translate(snapshot.line.text)
        if snapshot.line.kind == "wrong":
            raise gr.Error(sentence, print_exception=False)
        if snapshot.line.kind == "busy" and time.monotonic() < yielded_at + PAUSE_SECONDS:
            continue
        yielded_at = time.monotonic()
        for index, picture in run.pictures().items():
            pictures[index] = gr.FileData(path=picture.png).model_dump()
        yield list(pictures), run.seed, sentence
