"""The history: pictures of each browser, kept over restarts as SQLite rows and PNG files.

A file is whole on the disk before its row is, and gone before its row: whenever the server is
killed, a file without a row is a finished picture, which the next start reads back. So it does with
all of them where the database is lost: a file's name tells whose it is, and the PNG how it was
made.
"""

import dataclasses
import hashlib
import json
import logging
import math
import os
import re
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sd_tpu.pictures.images import read_png
from sd_tpu.reading import composed
from sd_tpu.request import Request
from sd_tpu.sentence import Sentence, SentenceError
from sd_tpu.settings import MAX_PROMPTS, SETTINGS, Picture, RequestError

log = logging.getLogger(__name__)

MAX_BYTES = 1 << 30
MAX_AGE_DAYS = 90.0
MIN_OWNER_LENGTH = 16  # characters; what is shorter can be guessed, or was never drawn
PRUNE_SECONDS = 60  # least time between two prunings by `add`
AGE_SECONDS = 24 * 3600  # between two prunings by age
SHARE = 10  # of pictures, at most one in so many goes by age at once
UNDO_SECONDS = 60.0  # in which a deletion can be taken back
RUN_SECONDS = 60  # pictures of one such span, of which no more is known, are taken for a run
DRAFT_SECONDS = 60  # a younger one may be on its way in, by another server of the same folder
BUSY_SECONDS = 20.0  # how long to wait for such a server
PENDING_SECONDS = 1.0  # how long whoever reads waits for what is being added
MAX_BOARDS = 100  # of an owner
MAX_BOARD_NAME = 60  # characters
SCHEMA = 4  # 3 knew no boards, 2 no runs; in 1 a file was named by its picture alone
BROKEN = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
DRAFT = ".tmp"
_NOT_ADDED = Sentence("The picture could not be added to the history")
_NAME = re.compile("(?:([0-9a-f]{64})-)?([0-9a-f]{32})[.]png")

_CREATE = """
CREATE TABLE pictures (
    id TEXT PRIMARY KEY,
    owner TEXT NOT NULL,
    number INTEGER NOT NULL,  -- of the owner's pictures, in the order they came
    made_at REAL NOT NULL,
    bytes INTEGER NOT NULL,
    favourite INTEGER NOT NULL DEFAULT 0,
    request TEXT NOT NULL,
    run TEXT NOT NULL,  -- in which it was made
    place INTEGER NOT NULL,  -- of its card in the gallery
    deleted_at REAL,  -- since when it waits to be deleted for good
    UNIQUE (owner, number)
) WITHOUT ROWID
"""
# The boards of an owner, and which pictures are on them.
_BOARDS = (
    """
CREATE TABLE boards (
    owner TEXT NOT NULL,
    name TEXT NOT NULL,
    PRIMARY KEY (owner, name)
) WITHOUT ROWID
""",
    """
CREATE TABLE on_boards (
    owner TEXT NOT NULL,
    board TEXT NOT NULL,
    picture TEXT NOT NULL REFERENCES pictures ON DELETE CASCADE,
    PRIMARY KEY (owner, board, picture),
    FOREIGN KEY (owner, board) REFERENCES boards ON DELETE CASCADE ON UPDATE CASCADE
) WITHOUT ROWID
""",
    "CREATE INDEX boards_by_picture ON on_boards (picture)",
)
_TO_3 = (
    "ALTER TABLE pictures ADD COLUMN run TEXT NOT NULL DEFAULT ''",
    "ALTER TABLE pictures ADD COLUMN place INTEGER NOT NULL DEFAULT 0",
    "ALTER TABLE pictures ADD COLUMN deleted_at REAL",
    f"UPDATE pictures SET run = CAST(made_at / {RUN_SECONDS} AS INTEGER)",
    """UPDATE pictures SET place = (
        SELECT count(*) FROM pictures AS before WHERE before.owner = pictures.owner
        AND before.run = pictures.run AND before.number < pictures.number) % 8""",
)
_INDEX = "CREATE INDEX pictures_by_age ON pictures (favourite, made_at, bytes)"
_INSERT = """
INSERT INTO pictures (id, owner, number, made_at, bytes, favourite, request, run, place)
SELECT :id, :owner, coalesce(max(number), 0) + 1, :made_at, :bytes, :favourite, :request, :run,
    :place
FROM pictures WHERE owner = :owner
ON CONFLICT (id) DO """
_ADD = (
    _INSERT
    + """UPDATE  -- another server has read it back
SET made_at = excluded.made_at, run = excluded.run, place = excluded.place
RETURNING number
"""
)
_READ_BACK = _INSERT + "NOTHING  -- another server has just added it, and knows more"
_WANTED = "(favourite OR id IN (SELECT picture FROM on_boards))"  # somebody wants to keep it
_LIST = """
WITH found AS (
    SELECT *, max(number) OVER (PARTITION BY run) AS latest FROM pictures
    WHERE owner = :owner AND deleted_at IS NULL AND favourite >= :least
        AND (:run IS NULL OR run = :run) AND (:words = '' OR says(request, :words))
        AND (:board = '' OR id IN (
            SELECT picture FROM on_boards WHERE owner = :owner AND board = :board))
), ranked AS (SELECT *, dense_rank() OVER (ORDER BY latest DESC) AS rank FROM found)
SELECT id, number, made_at, favourite, request, run, place FROM ranked
WHERE rank <= :runs ORDER BY rank, place, number
"""
_CHOSEN = (
    "FROM on_boards WHERE owner = :owner AND board = :name "
    "AND picture IN (SELECT value FROM json_each(:ids))"
)
# A picture is no older than those that its owner made before it, whatever the clock said.
_PRUNE_BY_AGE = f"""
DELETE FROM pictures WHERE id IN (
    SELECT id FROM (SELECT id, favourite,
                    max(made_at) OVER (PARTITION BY owner ORDER BY number) AS latest FROM pictures)
    WHERE NOT {_WANTED} AND latest <= ? ORDER BY latest LIMIT ?
) RETURNING id, owner
"""
_PRUNE_BY_SIZE = f"""
DELETE FROM pictures WHERE id IN (
    SELECT id FROM (SELECT id, sum(bytes) OVER (ORDER BY {_WANTED} DESC, made_at DESC, id) AS total
                    FROM pictures)
    WHERE total > ?
) RETURNING id, owner
"""


class HistoryError(SentenceError):
    """An error of the history's disk or database; the message says what failed and why."""


@dataclasses.dataclass(frozen=True)
class HistoryEntry:
    """A picture of the history.

    Attributes:
        id: its name.
        number: counts its owner's pictures.
        made_at: seconds since 1970.
        favourite: whether it is marked.
        picture: the settings that make it again.
        run: in which it was made.
        index: of its card in the gallery.
        file: its PNG.
    """

    id: str
    number: int
    made_at: float
    favourite: bool
    picture: Picture
    run: str
    index: int
    file: Path


class History:
    """Pictures by owner; every method may be called from any thread.

    An owner is a long random text that only the owner's browser knows; of it only a
    hash is kept. What belongs to another owner is treated exactly as what does not exist.
    """

    def __init__(
        self, folder: str | Path, *, max_bytes: int = MAX_BYTES, max_age_days: float = MAX_AGE_DAYS
    ):
        """Open the history in a folder, or begin one, and prune it.

        A database that is broken is set aside. Pictures that the database does not know are read
        back: they are their owner's again, as old as their files, and favourites only if they are
        so old that they must have been. What cannot be read back is set aside.

        Args:
            folder: made if absent, for nobody else on this machine to read; on a local disk, as
                SQLite's log does not work over a network.
            max_bytes: of all pictures of all owners together.
            max_age_days: of pictures that are no favourites and on no board, before the newest
                ones: a clock that is wrong makes nothing old.

        Raises:
            HistoryError: nothing can be kept in the folder.
        """
        self.folder, self._max_bytes, self._max_age_days = Path(folder), max_bytes, max_age_days
        self._pictures = self.folder / "pictures"
        self._aged = self.folder / "aged"  # written when pictures went by age
        self._lock = threading.Lock()  # around the connection that writes
        self._reading = threading.Lock()  # around the other, which no other server can block
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="history")
        # What is being added, by name: of which owner.
        self._pending: dict[str, tuple[str, Future]] = {}
        self._starting = threading.Lock()  # around changes of these
        self._next_prune = 0.0
        self._undoable = self._make_timer()  # while a deletion can be taken back
        with _as_history_error(
            Sentence("The history cannot be kept in {folder}", folder=self.folder)
        ):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._database = self._open()
            self._reader = _open(self.folder / "history.db")
            self._pictures.mkdir(exist_ok=True)
            _write(self._pictures / f"probe-{secrets.token_hex(16)}.png", b"").unlink()
            self._clean()
        self.prune()

    def add_later(
        self,
        owner: str,
        file: Path,
        picture: Picture,
        done: Callable[[HistoryError | None], None],
        *,
        name: str,
        run: str,
        index: int,
    ) -> None:
        """Add a picture in the background: a disk may be slow, and a database another server's.

        Args:
            owner: as `add` takes it, like `picture`, `name`, `run` and `index`.
            file: its PNG.
            done: called once it is kept, or with the reason why it is not.
        """

        def write() -> None:
            failure = None
            try:
                with _as_history_error(_NOT_ADDED):
                    png = file.read_bytes()
                self.add(owner, png, picture, run=run, index=index, name=name)
            except HistoryError as error:
                failure = error
            with self._starting:
                del self._pending[name]
            done(failure)

        with self._starting:  # or it might be over before it is pending
            self._pending[name] = _hashed(owner), self._writer.submit(write)

    def add(
        self,
        owner: str,
        png: bytes,
        picture: Picture,
        made_at: float | None = None,
        *,
        run: str | None = None,
        index: int = 0,
        name: str | None = None,
    ) -> HistoryEntry:
        """Add a finished picture; once this returns, it outlives the server.

        From time to time it prunes first.

        Args:
            owner: whose it is.
            png: the file.
            picture: what makes it again.
            made_at: seconds since 1970; now by default.
            run: in which it was made; one of its own by default.
            index: of its card in the gallery.
            name: as `new_name` draws it; drawn by default.

        Raises:
            HistoryError: the disk or the database refuses it.
        """
        hashed = _hashed(owner)
        if time.monotonic() >= self._next_prune:
            self.prune()
        made_at = time.time() if made_at is None else made_at
        name = name or new_name()
        run = name if run is None else run
        with _as_history_error(_NOT_ADDED):
            self._pictures.mkdir(exist_ok=True)
            file = _write(self._file(name, hashed), png)
            try:
                ((number,),) = self._insert(
                    _ADD, name, hashed, made_at, len(png), picture, run, index
                )
            except BaseException:
                file.unlink()
                raise
        return HistoryEntry(name, number, made_at, False, picture, run, index, file)

    def entries(
        self,
        owner: str,
        *,
        runs: int = 48,
        favourites_only: bool = False,
        words: str = "",
        run: str | None = None,
        board: str = "",
    ) -> list[HistoryEntry]:
        """Return the owner's pictures by run, the newest run first, in the order of the gallery.

        Args:
            owner: whose they are.
            runs: how many at most.
            favourites_only: leaves out all others.
            words: that are all found in the prompt, whatever their case.
            run: leaves out all others.
            board: leaves out what is not on it.
        """
        least, words, hashed = int(favourites_only), words.casefold(), _hashed(owner)
        rows = self._ask_waiting(
            _LIST, owner, least=least, runs=runs, words=words, run=run, board=board
        )
        return [
            HistoryEntry(
                name,
                number,
                made_at,
                bool(favourite),
                _picture(text),
                run,
                index,
                self._file(name, hashed),
            )
            for name, number, made_at, favourite, text, run, index in rows
        ]

    def picture(self, owner: str, id: str) -> Path | None:
        """Return the PNG file of the owner's picture; None if this owner has no such picture."""
        rows = self._ask_waiting(
            "SELECT id, owner FROM pictures "
            "WHERE id = :id AND owner = :owner AND deleted_at IS NULL",
            owner,
            id=id,
        )
        return self._file(*rows[0]) if rows else None

    def favourites(self, owner: str, ids: Collection[str]) -> dict[str, bool]:
        """Whether each of these pictures is a favourite, of those that the owner has or is about to
        have."""
        pending = dict.fromkeys(self._pending.keys() & {*ids}, False)
        rows = self._ask(
            "SELECT id, favourite FROM pictures WHERE owner = :owner AND deleted_at IS NULL"
            " AND id IN (SELECT value FROM json_each(:ids))",
            owner,
            ids=json.dumps([*ids]),
        )
        return pending | {id: bool(favourite) for id, favourite in rows}

    def set_favourite(self, owner: str, id: str, favourite: bool) -> bool:
        """Mark a picture, or take the mark away; return whether the owner has such a picture."""
        rows = self._ask_waiting(
            "UPDATE pictures SET favourite = :to WHERE id = :id AND owner = :owner "
            "AND deleted_at IS NULL RETURNING id",
            owner,
            to=int(favourite),
            id=id,
        )
        return bool(rows)

    # --- boards ---------------------------------------------------------------------------------

    def boards(self, owner: str) -> dict[str, int]:
        """Return how many pictures each board of the owner has, by its name."""
        rows = self._ask(
            "SELECT name, (SELECT count(*) FROM on_boards JOIN pictures ON id = picture "
            "WHERE on_boards.owner = boards.owner AND board = name AND deleted_at IS NULL) "
            "FROM boards WHERE owner = :owner",
            owner,
        )
        return dict(sorted(rows, key=lambda row: (row[0].casefold(), row[0])))

    def boards_with(self, owner: str, id: str) -> set[str]:
        """Return the names of the boards that the owner's picture is on."""
        rows = self._ask(
            "SELECT board FROM on_boards WHERE owner = :owner AND picture = :id", owner, id=id
        )
        return {name for (name,) in rows}

    def make_board(self, owner: str, name: str, ids: Collection[str] = ()) -> str:
        """Make a board with pictures, as `put_on_board` puts them there; return its name.

        Raises:
            RequestError: the owner has such a board or too many, or it is no name for one.
        """
        name, there = _board_name(name), self.boards(owner)
        if name in there:
            raise RequestError("There is a board “{name}” already.", name=name)
        if len(there) >= MAX_BOARDS:
            raise RequestError("There are {limit} boards, which is the limit.", limit=MAX_BOARDS)
        self._ask("INSERT OR IGNORE INTO boards VALUES (:owner, :name)", owner, name=name)
        self.put_on_board(owner, name, ids)
        return name

    def rename_board(self, owner: str, name: str, to: str) -> str:
        """Call a board otherwise; return its new name.

        Raises:
            RequestError: there is no such board, another has the name, or it is no name for one.
        """
        to, there = _board_name(to), self.boards(owner)
        if to in there and to != name:
            raise RequestError("There is a board “{name}” already.", name=to)
        self._know(name, there)
        self._ask(
            "UPDATE boards SET name = :to WHERE owner = :owner AND name = :name",
            owner,
            to=to,
            name=name,
        )
        return to

    def delete_board(self, owner: str, name: str) -> list[str]:
        """Delete a board, whose pictures stay; return their names.

        Raises:
            RequestError: there is no such board.
        """
        self._know(name, self.boards(owner))
        rows = self._ask(
            "SELECT picture FROM on_boards WHERE owner = :owner AND board = :name", owner, name=name
        )
        self._ask("DELETE FROM boards WHERE owner = :owner AND name = :name", owner, name=name)
        return [id for (id,) in rows]

    def put_on_board(self, owner: str, name: str, ids: Collection[str]) -> int:
        """Put those of the pictures that the owner has on a board, and return how many there are.

        They may be there already.

        Raises:
            RequestError: there is no such board.
        """
        self._know(name, self.boards(owner))
        chosen = dict(name=name, ids=json.dumps([*ids]))
        self._ask_waiting(
            "INSERT OR IGNORE INTO on_boards SELECT owner, :name, id FROM pictures "
            "WHERE owner = :owner AND deleted_at IS NULL "
            "AND id IN (SELECT value FROM json_each(:ids))",
            owner,
            **chosen,
        )
        ((count,),) = self._ask(f"SELECT count(*) {_CHOSEN}", owner, **chosen)
        return count

    def take_off_board(self, owner: str, name: str, ids: Collection[str]) -> None:
        """Take pictures off a board, where they may not be."""
        self._ask(f"DELETE {_CHOSEN}", owner, name=name, ids=json.dumps([*ids]))

    @staticmethod
    def _know(name: str, there: Collection[str]) -> None:
        if name not in there:
            raise RequestError("There is no board “{name}” any more.", name=name)

    # --- deletions ------------------------------------------------------------------------------

    def delete(self, owner: str, id: str | None = None) -> list[Path]:
        """Delete a picture of the owner, or all but the favourites and what is on boards, and
        return their files.

        They are deleted for good as soon as UNDO_SECONDS have passed without `restore`, or when the
        history is closed. Returns nothing if there is no such picture of this owner.
        """
        rows = self._ask_waiting(
            "UPDATE pictures SET deleted_at = :now WHERE owner = :owner "
            f"AND deleted_at IS NULL AND (id = :id OR :id IS NULL AND NOT {_WANTED}) "
            "RETURNING id, owner",
            owner,
            now=time.time(),
            id=id,
        )
        if rows:
            self._undoable = self._make_timer()  # earlier ones go on: each is for its own deletion
            self._undoable.start()
        return [self._file(*row) for row in rows]

    def unshared(self, owner: str, gone: Collection[Path]) -> list[Path]:
        """Return those files of deleted pictures that no other picture of the owner equals.

        A picture may have been drawn twice, with the same bytes.
        """
        rows = self._ask(
            "SELECT id, owner, bytes FROM pictures WHERE owner = :owner AND deleted_at IS NULL",
            owner,
        )
        there: dict[int, list[Path]] = {}
        for name, hashed, size in rows:
            there.setdefault(size, []).append(self._file(name, hashed))
        return [file for file in gone if not _among(file, there)]

    def restore(self, owner: str) -> int:
        """Take the owner's last deletion back, if it is not yet for good.

        Returns how many pictures are there again.
        """
        rows = self._ask(
            "UPDATE pictures SET deleted_at = NULL WHERE owner = :owner AND deleted_at = "
            "(SELECT max(deleted_at) FROM pictures WHERE owner = :owner) RETURNING id",
            owner,
        )
        return len(rows)

    def drop(self, owner: str, id: str) -> None:
        """Delete a picture for good at once, unless it is a favourite or on a board by now."""
        self._delete(
            f"DELETE FROM pictures WHERE id = ? AND owner = ? AND NOT {_WANTED} "
            "RETURNING id, owner",
            (id, _hashed(owner)),
        )

    def prune(self) -> int:
        """Delete pictures that are too old, and the oldest while all are too large.

        Returns how many were deleted.

        Favourites and what is on boards do not grow old, and go only when there is nothing else
        left to go. By age at most one in SHARE goes within AGE_SECONDS.
        """
        self._next_prune = time.monotonic() + PRUNE_SECONDS
        old = self._prune_by_age() if self._may_age() else 0
        return (
            self._delete_for_good(UNDO_SECONDS)
            + old
            + self._delete(_PRUNE_BY_SIZE, (self._max_bytes,))
        )

    def _prune_by_age(self) -> int:
        times = [made_at for (made_at,) in self._rows("SELECT made_at FROM pictures")]
        count = self._delete(_PRUNE_BY_AGE, (self._oldest(times), max(1, len(times) // SHARE)))
        if count:
            self._note_aging()
            log.warning(
                "%d of %d pictures of the history in %s were removed: they were made %g "
                "days or more before its newest, are no favourites and on no board.",
                count,
                len(times),
                self.folder,
                self._max_age_days,
            )
        return count

    def _may_age(self) -> bool:
        """Whether nothing went by age within AGE_SECONDS, over starts; what that was by a clock
        that was ahead counts from now on."""
        try:
            since = time.time() - self._aged.stat().st_mtime
        except FileNotFoundError:
            return True
        if since < 0:
            self._note_aging()
        return since >= AGE_SECONDS

    def _note_aging(self) -> None:
        self._aged.touch()
        os.utime(self._aged, (time.time(), time.time()))

    def close(self) -> None:
        """Close the database, once pending pictures are there or BUSY_SECONDS have passed."""
        futures.wait(self._adding(), BUSY_SECONDS)
        if lost := len(self._adding()):
            log.error(
                "%d pictures are missing from the history in %s, whose database another "
                "program holds.",
                lost,
                self.folder,
            )
        self._writer.shutdown(cancel_futures=True)
        self._undoable.cancel()
        with suppress(HistoryError):
            self._delete_for_good(0.0)
        with self._lock, self._reading:
            self._database.close()
            self._reader.close()

    def _make_timer(self) -> threading.Timer:
        timer = threading.Timer(UNDO_SECONDS + 0.1, self._end_undo)
        timer.daemon = True
        return timer

    def _end_undo(self) -> None:
        with suppress(HistoryError):  # then it is for good when the history prunes next
            self._delete_for_good(UNDO_SECONDS)

    def _delete_for_good(self, seconds: float) -> int:
        """Finish deletions older than `seconds`, or of a clock that was ahead; return how many."""
        now = time.time()
        return self._delete(
            "DELETE FROM pictures WHERE deleted_at <= ? OR deleted_at > ? RETURNING id, owner",
            (now - seconds, now + UNDO_SECONDS),
        )

    # --- the database ---------------------------------------------------------------------------

    def _open(self) -> sqlite3.Connection:
        try:
            return _connect(self.folder / "history.db")
        except _BrokenError as error:
            aside = self._set_aside()
            log.warning(
                "The database of the history in %s is broken (%s). It was moved to %s, and "
                "a new one is made from the pictures.",
                self.folder,
                error,
                aside,
            )
            return _connect(self.folder / "history.db")

    def _set_aside(self) -> Path:
        aside = self.folder / f"broken-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        aside.mkdir()
        for old in self.folder.glob("history.db*"):
            old.rename(aside / old.name)
        return aside

    def _adding(self, owner: str | None = None) -> list[Future]:
        """Return the pending additions, of an owner by its hash, or of all."""
        with self._starting:
            return [future for whose, future in self._pending.values() if owner in (None, whose)]

    def _ask_waiting(self, statement: str, owner: str, **values: Any) -> list[tuple]:
        """Return rows as `_ask`, once pictures that the owner is adding are there, or
        PENDING_SECONDS have passed."""
        futures.wait(self._adding(_hashed(owner)), PENDING_SECONDS)
        return self._ask(statement, owner, **values)

    def _ask(self, statement: str, owner: str, **values: Any) -> list[tuple]:
        """Return the rows of a statement with named values, among them the owner's hash."""
        return self._rows(statement, owner=_hashed(owner), **values)

    def _rows(self, statement: str, **values: Any) -> list[tuple]:
        with _as_history_error(Sentence("The history cannot be read or changed")):
            if not statement.lstrip().startswith(("SELECT", "WITH")):
                return self._run(statement, values)
            with self._reading:
                return self._reader.execute(statement, values).fetchall()

    def _run(self, statement: str, values: tuple | dict) -> list[tuple]:
        """Return all rows of one statement, which is done as a whole or not at all."""
        with self._lock:
            return self._database.execute(statement, values).fetchall()

    def _insert(
        self,
        statement: str,
        name: str,
        hashed: str,
        made_at: float,
        size: int,
        picture: Picture,
        run: str,
        index: int = 0,
        *,
        favourite: bool = False,
    ) -> list[tuple]:
        """Add the row of a picture whose file is there; return the statement's rows."""
        values = dict(
            id=name,
            owner=hashed,
            made_at=made_at,
            bytes=size,
            favourite=int(favourite),
            request=json.dumps(vars(picture)),
            run=run,
            place=index,
        )
        return self._run(statement, values)

    def _delete(self, statement: str, values: tuple) -> int:
        """Delete by a statement that returns the names and owners of its rows.

        The files go before that is done for good, or the next start would read them back.
        """
        with (
            _as_history_error(Sentence("The history cannot be read or changed")),
            self._lock,
            self._database,
        ):
            self._database.execute("BEGIN IMMEDIATE")
            gone = self._database.execute(statement, values).fetchall()
            for name, hashed in gone:
                _remove(self._file(name, hashed))
            if gone:
                _sync(self._pictures)
        return len(gone)

    def _oldest(self, times: Sequence[float]) -> float:
        """When the last picture was made that is kept for being a favourite alone, of pictures made
        at these times. What few of them say, or what lies ahead, may come of a wrong clock."""
        past = sorted(each for each in times if each <= time.time())
        newest = past[-1 - len(past) // SHARE] if past else -math.inf
        return newest - self._max_age_days * 24 * 3600

    # --- the files ------------------------------------------------------------------------------

    def _file(self, name: str, hashed: str) -> Path:
        return self._pictures / f"{hashed}-{name}.png"

    def _clean(self) -> None:
        """Read back files without a row, and remove rows without a file, and drafts.

        Somebody has deleted such a row's file by hand; a draft is no whole file.
        """
        rows = self._run("SELECT id, owner FROM pictures", ())
        for name, hashed in rows:
            with suppress(FileNotFoundError):  # named as in schema 1
                (self._pictures / f"{name}.png").rename(self._file(name, hashed))
        known, there = {self._file(*row): row for row in rows}, set(self._pictures.iterdir())
        for name, _ in [known[file] for file in known.keys() - there]:
            self._run("DELETE FROM pictures WHERE id = ?", (name,))
        unknown = there - known.keys()
        for file in unknown:
            if file.suffix == DRAFT and time.time() - _written(file) > DRAFT_SECONDS:
                _remove(file)
        self._read_back(sorted(filter(_named, unknown), key=_written))

    def _read_back(self, files: list[Path]) -> None:
        """Add rows of files that have none, or set the files aside, so that nothing is lost."""
        oldest = self._oldest([*map(_written, files)])
        others = [file for file in files if not self._owned(file, oldest)]
        if len(files) > len(others):
            log.warning(
                "The database of the history in %s did not know %d pictures, which were "
                "read back from their files.",
                self.folder,
                len(files) - len(others),
            )
        aside = self.folder / "set-aside"
        for file in others:
            aside.mkdir(exist_ok=True)
            with suppress(FileNotFoundError):  # another server has just done so
                file.rename(aside / file.name)
        if others:
            log.warning(
                "Of %d pictures in the history in %s it cannot be told whose they are or "
                "how they were made. They were moved to %s.",
                len(others),
                self.folder,
                aside,
            )

    def _owned(self, file: Path, oldest: float) -> bool:
        """Add the row of a file as far as it tells; return whether it does.

        A file that is older than `oldest` must have been a favourite.
        """
        hashed, name = _named(file).groups()  # ty: ignore[missing-union-attribute]
        made_at = _written(file)
        try:
            png = file.read_bytes()
            request = read_png(png)
        except (OSError, RequestError):
            return False
        if not hashed or request.indices() != [0]:
            return False
        self._insert(
            _READ_BACK,
            name,
            hashed,
            made_at,
            len(png),
            request.picture(0),
            str(int(made_at / RUN_SECONDS)),
            favourite=made_at <= oldest,
        )
        return True


class _BrokenError(Exception):
    """A database that cannot be used and never will be."""


def new_name() -> str:
    """Draw a name for a picture that nobody can guess."""
    return secrets.token_hex(16)


def request_of(entries: Sequence[HistoryEntry]) -> Request:
    """Return the request that makes a run again, with the last picture of each card."""
    latest = {entry.index: entry.picture for entry in entries if 0 <= entry.index < MAX_PROMPTS}
    return Request(tuple(map(latest.get, range(max(latest) + 1))))


def _connect(file: Path) -> sqlite3.Connection:
    """Open the database in the file, made if absent; raises _BrokenError for other files."""
    database = _open(file)
    try:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = FULL")  # what was committed outlives a power cut
        database.execute("BEGIN IMMEDIATE")  # another server may be about to create it as well
        (version,) = database.execute("PRAGMA user_version").fetchone()
        if version == 0 and not database.execute("SELECT 1 FROM sqlite_schema").fetchall():
            for statement in (_CREATE, _INDEX, *_BOARDS, f"PRAGMA user_version = {SCHEMA}"):
                database.execute(statement)
        elif version in (1, 2, 3):
            earlier = _TO_3 if version < 3 else ()
            for statement in (*earlier, *_BOARDS, f"PRAGMA user_version = {SCHEMA}"):
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


def _open(file: Path) -> sqlite3.Connection:
    database = sqlite3.connect(
        file, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
    )
    database.execute("PRAGMA foreign_keys = ON")  # what is on a board goes with either
    database.create_function("says", 2, _says, deterministic=True)
    return database


def _write(file: Path, data: bytes) -> Path:
    """Write the file as a whole or not at all, even through a power cut; return its path."""
    draft = file.with_suffix(DRAFT)
    try:
        with draft.open("wb") as opened:
            opened.write(data)
            opened.flush()
            os.fsync(opened.fileno())
        draft.replace(file)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    _sync(file.parent)
    return file


def _among(file: Path, there: Mapping[int, Sequence[Path]]) -> bool:
    """Whether one of these files by size is the same, byte for byte."""
    with suppress(OSError):  # one has just gone
        data = file.read_bytes()
        return any(other.read_bytes() == data for other in there.get(len(data), ()))
    return False


def _remove(file: Path) -> None:
    try:
        file.unlink(missing_ok=True)
    except OSError as error:
        log.warning("%s cannot be removed (%s).", file, error.strerror)


def _named(file: Path) -> re.Match | None:
    """Match the owner and the name in a picture's file name; None for other files."""
    return _NAME.fullmatch(file.name)


def _written(file: Path) -> float:
    """Return when the file was written, in seconds since 1970; now if it is gone by now."""
    try:
        return file.stat().st_mtime
    except FileNotFoundError:
        return time.time()


def _sync(folder: Path) -> None:
    """Flush the names in the folder to the disk."""
    if os.name == "posix":  # elsewhere a folder cannot be opened
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextmanager
def _as_history_error(what: Sentence) -> Iterator[None]:
    """Raise the errors of disks and databases as one sentence."""
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        raise HistoryError(
            "{what} ({reason}).", what=what, reason=getattr(error, "strerror", None) or error
        ) from error


def _hashed(owner: str) -> str:
    """Hash an owner for the database. The text is random and long, so that no salt is needed."""
    if not isinstance(owner, str) or len(owner) < MIN_OWNER_LENGTH:
        raise HistoryError(
            "An owner is a text of at least {least} random characters.", least=MIN_OWNER_LENGTH
        )
    return hashlib.sha256(owner.encode("utf-8", "surrogatepass")).hexdigest()


def _board_name(text: str) -> str:
    """Return a board's name, with single spaces; raises RequestError if it is none."""
    name = composed(" ".join(text.split()))
    if not name:
        raise RequestError("A board needs a name.")
    if len(name) > MAX_BOARD_NAME or not name.isprintable():
        raise RequestError(
            "A board's name has at most {limit} characters, and none that cannot be seen.",
            limit=MAX_BOARD_NAME,
        )
    return name


def _says(text: str, words: str) -> bool:
    """Whether the prompt of a row holds words, which are in lower case."""
    prompt = _picture(text).prompt.casefold()
    return all(word in prompt for word in words.split())


def _picture(text: str) -> Picture:
    """Return the picture of a row; older rows hold a request for one, and null as no spacing."""
    values = json.loads(text)
    (prompt,) = values.get("prompts") or [values.get("prompt")]
    known: dict[str, Any] = {name: values[name] for name in SETTINGS.keys() & values.keys()}
    known |= {"prompt": prompt, "spacing": values.get("spacing") or ""}
    return Picture(**known)
