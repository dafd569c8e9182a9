"""The APIs of A1111 and OpenAI on an engine: a FastAPI application that knows no page.

It is served beside the page, or alone: `create_api(engine, access)` is an ASGI application.
"""

from collections.abc import Mapping

import fastapi
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from sd_tpu.http import a1111, health, openai
from sd_tpu.http.access import Access
from sd_tpu.pictures.images import VERSION
from sd_tpu.serving.client import Closing, EngineClient
from sd_tpu.serving.job import DrawingError
from sd_tpu.serving.scheduler import Busy
from sd_tpu.settings import RequestError

# Which paths are the application's, not the page's.
HEALTH_PATHS = ("/healthz", "/readyz", "/metrics")
API_PATHS = ("/sdapi", "/controlnet", "/v1", "/docs", "/openapi.json")
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_DESCRIPTION = """Draws pictures for programs that speak the API of AUTOMATIC1111's Stable Diffusion
web UI (`/sdapi/v1`) or OpenAI's (`/v1`). A key, where the server asks for one, is the bearer token,
or the password of basic authentication."""


def create_api(engine: EngineClient, access: Access) -> fastapi.FastAPI:
    """Return the application for an engine, served to whom `access` admits; described at /docs."""
    api = fastapi.FastAPI(title="sd_tpu", version=VERSION, description=_DESCRIPTION, redoc_url=None)
    api.include_router(health.make_router(engine, access), tags=["Health"])
    files, admitted = openai.Kept(), [fastapi.Depends(access.admit)]
    api.include_router(
        a1111.make_router(engine), prefix="/sdapi/v1", tags=["A1111"], dependencies=admitted
    )
    api.include_router(
        a1111.make_control_router(engine),
        prefix="/controlnet",
        tags=["A1111"],
        dependencies=admitted,
    )
    api.include_router(
        openai.make_router(engine, files), prefix="/v1", tags=["OpenAI"], dependencies=admitted
    )
    # Whoever has an address of a picture was given it; browsers send no key with one.
    api.include_router(openai.make_file_router(files), prefix="/v1", tags=["OpenAI"])
    api.add_exception_handler(RequestError, _refuse)
    api.add_exception_handler(DrawingError, _refuse)
    api.add_exception_handler(RequestValidationError, _refuse_malformed)  # ty: ignore[invalid-argument-type]
    api.add_exception_handler(HTTPException, _refuse_http)  # ty: ignore[invalid-argument-type]
    return api


def _refuse(_: fastapi.Request, error: Exception) -> JSONResponse:
    """Answer why something is not drawn, and when to come back if it may be then."""
    match error:
        case Busy(retry_after=seconds):
            return error_response(429, str(error), {"Retry-After": str(seconds)})
        case Closing():
            return error_response(503, str(error), {"Retry-After": "60"})
        case DrawingError():
            return error_response(500, str(error))
    return error_response(400, str(error))


def _refuse_malformed(_: fastapi.Request, error: RequestValidationError) -> JSONResponse:
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    return error_response(400, f"The request cannot be read: {where}: {first['msg']}.")


def _refuse_http(_: fastapi.Request, error: HTTPException) -> JSONResponse:
    return error_response(error.status_code, str(error.detail), error.headers)


def error_response(
    status: int, sentence: str, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """Return an error response with the sentence where clients of either API look for it."""
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    error = {"message": sentence, "type": kind, "param": None, "code": None}
    return JSONResponse({"error": error, "detail": sentence}, status, headers)
