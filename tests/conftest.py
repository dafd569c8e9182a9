"""Eight host devices, tiny checkpoints made by PyTorch's own pipeline, and a browser."""

import os
import tempfile
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
# Compiled once for all tests, whichever process runs them; the folder is new, since no test may
# depend on an earlier run. LLVM does little, and XLA's simpler emitters write its input: a tiny
# UNet is compiled in a third of the time, and takes 1.6 times as long to run. Where a processor has
# no AVX-512 a slot's bytes depend on its place within a group with oneDNN's kernels, but not with
# Eigen's own (benchmarks/RESULTS.md).
if "PYTEST_XDIST_WORKER" not in os.environ:  # a worker inherits these
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
        " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
        " --xla_cpu_use_fusion_emitters=false"
    )
    if "avx512f" not in Path("/proc/cpuinfo").read_text():
        os.environ["TENSORFLOW_USE_CUSTOM_CONTRACTION_KERNEL"] = "false"
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="sd_tpu-tests-")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
# The tests' processes have all cores busy: threads of PyTorch's would wait for one another.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"

import dataclasses
import gc
import shutil
import time
from collections.abc import Iterator

import diffusers
import gradio_client
import pytest
import torch
from jaxtyping import install_import_hook
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright
from starlette.middleware import Middleware
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer
from visitor import newcomer

# From here on the shapes and types that functions of these modules declare are checked.
FAMILIES = ("latent_diffusion", "stable_diffusion", "stable_diffusion_xl")
install_import_hook(
    [*(f"sd_tpu.families.{name}" for name in FAMILIES), "sd_tpu.runtime"], "beartype.beartype"
)

from sd_tpu import BUNDLED_MODEL  # noqa: E402
from sd_tpu.__main__ import OBJECTS  # noqa: E402
from sd_tpu.families.checkpoint import Checkpoint  # noqa: E402
from sd_tpu.http.access import Access  # noqa: E402
from sd_tpu.http.gate import Gate, Names  # noqa: E402
from sd_tpu.page import build, close, launch  # noqa: E402
from sd_tpu.runtime.mesh import make_mesh, replicated  # noqa: E402
from sd_tpu.serving import latency  # noqa: E402
from sd_tpu.serving.engine import Engine  # noqa: E402

# What is imported is there to stay, and what is traced dies by its count of references: looking
# through all of it for garbage, as Python does again and again, took 8% of the time of two files.
gc.freeze()
gc.set_threshold(OBJECTS)

LAYOUTS = {
    # The differences between the generations that change what is computed.
    "sd1": dict(
        text=dict(hidden_act="quick_gelu", num_hidden_layers=3),
        unet=dict(attention_head_dim=4, use_linear_projection=False),
        scheduler=diffusers.PNDMScheduler(
            beta_start=0.00085,
            beta_end=0.012,
            beta_schedule="scaled_linear",
            skip_prk_steps=True,
            steps_offset=1,
        ),
    ),
    "sd2": dict(
        text=dict(hidden_act="gelu", num_hidden_layers=2),
        unet=dict(attention_head_dim=(2, 4), use_linear_projection=True, upcast_attention=True),
        scheduler=diffusers.DDIMScheduler(
            beta_start=0.00085,
            beta_end=0.012,
            beta_schedule="scaled_linear",
            clip_sample=False,
            set_alpha_to_one=False,
            steps_offset=1,
            prediction_type="v_prediction",
        ),
    ),
}


def make_torch_pipeline(layout: str, seed: int = 0) -> diffusers.StableDiffusionPipeline:
    """A randomly initialised tiny StableDiffusionPipeline (8x8 latents, 32x32 pictures)."""
    torch.manual_seed(seed)
    parts = LAYOUTS[layout]
    text_encoder = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=49408,
            hidden_size=32,
            intermediate_size=64,
            num_attention_heads=4,
            max_position_embeddings=77,
            **parts["text"],
        )
    )
    unet = diffusers.UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(16, 32),
        layers_per_block=1,
        norm_num_groups=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=32,
        **parts["unet"],
    )
    vae = diffusers.AutoencoderKL(
        block_out_channels=(8, 16, 16),
        layers_per_block=1,
        norm_num_groups=8,
        latent_channels=4,
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
    )
    return diffusers.StableDiffusionPipeline(
        text_encoder=text_encoder.eval(),
        unet=unet.eval(),
        vae=vae.eval(),
        tokenizer=CLIPTokenizer.from_pretrained(BUNDLED_MODEL / "tokenizer"),
        scheduler=parts["scheduler"],
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def pytest_unconfigure() -> None:
    """Removes what was compiled, once all are done with it."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        shutil.rmtree(os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)


@pytest.fixture(scope="session", params=LAYOUTS)
def layout(request) -> str:
    """Each generation's layout in turn."""
    return request.param


@pytest.fixture(scope="session")
def torch_pipelines() -> dict[str, diffusers.StableDiffusionPipeline]:
    """The PyTorch reference of each layout."""
    return {layout: make_torch_pipeline(layout) for layout in LAYOUTS}


@pytest.fixture(scope="session")
def checkpoints(torch_pipelines, tmp_path_factory) -> dict[str, Path]:
    """The same models as checkpoint folders, written by diffusers."""
    folders = {layout: tmp_path_factory.mktemp(layout) for layout in LAYOUTS}
    for layout, pipeline in torch_pipelines.items():
        pipeline.save_pretrained(folders[layout])
    return folders


@pytest.fixture(scope="session")
def loaded(checkpoints, layout):
    """(checkpoint, params) of each layout in turn, float32, on all eight devices."""
    return Checkpoint.from_pretrained(checkpoints[layout], sharding=replicated(make_mesh()))


@pytest.fixture(scope="session")
def sd1(checkpoints):
    """(checkpoint, params) of the SD 1.x layout, float32, on all eight devices."""
    return Checkpoint.from_pretrained(checkpoints["sd1"], sharding=replicated(make_mesh()))


# --- the page in a real browser -----------------------------------------------------------------

PAUSE = 0.2  # s
# Tabs of one site share a process, and what it has compiled of the page.
FLAGS = ["--no-sandbox", "--disable-gpu", "--process-per-site"]


@pytest.fixture(scope="session")
def page_engine(checkpoints, tmp_path_factory) -> Iterator[Engine]:
    """The engine behind the page, with two styles and a wildcard."""
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
def slow_engine(page_engine, monkeypatch) -> Engine:
    """The engine behind the page, taking PAUSE longer for a row and a row at a time: a run of LONG
    steps lasts until it is stopped, and the processor is the browser's meanwhile."""
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


@pytest.fixture(scope="session")
def address(page_engine) -> Iterator[str]:
    """Where the page is served."""
    page = build(page_engine)
    assert page_engine.ready.wait(300)
    gate = Middleware(Gate, names=Names(), access=Access(), api=None, paths=())
    yield launch(page, mcp_server=True, middleware=[gate])
    close(page)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """The browser, without any visitor yet."""
    program = shutil.which("chromium-headless-shell")
    if not program:
        pytest.fail("The browser tests need Debian's chromium-headless-shell")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def visitor(chromium, address) -> Iterator[BrowserContext]:
    """Somebody, all of whose tabs share what the browser has cached and stored."""
    with chromium.new_context(viewport={"width": 1440, "height": 900}) as context:
        context.grant_permissions(["clipboard-read", "clipboard-write"])
        context.new_page().goto(f"{address}robots.txt")  # the process lasts as long as a tab does
        yield context


@pytest.fixture
def tab(visitor, address) -> Iterator[Page]:
    """The page as it looks to somebody who was never there."""
    with newcomer(visitor, address) as tab:
        yield tab


@pytest.fixture(scope="module")
def client(address) -> gradio_client.Client:
    """A program."""
    return gradio_client.Client(address, verbose=False)
