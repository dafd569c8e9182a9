"""How the table of settings looks in OpenAPI.

The bodies of requests take anything: what is wrong is said by the same checks, and in the same
sentences, as on the page.
"""

from typing import Annotated, Any

import pydantic
from pydantic import WithJsonSchema

from sd_tpu.settings import Choice, Number, Setting

_NAMES = {int: "integer", float: "number", str: "string"}


class Body(pydantic.BaseModel):
    """A JSON object with the fields that are documented; which others there are is checked by those
    who read it."""

    model_config = pydantic.ConfigDict(extra="allow")

    def given(self) -> dict[str, Any]:
        """Return the given values, by name."""
        return self.model_dump(exclude_unset=True)


def anything(description: str, kind: type | str = "string", **facts: Any) -> tuple[Any, Any]:
    """Return a field of a Body, as `pydantic.create_model` takes it."""
    schema = {"type": _NAMES.get(kind, kind), "description": description, **facts}
    return Annotated[Any, WithJsonSchema(schema)], None


def field_of(setting: Setting, **facts: Any) -> tuple[Any, Any]:
    """Return the field for a setting; `facts` override those of the table."""
    kind, known = setting.kind, {}
    if isinstance(kind, Number):
        known = {"minimum": kind.least, "maximum": kind.most}
    elif isinstance(kind, Choice):
        known = {"enum": list(kind.options)}
    return anything(f"{setting.label}. {setting.help}", kind.type, **{**known, **facts})
