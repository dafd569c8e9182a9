"""What each browser made, kept over restarts: rows in SQLite, pictures as PNG files beside it.

A file is whole on the disk before its row is, and a row is gone before its file: whenever the
server is killed, every row has its picture, and what is left over are files without a row, which
the next start removes.
"""

import dataclasses
import hashlib
import json
import logging
import os
import secrets
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from sd_tpu.request import Request
from sd_tpu.sentence import Sentence, SentenceError

log = logging.getLogger(__name__)

MAX_BYTES = 1 << 30
MAX_AGE_DAYS = 90.0
MIN_OWNER_LENGTH = 16  # characters; what is shorter can be guessed, or was never drawn
PRUNE_SECONDS = 60  # least time between two prunings by `add`
ORPHAN_SECONDS = 60  # a younger file may be on its way in, by another server of the same folder
BUSY_SECONDS = 20.0  # how long to wait for such a server
SCHEMA = 1
BROKEN = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}

_CREATE = """
CREATE TABLE pictures (
    id TEXT PRIMARY KEY,
    owner TEXT NOT NULL,
    number INTEGER NOT NULL,  -- of the owner's pictures, in the order they came
    made_at REAL NOT NULL,
    bytes INTEGER NOT NULL,
    favourite INTEGER NOT NULL DEFAULT 0,
    request TEXT NOT NULL,
    UNIQUE (owner, number)
) WITHOUT ROWID
"""
_INDEX = "CREATE INDEX pictures_by_age ON pictures (favourite, made_at, bytes)"
_ADD = """
INSERT INTO pictures (id, owner, number, made_at, bytes, request)
SELECT :id, :owner, coalesce(max(number), 0) + 1, :made_at, :bytes, :request
FROM pictures WHERE owner = :owner
RETURNING number
"""
_LIST = """
SELECT id, number, made_at, favourite, request FROM pictures
WHERE owner = :owner AND number < :before AND favourite >= :least
ORDER BY number DESC LIMIT :limit
"""
_PRUNE_BY_AGE = "DELETE FROM pictures WHERE NOT favourite AND made_at < ? RETURNING id"
_PRUNE_BY_SIZE = """
DELETE FROM pictures WHERE id IN (
    SELECT id FROM (SELECT id, sum(bytes) OVER (ORDER BY favourite DESC, made_at DESC, id) AS total
                    FROM pictures)
    WHERE total > ?
) RETURNING id
"""


class HistoryError(SentenceError):
    """The history cannot be kept or read; the message says why."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """A picture of the history: `number` counts its owner's pictures, `made_at` is in seconds since
    1970, `request` is the one that makes it again."""

    id: str
    number: int
    made_at: float
    favourite: bool
    request: Request


class History:
    """Pictures by owner; every method may be called from any thread.

    An owner is a long random text that only the owner's browser knows; of it only a
    hash is kept. What belongs to another owner is treated exactly as what does not exist.
    """

    def __init__(self, folder: str | Path, *, max_bytes: int = MAX_BYTES,
                 max_age_days: float = MAX_AGE_DAYS):
        """Opens the history in a folder, or begins one, and prunes it.

        A database that is broken is set aside, with its pictures, and a new one is begun.

        Args:
            folder: made if absent, for nobody else on this machine to read; on a local disk, as
                SQLite's log does not work over a network.
            max_bytes: of all pictures of all owners together.
            max_age_days: of pictures that are no favourites.

        Raises:
            HistoryError: nothing can be kept in the folder.
        """
        self.folder, self._max_bytes, self._max_age_days = Path(folder), max_bytes, max_age_days
        self._pictures = self.folder / "pictures"
        self._lock = threading.Lock()  # around the connection
        self._next_prune = 0.0
        with _told(Sentence("The history cannot be kept in {folder}", folder=self.folder)):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._database = self._open()
            _write(self._pictures, secrets.token_hex(16), b"").unlink()
            self._clean()
        self.prune()

    def add(self, owner: str, png: bytes, request: Request, made_at: float | None = None) -> Entry:
        """Keeps a finished picture; once this returns, it outlives the server.

        From time to time it prunes first.

        Args:
            owner: whose it is.
            png: the file.
            request: of this one picture alone (`Request.only`).
            made_at: seconds since 1970; now by default.

        Raises:
            HistoryError: the disk or the database refuses it.
        """
        if len(request.prompts) != 1:
            raise ValueError("The request of a picture has one prompt.")
        alone, hashed = request.only(0), _hashed(owner)
        if time.monotonic() >= self._next_prune:
            self.prune()
        made_at = time.time() if made_at is None else made_at
        name = secrets.token_hex(16)
        with _told(Sentence("The picture could not be added to the history")):
            file = _write(self._pictures, name, png)
            try:
                rows = self._run(_ADD, dict(id=name, owner=hashed, made_at=made_at, bytes=len(png),
                                            request=json.dumps(dataclasses.asdict(alone))))
            except BaseException:
                file.unlink()
                raise
        return Entry(name, rows[0][0], made_at, False, alone)

    def entries(self, owner: str, *, before: int | None = None, limit: int = 48,
                favourites_only: bool = False) -> list[Entry]:
        """The owner's newest pictures, newest first.

        Args:
            owner: whose they are.
            before: only those of a lesser number: the last entry's, to go on from it.
            limit: how many at most.
            favourites_only: leaves out all others.
        """
        rows = self._ask(_LIST, dict(owner=_hashed(owner), least=int(favourites_only), limit=limit,
                                     before=1 << 62 if before is None else before))
        return [Entry(name, number, made_at, bool(favourite), _request(text))
                for name, number, made_at, favourite, text in rows]

    def picture(self, owner: str, id: str) -> Path | None:
        """The PNG file of the owner's picture; None if there is no such picture of this owner."""
        rows = self._ask("SELECT id FROM pictures WHERE id = ? AND owner = ?", (id, _hashed(owner)))
        return self._file(rows[0][0]) if rows else None

    def set_favourite(self, owner: str, id: str, favourite: bool) -> bool:
        """Marks a picture, or takes the mark away; whether the owner has such a picture."""
        return bool(self._ask(
            "UPDATE pictures SET favourite = ? WHERE id = ? AND owner = ? RETURNING id",
            (int(favourite), id, _hashed(owner))))

    def delete(self, owner: str, id: str, *, spare_favourite: bool = False) -> bool:
        """Deletes a picture for good; whether the owner had such a picture."""
        return bool(self._delete("DELETE FROM pictures WHERE id = ? AND owner = ? "
                                 "AND favourite <= ? RETURNING id",
                                 (id, _hashed(owner), int(not spare_favourite))))

    def clear(self, owner: str) -> int:
        """Deletes all pictures of the owner, favourites too; returns how many there were."""
        return self._delete("DELETE FROM pictures WHERE owner = ? RETURNING id", (_hashed(owner),))

    def prune(self) -> int:
        """Deletes what is too old, and the oldest while all together are too large; how many.

        Favourites do not grow old, and go only when there is nothing else left to go.
        """
        self._next_prune = time.monotonic() + PRUNE_SECONDS
        oldest = time.time() - self._max_age_days * 24 * 3600
        return (self._delete(_PRUNE_BY_AGE, (oldest,))
                + self._delete(_PRUNE_BY_SIZE, (self._max_bytes,)))

    def close(self) -> None:
        """Closes the database; nothing can be asked of it any more."""
        with self._lock:
            self._database.close()

    # --- the database ---------------------------------------------------------------------------

    def _open(self) -> sqlite3.Connection:
        try:
            return _connect(self.folder / "history.db")
        except _BrokenError as error:
            aside = self._set_aside()
            log.warning("The history in %s is broken (%s). It was moved to %s, and a new one is "
                        "begun.", self.folder, error, aside)
            return _connect(self.folder / "history.db")

    def _set_aside(self) -> Path:
        aside = self.folder / f"broken-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        aside.mkdir()
        for old in [*self.folder.glob("history.db*"), self._pictures]:
            if old.exists():
                old.rename(aside / old.name)
        return aside

    def _ask(self, statement: str, values: tuple | dict) -> list[tuple]:
        with _told(Sentence("The history cannot be read or changed")):
            return self._run(statement, values)

    def _run(self, statement: str, values: tuple | dict) -> list[tuple]:
        """All rows of one statement, which is done as a whole or not at all."""
        with self._lock:
            return self._database.execute(statement, values).fetchall()

    def _delete(self, statement: str, values: tuple) -> int:
        names = [name for (name,) in self._ask(statement, values)]
        self._remove(self._file(name) for name in names)
        return len(names)

    # --- the files ------------------------------------------------------------------------------

    def _file(self, name: str) -> Path:
        return self._pictures / f"{name}.png"

    def _clean(self) -> None:
        """Removes files without a row, and rows without a file: somebody deleted it by hand."""
        known = {self._file(name) for (name,) in self._run("SELECT id FROM pictures", ())}
        there = set(self._pictures.iterdir())
        self._remove(file for file in there - known if _age(file) > ORPHAN_SECONDS)
        for file in known - there:
            self._run("DELETE FROM pictures WHERE id = ?", (file.stem,))

    def _remove(self, files: Iterable[Path]) -> None:
        for file in files:
            try:
                file.unlink(missing_ok=True)
            except OSError as error:  # it has no row any more, and the next start tries again
                log.warning("%s cannot be removed (%s).", file, error.strerror)


class _BrokenError(Exception):
    """A database that cannot be used and never will be."""


def _connect(file: Path) -> sqlite3.Connection:
    """The database in the file, made if absent; raises _BrokenError if it is none of ours."""
    database = sqlite3.connect(file, timeout=BUSY_SECONDS, isolation_level=None,
                               check_same_thread=False)
    try:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = FULL")  # what was committed outlives a power cut
        database.execute("BEGIN IMMEDIATE")  # another server may be about to create it as well
        (version,) = database.execute("PRAGMA user_version").fetchone()
        if version == 0 and not database.execute("SELECT 1 FROM sqlite_schema").fetchall():
            for statement in (_CREATE, _INDEX, f"PRAGMA user_version = {SCHEMA}"):
                database.execute(statement)
        elif version != SCHEMA:
            raise _BrokenError(f"its version is {version}, not {SCHEMA}")
        database.execute("COMMIT")
        (state,), *_ = database.execute("PRAGMA quick_check").fetchall()
        if state != "ok":
            raise _BrokenError(state.replace("\n", ", ")[:200])
    except sqlite3.DatabaseError as error:
        database.close()
        if getattr(error, "sqlite_errorcode", 0) & 0xFF in BROKEN:
            raise _BrokenError(str(error)) from error
        raise
    except BaseException:
        database.close()
        raise
    return database


def _write(folder: Path, name: str, data: bytes) -> Path:
    """The file `name`.png in the folder, there as a whole or not at all, even after a power cut."""
    folder.mkdir(exist_ok=True)
    draft, file = folder / f"{name}.tmp", folder / f"{name}.png"
    try:
        with draft.open("wb") as opened:
            opened.write(data)
            opened.flush()
            os.fsync(opened.fileno())
        draft.replace(file)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    _sync(folder)
    return file


def _age(file: Path) -> float:
    """Seconds since the file was written; none if another server has just removed it."""
    try:
        return time.time() - file.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _sync(folder: Path) -> None:
    """Sees to it that the names in the folder are on the disk."""
    if os.name == "posix":  # elsewhere a folder cannot be opened
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextmanager
def _told(what: Sentence) -> Iterator[None]:
    """Turns what disks and databases raise into one sentence."""
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        raise HistoryError("{what} ({reason}).", what=what,
                           reason=getattr(error, "strerror", None) or error) from error


def _hashed(owner: str) -> str:
    """What is kept of an owner. Its text is random and long, so that no salt is needed."""
    if not isinstance(owner, str) or len(owner) < MIN_OWNER_LENGTH:
        raise HistoryError("An owner is a text of at least {least} random characters.",
                           least=MIN_OWNER_LENGTH)
    return hashlib.sha256(owner.encode("utf-8", "surrogatepass")).hexdigest()


def _request(text: str) -> Request:
    values = json.loads(text)
    return Request(**{**values, "prompts": tuple(values["prompts"]), "own": ()})
