"""Python programs in processes of their own."""

import select
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def told_by(program: str, *arguments: object, **options) -> subprocess.CompletedProcess[str]:
    """What a program printed, which has to succeed.

    Args:
        program: its text.
        arguments: of the program.
        options: of `subprocess.run`.
    """
    ran = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        capture_output=True,
        text=True,
        **options,
    )
    assert ran.returncode == 0, ran.stderr
    return ran


def peak_of_loading(program: str, *arguments: object) -> tuple[int, int]:
    """The most memory in bytes that a program takes for what it loads, and what that has itself.

    The program says that it is ready and waits for a line, then loads, prints how many bytes there
    are, and waits for another.
    """
    with subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=REPOSITORY,
        env={"JAX_PLATFORMS": "cpu", "PATH": ""},
    ) as child:
        assert child.stdout.readline() == "ready\n"
        before = peak = _anonymous_bytes(child.pid)
        child.stdin.write("go\n")
        child.stdin.flush()
        while not select.select([child.stdout], [], [], 0.001)[0]:
            peak = max(peak, _anonymous_bytes(child.pid))
        child.stdin.write("end\n")
        child.stdin.flush()
        return peak - before, int(child.stdout.read())


def _anonymous_bytes(pid: int) -> int:
    """Resident memory of a process without the pages that are files, such as those mapped in."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024
