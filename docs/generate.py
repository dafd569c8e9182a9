"""The pages of docs/reference/, from the code: `python -m docs.generate` writes them."""

import argparse
import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, is_typeddict

from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

import sd_tpu
from sd_tpu import app, cli
from sd_tpu.checkpoint.config import BUNDLED_MODEL
from sd_tpu.folders import data_folder
from sd_tpu.http import create_api
from sd_tpu.http.access import Access
from sd_tpu.pictures.images import a1111_name, format_parameters
from sd_tpu.request import Request
from sd_tpu.sampling.samplers import FLOW_SAMPLERS, SAMPLERS
from sd_tpu.serving.client import EngineClient, Status
from sd_tpu.settings import SETTINGS, SIZE, Choice, Number, Picture, Setting, Text, Upload

FOLDER = Path(__file__).parent / "reference"
CONSTANTS = {
    "BUNDLED_MODEL": "The folder of the bundled model, a `Path`.",
    "RANDOM": "-1: the seed that draws one.",
}
INTERNAL = {"Engine.train", "Engine.end_training"}  # methods for the rooms above alone
LINE = 90  # characters of a signature that stays on one
NOTE = "<!-- Written by `python -m docs.generate`: change the code instead. -->\n"

VARIABLES = {
    "This program": {
        "SD_TPU_FLAGS": "Flags of `app.py`, before those of the command line.",
        "SD_TPU_CACHE": "The folder of training runs, instead of `~/.cache/sd_tpu/training`.",
    },
    "Where files are kept": {
        "XDG_DATA_HOME": "Pictures are kept in `sd_tpu/history` below it, instead of "
        "`~/.local/share`.",
        "XDG_CACHE_HOME": "Compiled programs are kept in `sd_tpu/compiled` below it, instead of "
        "`~/.cache`.",
        "JAX_COMPILATION_CACHE_DIR": "The folder of compiled programs itself.",
        "JAX_ENABLE_COMPILATION_CACHE": "`false` keeps no compiled programs.",
        "GRADIO_TEMP_DIR": "Where Gradio's files lie while the server runs; a temporary folder by "
        "default.",
        "HF_HOME": "Where the hub's library keeps checkpoints, instead of `~/.cache/huggingface`.",
    },
    "How the page is reached": {
        "GRADIO_SERVER_NAME": "As `--host`, which wins.",
        "GRADIO_SERVER_PORT": "As `--port`, which wins.",
        "GRADIO_ROOT_PATH": "The folder or address below which a proxy serves the page.",
        "GRADIO_SHARE": "`true` makes a public link unless `--no-share` is given.",
        "FORWARDED_ALLOW_IPS": "Proxies elsewhere whose `X-Forwarded-For` is believed, separated "
        "by commas.",
        "NO_PROXY": "Names that libraries reach without a proxy; this machine's are added. So in "
        "small letters.",
        "SYSTEM": "`spaces` on the Hugging Face Hub, where the page is public.",
        "COLAB_RELEASE_TAG": "Set in Colab, where a public link is made.",
        "KAGGLE_KERNEL_RUN_TYPE": "Set on Kaggle, where a public link is made.",
    },
    "Devices": {
        "JAX_PLATFORMS": "What JAX may work on, such as `cpu`; all that is there by default.",
        "TPU_WORKER_HOSTNAMES": "Set on the hosts of a TPU slice of several.",
    },
    "How pictures are computed": {
        "TENSORFLOW_USE_CUSTOM_CONTRACTION_KERNEL": "`false` makes pictures equal to the last bit "
        "on CPUs without AVX-512, and a fifth slower."
    },
}
PNG_FIELDS = {  # beside those of settings
    "Size": "Width and height; with hires fix, those of the first drawing.",
    "Model hash": "The beginning of the SHA-256 of the model's file.",
    "VAE": "The tiny decoder that drew the picture.",
    "Weights": "`int8` where the model's weights were rounded to it, `w8a8` where its tokens were, "
    "too.",
    "Lora hashes": "LoRAs by name, with the hashes of their files.",
    "Token downsampling": "The server's, if it is not 1.",
    "Hires upscale": "How many times as large the second drawing is.",
    "Hires resize": "The second drawing's size, if its sides grew by different factors.",
    "Hires steps": "Steps of the second drawing.",
    "Hires upscaler": "How the first drawing was enlarged for it.",
    "ControlNet 0": "The control picture's settings, as A1111's extension writes them.",
    "Prompts": "All prompts as JSON, if there are several.",
    "Negative": "The negative prompt, if the text above cannot be told apart.",
    "Own settings": "What single pictures have in place of the common settings, as JSON.",
    "Version": "The program and its version.",
}


def pages() -> dict[str, str]:
    """Return the pages by their files' names, as they should be."""
    told = {
        "settings.md": ("Settings", _settings()),
        "samplers.md": ("Samplers", _samplers()),
        "command-line.md": ("Command line", _command_line()),
        "environment.md": ("Environment variables", _environment()),
        "http.md": ("HTTP routes", _http()),
        "png-fields.md": ("PNG fields", _png_fields()),
        "metrics.md": ("Metrics", _metrics()),
        "python.md": ("Python", _python()),
    }
    index = ["These pages are written from the code.", ""]
    index += [f"- [{title}]({name})" for name, (title, _) in told.items()]
    told["index.md"] = "Reference", index
    return {
        name: f"{NOTE}\n# {title}\n\n" + "\n".join(lines).rstrip() + "\n"
        for name, (title, lines) in told.items()
    }


def _settings() -> Iterator[str]:
    openai = _schemas()["Generation"]["properties"]
    yield "What they do is told in [Settings](../guide/settings.md). Defaults are of models that"
    yield "say nothing of them. OpenAI's API takes those that are marked, by their names."
    for section in dict.fromkeys(setting.section for setting in SETTINGS.values()):
        settings = [each for each in SETTINGS.values() if each.section == section]
        yield f"\n## {section.capitalize()}\n"
        yield from _table(
            ("Name", "Label", "Values", "Default", "Flag", "A1111", "PNG", "OpenAI"),
            (
                (
                    _code(each.name),
                    each.label,
                    _values(each),
                    _code(_default(each)) if each.default != "" else "",
                    _code(each.flag) if each.flag else "",
                    _code(each.a1111),
                    each.png,
                    "yes" if each.name in openai else "",
                )
                for each in settings
            ),
        )
        yield ""
        yield from (f"- **{each.label}**: {each.help}" for each in settings)


def _default(setting: Setting) -> str:
    choice = isinstance(setting.kind, Choice)
    return setting.default if choice else setting.kind.shown(setting.default)


def _values(setting: Setting) -> str:
    match setting.kind:
        case Upload(most=most):
            return "a picture" if most == 1 else f"1 to {most} pictures"
        case Choice(options=options, per=per):
            named = ("sampler", "spacing")
            if setting.name in named or per:
                return "a [key](samplers.md)"
            return ", ".join(_code(key) for key in options if key)
        case Number(least=least, most=most):
            return f"{least} to {most}"
        case Text(limit=limit):
            return f"text, {limit} characters at most"


def _samplers() -> Iterator[str]:
    yield "Each is a table of numbers ([Architecture](../architecture.md#ideas)); results are those"
    yield "of diffusers' scheduler. The first spacing is the sampler's own. Models of flow matching"
    yield "take those that have a scheduler for it, with the one spacing that there is.\n"
    yield from _table(
        (
            "Key",
            "Name",
            "A1111",
            "Scheduler of diffusers",
            "Spacings",
            "Evaluations a step",
            "For flow matching",
        ),
        (
            (
                _code(key),
                each.label,
                a1111_name(key),
                _code(each.scheduler),
                ", ".join(each.spacings),
                each.evaluations,
                _code(FLOW_SAMPLERS[key].scheduler) if key in FLOW_SAMPLERS else "",
            )
            for key, each in SAMPLERS.items()
        ),
    )
    for key, each in SAMPLERS.items():
        noise = " Draws fresh noise at its steps." if each.stochastic else ""
        rows = getattr(each.rows, "func", each.rows)
        yield f"\n## {each.label}\n\n`{key}`.{noise} {_linked(inspect.getdoc(rows))}"


def _command_line() -> Iterator[str]:
    yield (
        "After installation, `sd-tpu` is `python -m sd_tpu`, and `sd-tpu page` is `python app.py`."
    )
    yield "\n## python app.py\n\nServes the page, and with `--api` the APIs.\n"
    yield from _flags(app.make_parser())
    for name, does in cli.COMMANDS.items():
        parser = argparse.ArgumentParser()
        importlib.import_module(f"sd_tpu.cli.{name}").add_flags(parser)
        yield f"\n## python -m sd_tpu {name}\n\n{does.capitalize()}.\n"
        yield from _flags(parser)


def _flags(parser: argparse.ArgumentParser) -> Iterator[str]:
    home = {str(data_folder()): "~/.local/share/sd_tpu", str(BUNDLED_MODEL): "the bundled model"}
    formatter = parser._get_formatter()  # argparse has no other way to expand what help says
    actions = [each for each in parser._actions if each.dest != "help"]
    if not actions:
        yield "It has no flags."
        return
    rows = []
    for action in actions:
        value = formatter._format_args(action, action.dest.upper()) if action.nargs != 0 else ""
        value = "" if action.option_strings[-1].startswith("--no-") else value
        told = formatter._expand_help(action) if action.help else ""
        for path, name in home.items():
            told = told.replace(path, name)
        flags = ", ".join(_code(f"{flag} {value}".strip()) for flag in action.option_strings)
        rows.append((flags, _plain(told[:1].upper() + told[1:])))
    yield from _table(("Flag", "Meaning"), rows)


def _environment() -> Iterator[str]:
    yield "Flags win over variables."
    for title, variables in VARIABLES.items():
        yield f"\n## {title}\n"
        yield from _table(
            ("Variable", "Meaning"), ((_code(name), told) for name, told in variables.items())
        )


def _http() -> Iterator[str]:
    yield "Of a server with `--api`; health and metrics are always there. A running server"
    yield "describes its routes at `/docs` and `/openapi.json`. How they are used:"
    yield "[APIs](../host/apis.md).\n"
    api = create_api(None, Access()).openapi()
    rows: dict[str, list[tuple]] = {}
    for path, methods in api["paths"].items():
        for method, route in methods.items():
            body = next(iter(route.get("requestBody", {}).get("content", {}).values()), {})
            name = body.get("schema", {}).get("$ref", "").rpartition("/")[2]
            link = f"[{name}](#{name.lower()})" if name else ""
            told = " ".join(route.get("description", "").split())
            row = _code(f"{method.upper()} {path}"), told, link
            rows.setdefault(route["tags"][0], []).append(row)
    for tag, of_tag in rows.items():
        yield f"\n## {tag}\n"
        yield from _table(("Route", "What it does", "Body"), of_tag)
    yield "\n## Bodies"
    for name, schema in api["components"]["schemas"].items():
        if "Validation" in name:
            continue
        yield f"\n### {name}\n"
        yield from _table(
            ("Field", "Type", "Meaning"),
            (
                (_code(field), said.get("type", ""), said.get("description", ""))
                for field, said in schema["properties"].items()
            ),
        )


def _schemas() -> dict[str, Any]:
    return create_api(None, Access()).openapi()["components"]["schemas"]


def _png_fields() -> Iterator[str]:
    yield "The text chunk `parameters` of a PNG file is that of A1111: the prompt,"
    yield "`Negative prompt:` and the negative prompt, and a line of fields. What a field's default"
    yield "says is left out.\n"
    of_settings = {each.png: f"{each.label}. {each.help}" for each in SETTINGS.values()}
    meanings = of_settings | PNG_FIELDS
    yield from _table(("Field", "Meaning"), ((name, meanings[name]) for name in _written_fields()))


def _written_fields() -> list[str]:
    """Return the fields of a text that has them all."""
    changed = {
        name: _another(setting) for name, setting in SETTINGS.items() if setting.section != SIZE
    }
    picture = Picture(**changed, width=512, height=512)
    request = Request((picture, dataclasses.replace(picture, seed=picture.seed + 1, steps=1)))
    facts = dict(
        model_hash="0", token_downsampling=2, vae="taesd", weights="int8", lora_hashes={"a": "b"}
    )
    texts = [
        format_parameters(request, **facts, first_size=size) for size in ((256, 256), (256, 128))
    ]
    names = re.compile(r'(?:^|, )([A-Z][\w /-]*): (?:"(?:[^\\"]|\\.)*"|[^,]*)')
    return list(dict.fromkeys(name for text in texts for name in names.findall(_last_line(text))))


def _last_line(text: str) -> str:
    return text.rpartition("\n")[2]


def _another(setting: Setting) -> Any:
    """Return a value that is not the default."""
    match setting.kind:
        case Upload():
            return "0" * 64
        case Choice(options=options):
            return next(key for key in reversed(options) if key != setting.default)
        case Number(least=least, most=most, type=kind):
            return kind(most if setting.default != most else least)
        case Text():
            return "text"


def _metrics() -> Iterator[str]:
    yield "What `/metrics` tells Prometheus, beside figures of the process"
    yield "([Monitoring](../host/monitoring.md)).\n"
    engine = SimpleNamespace(status=lambda: Status(taking=True, devices=(), dtype="float32"))
    answer = TestClient(create_api(engine, Access(public=True))).get("/metrics").text
    rows = []
    for family in text_string_to_metric_families(answer):
        if family.name.startswith("sd_tpu_"):
            labels = sorted({f"{k}={v}" for each in family.samples for k, v in each.labels.items()})
            name = family.name + ("_total" if family.type == "counter" else "")
            rows.append((_code(name), family.type, family.documentation, ", ".join(labels)))
    yield from _table(("Name", "Type", "Meaning", "Labels"), rows)


def _python() -> Iterator[str]:
    yield "All that `sd_tpu` offers. How it is used: [Python quickstart](../python/quickstart.md),"
    yield "[the Flax classes](../python/flax.md)."
    described: dict[Any, str] = {}
    for name in sorted(sd_tpu.__all__):
        thing = getattr(sd_tpu, name)
        yield f"\n## {name}\n"
        if not callable(thing):
            yield CONSTANTS.get(name) or f"{_code(_short(str(thing)))}"
            continue
        if is_typeddict(thing):
            yield from _keys(thing)
            continue
        yield from _described(name, thing)
        if inspect.isclass(thing):
            yield from _methods(name, thing, described)


def _methods(name: str, thing: type, described: dict[Any, str]) -> Iterator[str]:
    """Return the public methods of a class; of those described with an earlier class, the names."""
    again: dict[str, list[str]] = {}
    for method, of in inspect.getmembers(thing, _is_method):
        owner = next((each for each in thing.__mro__ if method in vars(each)), None)
        ours = owner and owner.__module__.startswith("sd_tpu") and inspect.getdoc(of)
        if method.startswith("_") or not ours or f"{name}.{method}" in INTERNAL:
            continue
        first = described.setdefault((owner, method), name)
        if first != name:
            again.setdefault(first, []).append(_code(method))
            continue
        yield f"\n### {name}.{method}\n"
        yield from _described(f"{name}.{method}", of)
    for first, methods in again.items():
        yield f"\nAs those of [{first}](#{first.lower()}): {', '.join(methods)}."


def _is_method(of: Any) -> bool:
    return inspect.isroutine(of) and callable(of)


def _described(name: str, thing: Any) -> Iterator[str]:
    if inspect.isclass(thing) and issubclass(thing, Exception):
        yield inspect.getdoc(thing) or ""
        return
    yield f"```text\n{name}{_signature(thing)}\n```\n"
    yield _linked(_doc(thing))


def _doc(thing: Any) -> str:
    """Return a docstring; for a method like a base class's, the base's."""
    said = inspect.getdoc(thing) or ""
    base = re.fullmatch(r".*, as `EngineClient\.(\w+)`\.", said)
    return inspect.getdoc(getattr(EngineClient, base[1])) if base else said


def _signature(thing: Any) -> str:
    """Return the parameters, a line each where one is too long, without their types' modules."""
    signature = inspect.signature(thing)
    of_parameters = signature.parameters.values()
    parts = [str(each) for each in of_parameters if each.name not in ("self", "cls")]
    named = [each for each in of_parameters if each.kind is each.KEYWORD_ONLY]
    if named and not any(each.kind is each.VAR_POSITIONAL for each in of_parameters):
        parts.insert(parts.index(str(named[0])), "*")
    returned = signature.return_annotation
    back = "" if returned is signature.empty else f" -> {inspect.formatannotation(returned)}"
    line = _short(f"({', '.join(parts)}){back}")
    if len(line) > LINE:
        line = "(\n" + "".join(f"    {_short(part)},\n" for part in parts) + f"){_short(back)}"
    return line


def _short(text: str) -> str:
    """Return a signature or a type without modules and addresses."""
    text = text.replace(repr(BUNDLED_MODEL), "BUNDLED_MODEL").replace("mappingproxy({})", "{}")
    text = re.sub(r"<(?:class |function )?'?([\w.]+)[^>]*>", r"\1", text)
    text = re.sub(r"\b[A-Za-z_]\w*(?:\.\w+)*\.(\w+)", r"\1", text)
    return re.sub(r": \*(\w+)", r": Unpack[\1]", text)


def _keys(thing: type) -> Iterator[str]:
    """Return a dictionary's keys with their types."""
    yield f"{_linked(inspect.getdoc(thing) or '')}\n"
    types = thing.__annotations__.items()
    yield from _table(
        ("Key", "Type"),
        ((_code(key), _code(_short(inspect.formatannotation(of)))) for key, of in types),
    )


def _linked(docstring: str) -> str:
    """Return a docstring as Markdown.

    Sections are lists, examples are blocks, addresses are links.
    """
    docstring = re.sub(r"(?m)^>>> (?:.+\n?)+", _block, docstring)
    lines, listed = [], False
    for line in docstring.splitlines():
        if re.fullmatch(r"(Args|Attributes|Raises|Returns|Yields):", line):
            lines.append(f"\n**{line[:-1]}**\n")
            listed = True
        elif listed and re.match(r"    \S", line):
            name, colon, told = line.strip().partition(": ")
            lines.append(f"- `{name}`: {told}" if colon else f"- {line.strip()}")
        elif listed and line.startswith("     "):
            lines.append(f"  {line.strip()}")
        else:
            listed = listed and not line.strip()
            lines.append(line)
    return re.sub(r"(?<!<)(https?://[^\s),]+)", r"<\1>", "\n".join(lines))


def _block(example: re.Match) -> str:
    return f"```pycon\n{example[0].rstrip()}\n```\n"


def _table(head: tuple[str, ...], rows: Iterable[tuple]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(str(each).replace('|', chr(92) + '|') for each in row)} |"


def _plain(text: str) -> str:
    """Return a text that Markdown shows as it is."""
    return re.sub(r"[*_]", r"\\\g<0>", text).replace("<", "&lt;")


def _code(text: Any) -> str:
    return f"`{text}`"


def main() -> None:
    """Write the pages, and remove files that are no pages any more."""
    FOLDER.mkdir(exist_ok=True)
    written = pages()
    for file in FOLDER.glob("*.md"):
        if file.name not in written:
            file.unlink()
    for name, text in written.items():
        (FOLDER / name).write_text(text, "utf-8")


if __name__ == "__main__":
    main()
