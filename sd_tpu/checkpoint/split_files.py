"""The parts of a checkpoint beside its transformer in files of their own, as ComfyUI keeps them.

Which file is a part is told by names and shapes of its tensors, and by its own name where several
fit.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sd_tpu.checkpoint.config import CheckpointError
from sd_tpu.checkpoint.layouts import ANIMA, KLEIN, LANGUAGES, VAES, Z_IMAGE, Layout
from sd_tpu.checkpoint.weights import NOT_PARAMETERS, READ, Stored, header, modern

# Folders of transformers, of text encoders, of autoencoders, by their newer names and their older.
TRANSFORMERS, TEXTS = ("diffusion_models", "unet"), ("text_encoders", "clip")
AUTOENCODERS = ("vae",)
OF_PARTS = (*TEXTS, *AUTOENCODERS)
WAY_OUT = (
    f", or have the transformer lie in {TRANSFORMERS[0]}/, its text encoders in {TEXTS[0]}/ and "
    f"its autoencoder in {AUTOENCODERS[0]}/, beside one another, or name them with --text-encoder "
    "and --vae"
)
WHITENING = "bn.running_mean"  # of FLUX.2's autoencoder


class Part(NamedTuple):
    """A part of a checkpoint.

    Attributes:
        what: it is, for people.
        folders: where it may lie.
        prefix: of its tensors' names in a whole checkpoint.
        tensor: one of its own, whose second axis is so long.
        width: of that.
        has: another of its own.
        lacks: one that it does not have.
    """

    what: str
    folders: tuple[str, ...]
    prefix: str
    tensor: str
    width: float
    has: str
    lacks: str = ""

    @property
    def flag(self) -> str:
        """The flag that names its file."""
        return "vae" if self.folders is AUTOENCODERS else "text-encoder"

    def is_in(self, tensors: dict[str, Stored]) -> bool:
        """Whether a file holds it."""
        shapes = {modern(name): tensor.shape for name, tensor in tensors.items()}
        there = shapes.get(self.tensor, ())[1:2] == (self.width,) and self.has in shapes
        return there and self.lacks not in shapes


def parts(
    path: Path, layout: Layout, network: dict[str, Any], clip: int, named: Sequence[Path] = ()
) -> dict[str, Stored]:
    """Return the tensors of the parts beside a transformer, by their names in a whole checkpoint.

    Args:
        path: the transformer's file.
        layout: what it is of.
        network: its config, and values of the configs of networks that lie among its tensors.
        clip: the width of CLIP's texts that it takes, if it does.
        named: files of parts, which count before those in ComfyUI's folders.

    Returns:
        Them, or nothing of a file that lies elsewhere than where ComfyUI keeps transformers, if no
        parts are named.

    Raises:
        CheckpointError: a part is missing, several files fit, or a file that is named is no part.
    """
    home = next(
        (each.parent for each in path.absolute().parents if each.name in TRANSFORMERS), None
    )
    if home is None and not named:
        return {}
    headers = {file: header(file) for file in named}
    found, used = {}, set()
    for part in _wanted(layout, network, clip):
        fitting = [file for file, tensors in headers.items() if part.is_in(tensors)]
        used.update(fitting)
        if len(fitting) > 1:
            raise CheckpointError(f"{fitting[0]} and {fitting[1]} are both a {part.what}.")
        if fitting:
            tensors = headers[fitting[0]]
        elif home is None:
            raise CheckpointError(
                f"{path} holds the transformer of {layout.name}, and no file that was named is its "
                f"{part.what}: name one with --{part.flag}."
            )
        else:
            tensors = _found(path, layout, part, home)
        found |= {f"{part.prefix}{name}": tensor for name, tensor in tensors.items()}
    if unused := [file for file in named if file not in used]:
        raise CheckpointError(f"{unused[0]} is no part of the {layout.name} in {path}.")
    return found


def _wanted(layout: Layout, network: dict[str, Any], clip: int) -> Iterator[Part]:
    channels = network["in_channels"] // (1 if layout in (Z_IMAGE, ANIMA) else 4)
    first, last = "decoder.conv_in.weight", "encoder.conv_out.weight"
    if layout.of_wan:
        first, last = "decoder.conv1.weight", "encoder.head.2.weight"
    whitening = (WHITENING,) if layout is KLEIN else (last, WHITENING)
    yield Part("autoencoder", AUTOENCODERS, VAES[0], first, channels, *whitening)
    for encoder in layout.text_encoders.values():
        tokens = "text_model.embeddings.token_embedding.weight"
        norm = "text_model.final_layer_norm.weight"
        prefix = f"{encoder.prefix}transformer."
        yield Part("CLIP text encoder", TEXTS, prefix, tokens, clip, norm)
    for language in map(LANGUAGES.__getitem__, layout.languages.values()):
        name, states = layout.takes
        prefix, width = f"{language.prefix}.transformer.", network[name] / states
        own = language.has, language.lacks
        yield Part(language.what, TEXTS, prefix, language.tokens, width, *own)


def _found(path: Path, layout: Layout, part: Part, home: Path) -> dict[str, Stored]:
    """Return the tensors of a part's file; raises CheckpointError unless one alone fits."""
    fitting, others = {}, set()
    for file in sorted(
        file for folder in part.folders for file in (home / folder).rglob("*.safetensors")
    ):
        try:
            tensors = header(file)
        except CheckpointError:  # of one that nobody asked for
            continue
        if part.is_in(tensors):
            parameters = (name for name in tensors if not NOT_PARAMETERS.search(name))
            unread = {tensors[name].dtype for name in parameters} - {*READ}
            others |= unread
            if not unread:
                fitting[file] = tensors
    usual = [file for file in fitting if file.stem in layout.usual]
    if len(chosen := usual if len(usual) == 1 else [*fitting]) == 1:
        return fitting[chosen[0]]
    where = " or ".join(str(home / folder) for folder in part.folders)
    begin = f"{path} holds the transformer of {layout.name}, and"
    if fitting:
        names = ", ".join(file.name for file in fitting)
        raise CheckpointError(
            f"{begin} several files may be its {part.what}: {names}. Leave one of them in {where}, "
            "or call it as ComfyUI does."
        )
    told = f" but in {' and '.join(sorted(others))}, which is not read" if others else ""
    raise CheckpointError(f"{begin} its {part.what} is not in {where}{told}.")
