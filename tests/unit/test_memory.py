"""Memory that a process has freed."""

import ctypes

import pytest

from benchmarks.report import memory
from sd_tpu import memory as machine
from sd_tpu.memory import return_freed_memory
from sd_tpu.runtime import mesh
from tests.support.processes import told_by

# As many threads as there are blocks, all alive, and how many arenas malloc says that it has.
THREADS = """
import ctypes, threading
from sd_tpu import memory
memory.keep_freed_memory_together()
libc, all_there = ctypes.CDLL("libc.so.6"), threading.Barrier(16)
libc.malloc.restype = libc.fopen.restype = ctypes.c_void_p
def take():
    libc.malloc(1000)
    all_there.wait()
threads = [threading.Thread(target=take) for _ in range(16)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
file = ctypes.c_void_p(libc.fopen(b"/dev/stdout", b"w"))
libc.malloc_info(0, file)
libc.fclose(file)
"""


def test_all_threads_share_what_was_freed():
    assert told_by(THREADS).stdout.count("<heap nr=") == 2


@pytest.mark.parametrize("limit, least", [("1000000\n", 0), ("max\n", 1 << 20)])
def test_a_cpu_has_the_memory_of_its_container(limit, least, tmp_path, monkeypatch):
    (tmp_path / "memory.max").write_text(limit)
    monkeypatch.setattr(machine, "CONTAINER", tmp_path / "memory.max")
    found = mesh.device_bytes(mesh.make_mesh(1))
    assert found > least if least else found == 500_000


def test_memory_that_was_freed_is_returned_to_the_system():
    libc = ctypes.CDLL("libc.so.6")
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    blocks = [libc.malloc(100_000) for _ in range(3000)]
    for block in blocks:
        ctypes.memset(block, 1, 100_000)
    for block in blocks[:-1]:  # the last keeps the heap from shrinking by itself
        libc.free(block)
    kept = memory("VmRSS")
    return_freed_memory()
    assert memory("VmRSS") < kept - 200e6
    libc.free(blocks[-1])
