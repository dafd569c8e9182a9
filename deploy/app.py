"""Page and APIs before as many hosts as there are, by Ray Serve:

    serve run deploy.app:app
    serve run deploy.app:app flags="--model org/model --api --api-public" hosts=2 most=8 tpus=8

Each host that draws is a replica of `Drawing` with all its devices. One replica of `Page` serves
page and APIs; it knows the models but holds no parameters.
"""

import argparse
import asyncio
import contextlib
import shlex
from typing import NoReturn, Self

import fastapi
import pydantic
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from deploy.drawing import Drawing
from deploy.remote import RemoteEngine
from deploy.routing import ByRows, ByWeights
from sd_tpu.app import add_page_flags, make_site
from sd_tpu.cli.flags import model_options
from sd_tpu.folders import temporary_folder
from sd_tpu.serving.scheduler import Limits

MAX_VISITORS = 1000  # requests to page and APIs at a time; who watches a run holds one
GRACE_SECONDS = 600.0  # that a host which is to end may take for what it has begun


class Options(pydantic.BaseModel):
    """Options of an application, on the command line as `name=value`.

    Attributes:
        flags: those of `app.py` for models, page and APIs.
        hosts: how many draw, at least.
        most: how many draw, at most; as many as `hosts` by default.
        rows: steps of pictures that wait for a host before another one is asked for.
        cpus: that a host has to have free.
        gpus: that a host has to have free; a replica uses so many.
        tpus: chips that a host has to have free, such as 8 of a v5e-8; a replica uses so many.
        place: a resource of Ray's that the host has on which the page is to be; "" is any.
    """

    model_config = pydantic.ConfigDict(extra="forbid")

    flags: str = ""
    hosts: int = pydantic.Field(1, ge=1)
    most: int | None = pydantic.Field(None, ge=1)
    rows: float = pydantic.Field(2000, gt=0)
    cpus: float = pydantic.Field(1, ge=0)
    gpus: float = pydantic.Field(0, ge=0)
    tpus: float = pydantic.Field(0, ge=0)
    place: str = ""

    @pydantic.model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.most is not None and self.most < self.hosts:
            raise ValueError(
                f"There cannot be at most {self.most} hosts and at least {self.hosts}."
            )
        return self


def app(options: Options) -> Application:
    """Return the application.

    Raises:
        ValueError: a flag is unknown or has no such value.
    """
    args = _parse(options.flags)
    actor = {
        "num_cpus": options.cpus,
        "num_gpus": options.gpus,
        "resources": {"TPU": options.tpus} if options.tpus else {},
    }
    drawing = (
        serve.deployment(Drawing)  # ty: ignore[missing-attribute]
        .options(
            ray_actor_options=actor,
            autoscaling_config=AutoscalingConfig(
                min_replicas=options.hosts,
                max_replicas=options.most or options.hosts,
                policy=AutoscalingPolicy(
                    policy_function=ByRows, policy_kwargs={"rows": options.rows}
                ),
            ),
            max_ongoing_requests=Limits().jobs
            + 100,  # what is too much is for its scheduler to say
            graceful_shutdown_timeout_s=GRACE_SECONDS,
            request_router_config=RequestRouterConfig(
                request_router_class=ByWeights,  # ty: ignore[invalid-argument-type]
                request_routing_stats_period_s=2.0,  # ty: ignore[invalid-argument-type]
            ),
        )
        .bind(
            {
                **model_options(args),
                "dtype": args.dtype,
                "memory": args.memory,
                "tensor_parallel": args.tensor_parallel_size,
            },
            args.devices,
        )
    )
    # The runs that people watch are in its memory, so there is one. It draws nothing, and keeps
    # away from accelerators, which only one process can have.
    page = serve.deployment(Page).options(  # ty: ignore[missing-attribute]
        max_ongoing_requests=MAX_VISITORS,
        ray_actor_options={
            "num_cpus": 1,
            "resources": {options.place: 1} if options.place else {},
            "runtime_env": {"env_vars": {"JAX_PLATFORMS": "cpu"}},
        },
    )
    return page.bind(drawing, options.flags)


@serve.ingress()
class Page:
    """Page and APIs for the hosts that draw."""

    async def __init__(self, drawing: DeploymentHandle, flags: str):
        """Wait for the first host; `flags` as `Options` has them."""
        self._args = _parse(flags)
        self._end = contextlib.ExitStack()
        self._end.enter_context(temporary_folder())
        self._engine = await asyncio.to_thread(
            RemoteEngine.connect, drawing, model_options(self._args)
        )
        self._end.callback(self._engine.close)

    def __serve_build_asgi_app__(self) -> fastapi.FastAPI:
        """Return the application that Serve serves."""
        return make_site(self._engine, self._args)

    def __del__(self):
        """Stop when Serve ends it."""
        self._end.close()


class _Flags(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise ValueError and end no process: Serve may build an application in one of its own."""
        raise ValueError(f"flags: {message}")


def _parse(flags: str) -> argparse.Namespace:
    parser = _Flags()
    add_page_flags(parser)
    try:
        words = shlex.split(flags)
    except ValueError as error:  # such as a quote that is never closed
        parser.error(str(error))
    args = parser.parse_args(words)
    args.safety_checker = args.safety_checker is not False  # it is served to others
    return args
