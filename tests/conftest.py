"""Eight host devices, what is compiled kept from run to run, and tiny checkpoints.

Nothing here imports PyTorch, Gradio or a browser: the fixtures that need one do.
"""

import dataclasses
import gc
import hashlib
import os
import platform
import shutil
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from jaxtyping import install_import_hook
from packaging.version import Version

if TYPE_CHECKING:
    from diffusers import StableDiffusionPipeline

    from sd_tpu.serving.engine import Engine

pytest.register_assert_rewrite("tests.support")  # whose assertions say what they compared

LAYOUTS = ("sd1", "sd2")
PAUSE = 0.2  # s
SLOW = 10.0  # s, from which on a test says why
COMPILED_BYTES = 2**31
PROCESSOR = Path("/proc/cpuinfo")


def configure_jax() -> None:
    """Sets JAX's variables, before anything imports it; worker processes inherit them.

    LLVM does little, and XLA's simpler emitters write its input, where it still has them: a tiny
    UNet is compiled in a third of the time, and takes 1.6 times as long to run. Where a processor
    has no AVX-512, a slot's bytes depend on its index within a group with oneDNN's kernels, but not
    with Eigen's own (decision 0017).
    """
    os.environ["JAX_PLATFORMS"] = "cpu"
    # The tests' processes have all cores busy: threads of PyTorch's would wait for one another.
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
        " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    )
    if Version(version("jaxlib")) < Version("0.11"):  # which has no others since
        os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"
    if "avx512f" not in _processor():
        os.environ["TENSORFLOW_USE_CUSTOM_CONTRACTION_KERNEL"] = "false"
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(_compiled())
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"


def _processor() -> str:
    """Returns the instructions of this machine's processor."""
    if not PROCESSOR.exists():
        return platform.processor()
    return next(line for line in PROCESSOR.read_text().splitlines() if line.startswith("flags"))


def _compiled() -> Path:
    """Returns where compiled programs are kept: JAX itself tells them apart by their source, and
    the folder's name by versions, flags and processor. Too large a folder begins anew."""
    made_by = (version("jax"), version("jaxlib"), os.environ["XLA_FLAGS"], _processor())
    name = hashlib.sha256(repr(made_by).encode()).hexdigest()[:16]
    folder = Path(__file__).parents[1] / ".pytest_cache" / "compiled" / name
    if sum(file.stat().st_size for file in folder.glob("*")) > COMPILED_BYTES:
        shutil.rmtree(folder)
    return folder


configure_jax()


def import_unchecked() -> None:
    """Imports what checked modules import, which would otherwise be compiled anew for them."""
    import beartype  # noqa: F401
    import flax.nnx  # noqa: F401


if "PYTEST_XDIST_WORKER" in os.environ:
    import_unchecked()

# From here on the shapes and types that functions of these modules declare are checked.
FAMILIES = ("latent_diffusion", "stable_diffusion", "stable_diffusion_xl")
install_import_hook(
    [*(f"sd_tpu.families.{name}" for name in FAMILIES), "sd_tpu.runtime"], "beartype.beartype"
)


def pytest_configure(config) -> None:
    """Leaves out what takes seconds to import where workers run the tests."""
    if not config.getoption("numprocesses", None):
        import_unchecked()


def pytest_collection_finish() -> None:
    """Leaves what is imported out of the search for garbage, which comes after more objects than
    usual: it took 8% of the time of two files."""
    from sd_tpu.__main__ import OBJECTS

    gc.freeze()
    gc.set_threshold(OBJECTS)


def pytest_terminal_summary(terminalreporter) -> None:
    """Names the tests that took long and do not say why."""
    long = [
        report
        for report in terminalreporter.stats.get("passed", [])
        if report.when == "call" and report.duration > SLOW and "slow" not in report.keywords
    ]
    for report in long:
        terminalreporter.write_line(
            f"{report.nodeid} took {report.duration:.0f} s: mark why it is slow, or mend it"
        )


@pytest.fixture(scope="session", autouse=True)
def data_home(tmp_path_factory) -> None:
    """Data of servers, apart from the user's own, and from that of the other workers."""
    os.environ["XDG_DATA_HOME"] = str(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session", params=LAYOUTS)
def layout(request) -> str:
    """Each generation's layout in turn."""
    return request.param


@pytest.fixture(scope="session")
def torch_pipelines() -> "dict[str, StableDiffusionPipeline]":
    """The PyTorch reference of each layout."""
    from tests.support.reference import make_torch_pipeline

    return {layout: make_torch_pipeline(layout) for layout in LAYOUTS}


@pytest.fixture(scope="session")
def checkpoints(torch_pipelines, tmp_path_factory) -> dict[str, Path]:
    """The same models as checkpoint folders, written by diffusers."""
    folders = {layout: tmp_path_factory.mktemp(layout) for layout in LAYOUTS}
    for layout, pipeline in torch_pipelines.items():
        pipeline.save_pretrained(folders[layout])
    return folders


@pytest.fixture(scope="session")
def least_pipeline() -> "StableDiffusionPipeline":
    """The smallest of PyTorch's pipelines, for tests of what is around the networks."""
    from tests.support.reference import LEAST, make_torch_pipeline

    return make_torch_pipeline("sd1", **LEAST)


@pytest.fixture(scope="session")
def least(least_pipeline, tmp_path_factory) -> Path:
    """Folder of `least_pipeline` as a checkpoint."""
    folder = tmp_path_factory.mktemp("least")
    least_pipeline.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def loaded(checkpoints, layout):
    """(checkpoint, params) of each layout in turn, float32, on all eight devices."""
    from sd_tpu.families.checkpoint import Checkpoint
    from sd_tpu.runtime.mesh import make_mesh, replicated

    return Checkpoint.from_pretrained(checkpoints[layout], sharding=replicated(make_mesh()))


@pytest.fixture(scope="session")
def sd1(checkpoints):
    """(checkpoint, params) of the SD 1.x layout, float32, on all eight devices."""
    from sd_tpu.families.checkpoint import Checkpoint
    from sd_tpu.runtime.mesh import make_mesh, replicated

    return Checkpoint.from_pretrained(checkpoints["sd1"], sharding=replicated(make_mesh()))


@pytest.fixture(scope="session")
def page_engine(checkpoints, tmp_path_factory) -> "Iterator[Engine]":
    """The engine behind the page, with two styles and a wildcard."""
    from sd_tpu.serving.engine import Engine

    folder = tmp_path_factory.mktemp("prompts")
    (folder / "colour.txt").write_text("red\nblue\n")
    (folder / "styles.csv").write_text(
        'name,prompt,negative_prompt\nInk,"ink drawing of {prompt}",photo\nBright,bright,\n'
    )
    engine = Engine.open(
        checkpoints["sd1"], devices=1, wildcard_dir=folder, styles=folder / "styles.csv"
    )
    yield engine
    engine.close()


@pytest.fixture
def slow_engine(page_engine, monkeypatch) -> "Engine":
    """The engine behind the page, taking PAUSE longer for a row and a row at a time: a run of LONG
    steps lasts until it is stopped, and the processor is the browser's meanwhile."""
    from sd_tpu.serving import latency

    execute = page_engine.worker.execute

    def slowly(plan):
        report = execute(plan)
        if not plan.rows:
            return report
        time.sleep(PAUSE)
        return dataclasses.replace(report, advance_seconds=report.advance_seconds + PAUSE)

    monkeypatch.setattr(latency, "CALL_SECONDS", 0.0)
    monkeypatch.setattr(page_engine.worker, "execute", slowly)
    return page_engine
