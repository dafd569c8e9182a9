"""The panel Teach: what is asked of it, and what it shows of each run."""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sd_tpu.gallery.status import duration
from sd_tpu.language import Language
from sd_tpu.page.files import uploaded
from sd_tpu.page.parts import part
from sd_tpu.pictures.images import MAX_FILE_BYTES, webp_url
from sd_tpu.pictures.inputs import Input
from sd_tpu.reading import composed, read_bytes
from sd_tpu.sentence import Sentence
from sd_tpu.serving.teaching import Teaching, TrainingRequest
from sd_tpu.serving.training_run import DONE, FAILED, PREPARING, STOPPED, WAITING, TrainingRun
from sd_tpu.settings import RequestError, drawn_seed
from sd_tpu.training.options import BOUNDS
from sd_tpu.training.pictures import PICTURE_SIDES, captioned, words_of_name

MAX_CAPTION = 1000  # characters
MAX_BYTES = 1 << 28  # of a run's pictures
CURVE = 200, 40  # the size in which the loss's curve is drawn


class TeachPanel:
    """Answers to the panel's messages."""

    def __init__(self, teaching: Teaching):
        """Have the panel for a server's runs."""
        self._teaching = teaching

    def answer(
        self,
        data: Mapping[str, Any],
        filled: Mapping[str, Any],
        owner: str,
        address: str,
        language: Language,
    ) -> dict[str, Any]:
        """Answer a message.

        Args:
            data: of `schema.Teach`.
            filled: the form, as `form.read` returns it.
            owner: the browser.
            address: its network.
            language: of the page.

        Raises:
            RequestError: why something is not done.
        """
        teaching, id = self._teaching, data.get("id", "")
        match data["act"]:
            case "add":
                return {"words": self._words(data)}
            case "check":
                return self._checked(data, filled, owner, language)
            case "start":
                request = _request(data, filled, owner)
                pictures = self._pictures(data)
                teaching.start(dataclasses.replace(request, address=address, pictures=pictures))
            case "stop":
                teaching.stop(owner, id)
            case "resume":
                teaching.resume(owner, id)
            case "discard":
                teaching.discard(owner, id)
            case "keep":
                name = teaching.keep(owner, id, data.get("step", 0))
                message = language.say("The LoRA {name} is kept.", name=name)
                return {"message": message, "kind": "over", **self._shown(data, owner, language)}
        return self._shown(data, owner, language)

    def _words(self, data: Mapping[str, Any]) -> str:
        """Check a picture that has been uploaded, and return what its name says of it."""
        self._picture(data)
        return words_of_name(Path(composed(data.get("name", ""))).stem)

    def _pictures(self, data: Mapping[str, Any]) -> list[bytes]:
        """Return the contents of the pictures, of which no more is read than is taken."""
        found: list[bytes] = []
        for each in data.get("pictures", []):
            found.append(self._picture(each))
            if sum(map(len, found)) > MAX_BYTES:
                raise RequestError(
                    "The pictures have more than {limit} MB together.", limit=MAX_BYTES >> 20
                )
        return found

    def _picture(self, data: Mapping[str, Any]) -> bytes:
        """Return the content of an uploaded file, which is a picture."""
        try:
            content = read_bytes(uploaded(data.get("file")), MAX_FILE_BYTES)
        except FileNotFoundError:
            raise RequestError(
                "{name} is not on the server any more: choose it anew.", name=data.get("name", "")
            ) from None
        Input(content, composed(data.get("name", "")))
        return content

    def _checked(
        self, data: Mapping[str, Any], filled: Mapping[str, Any], owner: str, language: Language
    ) -> dict[str, Any]:
        """Return the captions as they will be taught, and how long it takes or what is wrong."""
        teaching, pictures = self._teaching, data.get("pictures", [])
        shown = {"captions": [_caption(each, data) for each in pictures]}
        try:
            request = _request(data, filled, owner)
            teaching.check(request, data.get("count") or len(pictures))
        except RequestError as error:
            return {**shown, "note": language.translate(error.sentence), "ready": False}
        seconds, memory = teaching.seconds(request), teaching.model_bytes(request)
        estimate = (
            Sentence(
                "About {time} while nothing is drawn. {memory} for the model on each device, "
                "which those who draw with it share, and more for a step.",
                time=duration(seconds),
                memory=_size(memory),
            )
            if seconds is not None
            else Sentence("How long it takes is not known yet: the model is still compiled for.")
        )
        return {**shown, "note": language.translate(estimate), "ready": True}

    # --- runs -----------------------------------------------------------------------------------

    def _shown(self, data: Mapping[str, Any], owner: str, language: Language) -> dict[str, Any]:
        seen = data.get("seen", {})
        return {"runs": [self._run(run, seen, language) for run in self._teaching.runs(owner)]}

    def _run(self, run: TrainingRun, seen: Mapping[str, str], language: Language) -> dict[str, str]:
        """Return what is shown of a run; its pictures only where the browser has not seen them."""
        rows = [(step, run.drawn(step)) for step in (0, *run.kept)]
        key = hashlib.sha256(repr((run.is_active, rows)).encode()).hexdigest()[:16]
        shown = {
            "id": run.id,
            "status": part("run_status", language, run, self._status(run), curve(run.losses)),
            "actions": part("run_actions", language, run),
            "key": key,
        }
        if seen.get(run.id) != key:
            urls = [
                (step, {index: webp_url(file) for index, file in run.samples(step).items()})
                for step, drawn in rows
                if step or drawn
            ]
            shown["samples"] = part("run_samples", language, run, urls)
        return shown

    def _status(self, run: TrainingRun) -> str:
        """Return how a run goes, in a sentence."""
        steps = {"step": run.step, "steps": run.steps}
        if run.status == WAITING and self._teaching.ahead(run):
            return Sentence("It waits until what was begun before is taught.")
        if run.status in (WAITING, PREPARING):
            return Sentence("Compiling, which takes minutes the first time…")
        if run.status == STOPPED:
            return Sentence("Stopped after step {step} of {steps}.", **steps)
        if run.status == FAILED:
            return run.message
        if run.status == DONE:
            tag = f"<lora:{run.name}:1>"
            return Sentence("Done. Write {tag} in a prompt to draw with it.", tag=tag)
        if run.seconds is None:
            return Sentence("Reading the pictures…")
        return Sentence(
            "Step {step} of {steps}, about {time} left. A step takes {memory} beside the model.",
            time=duration(run.seconds),
            memory=_size(run.memory or 0),
            **steps,
        )


def _request(data: Mapping[str, Any], filled: Mapping[str, Any], owner: str) -> TrainingRequest:
    """Return what a message asks for, but for pictures; only what it says of them is checked."""
    examples = data.get("pictures", [])
    seen: set[Path] = set()
    for each in examples:
        if len(each["text"]) > MAX_CAPTION:
            raise RequestError(
                "What is said of {name} has more than {limit} characters.",
                name=each["name"],
                limit=MAX_CAPTION,
            )
        file = uploaded(each["file"])
        if file in seen:
            raise RequestError("{name} is there twice.", name=each["name"])
        seen.add(file)
    side = data.get("side", "")
    return TrainingRequest(
        owner=owner,
        model=filled.get("model", ""),
        name=_name(data),
        kind=data.get("kind", "thing"),
        steps=_number(data, "steps", Sentence("Steps")),
        rank=_number(data, "rank", Sentence("Rank")),
        side=float(side) if side in map(str, PICTURE_SIDES) else PICTURE_SIDES[0],
        captions=[composed(each["text"]).strip() for each in examples],
        prompts=filled["prompts"],
        seed=drawn_seed(filled["seed"]),
    )


def _size(count: int) -> str:
    """Return bytes with their unit, which is the same in all languages."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def _name(data: Mapping[str, Any]) -> str:
    return composed(data.get("name", "")).strip()


def _caption(example: Mapping[str, str], data: Mapping[str, Any]) -> str:
    name = _name(data)
    text = composed(example["text"]).strip()
    return captioned(text, name, data.get("kind", "thing")) if name else text


def _number(data: Mapping[str, Any], name: str, label: Sentence) -> int:
    """Return a whole number that was written; raises RequestError for what is none, or too much."""
    number = BOUNDS[name]
    return number.check(number.parse(data.get(name, "")), label)


def curve(losses: Sequence[tuple[int, float]]) -> str:
    """Return the points of a loss's curve in an SVG picture of CURVE; "" before there are two."""
    if len(losses) < 2:
        return ""
    width, height = CURVE
    first, last = losses[0][0], losses[-1][0]
    values = [loss for _, loss in losses]
    least, spread = min(values), (max(values) - min(values)) or 1.0
    points = [
        (width * (step - first) / (last - first), height * (1 - (loss - least) / spread))
        for step, loss in losses
    ]
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
