"""The server: flags -> engine -> page and APIs. `python app.py` and `sd-tpu page` start it."""

import argparse
import errno
import logging
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import fastapi
import httpx
from starlette.middleware import Middleware

from sd_tpu import http
from sd_tpu.cli import INTERRUPTED
from sd_tpu.cli.flags import add_model_flags, open_engine
from sd_tpu.folders import data_folder, temporary_folder
from sd_tpu.gallery.history import History, HistoryError
from sd_tpu.http.access import LOCAL_NAMES, Access, is_loopback, read_keys
from sd_tpu.http.gate import Gate, Names, is_shared_unasked
from sd_tpu.http.server import bind, server_name
from sd_tpu.logs import quote_errors
from sd_tpu.memory import keep_freed_memory_together
from sd_tpu.serving import journal
from sd_tpu.serving.client import EngineClient
from sd_tpu.serving.engine import Engine
from sd_tpu.serving.teaching import Teaching

log = logging.getLogger(__name__)

FLAGS = "SD_TPU_FLAGS"  # of the environment: come before those of the command line
GRACE_SECONDS = 30.0  # as container schedulers have it
LAST_LOOK_SECONDS = 2.0  # of these, in which visitors are told how it ended, and fetch it


class _Terminated(BaseException):
    """A request to end the server, by SIGTERM."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Load, serve and compile until interrupted; return the exit code."""
    parser = make_parser()
    try:
        common = shlex.split(os.environ.get(FLAGS, ""))
    except ValueError as error:
        parser.error(f"The flags in {FLAGS} cannot be read: {error}.")
    args = parser.parse_args([*common, *(sys.argv[1:] if arguments is None else arguments)])
    keep_freed_memory_together()
    quote_errors()
    try:
        _check_proxies()
        with _termination(), temporary_folder():
            return _serve(args)
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        return INTERRUPTED
    except _Terminated:  # before anything was served
        return 0
    except (ValueError, OSError) as error:  # CheckpointError is a ValueError
        print(f"sd_tpu: {error}", file=sys.stderr)
        return 2


class Site:
    """A page that is served in the background; in a notebook it shows itself as a link.

    Attributes:
        address: where it is: the public link, if there is one.
    """

    def __init__(self, address: str, ends: ExitStack):
        """Keep what ends the page."""
        self.address, self._ends = address, ends

    def close(self) -> None:
        """End the page; the engine draws on."""
        self._ends.close()

    def _repr_html_(self) -> str:
        return f'<a href="{self.address}" target="_blank">{self.address}</a>'


_served: list[Site] = []  # the page of this process, whether or not somebody has a name for it


def serve(
    engine: EngineClient,
    *,
    share: bool | None = None,
    host: str | None = None,
    port: int | None = None,
    history: str | Path | None = None,
) -> Site:
    """Serve the page on an engine in the background, as in a notebook, which goes on using it.

    A process serves one page: one that it served before is closed. Who serves a model with a safety
    checker to others opens the engine with `safety_checker=True`.

    >>> page = serve(engine, share=False)
    >>> page.address.startswith("http://127.0.0.1:")
    True
    >>> page.close()

    Args:
        engine: draws.
        share: whether to make a public link through Gradio's servers; by default in hosted
            notebooks.
        host: address to listen on; by default this machine's own.
        port: by default the first free one from 7860.
        history: folder in which finished pictures are kept for the browser that made them; by
            default they are kept as long as the page is served.

    Raises:
        ValueError: nothing can be served at this address, or the folder cannot be used.
        OSError: another program serves there.
    """
    share = is_shared_unasked() if share is None else share
    names = Names.here([host] if host else [], share=share)
    pages = _import_page()
    quote_errors()
    while _served:
        _served.pop().close()
    if share and engine.checkpoint.leaves_out_checker:
        log.warning(
            "%s brings a safety checker, which was not read: open the engine with "
            "safety_checker=True to have pictures that are not safe for work blurred.",
            engine.checkpoint.card.name,
        )
    with ExitStack() as begun:
        begun.enter_context(temporary_folder())
        page = pages.build(engine, _open_history(Path(history) if history else None))
        begun.callback(pages.close, page)
        gate = _gate(engine, Access(()), names, api=False)
        address = pages.launch(page, host=host, port=port, share=share, middleware=[gate])
        _served.append(Site(address, begun.pop_all()))
    return _served[-1]


def _serve(args: argparse.Namespace) -> int:
    bind(args.host, args.port).close()  # refuses what cannot be, before minutes go into loading
    access, history = _opened(args)
    names = Names.here([*args.allowed_host, *filter(None, [args.host])], share=args.share)
    begun = time.monotonic()
    print(f"Loading {args.model} ...", flush=True)
    if args.safety_checker is None:
        args.safety_checker = _is_served_to_others(args)
    teaches = _teaches(args)
    if teaches and not args.lora_dir:
        args.lora_dir = _made_lora_dir(args)
    engine = open_engine(args)
    teaching = _teaching(engine, args) if teaches and args.lora_dir else None
    print(f"Compiling ... ({time.monotonic() - begun:.0f} s so far)", flush=True)
    pages = _import_page()  # takes seconds: meanwhile
    page = pages.build(engine, history, teaching)
    try:
        address = pages.launch(
            page,
            host=args.host,
            port=args.port,
            share=args.share,
            mcp_server=args.api,
            middleware=[_gate(engine, access, names, api=args.api)],
        )
        with _drained(engine, teaching, args.grace):
            if not engine.ready.is_set():
                print(
                    f"Open {address} in a browser: the first pictures are drawn once the programs "
                    "are compiled.",
                    flush=True,
                )
            _wait_until_ready(engine, begun)
            if engine.failure:
                print(f"sd_tpu: {engine.failure}", file=sys.stderr)
                return 1
            print(
                f"Ready on {address} after {time.monotonic() - begun:.0f} s: open this address in "
                "a browser; Ctrl+C ends it.",
                flush=True,
            )
            while True:
                time.sleep(3600)
    finally:
        pages.close(page)
        if teaching:
            teaching.close()
    engine.close()
    return 0


def _teaches(args: argparse.Namespace) -> bool:
    """Whether the page has Teach: by default where only this machine is served."""
    return not _is_served_to_others(args) if args.teach is None else args.teach


def _made_lora_dir(args: argparse.Namespace) -> Path | None:
    """Return the folder for LoRAs where none is given; None, and a line in the log, if it fails."""
    folder = data_folder() / "loras"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        _teach_nothing(args, error)
        return None
    return folder


def _teach_nothing(args: argparse.Namespace, error: OSError) -> None:
    """Raise the error where teaching was asked for, else tell the log."""
    if args.teach:
        raise error
    log.warning("Nothing is taught here: %s", error)


def _teaching(engine: Engine, args: argparse.Namespace) -> Teaching | None:
    """Return what trains LoRAs; None, and a line in the log, where nothing can be written."""
    try:
        if not os.access(args.lora_dir, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(args.lora_dir))
        return Teaching.open(engine, data_folder() / "teaching", Path(args.lora_dir))
    except OSError as error:
        _teach_nothing(args, error)
        return None


def _wait_until_ready(engine: Engine, begun: float) -> None:
    """Wait until programs are compiled; a terminal shows for how long already."""
    while not engine.ready.wait(1.0):
        if sys.stdout.isatty():
            print(f"\rCompiling ... {time.monotonic() - begun:.0f} s", end="\r", flush=True)


@contextmanager
def _drained(engine: Engine, teaching: Teaching | None, grace: float) -> Iterator[None]:
    """Serve until somebody ends the server: at once, or once all that was asked for is done.

    A training is stopped, and kept.
    """
    try:
        yield
    except _Terminated:
        print(f"Ending: what has been asked for is drawn within {grace:g} s.", flush=True)
        last_look = min(LAST_LOOK_SECONDS, grace / 2)
        if teaching:
            teaching.stop_all()
        engine.drain(grace - last_look)
        time.sleep(last_look)


@contextmanager
def _termination() -> Iterator[None]:
    """Raise _Terminated on SIGTERM inside, where signals can be handled at all."""

    def terminate(*_) -> NoReturn:
        raise _Terminated

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def make_site(engine: EngineClient, args: argparse.Namespace) -> fastapi.FastAPI:
    """Return page and APIs on an engine as an ASGI application.

    Args:
        engine: draws.
        args: parsed flags of `add_page_flags`.

    Raises:
        ValueError: a flag's value cannot be used.
        OSError: a file that a flag names cannot be read or written.
    """
    quote_errors()
    pages = _import_page()
    access, history = _opened(args)
    return pages.mount(
        pages.build(engine, history),
        mcp_server=args.api,
        middleware=[_gate(engine, access, Names.here(args.allowed_host), api=args.api)],
    )


def _import_page() -> ModuleType:
    """Return the page's module, which imports Gradio."""
    # In this order: importing the first imports Gradio in less time.
    from sd_tpu import gradio_compat, page  # noqa: F401

    return page


def _opened(args: argparse.Namespace) -> tuple[Access, History | None]:
    """Open the APIs' access rules, the history and the log, before minutes go into loading."""
    if args.decoder_for == "pictures" and not args.decoder:
        raise ValueError(
            "--decoder-for pictures says what a decoder draws; name one with --decoder."
        )
    access, history = _access(args), _open_history(args.history)
    if args.log:
        journal.keep(args.log, prompts=args.log_prompts)
    return access, history


def _access(args: argparse.Namespace) -> Access:
    """Return the rules for the APIs' clients; raises ValueError or OSError without them."""
    if not args.api and (args.api_key or args.api_key_file or args.api_public):
        raise ValueError("The APIs are not served without --api.")
    keys = [key.strip() for key in args.api_key]
    if not all(keys):
        raise ValueError("An API key is not empty.")
    keys += read_keys(args.api_key_file) if args.api_key_file else ()
    if keys and args.api_public:
        raise ValueError("With --api-public no API key is asked for: leave one of them out.")
    return Access(tuple(keys), public=args.api_public)


def _gate(engine: EngineClient, access: Access, names: Names, *, api: bool) -> Middleware:
    """Return the middleware that serves everything beside the page."""
    return Middleware(
        Gate,
        names=names,
        access=access,
        api=http.create_api(engine, access),
        paths=http.HEALTH_PATHS + http.API_PATHS * api,
    )


def _open_history(folder: Path | None) -> History | None:
    """Open the history in the folder, if there is to be one."""
    try:
        return History(folder) if folder else None
    except HistoryError as error:
        raise ValueError(
            f"{error} Name another folder with --history, or keep nothing with --no-history."
        ) from error


def _is_served_to_others(args: argparse.Namespace) -> bool:
    return bool(args.share or args.allowed_host) or not is_loopback(server_name(args.host))


def _check_proxies() -> None:
    """Have libraries leave proxies of the environment aside where this machine asks itself; raises
    ValueError if they could use none of them."""
    variables = ("NO_PROXY", "no_proxy")
    there = ",".join(os.environ.get(variable, "") for variable in variables).split(",")
    names = (*(each.strip(" []") for each in there), *LOCAL_NAMES, "127.0.0.1", "::1")
    value = "*" if "*" in names else ",".join(dict.fromkeys(filter(None, names)))
    os.environ.update(dict.fromkeys(variables, value))
    try:
        httpx.Client().close()  # as the libraries make theirs, some while they are imported
    except Exception as error:
        raise ValueError(
            f"A proxy in the environment (HTTP_PROXY, HTTPS_PROXY, ALL_PROXY or "
            f"NO_PROXY) cannot be used: {error}"
        ) from error


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of the server's flags."""
    parser = argparse.ArgumentParser(
        description="Stable Diffusion's page: eight prompts, a seed.",
        epilog=f"Flags in the environment's {FLAGS} count as well, before those given here.",
    )
    add_page_flags(parser)
    parser.add_argument("--host", help="address to listen on; 0.0.0.0 for every network")
    parser.add_argument("--port", type=int, help="by default the first free one from 7860")
    parser.add_argument(
        "--share",
        action=argparse.BooleanOptionalAction,
        default=is_shared_unasked(),
        help="make a public link through Gradio's servers, as in hosted notebooks "
        "unless told otherwise",
    )
    parser.add_argument(
        "--teach",
        action=argparse.BooleanOptionalAction,
        help="offer Teach, which trains LoRAs beside what is drawn (default: where only this "
        "machine is served)",
    )
    parser.add_argument(
        "--grace",
        type=float,
        default=GRACE_SECONDS,
        metavar="SECONDS",
        help="seconds that running requests may take after SIGTERM (default: %(default)g)",
    )
    return parser


def add_page_flags(parser: argparse.ArgumentParser) -> None:
    """Add the model's flags, and those of page and APIs wherever they are served."""
    add_model_flags(parser)
    parser.add_argument(
        "--decoder-for",
        choices=("previews", "pictures"),
        default="previews",
        help="what --decoder draws: the previews alone, or the pictures as well, "
        "whose start pictures it then encodes (default: %(default)s)",
    )
    parser.add_argument(
        "--allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a name that the server is reached by, such as a proxy's, and whose "
        "pages may use it; *.example.org for all below, * for any",
    )
    parser.add_argument(
        "--log",
        type=Path,
        metavar="FILE",
        help="write a line of JSON to this file for every finished request, without its prompts",
    )
    parser.add_argument("--log-prompts", action="store_true", help="include the prompts in --log")
    _add_api_flags(parser)
    kept = parser.add_mutually_exclusive_group()
    kept.add_argument(
        "--history",
        type=Path,
        default=data_folder() / "history",
        metavar="DIR",
        help="where finished pictures are kept, for the browser that made them "
        "(default: %(default)s)",
    )
    kept.add_argument(
        "--no-history", dest="history", action="store_const", const=None, help="keep no pictures"
    )


def _add_api_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("APIs").add_argument
    add(
        "--api",
        action="store_true",
        help="serve the APIs of A1111 (/sdapi/v1) and OpenAI (/v1) too, described at /docs, and "
        "tools for assistants (/gradio_api/mcp)",
    )
    add(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help="key that programs must give; without one only programs on this machine are served",
    )
    add("--api-key-file", type=Path, metavar="FILE", help="file of API keys, one a line")
    add("--api-public", action="store_true", help="serve programs of all machines without a key")
