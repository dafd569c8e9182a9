"""The same for programs: named endpoints, whose docstrings are their documentation."""

import dataclasses
from collections.abc import Iterator
from inspect import getdoc
from typing import Any

import gradio as gr

from sd_tpu.engine import Engine
from sd_tpu.images import read_png
from sd_tpu.page.run import Run
from sd_tpu.page.runs import Runs
from sd_tpu.page.texts import ENGLISH
from sd_tpu.request import RANDOM, Request, RequestError, drawn_seed
from sd_tpu.samplers import SAMPLERS


def offer(engine: Engine, runs: Runs) -> None:
    """Adds the endpoints to the page that is being built."""

    def generate(
        visitor: gr.Request,
        prompts: list[str],
        seed: int = RANDOM,
        negative_prompt: str = "",
        steps: int | None = None,
        guidance: float | None = None,
        sampler: str | None = None,
        spacing: str | None = None,
        own: list[dict | None] | None = None,
        guidance_start: float | None = None,
        guidance_stop: float | None = None,
        cache_interval: int | None = None,
    ) -> tuple[list[dict], int, str]:
        """Draws a picture of each prompt; yields what is finished and what is happening.

        Args:
            prompts: One to eight texts; no picture is made of an empty one.
            seed: Of the first picture, the next one has seed + 1; -1 draws a seed.
            negative_prompt: What the pictures should not show.
            steps: How many steps to take; the model's own number by default.
            guidance: How strictly to follow the prompts; the model's own by default.
            sampler: A key that /samplers lists; the model's own by default.
            spacing: One of the sampler's spacings that /samplers lists; by default the model's own.
            own: What single pictures have in place of these settings, in the places of their
                prompts: null, or an object with any of seed, negative_prompt, steps, guidance,
                sampler, spacing, guidance_start, guidance_stop and cache_interval.
            guidance_start: The share of the steps before guidance begins, 0 (the default) to 1.
            guidance_stop: The share of the steps after which it ends, 0 to 1 (the default). A step
                without guidance takes about half the time where several pictures are drawn.
            cache_interval: 1 (the default) evaluates the whole model each time; N up to 10 only
                every N times, and reuses its deep features in between: faster, and not quite the
                same picture.

        Returns:
            PNG files in the places of their prompts, null where there is none (yet); the seed of
            the first; and a sentence that says what is happening.
        """
        seed = drawn_seed(RANDOM if seed is None else seed)
        asked = {"prompts": prompts, "seed": seed, "negative_prompt": negative_prompt,
                 "steps": steps, "guidance": guidance, "sampler": sampler, "spacing": spacing,
                 "own": own, "guidance_start": guidance_start, "guidance_stop": guidance_stop,
                 "cache_interval": cache_interval}
        try:
            request = Request.check(asked, engine.defaults)
            run = runs.start(request, grace=0, previews=False)
            yield from _answers(run, visitor)
        except RequestError as error:
            raise gr.Error(str(error), print_exception=False) from error

    def samplers() -> list[dict]:
        """Lists the samplers: their keys for /generate, their names and their spacings."""
        return [{"key": key, "label": sampler.label, "spacings": list(sampler.spacings)}
                for key, sampler in SAMPLERS.items()]

    gr.api(generate, api_name="generate", concurrency_limit=None, api_description=getdoc(generate))
    gr.api(samplers, api_name="samplers", queue=False)
    _offer_read_metadata()


def _offer_read_metadata() -> None:
    def read_metadata(picture: str) -> dict[str, Any]:
        """Reads the prompts, the seed and the settings that a PNG carries, ours or A1111's.

        Args:
            picture: A PNG file.

        Returns:
            prompts (a list), seed, negative_prompt, steps, guidance, sampler, spacing,
            guidance_start, guidance_stop, cache_interval, own, height and width; all but the last
            two are named as in /generate.
        """
        if picture is None:
            raise gr.Error("There is no picture.", print_exception=False)
        try:
            return dataclasses.asdict(read_png(picture))
        except RequestError as error:
            raise gr.Error(str(error), print_exception=False) from error

    # Not gr.api: a component of Gradio's takes nothing but what has been uploaded to it.
    file, request = gr.File(visible=False, label="picture"), gr.JSON(visible=False, label="request")
    file.change(read_metadata, file, request, api_name="read_metadata",
                api_description=getdoc(read_metadata))


def _answers(run: Run, visitor: gr.Request) -> Iterator[tuple[list[dict | None], int, str]]:
    """What a program is told: the pictures so far, the seed and a sentence."""
    pictures: list[dict | None] = [None] * len(run.request.prompts)
    for snapshot in run.follow(visitor.session_hash):
        sentence = ENGLISH.translate(snapshot.line.text)
        if snapshot.line.kind == "wrong":
            raise gr.Error(sentence, print_exception=False)
        for place, picture in run.pictures().items():
            pictures[place] = gr.FileData(path=picture.png).model_dump()
        yield list(pictures), run.request.seed, sentence
