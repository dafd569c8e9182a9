"""Actions on the boxes: what is remarked about them, and what is filled in."""

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from sd_tpu.gallery.history import HistoryError
from sd_tpu.gallery.status import StatusLine
from sd_tpu.gallery.uploads import painted, to_paint_on
from sd_tpu.language import Language
from sd_tpu.links import read_link
from sd_tpu.page import form
from sd_tpu.page.answers import Answers, named
from sd_tpu.page.drawing import too_slow
from sd_tpu.page.events import ActionRequest
from sd_tpu.page.files import uploaded
from sd_tpu.page.parts import part
from sd_tpu.pictures.images import (
    MAX_FILE_BYTES,
    carries_settings,
    data_url,
    parse_token_downsampling,
    parse_usable,
    read_parameters,
    read_png,
)
from sd_tpu.pictures.inputs import Canvas, Input, find_input
from sd_tpu.request import AnyModelCatalog, Request, for_all, preset_steps
from sd_tpu.sentence import Sentence
from sd_tpu.serving.client import EngineClient
from sd_tpu.serving.resolve import as_request_errors
from sd_tpu.settings import (
    FASTER,
    MAX_PROMPT_LENGTH,
    MAX_PROMPTS,
    OVERRIDABLE,
    RANDOM,
    SETTINGS,
    UPLOADS,
    Picture,
    RequestError,
)

NEAR = 0.8  # of the model's tokens: from there on their count is shown
MAX_KNOWN = 5000  # names and words that a page is told


class BoxActions(Answers):
    """Actions on what is filled in, or is to be."""

    def _do_look(self, asked: ActionRequest) -> dict[str, Any]:
        """Check the values that are filled in, and return remarks about them.

        They are about each box and all of them, whether Live is possible, and which field is wrong;
        a fresh page also gets the models that there are by now.
        """
        filled, language, refused = asked.filled(), asked.language, {}
        run, pictures = self._run(asked), []
        per_picture = [*filled["overrides"], *[{}] * MAX_PROMPTS][:MAX_PROMPTS]
        prompts = filled["prompts"][:MAX_PROMPTS]
        values = [prompt.strip() for prompt in prompts]
        seed = 0 if filled["seed"] == RANDOM else filled["seed"]
        try:
            request = Request.check({**filled, "seed": seed}, self.engine.catalog)
            values = request.prompts
            any_seed = filled["seed"] == RANDOM
            anew = {i for i, box in enumerate(per_picture) if any_seed and "seed" not in box}
            pictures = self.runs.to_draw(request, run, asked.kept(), anew)
        except RequestError as error:
            refused = {
                "wrong": language.translate(error.sentence),
                "culprit": {"setting": error.setting, "index": error.index},
            }
        faster = {
            name: value
            for name, value in filled.items()
            if name in OVERRIDABLE
            and OVERRIDABLE[name].section == FASTER
            and value != OVERRIDABLE[name].default
        }
        return {
            "remarks": [
                part(
                    "remark", language, *remark(prompt, value, self.engine, filled.get("model", ""))
                )
                for prompt, value in zip(prompts, values, strict=True)
            ],
            "summaries": [
                part("summary", language, box, index) for index, box in enumerate(per_picture)
            ],
            "faster": part("summary", language, faster),
            "inputs": self.inputs.shown(
                asked.browser,
                {
                    name
                    for each in (filled, *per_picture)
                    for setting in UPLOADS
                    for name in str(each.get(setting, "")).split()
                },
            ),  # small
            "draw": {"count": len(pictures), "seconds": self._seconds(pictures)},
            "change": self._seconds_of_change(asked),
            "slow": self._slow(filled, language),
            "line": part(
                "progress", language, run.line if run and run.line.kind != "wrong" else StatusLine()
            ),
            **self._model_values(filled),
            **({"models": self.engine.catalog.models()} if asked.data.get("fresh") else {}),
            **refused,
        }

    def _model_values(self, filled: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the chosen model is offered with, if there is one: the steps of the presets,
        sizes, samplers with their spacings, and how many reference pictures it takes."""
        catalog = self.engine.catalog
        try:
            defaults = catalog.defaults(filled.get("model", ""))
        except RequestError:
            return {}
        presets = preset_steps(defaults.steps)
        values = {"paces": [None] * len(presets), "pace": None}
        with suppress(RequestError):
            picture = for_all({**filled, "seed": 0}, catalog)
            eight = [[dataclasses.replace(picture, steps=steps)] * MAX_PROMPTS for steps in presets]
            values = {
                "paces": [*map(self._seconds, eight)],
                "pace": self._seconds([picture] * MAX_PROMPTS),
            }
        return {
            "presets": presets,
            "sizes": form.sizes(defaults.model, catalog),
            "samplers": catalog.samplers(defaults.model),
            "references": catalog.max_references(defaults.model),
            **values,
        }

    def _seconds(self, pictures: Sequence[Picture]) -> float | None:
        """Return an estimate for pictures, rounded; None if nothing is known, or there are none."""
        seconds = self.engine.seconds(*pictures) if pictures else None
        return None if seconds is None else round(seconds, 2)

    def _seconds_of_change(self, asked: ActionRequest) -> float | None:
        """Return an estimate for a change of the selected pictures, whatever the words."""
        with suppress(RequestError):
            pictures = [self._changed(asked, index, "–") for index in asked.data.get("indices", [])]
            return self._seconds(pictures)
        return None

    def _slow(self, filled: Mapping[str, Any], language: Language) -> str:
        """Return why Live is not possible with the settings for all boxes."""
        try:
            picture = for_all({**filled, "seed": 0}, self.engine.catalog)
        except RequestError:
            picture = self.engine.defaults
        slow = too_slow(self.engine, picture)
        return language.translate(slow.sentence) if slow else ""

    def _do_model(self, asked: ActionRequest) -> dict[str, Any]:
        """Return the settings that another model brings along, except for texts."""
        name = str(asked.data.get("model"))
        brought = form.show_settings(vars(self.engine.catalog.defaults(name)), self.engine.catalog)
        left = {
            "negative_prompt",
            "style",
            *(name for name, each in SETTINGS.items() if each.of_upload),
        }
        brought = {name: text for name, text in brought.items() if name not in left}
        return {"form": {"settings": brought, "sizes": form.sizes(name, self.engine.catalog)}}

    def _do_link(self, asked: ActionRequest) -> dict[str, Any]:
        request = Request.check(read_link(str(asked.data.get("link"))), AnyModelCatalog())
        return self._gathered(request, asked) | self._fill(
            request, asked, Sentence("The link's prompts, seed and settings are in the boxes.")
        )

    def _do_again(self, asked: ActionRequest) -> dict[str, Any]:
        return self._fill_from(
            self._file(asked),
            asked,
            Sentence("Prompt, seed and settings of the picture are in the boxes."),
        )

    def _do_read(self, asked: ActionRequest) -> dict[str, Any]:
        """Read a picture that has been uploaded."""
        file = uploaded(asked.data.get("file"))
        request, _ = parse_usable(read_parameters(file))
        return self._gathered(request, asked) | self._fill_from(
            file,
            asked,
            Sentence(
                "The prompts, the seed and the settings of {file} are in the boxes.", file=file.name
            ),
        )

    def _fill_from(self, file: Path, asked: ActionRequest, said: Sentence) -> dict[str, Any]:
        """Fill the form with the settings of a picture, as `_fill`.

        Raises:
            RequestError: the file carries no settings, or no prompt.
        """
        text = read_parameters(file)
        there = parse_token_downsampling(text)
        here = self.engine.checkpoint.model.token_downsampling
        more = (
            []
            if here == there
            else [
                Sentence(
                    "It was drawn with token downsampling {there}, which is set when a page is "
                    "started; here it is {here}.",
                    there=there,
                    here=here,
                )
            ]
        )
        request, unusable = parse_usable(text)
        if unusable:
            more.append(
                Sentence("{names} of the picture cannot be used here.", names=", ".join(unusable))
            )
        return self._fill(request, asked, said, *more)

    def _fill(self, request: Request, asked: ActionRequest, *texts: Sentence) -> dict[str, Any]:
        """Return the form of a request as far as it can be made here, with remarks on the rest."""
        values, otherwise = self.runs.values_here(request, asked.browser)
        return {
            "form": {**form.show(values, self.engine.catalog), "keep": []},
            "message": " ".join(map(asked.language.translate, (*texts, *otherwise))),
        }

    def _gathered(self, request: Request, asked: ActionRequest) -> dict[str, Any]:
        """Return the pictures of a request, where the browser's runs still have them."""
        return named(self.runs.gather(request, asked.browser, asked.address))

    def _do_take(self, asked: ActionRequest) -> dict[str, Any]:
        """Take a picture in: one of a card or of the history, or an uploaded file.

        The settings of an uploaded file are read instead if that is asked for and it has any.
        """
        if asked.data.keys() & {"id", "index"}:
            file = self._file(asked)
        else:
            file = uploaded(asked.data.get("file"))
            if asked.data.get("or_read") and carries_settings(file):
                return self._do_read(asked)
        with file.open("rb") as opened:
            uploaded_input = Input(opened.read(MAX_FILE_BYTES + 1))
        if asked.data.get("mask_of"):
            uploaded_input = painted(uploaded_input, self._handed_in(asked, "mask_of"))
        return {"input": self.inputs.add(asked.browser, uploaded_input)}

    def _do_before(self, asked: ActionRequest) -> dict[str, Any]:
        """Return the picture that a card's was made from, as it lies under it; nothing if it is
        gone. It is the start picture, or the only reference picture if that has the same size.

        Of a card's picture there is also the `unit` by which it can be extended.
        """
        unit = {}
        with suppress(RequestError):
            if "index" in asked.data:
                model = self._card(asked, asked.data["index"]).asked.model
                unit = {"unit": self.engine.catalog.size_unit(model)}
        with suppress(RequestError, HistoryError, OSError):
            picture = read_png(self._file(asked)).picture(0)
            inputs = self.inputs.of(asked.browser)
            if canvas := Canvas.of(picture, inputs):
                return {**unit, "before": data_url(canvas.pixels)}
            reference = find_input(inputs, picture.reference)
            alike = reference and reference.size == (picture.width, picture.height)
            if alike and self.engine.catalog.edits(picture.model):
                return {**unit, "before": data_url(np.asarray(reference.on_white()))}
        return unit

    def _do_paint(self, asked: ActionRequest) -> dict[str, Any]:
        return {"view": to_paint_on(self._handed_in(asked, "input"))}

    def _do_known(self, asked: ActionRequest) -> dict[str, Any]:
        """Return names that prompts can use here, the words of a model that has few, and what
        styles put behind prompts."""
        catalog, adapters = self.engine.catalog, self.engine.adapters
        card = catalog.open(asked.filled().get("model", "")).checkpoint.card
        loras = (f"<lora:{name}:1>" for name in adapters.loras())
        wildcards = (f"__{name}__" for name in catalog.wildcards.names())
        return {
            "known": [*adapters.embeddings(), *loras, *wildcards, *card.words][:MAX_KNOWN],
            "endings": catalog.styles.endings()[:MAX_KNOWN],
        }


def remark(prompt: str, value: str, engine: EngineClient, model: str) -> tuple[str, Sentence | str]:
    """Return the kind and the text of a remark under a prompt box, mostly nothing.

    It is one of the prompt's values where it stands for several, or says that the prompt is near
    the model's limit or beyond it, or which words mean nothing to the model.
    """
    if value != prompt.strip():
        return "such", Sentence("For example: “{prompt}”", prompt=value)
    if len(prompt) > MAX_PROMPT_LENGTH:
        return "over", Sentence(
            "{count} of at most {limit} characters", count=len(prompt), limit=MAX_PROMPT_LENGTH
        )
    if not prompt.strip():
        return "", ""
    try:
        with as_request_errors():
            remarks = engine.resolver.remarks(Picture(prompt=prompt, model=model))
    except RequestError as error:
        return "over", error.sentence
    counted = remarks.count
    tokens = Sentence("{count} / {limit} tokens", count=counted.tokens, limit=counted.limit)
    if counted.lost:
        return "over", Sentence("{tokens}, cut off: “{lost}”", tokens=tokens, lost=counted.lost)
    if remarks.unknown:
        return "unknown", Sentence("Unknown: “{words}”", words=list(remarks.unknown))
    return "", tokens if counted.tokens >= NEAR * counted.limit else ""
