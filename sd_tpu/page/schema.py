"""Messages of the page: what its script may ask, one class for each action.

The types of the script in `script/messages.d.ts` are generated from these. A message that does not
fit is refused before anything is done for it.
"""

import json
from typing import Annotated, Any, Literal, get_args

import pydantic
from pydantic import ConfigDict, Field
from pydantic.json_schema import GenerateJsonSchema

from sd_tpu.settings import MAX_PROMPTS
from sd_tpu.training.pictures import MOST

MAX_IDS = 100_000  # pictures of a board that is made again
Boxes = Field(max_length=MAX_PROMPTS, fail_fast=True)
Index = Annotated[int, Field(ge=0, lt=MAX_PROMPTS)]
Indices = Annotated[list[Index], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]


class Form(pydantic.BaseModel):
    """Texts that are filled in, `overrides` each box's by name, and which cards are kept."""

    model_config = ConfigDict(strict=True, extra="forbid")

    prompts: Annotated[list[str], Boxes]
    seed: str
    settings: dict[str, str]
    overrides: Annotated[list[dict[str, str]], Boxes]
    keep: Annotated[list[bool], Boxes]


class Message(pydantic.BaseModel):
    """Fields of every message: the page's language, the browser's name, and the run it shows."""

    model_config = ConfigDict(strict=True, extra="ignore")

    lang: str
    browser: str | None
    run: str | None
    form: Form


class Plain(Message):
    """An action that needs nothing else."""

    do: Literal["generate", "stop", "known", "grid", "about", "way"]


class OfCard(Message):
    """An action on one card."""

    do: Literal["vary", "larger", "redraw", "live"]
    index: Index


class Change(Message):
    """Draw the pictures of cards anew, changed as words say."""

    do: Literal["change"]
    indices: Indices
    words: str
    strength: float  # models that edit need none


class Around(Message):
    """Draw new pictures from those of cards, with other seeds."""

    do: Literal["around"]
    indices: Indices
    strength: float


class Choose(Message):
    """Take a variant into its card; without a number, take all of them away."""

    do: Literal["choose"]
    index: Index
    variant: int | None


class Finish(Message):
    """Draw the drafts of cards again, finely and from the same noise."""

    do: Literal["finish"]
    indices: Indices


class Extend(Message):
    """Draw what lies beside a card's picture: pixels to the left, above, to the right, below."""

    do: Literal["extend"]
    index: Index
    sides: Annotated[list[int], Field(min_length=4, max_length=4)]


class OfTwoCards(Message):
    """Say what sets the pictures of two cards apart, or have the cards change places."""

    do: Literal["beside", "swap"]
    index: Index
    to: Index


class Zip(Message):
    """Pack the pictures of cards, or of all."""

    do: Literal["zip"]
    indices: Indices | None = None


class OfPicture(Message):
    """An action on the picture of a card or, by its name, of the history."""

    do: Literal["again", "before", "large"]
    index: Index | None = None
    id: str | None = None


class Take(Message):
    """Use a picture as a start, control or reference picture, or as a mask."""

    do: Literal["take"]
    index: Index | None = None
    id: str | None = None
    file: str | None = None  # an uploaded one
    or_read: bool = False  # whether settings in the file are to be read instead
    mask_of: str | None = None  # the picture that the mask was painted on


class Read(Message):
    """Read the settings of an uploaded picture."""

    do: Literal["read"]
    file: str


class Paint(Message):
    """Look at a start picture to paint a mask on it."""

    do: Literal["paint"]
    input: str


class Compare(Message):
    """Draw the first prompt with several values of one setting."""

    do: Literal["compare"]
    what: str
    values: str | list[str]


class Journey(Message):
    """Draw the way from a card's picture to another's, or to another seed."""

    do: Literal["journey"]
    index: Index
    to: Index | None
    count: int


class Movie(Message):
    """Look at the last journey, or download it."""

    do: Literal["movie"]
    kind: str | None = None


class Show(Message):
    """Show a former run, or the browser's last one."""

    do: Literal["show"]
    shown: str | None = None


class Watch(Message):
    """Follow a run, from a version on; with `before`, its end is not announced again."""

    do: Literal["watch"]
    seen: int
    before: bool


class Look(Message):
    """Check what is filled in; a page that is `fresh` also asks for the models.

    The answer says how long a change of the pictures at `indices` takes.
    """

    do: Literal["look"]
    fresh: bool = False
    indices: Annotated[list[Index], Boxes] = []
    strength: float = 0.5


class Styles(Message):
    """List the styles, with pictures of those that are not `seen` yet."""

    do: Literal["styles"]
    seen: Annotated[list[str], Field(max_length=MAX_IDS)]


class ChooseModel(Message):
    """Fill in the settings that a model brings along."""

    do: Literal["model"]
    model: str


class Link(Message):
    """Fill in what a link describes."""

    do: Literal["link"]
    link: str


class OfHistory(Message):
    """Show the history after one of its buttons."""

    do: Literal["history"]
    act: Literal[
        "show", "more", "only", "view", "save", "run", "favourite", "delete", "clear", "restore",
        "board", "boards", "make", "rename", "unmake", "put", "take_off",
    ]  # fmt: skip
    pages: int = 1
    favourites: bool = False
    words: str = ""
    board: str = ""  # that is shown; all pictures are where it is empty
    name: str = ""  # of the board that the button is about
    ids: Annotated[list[str], Field(max_length=MAX_IDS)] = []  # of the pictures that it is about
    id: str | None = None
    to: str | None = None


class Example(pydantic.BaseModel):
    """A picture to teach by, which has been uploaded, and its caption."""

    model_config = ConfigDict(strict=True, extra="forbid")

    file: str
    name: str
    text: str


class Teach(Message):
    """Something about teaching a LoRA, or about a run of it."""

    do: Literal["teach"]
    act: Literal["show", "add", "check", "start", "stop", "resume", "keep", "discard"]
    file: str = ""  # a picture that has been uploaded, to be added
    name: str = ""  # of that file, else of what is taught
    kind: Literal["thing", "person", "style"] = "thing"
    steps: str = ""
    rank: str = ""
    side: str = ""
    pictures: Annotated[list[Example], Field(max_length=MOST, fail_fast=True)] = []
    count: int | None = None  # of pictures, where they are too many to be handed in
    id: str = ""  # of a run
    step: int = 0  # of a state of it
    seen: dict[str, str] = {}  # what is shown of each run's kept states


Asked = (
    Plain
    | OfCard
    | Change
    | Around
    | Choose
    | Finish
    | Extend
    | OfTwoCards
    | Zip
    | OfPicture
    | Take
    | Read
    | Paint
    | Compare
    | Journey
    | Movie
    | Show
    | Watch
    | Look
    | Styles
    | ChooseModel
    | Link
    | OfHistory
    | Teach
)
MESSAGES: pydantic.TypeAdapter[Message] = pydantic.TypeAdapter(
    Annotated[Asked, Field(discriminator="do")]
)
ACTIONS = frozenset(
    name for message in get_args(Asked) for name in get_args(message.model_fields["do"].annotation)
) - {"watch"}


class _Untitled(GenerateJsonSchema):
    """Schemas without a title for each field, which would become a type of its own."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        """Return False."""
        return False


def json_schema() -> str:
    """Return the JSON schema of all messages."""
    schema = MESSAGES.json_schema(schema_generator=_Untitled)
    return json.dumps({"title": "Asked", **schema})


def read(data: Any) -> dict[str, Any]:
    """Return a message of a browser with the fields that it has.

    Raises:
        pydantic.ValidationError: it is none that the page sends.
    """
    return MESSAGES.validate_python(data).model_dump(exclude_unset=True)
