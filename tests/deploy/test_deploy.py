"""Page, APIs and hosts that draw by Ray Serve; containers and manifests; the Space's header."""

import argparse
import asyncio
import base64
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import kubernetes_validate
import psutil
import pytest
import ray
import yaml
from gradio_client import Client
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from PIL import Image
from ray.exceptions import RayError
from ray.serve.schema import ServeDeploySchema

from deploy.app import GRACE_SECONDS, Options, app
from deploy.orders import SLACK, Host, Order, ranked
from deploy.remote import RemoteEngine
from deploy.routing import ByRows
from sd_tpu.app import add_page_flags
from sd_tpu.pictures.images import read_png
from sd_tpu.request import Request
from sd_tpu.serving.client import Status
from sd_tpu.serving.job import Cancelled, Done, Failed, ImageReady
from sd_tpu.serving.plan import Weights
from sd_tpu.serving.resolve import ResolvedRequest
from sd_tpu.settings import Picture
from tests.support.tiny import flags_of_devices

ROOT, BIN = Path(__file__).parents[2], Path(sys.executable).parent
WITH_RAY = pytest.mark.long("starts Ray Serve with two drawing hosts")
PATIENCE = 240.0  # seconds, on a machine that has much else to do
BASE, OTHER = Weights(name="base"), Weights(name="other")

# Ray's example for TPUs (stable_diffusion_tpu.py of ray-project/serve_config_examples) in fewer
# words: it calls the pipeline as there, but for the import, the model's name, and batches of 8
# instead of 64 pictures, which a CPU takes a minute for.
EXAMPLE = """
from io import BytesIO
from fastapi import FastAPI
from fastapi.responses import Response
from ray import serve

app, BATCH = FastAPI(), 8

@serve.deployment(num_replicas=1)
@serve.ingress(app)
class APIIngress:
    def __init__(self, diffusion_model_handle):
        self.handle = diffusion_model_handle

    @app.get("/imagine", response_class=Response)
    async def generate(self, prompt: str):
        return await self.handle.generate.remote(prompt)

@serve.deployment(ray_actor_options={"resources": {"TPU": 4}})
class StableDiffusion:
    def __init__(self):
        from sd_tpu import FlaxStableDiffusionPipeline
        from flax.jax_utils import replicate
        import jax.numpy as jnp
        from jax import pmap

        self._pipeline, params = FlaxStableDiffusionPipeline.from_pretrained(
            "MODEL", revision="bf16", dtype=jnp.bfloat16)
        self._p_params = replicate(params)
        self._p_generate = pmap(self._pipeline._generate)

    def generate_tpu(self, prompts):
        from flax.training.common_utils import shard
        import jax
        import numpy as np

        rng = jax.random.split(jax.random.PRNGKey(0), jax.device_count())
        prompt_ids = shard(self._pipeline.prepare_inputs(prompts))
        images = self._p_generate(prompt_ids, self._p_params, rng)
        images = images.block_until_ready()
        images = images.reshape((images.shape[0] * images.shape[1],) + images.shape[-3:])
        return self._pipeline.numpy_to_pil(np.array(images))

    @serve.batch(batch_wait_timeout_s=1, max_batch_size=BATCH)
    async def batched_generate_handler(self, prompts):
        images = self.generate_tpu(prompts + ["Scratch request"] * (BATCH - len(prompts)))
        results = []
        for image in images[:len(prompts)]:
            file_stream = BytesIO()
            image.save(file_stream, "PNG")
            results.append(Response(content=file_stream.getvalue(), media_type="image/png"))
        return results

    async def generate(self, prompt):
        return await self.batched_generate_handler(prompt)

deployment = APIIngress.bind(StableDiffusion.bind())
"""


# --- where orders go, and how many hosts there are ------------------------------------------------


def test_an_order_goes_where_its_client_is_then_where_its_weights_lie_then_where_least_is_to_do():
    hosts = {"idle": Host(0), "held": Host(9, [BASE]), "last": Host(99, last=True)}
    assert ranked(hosts, [BASE]) == ["last", "held", "idle"]
    assert ranked(hosts, [OTHER]) == ["last", "idle", "held"]
    assert ranked({"more": Host(5, [BASE]), "less": Host(4, [BASE])}, [BASE]) == ["less", "more"]
    hosts["last"] = Host(SLACK + 1, [BASE], last=True)
    assert ranked(hosts, [BASE]) == ["held", "idle", "last"], "nobody waits for what is near"


@pytest.mark.parametrize(
    "rows, hosts",
    [({}, 0), ({"a": 0.0}, 0), ({"a": 1.0, "b": 0.0}, 1), ({"a": 900.0, "b": 101.0}, 11)],
)
def test_there_are_as_many_hosts_as_the_rows_that_wait_are_worth(rows, hosts):
    assert ByRows(100)(SimpleNamespace(aggregated_metrics={"rows": rows})) == (hosts, {})


def test_at_most_so_many_hosts_are_no_fewer_than_at_least():
    with pytest.raises(ValueError, match=r"at most 2 hosts.* at least 3"):
        Options(hosts=3, most=2)


@pytest.mark.parametrize("flags", ["--no-such-flag", "--devices 0", '--model "open'])
def test_flags_that_cannot_be_read_are_named_before_anything_is_started(flags):
    with pytest.raises(ValueError, match=r"^flags: (?!flags)"):
        app(Options(flags=flags))


# --- containers, manifests, the Space ------------------------------------------------------------


def test_the_containers_file_has_nothing_that_its_linter_minds():
    found = subprocess.run(
        [BIN / "hadolint", ROOT / "deploy" / "Dockerfile"], capture_output=True, text=True
    )
    assert found.returncode == 0, found.stdout


@pytest.mark.parametrize("chips", ["v5e", "v6e"])
def test_kubernetes_and_ray_can_read_the_manifests(chips):
    service, claim = yaml.safe_load_all(
        (ROOT / f"deploy/rayservice-{chips}-8.yaml").read_text("utf-8")
    )
    kubernetes_validate.validate(claim, "1.33", strict=True)
    cluster = service["spec"]["rayClusterConfig"]
    head, (workers,) = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    for group in (head, workers):
        kubernetes_validate.validate(
            {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, **group["template"]},
            "1.33",
            strict=True,
        )
    assert cluster["rayVersion"] == ray.__version__
    (application,) = ServeDeploySchema.model_validate(
        yaml.safe_load(service["spec"]["serveConfigV2"])
    ).applications
    options = Options(**application.args)
    assert application.import_path == "deploy.app:app" and app(options)
    assert options.place in json.loads(json.loads(head["rayStartParams"]["resources"]))
    assert (options.hosts, options.most) == (workers["minReplicas"], workers["maxReplicas"])
    (container,) = workers["template"]["spec"]["containers"]
    assert str(int(options.tpus)) == container["resources"]["limits"]["google.com/tpu"]
    assert workers["template"]["spec"]["terminationGracePeriodSeconds"] > GRACE_SECONDS


def test_the_manifests_differ_in_their_chips_alone():
    one, other = (
        (ROOT / f"deploy/rayservice-{chips}-8.yaml").read_text("utf-8") for chips in ("v5e", "v6e")
    )
    names = {
        "v5e": "v6e",
        "tpu-v5-lite-podslice": "tpu-v6e-slice",
        "ct5lp-hightpu-8t": "ct6e-standard-8t",
    }
    for mine, theirs in names.items():
        one = one.replace(mine, theirs)
    assert one == other


def test_the_spaces_header_names_what_is_there():
    _, head, _ = (ROOT / "README.md").read_text("utf-8").split("---\n", 2)
    header = yaml.safe_load(head)
    assert (ROOT / header["app_file"]).is_file() and header["sdk"] == "gradio"
    needed = (ROOT / "requirements.txt").read_text("utf-8")
    gradio = next(Requirement(line) for line in needed.splitlines() if line.startswith("gradio"))
    assert header["sdk_version"] in gradio.specifier
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert header["license"] == project["license"].lower()
    assert header["python_version"] in SpecifierSet(project["requires-python"])
    assert header["suggested_hardware"] == "cpu-basic"
    assert len(header["short_description"]) <= 60, "the Hub refuses longer ones"
    text = (ROOT / "docs/host/space.md").read_text("utf-8")
    preset = next(line for line in text.splitlines() if line.startswith("--model "))
    flags = argparse.ArgumentParser()
    add_page_flags(flags)
    asked = flags.parse_args(preset.split())
    assert header["models"] == [asked.model, asked.decoder]


# --- on this machine ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def serving(checkpoints, tmp_path_factory) -> Iterator[SimpleNamespace]:
    """Two hosts that draw, with page and APIs before them, and Ray's own example."""
    folder = tmp_path_factory.mktemp("serve")
    model = checkpoints["sd1"]
    (folder / "example.py").write_text(EXAMPLE.replace("MODEL", str(model)))
    (folder / "keys").write_text("\n".join(f"key-{number}" for number in range(8)))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = f"--model {model} --devices 1 --no-history --api --api-key-file {folder / 'keys'}"
    (folder / "serve.yaml").write_text(
        yaml.safe_dump(
            {
                "http_options": {"host": "127.0.0.1", "port": port},
                "applications": [
                    {
                        "name": "sd-tpu",
                        "import_path": "deploy.app:app",
                        "route_prefix": "/",
                        "args": {"flags": flags, "hosts": 2, "cpus": 0.25},
                    },
                    {
                        "name": "example",
                        "import_path": "example:deployment",
                        "route_prefix": "/example",
                    },
                ],
            }
        )
    )
    output = (folder / "output").open("w+")
    program = subprocess.Popen(
        [BIN / "serve", "run", folder / "serve.yaml"],
        cwd=ROOT,
        stdout=output,
        stderr=subprocess.STDOUT,
        env={
            **os.environ,
            "XLA_FLAGS": flags_of_devices(2),
            "PYTHONPATH": f"{ROOT}:{folder}",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_OVERRIDE_RESOURCES": json.dumps({"CPU": 4, "TPU": 4}),
        },
    )
    here = psutil.Process(program.pid)
    try:
        with httpx.Client(
            base_url=f"http://127.0.0.1:{port}",
            timeout=PATIENCE,
            headers={"authorization": "Bearer key-0"},
        ) as http:
            yield SimpleNamespace(
                http=http, program=program, process=here, output=folder / "output"
            )
    finally:
        left = here.children(recursive=True)
        program.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            program.wait(20)
        for process in [*left, here]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        output.close()


def until(true, serving) -> None:
    deadline = time.monotonic() + PATIENCE
    while not true():
        if serving.program.poll() is not None:
            skip_where_ray_does_not_start()
        assert serving.program.returncode is None and time.monotonic() < deadline, (
            serving.output.read_text()[-5000:]
        )
        time.sleep(0.2)


def test_what_was_given_up_is_not_asked_for_again_of_another_host():
    asked = []

    class Hosts:
        """Each takes an order, draws the first picture of it and is gone."""

        async def remote(self, order):
            asked.append([*order.resolved.pictures])
            yield None
            yield ImageReady(asked[-1][0], None)
            raise RayError("gone")

    async def told(*given_up):
        asked.clear()
        engine = object.__new__(RemoteEngine)
        engine._orders, engine._lock = {}, threading.Condition()
        engine._replicas = SimpleNamespace(draw=Hosts())
        pictures = (Picture(prompt="a"),) * 3
        resolved = ResolvedRequest(Request(pictures), dict(enumerate(pictures)))  # ty: ignore[invalid-argument-type]
        order = Order("key", resolved, "", "", False)
        events = engine._answers(order)
        assert await anext(events) is None
        for index in given_up:
            engine._strike("key", index)
        return [type(event) async for event in events]

    assert asyncio.run(told(1)) == [ImageReady, ImageReady, Done] and asked == [[0, 1, 2], [2]]
    assert asyncio.run(told(None)) == [ImageReady, Cancelled] and asked == [[0, 1, 2]]
    assert asyncio.run(told()) == [ImageReady, ImageReady, Failed]
    assert asked == [[0, 1, 2], [1, 2]]


def test_orders_wait_for_their_hosts_without_a_thread_each(checkpoints):
    go_on = threading.Event()

    class Hosts:
        """Each takes an order, and is done with it some time."""

        async def remote(self, order):
            yield None
            while not go_on.is_set():
                await asyncio.sleep(0.01)
            yield Done(1.0)

    def answer(value):
        return SimpleNamespace(result=lambda: value, results=lambda **_: [])

    status = Status(taking=True, devices=("cpu",), dtype="float32")
    hosts: Any = SimpleNamespace(
        options=lambda stream: SimpleNamespace(draw=Hosts()),
        status=SimpleNamespace(remote=lambda: answer(status)),
        broadcast=lambda *_: answer(None),
    )
    engine = RemoteEngine.connect(hosts, {"model": checkpoints["sd1"]})
    picture = Picture(prompt="a")
    before = {*threading.enumerate()}
    jobs = [
        engine.queue(ResolvedRequest(Request((picture,)), {0: picture}))  # ty: ignore[invalid-argument-type]
        for _ in range(20)
    ]
    assert {*threading.enumerate()} <= before
    go_on.set()
    assert [[*job.events()] for job in jobs] == 20 * [[Done(1.0)]]
    assert engine.drain(60) and not engine.status().jobs
    engine.close()


def skip_where_ray_does_not_start() -> None:
    alone = subprocess.run(
        [sys.executable, "-c", "import ray; ray.init(num_cpus=1)"],
        text=True,
        capture_output=True,
        env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0"},
    )
    if alone.returncode:
        pytest.skip(f"Ray itself does not start on this machine: {alone.stderr[-500:]}")


def devices(serving) -> int:
    """How many of them are ready, over all hosts."""
    return measured(serving, "devices")


def measured(serving, what: str) -> int:
    """A number of the server's metrics; 0 while it serves none."""
    with contextlib.suppress(httpx.TransportError):
        answer = serving.http.get("/metrics")
        if answer.is_success:
            return int(float(re.search(rf"^sd_tpu_{what} (.*)$", answer.text, re.M)[1]))
    return 0


def draw(serving, key: int) -> list[bytes]:
    answer = serving.http.post(
        "/sdapi/v1/txt2img",
        auth=("", f"key-{key}"),
        json={"prompt": f"picture {key}", "seed": 10 * key, "steps": 100, "batch_size": 3},
    )
    assert answer.status_code == 200, answer.text
    return [base64.b64decode(image) for image in answer.json()["images"]]


@WITH_RAY
def test_a_host_that_is_killed_under_load_loses_nothing(serving):
    until(lambda: devices(serving) == 2, serving)
    drawing = [
        process
        for process in serving.process.children(recursive=True)
        if "ServeReplica:sd-tpu:Drawing" in " ".join(process.cmdline())
    ]
    assert len(drawing) == 2
    for process in drawing:
        process.cpu_percent()  # from now on
    with ThreadPoolExecutor(8) as pool:
        drawn = pool.map(partial(draw, serving), range(8))
        until(lambda: measured(serving, "slots_occupied") >= 6, serving)
        busy = max(drawing, key=psutil.Process.cpu_percent)  # all may have gone to one of them
        busy.kill()
        drawn = list(drawn)
    assert not busy.is_running()
    for key, files in enumerate(drawn):
        made = [read_png(file).pictures[0] for file in files]
        assert [(picture.prompt, picture.seed) for picture in made] == [
            (f"picture {key}", 10 * key + index) for index in range(3)
        ], "none lost, none crossed"
    until(lambda: "asked for again" in serving.output.read_text(), serving)
    assert draw(serving, 0) == drawn[0], "the same wherever it is drawn"


@WITH_RAY
def test_the_page_streams_and_stops_through_serve(serving):
    until(lambda: devices(serving), serving)
    client = Client(str(serving.http.base_url), verbose=False)
    pictures, seed, told = client.predict(["a cat"] * 2, seed=7, steps=4, api_name="/generate")
    assert len(pictures) == 2 and seed == 7 and told.startswith("Done")
    asked = client.submit(["a cat"] * 8, steps=200, api_name="/generate")
    until(lambda: any("Step" in told[2] for told in asked.outputs()), serving)
    asked.cancel()
    client.close()
    until(lambda: re.search(r"^sd_tpu_jobs 0", serving.http.get("/metrics").text, re.M), serving)
    until(
        lambda: re.search(r"^sd_tpu_slots_occupied 0", serving.http.get("/metrics").text, re.M),
        serving,
    )


@WITH_RAY
def test_assistants_find_their_tools_through_serve(serving):
    until(lambda: devices(serving), serving)
    answer = serving.http.post(
        "/gradio_api/mcp/",
        json={"jsonrpc": "2.0", "id": 1, "method": "tools/list"},
        headers={"accept": "application/json, text/event-stream"},
    )
    assert answer.status_code == 200 and '"draw"' in answer.text


@WITH_RAY
def test_what_a_host_refuses_is_said_as_it_would_be_here(serving):
    until(lambda: devices(serving), serving)
    answer = serving.http.post("/v1/images/generations", json={"prompt": "a cat", "n": 99})
    assert answer.status_code == 400 and "99" in answer.json()["error"]["message"]


@WITH_RAY
def test_rays_own_example_for_tpus_draws_with_another_import(serving, tmp_path):
    def there() -> bool:
        return serving.http.get("/example/docs").status_code == 200

    until(lambda: devices(serving) and there(), serving)
    answer = serving.http.get("/example/imagine", params={"prompt": "a cat"})
    assert answer.headers["content-type"] == "image/png", answer.text
    (tmp_path / "cat.png").write_bytes(answer.content)
    assert Image.open(tmp_path / "cat.png").size == (32, 32)
