"""Configs as diffusers up to 0.39 had them: read by attribute and by key, kept as JSON."""

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from sd_tpu.checkpoint.config import read_json
from sd_tpu.pipelines.files import find_config


class FrozenConfig(dict):
    """A dictionary whose keys are attributes as well."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"The config has no {name!r}.") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


class Configured:
    """A class with a `config`: the values of its constructor or its file, over `defaults`."""

    config_name: ClassVar[str]  # of the file
    defaults: ClassVar[dict[str, Any]]

    def __init__(self, *args: Any, **values: Any):
        """Take the values of `defaults` by position, or these and any others by name."""
        if len(args) > len(self.defaults):
            raise TypeError(f"{type(self).__name__} takes at most {len(self.defaults)} values.")
        values |= dict(zip(self.defaults, args, strict=False))
        unknown = values.keys() - self.defaults.keys()
        if unknown:
            raise TypeError(f"{type(self).__name__} has no {', '.join(sorted(unknown))}.")
        self.config = FrozenConfig({**self.defaults, **values, "_class_name": type(self).__name__})

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any] | str | Path, *, dtype: Any = None, **values: Any
    ) -> Self:
        """Make one from a config, with `values` in place of the config's.

        The config may hold more than this class reads. In place of a mapping it may be the folder
        or the hub id where one is stored, as `load_config` finds it.
        """
        if not isinstance(config, Mapping):
            config, values = cls.load_config(config, **values), {}
        configured = cls(**({} if dtype is None else {"dtype": dtype}))
        configured.config.update(config)
        configured.config.update(values)
        configured.config["_class_name"] = cls.__name__
        return configured

    @classmethod
    def load_config(
        cls, name: str | Path, *, subfolder: str | None = None, **options: Any
    ) -> dict[str, Any]:
        """Load the config stored in a folder, or in one on the hub.

        Args:
            name: folder or hub id.
            subfolder: the one that has the file.
            options: as `from_pretrained` of the pipelines takes them.

        Raises:
            CheckpointError: there is none, or it is not JSON.
        """
        return read_json(find_config(name, subfolder, cls.config_name, options))

    def save_config(self, folder: str | Path) -> None:
        """Write the config into the folder, which is made if absent.

        The class goes by the name that it has in PyTorch, which reads the file as well.
        """
        name = self.config["_class_name"].removeprefix("Flax")
        write_json(Path(folder) / self.config_name, self.config | {"_class_name": name})


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object as diffusers does, into a folder that is made if absent."""
    file.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(
        content, indent=2, sort_keys=True, ensure_ascii=False, default=np.ndarray.tolist
    )
    file.write_text(f"{text}\n", encoding="utf-8")


def warn_of_unknown(options: Mapping[str, Any], owner: str) -> None:
    """Warn of ignored keywords, as diffusers did."""
    if options:
        warnings.warn(f"{owner} has no {', '.join(sorted(options))}: ignored.", stacklevel=3)
