"""The settings of a picture, each defined once: the fields of `Picture` are the table.

Checks, the page's fields, captions, comparisons, command-line flags, the API, links and PNG
metadata all follow from a field's metadata. A new setting is a field here, the arithmetic that it
changes, and the translations of its texts.
"""

import contextlib
import dataclasses
import math
import numbers
import random
import re
import reprlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from sd_tpu.reading import composed
from sd_tpu.sampling.samplers import SAMPLERS, steps_taken
from sd_tpu.sampling.schedule import SPACINGS
from sd_tpu.sentence import Sentence, SentenceError

MAX_PROMPTS = 8
MAX_MODEL_LENGTH = 1000  # characters of a name, which is a path
MAX_STYLE_LENGTH = 200  # characters of its name
MAX_PROMPT_LENGTH = 4000  # characters; 77 tokens are rarely more than 400
MAX_SIZE = 1 << 16  # pixels; which sizes there are is the model's and the server's business
MAX_STEPS = 200
MAX_REFERENCES = 10  # pictures; how many of them a model takes is its own business
MAX_SEED = 2**32 - 1
RANDOM = -1  # where a person gives a seed; a picture has the one that was drawn
LARGER_STRENGTH = 0.4  # where a picture is drawn again larger, and its model asks for no other
MAX_SHOWN = 60  # characters of a bad value in a sentence


class RequestError(SentenceError):
    """A request that cannot be served; the message is for the person who made it.

    Attributes:
        setting: the name of the setting that is wrong, if it is one; "prompt" is a prompt.
        index: of the picture whose own value is wrong; None where the value is for all.
    """

    def __init__(
        self, template: str, /, *, setting: str = "", index: int | None = None, **facts: Any
    ):
        """Format the message as a Sentence does, and note what it is about."""
        super().__init__(template, **facts)
        self.setting, self.index = setting, index


@contextlib.contextmanager
def about(setting: str, index: int | None = None) -> Iterator[None]:
    """Complete a RequestError that is raised inside with the setting and the index it is about.

    An error that names a setting or an index itself keeps it.
    """
    try:
        yield
    except RequestError as error:
        error.setting = error.setting or setting
        error.index = index if error.index is None else error.index
        raise


def of_prompt(index: int | None) -> Sentence | str:
    """Words that say whose a value is; none for the value of all."""
    return "" if index is None else Sentence(" of prompt {number}", number=index + 1)


# --- kinds of settings --------------------------------------------------------------------------


class _Texts:
    """Values that are texts."""

    type = str

    def parse(self, text: str) -> str:
        """Parse a text from a link, a file or a command line."""
        return text


@dataclasses.dataclass(frozen=True)
class Text(_Texts):
    """A text without half characters and without spaces around it."""

    limit: int = MAX_PROMPT_LENGTH

    def check(self, value: Any, name: Sentence | str, of: Sentence | str = "") -> str:
        """Return the value as a picture holds it; None is the empty text. Raises RequestError."""
        name, value = _whose(name, of), "" if value is None else value
        if not isinstance(value, str):
            raise RequestError(
                "{name} should be text, not {kind}.", name=name, kind=type(value).__name__
            )
        if len(value) > self.limit:
            raise RequestError(
                "{name} has {count} characters; at most {limit} are accepted.",
                name=name,
                count=len(value),
                limit=self.limit,
            )
        # Half of a surrogate pair is no character: it can neither be tokenized nor saved.
        return value.encode("utf-8", "ignore").decode("utf-8").strip()

    def shown(self, value: Any) -> str:
        """Return the value as a caption of one line."""
        return " ".join(str(value).split())


@dataclasses.dataclass(frozen=True)
class Name(Text):
    """A name in NFC, as lists show it."""

    limit: int = MAX_MODEL_LENGTH

    def check(self, value: Any, name: Sentence | str, of: Sentence | str = "") -> str:
        """Check a text and compose it (NFC); raises RequestError."""
        return composed(super().check(value, name, of))


@dataclasses.dataclass(frozen=True)
class Upload(_Texts):
    """An uploaded picture, named by the hash of its content, or up to `most`; "" is none.

    Names of several stand in their order, with a space between.
    """

    most: int = 1

    def check(self, value: Any, name: Sentence | str, of: Sentence | str = "") -> str:
        """Return the value as a picture holds it; None is none. Raises RequestError."""
        value = "" if value is None else value
        names = value.split(" ") if isinstance(value, str) and value else []
        if not isinstance(value, str) or not all(re.fullmatch("[0-9a-f]{64}", x) for x in names):
            raise RequestError(
                "{name} should be the name of a picture that was handed in, not {value}.",
                name=_whose(name, of),
                value=shortened(value),
            )
        if len(names) > self.most:
            raise RequestError(
                "{name}: {count} pictures were given; at most {most} are accepted.",
                name=_whose(name, of),
                count=len(names),
                most=self.most,
            )
        return value

    def shown(self, value: Any) -> str:
        """Return the first digits of each name, enough to tell it from others."""
        return " ".join(name[:8] for name in str(value).split())


@dataclasses.dataclass(frozen=True)
class Number:
    """A number of a type, int or float, with its bounds; `step` is what a field's arrows take."""

    type: type
    least: float
    most: float
    step: float = 1

    def check(self, value: Any, name: Sentence | str, of: Sentence | str = "") -> Any:
        """Return the value as a picture holds it. Raises RequestError."""
        name, whole = _whose(name, of), self.type is int
        if whole and (not _is_number(value) or value != int(value)):
            raise RequestError(
                "{name} should be a whole number, not {value}.", name=name, value=shortened(value)
            )
        if not _is_number(value):
            raise RequestError(
                "{name} should be a number, not {value}.", name=name, value=shortened(value)
            )
        if not self.least <= value <= self.most:
            shown = shortened(int(value)) if whole else f"{value:g}"
            raise RequestError(
                "{name} should be from {least} to {most}, not {value}.",
                name=name,
                least=self.least,
                most=self.most,
                value=shown,
            )
        return self.type(value)

    def parse(self, text: str) -> float | str:
        """Return the number, or the text itself where it is none: `check` says what is wrong."""
        for kind in (int, float):
            try:
                number = kind(text)
            except ValueError:  # also for whole numbers of thousands of digits
                continue
            return number if _is_number(number) else text
        return text

    def shown(self, value: Any) -> str:
        """Return the number without a fraction of zero."""
        return str(value).removesuffix(".0")


@dataclasses.dataclass(frozen=True)
class Choice(_Texts):
    """One of several keys.

    Attributes:
        options: the keys, each with the name or Sentence that people are shown.
        per: another setting, on whose value the allowed keys depend; "" is none.
        allowed_keys: the keys that go with a value of `per`; the empty key always does.
    """

    options: Mapping[str, str]
    per: str = ""
    allowed_keys: Callable[[str], tuple[str, ...]] = lambda _: ()

    def check(self, value: Any, name: Sentence | str, of: Sentence | str = "") -> str:
        """Return the value as a picture holds it; None is the empty key. Raises RequestError."""
        value = "" if value is None else value
        if not isinstance(value, str) or value not in self.options:
            raise RequestError(
                "{name} {value}{of} is unknown; there are {known}.",
                name=name,
                value=shortened(value),
                of=of,
                known=", ".join(filter(None, self.options)),
            )
        return value

    def shown(self, value: Any) -> str:
        """Return the name that people are shown for a key."""
        return self.options.get(value, str(value))

    def allowed(self, values: Mapping[str, Any]) -> dict[str, str]:
        """Return the options that go with the other settings, by name."""
        if not self.per:
            return dict(self.options)
        keys = ("", *self.allowed_keys(values[self.per]))
        return {key: label for key, label in self.options.items() if key in keys}


def _whose(name: Sentence | str, of: Sentence | str) -> Sentence | str:
    return Sentence("{name}{of}", name=name, of=of) if of else name


def shortened(value: Any) -> str:
    """Shorten a value for a sentence to MAX_SHOWN characters."""
    try:
        text = reprlib.repr(value)
        return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 1]}…"
    except ValueError:  # Python refuses to write out whole numbers of thousands of digits
        return Sentence("a number as long as that")


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond all floats
        return False


# --- values to compare, around the model's own --------------------------------------------------


def _first(*keys: str) -> Callable[[str], list[str]]:
    """Suggest the model's own value, then these."""
    return lambda model_value: list(dict.fromkeys((model_value, *keys)))[:MAX_PROMPTS]


def _around(*values: float) -> Callable[[float], list[float]]:
    """Suggest these values, with the model's own in place of the nearest."""

    def suggest(model_value: float) -> list[float]:
        nearest = min(values, key=lambda value: abs(value - model_value))
        return [model_value if value == nearest else value for value in values]

    return suggest


def _shares(least: int, most: int, *shares: float) -> Callable[[int], list[int]]:
    """Suggest these shares of the model's own value."""
    return lambda model_value: list(
        dict.fromkeys(min(max(least, round(share * model_value)), most) for share in shares)
    )


def _following(most: int) -> Callable[[int], list[int]]:
    """Suggest the whole numbers from this one on; after `most` they begin again at 0."""
    return lambda first: [(first + index) % (most + 1) for index in range(MAX_PROMPTS)]


# --- the table ----------------------------------------------------------------------------------

PROMPT, BASIC, ADVANCED, FASTER, SIZE = "prompt", "basic", "advanced", "faster", "size"
START, CONTROL, REFERENCE, JOURNEY = "start", "control", "reference", "journey"
# The pictures that are handed in to be used, by the sections that say how.
HANDED_IN = {START: "init_image", CONTROL: "control_image", REFERENCE: "reference"}
DETECTORS = {
    "": Sentence("as it is"),
    "canny": "canny",
    "scribble": "scribble",
    "lineart": "lineart",
}
FITS = {"cover": "cover", "contain": "contain", "stretch": "stretch", "extend": "extend"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """A setting of pictures; its texts are English, by which translations are found.

    Attributes:
        name: of the field of `Picture`, in the API and in links.
        default: of a model that says nothing of it.
        kind: what values it takes.
        label: what people call it.
        help: a sentence about it.
        section: BASIC is for everybody; ADVANCED and FASTER are for experts and at their default
            unless somebody asks for something else, FASTER what costs likeness for speed; a PROMPT
            is written for each picture; height and width are a SIZE, which people choose as one;
            START says what a picture begins with, CONTROL what it follows, REFERENCE what it is
            drawn after; all are nowhere where none can be handed in. JOURNEY says which prompt and
            seed it is on the way to; the page does not ask for that.
        caption: what a caption says of a value; the value alone if it is empty.
        caption_empty: what a caption says of the empty value.
        png: the field of A1111's `parameters` text in PNG files.
        a1111: the parameter in A1111's API.
        flag: of the command line; None where it has none.
        suggest: values worth comparing, given the model's own; None where there is nothing to
            compare.
    """

    name: str
    default: Any
    kind: Text | Number | Choice | Upload
    label: Sentence
    help: str
    section: str
    caption: str
    caption_empty: str
    png: str
    a1111: str
    flag: str | None
    suggest: Callable[[Any], list] | None

    @property
    def expert(self) -> bool:
        """Whether it is shown, written and explained to experts only."""
        return self.section in (ADVANCED, FASTER) or not self.common

    @property
    def of_upload(self) -> bool:
        """Whether it is a picture that is handed in, or says how one is used."""
        return self.section in HANDED_IN

    @property
    def most_pictures(self) -> int:
        """How many pictures that are handed in it names, at most."""
        return self.kind.most if isinstance(self.kind, Upload) else 0

    @property
    def common(self) -> bool:
        """Whether pictures of all kinds use it, also without uploads and outside of journeys."""
        return not (self.of_upload or self.section == JOURNEY)

    def check(self, value: Any, index: int | None = None) -> Any:
        """Return the value as a picture holds it.

        Args:
            value: untrusted.
            index: the picture whose override it is; None where it is for all.

        Raises:
            RequestError: the value is not allowed.
        """
        with about(self.name, index):
            return self.kind.check(value, self.label, of_prompt(index))

    def caption_of(self, value: Any) -> Sentence | str:
        """Return the value as a caption: `20 steps`."""
        shown = self.kind.shown(value)
        if self.caption_empty and not str(value).strip():
            return Sentence(self.caption_empty)
        return Sentence(self.caption, value=shown) if self.caption else shown

    def texts(self) -> list[str]:
        """Return all texts that are to be translated."""
        return [text for text in (self.label, self.help, self.caption, self.caption_empty) if text]


def _setting(
    default: Any,
    kind: Text | Number | Choice | Upload,
    label: str,
    help: str,
    *,
    section: str = BASIC,
    caption: str = "",
    caption_empty: str = "",
    png: str = "",
    a1111: str = "",
    flag: str | None = "",
    suggest: Callable | None = None,
) -> Any:
    """Define a field of `Picture`; empty arguments follow from the field's name or its label."""
    return dataclasses.field(
        default=default,
        metadata=dict(
            kind=kind,
            label=Sentence(label),
            help=help,
            section=section,
            caption=caption,
            caption_empty=caption_empty,
            png=png or label,
            a1111=a1111,
            flag=flag,
            suggest=suggest,
        ),
    )


def _describe(field: dataclasses.Field) -> Setting:
    metadata: dict[str, Any] = dict(field.metadata)
    if metadata["flag"] == "":
        metadata["flag"] = f"--{field.name.replace('_', '-')}"
    metadata["a1111"] = metadata["a1111"] or field.name
    return Setting(name=field.name, default=field.default, **metadata)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Picture:
    """Everything that a picture depends on. A model's defaults are one without a prompt.

    In lists of parameters and files the settings stand in this order, so new ones for experts come
    last.
    """

    prompt: str = _setting("", Text(), "Prompt", "What to draw.", section=PROMPT, png="Prompts")
    model: str = _setting(
        "",
        Name(),
        "Model",
        "Which of the server's models draws.",
        caption_empty="the first model",
        a1111="sd_model_checkpoint",
        flag=None,
    )
    negative_prompt: str = _setting(
        "",
        Text(),
        "Negative prompt",
        "What the pictures should not show.",
        caption="without “{value}”",
        caption_empty="no negative prompt",
        png="Negative",
        flag="--negative",
    )
    style: str = _setting(
        "",
        Name(MAX_STYLE_LENGTH),
        "Style",
        "A template that the prompts are put into.",
        caption="style {value}",
        caption_empty="no style",
        a1111="styles",
    )
    steps: int = _setting(
        20,
        Number(int, 1, MAX_STEPS),
        "Steps",
        "More steps take longer and add detail.",
        caption="{value} steps",
        suggest=_shares(1, MAX_STEPS, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 1.5, 2.5),
    )
    guidance: float = _setting(
        7.5,
        Number(float, 0, 50, step=0.5),
        "Guidance",
        "Higher values follow the prompt more closely; 1 turns guidance off.",
        caption="guidance {value}",
        png="CFG scale",
        a1111="cfg_scale",
        suggest=_around(1, 2, 3, 4, 5, 7.5, 10, 15),
    )
    sampler: str = _setting(
        "dpmpp_2m",
        Choice({key: sampler.label for key, sampler in SAMPLERS.items()}),
        "Sampler",
        "The method that turns noise into a picture.",
        a1111="sampler_name",
        suggest=_first(
            "dpmpp_2m", "dpmpp_2m_sde", "euler", "euler_ancestral", "heun", "ddim", "pndm", "unipc"
        ),
    )
    spacing: str = _setting(
        "",
        Choice(
            {"": Sentence("the model's own"), **{key: key for key in SPACINGS}},
            per="sampler",
            allowed_keys=lambda sampler: SAMPLERS[sampler].spacings,
        ),
        "Spacing",
        "How the steps are spread over the noise.",
        caption_empty="the model's own spacing",
        png="Schedule type",
        a1111="scheduler",
    )
    seed: int = _setting(
        0,
        Number(int, 0, MAX_SEED),
        "Seed",
        "The noise that a picture begins with.",
        caption="seed {value}",
        suggest=_following(MAX_SEED),
    )
    height: int = _setting(
        512,
        Number(int, 1, MAX_SIZE),
        "Height",
        "Of the pictures, in pixels.",
        section=SIZE,
        flag=None,
    )
    width: int = _setting(
        512,
        Number(int, 1, MAX_SIZE),
        "Width",
        "Of the pictures, in pixels.",
        section=SIZE,
        flag=None,
    )
    guidance_start: float = _setting(
        0.0,
        Number(float, 0, 1, step=0.1),
        "Guidance start",
        "Starts after this fraction of the steps; 0 starts at once.",
        section=FASTER,
        caption="guidance from {value}",
    )
    guidance_stop: float = _setting(
        1.0,
        Number(float, 0, 1, step=0.1),
        "Guidance stop",
        "Stops after this fraction of the steps; 1 never stops it.",
        section=FASTER,
        caption="guidance until {value}",
        suggest=_around(1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3),
    )
    cache_interval: int = _setting(
        1,
        Number(int, 1, 10),
        "Cache interval",
        "1 is off; 3 runs the whole model every 3rd time; 10 at most.",
        section=FASTER,
        caption="cache interval {value}",
        suggest=_around(1, 2, 3, 4, 5, 6, 8, 10),
    )
    guidance_rescale: float = _setting(
        0.0,
        Number(float, 0, 1, step=0.1),
        "Guidance rescale",
        "0.7 helps models that overexpose; 0 is off.",
        section=ADVANCED,
        caption="guidance rescale {value}",
        suggest=_around(0, 0.2, 0.4, 0.6, 0.7, 0.8, 0.9, 1),
    )
    init_image: str = _setting(
        "",
        Upload(),
        "Start picture",
        "The picture that is changed.",
        section=START,
        caption="from a picture",
        caption_empty="no start picture",
        png="Init image",
        a1111="init_images",
    )
    strength: float = _setting(
        0.75,
        Number(float, 0, 1, step=0.05),
        "Strength",
        "How much of the start picture becomes noise; 1 is all of it.",
        section=START,
        caption="strength {value}",
        png="Denoising strength",
        a1111="denoising_strength",
        suggest=_around(0.2, 0.3, 0.4, 0.5, 0.6, 0.75, 0.9, 1),
    )
    mask: str = _setting(
        "",
        Upload(),
        "Mask",
        "White areas are redrawn; black areas stay.",
        section=START,
        caption="with a mask",
        caption_empty="no mask",
    )
    mask_blur: int = _setting(
        4,
        Number(int, 0, 64),
        "Mask blur",
        "How far inward the mask's edge is softened, in pixels.",
        section=START,
        caption="mask blur {value}",
    )
    fit: str = _setting(
        "cover",
        Choice(FITS),
        "Fit",
        "How a start picture of another size is fitted: cut, with a border, stretched, or "
        "as it is with a border that is drawn.",
        section=START,
        a1111="resize_mode",
    )
    control_image: str = _setting(
        "",
        Upload(),
        "Control picture",
        "The picture whose lines or depth are followed.",
        section=CONTROL,
        caption="with a control picture",
        caption_empty="no control picture",
        png="Control image",
    )
    controlnet: str = _setting(
        "",
        Name(),
        "ControlNet",
        "Which of the server's ControlNets follows it; by default the first that fits the model.",
        section=CONTROL,
        caption_empty="the first ControlNet",
        flag="--control-name",
    )
    detector: str = _setting(
        "",
        Choice(DETECTORS),
        "Detector",
        "What is followed of a photo; maps of depth or poses are taken as they are.",
        section=CONTROL,
        caption="{value} detected",
        caption_empty="as it is",
    )
    control_scale: float = _setting(
        1.0,
        Number(float, 0, 2, step=0.05),
        "Control strength",
        "How strictly the control picture is followed; 0 is not at all.",
        section=CONTROL,
        caption="control strength {value}",
        suggest=_around(0.2, 0.4, 0.6, 0.8, 1, 1.2, 1.5, 2),
    )
    control_start: float = _setting(
        0.0,
        Number(float, 0, 1, step=0.05),
        "Control start",
        "Starts after this fraction of the steps; 0 starts at once.",
        section=CONTROL,
        caption="control from {value}",
    )
    control_stop: float = _setting(
        1.0,
        Number(float, 0, 1, step=0.05),
        "Control stop",
        "Stops after this fraction of the steps; 1 never stops it.",
        section=CONTROL,
        caption="control until {value}",
    )
    reference: str = _setting(
        "",
        Upload(MAX_REFERENCES),
        "Reference picture",
        "A picture whose subject, faces or style the result takes up; models that edit take "
        "several.",
        section=REFERENCE,
        caption="with a reference picture",
        caption_empty="no reference picture",
    )
    ip_adapter: str = _setting(
        "",
        Name(),
        "IP-Adapter",
        "Which of the server's IP-Adapters sees it; by default the first that fits the model.",
        section=REFERENCE,
        caption_empty="the first IP-Adapter",
        flag="--reference-name",
    )
    reference_scale: float = _setting(
        0.6,
        Number(float, 0, 2, step=0.05),
        "Reference strength",
        "How much the reference picture counts beside the prompt, with an IP-Adapter; 0 is not at "
        "all.",
        section=REFERENCE,
        caption="reference strength {value}",
        suggest=_around(0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 1, 1.2),
    )
    to_prompt: str = _setting(
        "",
        Text(),
        "Second prompt",
        "What the picture is on the way to.",
        section=JOURNEY,
        caption="towards “{value}”",
        caption_empty="no second prompt",
    )
    to_seed: int = _setting(
        RANDOM,
        Number(int, RANDOM, MAX_SEED),
        "Second seed",
        "Whose noise the picture's is on the way to; -1 is its own.",
        section=JOURNEY,
        caption="towards seed {value}",
    )
    share: float = _setting(
        0.0,
        Number(float, 0, 1, step=0.05),
        "Share of the way",
        "How far the picture is on the way to the second prompt and seed.",
        section=JOURNEY,
        caption="{value} of the way",
    )
    clip_skip: int = _setting(
        1,
        Number(int, 1, 12),
        "Clip skip",
        "1 is off; 2 takes the text encoder's last layer but one, as many anime models need. With "
        "SDXL, 1 and 2 are the same.",
        section=ADVANCED,
        caption="clip skip {value}",
        a1111="CLIP_stop_at_last_layers",
        suggest=_around(*range(1, MAX_PROMPTS + 1)),
    )

    @property
    def uses_controlnet(self) -> bool:
        """Whether it follows a control picture."""
        return bool(self.control_image and self.control_scale)

    @property
    def references(self) -> list[str]:
        """The names of its reference pictures, in their order."""
        return self.reference.split()

    @property
    def uses_reference(self) -> bool:
        """Whether it is drawn after reference pictures."""
        return bool(self.reference and self.reference_scale)


SETTINGS = {field.name: _describe(field) for field in dataclasses.fields(Picture)}
OVERRIDABLE = {
    name: setting
    for name, setting in SETTINGS.items()  # by a single picture
    if setting.section != PROMPT
}
UPLOADS = [name for name, setting in SETTINGS.items() if isinstance(setting.kind, Upload)]
SIDES = {name for name, setting in SETTINGS.items() if setting.section == SIZE}
_CAPTIONED = [
    setting
    for kind in (Choice, Number, Upload, Text)
    for name, setting in OVERRIDABLE.items()
    if isinstance(setting.kind, kind) and name not in SIDES
]


def named_size(size: tuple[int, int]) -> str:
    """Return a height and width as people say it, width first."""
    return f"{size[1]}×{size[0]}"


def captions(values: Mapping[str, Any]) -> list[Sentence | str]:
    """Return settings, given by name, as captions: `Euler`, `20 steps`, `512×768`.

    The model's own spacing, which is usual, gets no caption.
    """
    granted = {
        name
        for name, setting in SETTINGS.items()
        if isinstance(setting.kind, Choice) and setting.kind.per in values and not values.get(name)
    }
    texts = [
        setting.caption_of(values[setting.name])
        for setting in _CAPTIONED
        if setting.name in values and setting.name not in granted
    ]
    if values.keys() >= SIDES:
        texts.append(named_size((values["height"], values["width"])))
    return texts


def check_together(picture: Picture, index: int | None = None) -> None:
    """Check what depends on several settings; raises RequestError."""
    of = of_prompt(index)
    sampler, start, stop = SAMPLERS[picture.sampler], picture.guidance_start, picture.guidance_stop
    if picture.spacing and picture.spacing not in sampler.spacings:
        raise RequestError(
            "{sampler}{of} has no {spacing} spacing; it has {known}.",
            sampler=sampler.label,
            setting="spacing",
            index=index,
            of=of,
            spacing=picture.spacing,
            known=", ".join(sampler.spacings),
        )
    if start >= stop:
        raise RequestError(
            "Guidance{of} should start before it stops, not start at {start} and stop at {stop}.",
            setting="guidance_start",
            index=index,
            of=of,
            start=f"{start:g}",
            stop=f"{stop:g}",
        )
    if picture.control_start >= picture.control_stop:
        raise RequestError(
            "Control{of} should start before it stops, not start at {start} and stop at {stop}.",
            setting="control_start",
            index=index,
            of=of,
            start=f"{picture.control_start:g}",
            stop=f"{picture.control_stop:g}",
        )
    if picture.share and picture.init_image:
        raise RequestError(
            "A journey cannot begin or end with a start picture{of}.",
            setting="share",
            index=index,
            of=of,
        )
    if picture.mask and not picture.init_image:
        raise RequestError(
            "The mask{of} needs a start picture that it is of.", setting="mask", index=index, of=of
        )
    if picture.init_image and not steps_taken(picture.steps, picture.strength):
        raise RequestError(
            "A strength{of} of {strength} leaves none of {steps} steps to take.",
            setting="strength",
            index=index,
            of=of,
            strength=f"{picture.strength:g}",
            steps=picture.steps,
        )


def drawn_seed(value: Any) -> Any:
    """Draw a seed for RANDOM, else return the value in 32 bits, valid or not: `check` decides."""
    return (
        random.randint(0, MAX_SEED) if _is_number(value) and value == RANDOM else short_seed(value)
    )


def short_seed(value: Any) -> Any:
    """Return the lower half of a seed of 64 bits, as jax.random.PRNGKey takes it.

    Other values are returned as they are.
    """
    return value & MAX_SEED if type(value) is int and 0 <= value < 1 << 64 else value
