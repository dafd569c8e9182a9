"""The server's log, whatever visitors have sent."""

import io
import logging
import traceback
from types import SimpleNamespace

import pytest

from sd_tpu.logs import LONGEST, _Quoting, log_printed_errors, quoted

FORGED = "x\nERROR root: all pictures are gone\r\n\x1b[2J" + "y" * 20_000_000


@pytest.fixture
def written():
    """What a logger writes."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_Quoting())
    log = logging.getLogger("sd_tpu.test_logs")
    log.addHandler(handler)
    yield log, stream
    log.removeHandler(handler)


def test_a_message_is_one_line_and_has_an_end(written):
    log, stream = written
    log.warning("a visitor asked for %s", FORGED)
    (line,) = stream.getvalue().splitlines()
    assert line.startswith("WARNING sd_tpu.test_logs: a visitor asked for x\\nERROR root")
    assert "\\x1b[2J" in line and len(line) < 2 * LONGEST and "characters)" in line


def test_an_exception_has_its_frames_and_none_of_its_messages_lines(written):
    log, stream = written
    try:
        try:
            {}[FORGED]
        except KeyError as error:
            raise ValueError(FORGED) from error
    except ValueError:
        log.exception("an event failed")
    lines = stream.getvalue().splitlines()
    assert len(stream.getvalue()) < 5000
    assert not any(line.startswith("ERROR root") for line in lines)
    assert [line.split(":")[0].strip() for line in lines if "Error: " in line] == [
        "KeyError",
        "ValueError",
    ]
    assert any("test_logs.py" in line for line in lines)


def test_of_a_long_chain_of_exceptions_the_last_ones_are_written(written):
    log, stream = written
    error = None
    for number in range(3000):
        following = ValueError(f"number {number}")
        following.__cause__, error = error, following
    log.error("an event failed", exc_info=error)
    text = stream.getvalue()
    assert "number 2999" in text and "number 2990" in text and "number 2989" not in text


def test_what_a_module_prints_of_an_exception_is_logged(caplog, capsys):
    module = SimpleNamespace(traceback=traceback)
    log_printed_errors(module)
    try:
        raise RuntimeError("sent")
    except RuntimeError:
        module.traceback.print_exc()
    assert "an event failed" in caplog.text and not capsys.readouterr().err
    assert module.traceback.format_exc is traceback.format_exc


def test_letters_of_every_script_stay_as_they_are():
    assert quoted("수채화 猫 قط é") == "수채화 猫 قط é"
    assert quoted("\u202egnp.exe\u2028") == "\\u202egnp.exe\\u2028"
