"""The application: routes, middleware, and what becomes of errors."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from fastapi.security import HTTPBearer
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

import regard
from regard import page
from regard.messages import localize
from regard.serve import libretranslate, openai, tasks
from regard.serve.errors import MEANINGS, ApiError, PlainError, asked_language, documented, error_response, invalid
from regard.serve.guard import ASSETS, Guard, GuardMiddleware
from regard.serve.metrics import Metrics, Observed
from regard.serve.service import Service
from regard.serve.shared import NotAll

log = logging.getLogger("regard.serve")


class Health(BaseModel):
    status: str


class Readiness(BaseModel):
    ready: bool
    models: dict[str, str]  # ready, loading or failed


class Reloaded(BaseModel):
    model: str
    status: str


class Application(FastAPI):
    """FastAPI, but its OpenAPI does not say that an invalid request gets 422: here it gets 400, as documented."""

    def openapi(self) -> dict[str, Any]:
        schema = super().openapi()
        for path in schema["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            schema["components"]["schemas"].pop(name, None)
        return schema


def localized(schema: Any, language: str) -> Any:
    """An OpenAPI document with its descriptions in this language."""
    if isinstance(schema, list):
        return [localized(one, language) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: localize(one, language) if name == "description" and isinstance(one, str) else localized(one, language)
        for name, one in schema.items()
    }


class Assets(StaticFiles):
    """The scripts and styles of the page."""

    def file_response(self, *arguments: Any, **options: Any) -> Response:
        response = super().file_response(*arguments, **options)
        response.headers.update(page.HEADERS)
        return response


def send_page(name: str) -> Response:
    """A file of the page, or why there is none."""
    if (why := page.page_missing(name)) is not None:
        return PlainTextResponse(f"{why}\n", 404, page.HEADERS)
    return FileResponse(page.PAGE / name, headers=page.HEADERS)


def make_app(
    service: Service,
    guard: Guard,
    metrics: Metrics,
    *,
    cors: Sequence[str] = (),
    admin_key: str | None = None,
    reload: Callable[[str], None] | None = None,
) -> FastAPI:
    """`reload` loads a model again; by default, in this process."""
    api = Application(title="Regard", version=regard.__version__, openapi_url=None)
    for kind in (ApiError, RequestValidationError, HTTPException, Exception):
        api.add_exception_handler(kind, respond)
    # for OpenAPI; the guard checks keys
    auth = [Depends(HTTPBearer(auto_error=False, description="a key of this server"))] if guard.keys else []
    for router in (openai.router(service), tasks.router(service), libretranslate.router(service, guard)):
        api.include_router(router, dependencies=auth)
    api.include_router(state_router(service))
    api.include_router(metrics_router(metrics), dependencies=auth)
    if admin_key is not None:
        load = reload or service.models.reload
        api.include_router(admin_router(service, guard, admin_key, load), dependencies=auth)

    @api.get("/openapi.json", include_in_schema=False)
    def schema(request: Request) -> Response:
        return JSONResponse(localized(api.openapi(), asked_language(request.scope)))

    for path, name in {"/": "playground.html", "/docs": "playground.html", "/icon.svg": "icon.svg"}.items():
        api.add_api_route(path, partial(send_page, name), include_in_schema=False, response_model=None)
    api.mount(ASSETS.rstrip("/"), Assets(directory=page.PAGE / "assets", check_dir=False))

    api.add_middleware(GuardMiddleware, guard=guard)
    if cors:
        api.add_middleware(
            CORSMiddleware,
            allow_origins=list(cors),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["Retry-After"],
        )
    api.add_middleware(Observed, metrics=metrics)
    return api


def state_router(service: Service) -> APIRouter:
    api = APIRouter(tags=["state"])

    @api.get("/health")
    def health() -> Health:
        """The process runs."""
        return Health(status="ok")

    @api.get("/ready", response_model=Readiness, responses={503: {"model": Readiness}})
    def ready() -> Response:
        """All models are loaded and requests are accepted: 200, otherwise 503."""
        states = {name: openai.describe(service, name).status for name in service.models.folders}
        is_ready = not service.draining and all(state == "ready" for state in states.values())
        return JSONResponse({"ready": is_ready, "models": states}, 200 if is_ready else 503)

    return api


def metrics_router(metrics: Metrics) -> APIRouter:
    refused: dict[int | str, Any] = {status: {"description": MEANINGS[status]} for status in (401, 429)}
    api = APIRouter(tags=["state"], responses=refused)

    @api.get("/metrics", response_class=PlainTextResponse)
    def prometheus() -> Response:
        """Metrics in the text format of Prometheus."""
        return PlainTextResponse(metrics.text(), media_type="text/plain; version=0.0.4")

    return api


def admin_router(service: Service, guard: Guard, key: str, load: Callable[[str], None]) -> APIRouter:
    api = APIRouter(tags=["state"], responses=documented(PlainError, 400, 401, 404, 409, 429))

    @api.post("/admin/reload")
    async def reload_model(request: Request, model: str) -> Reloaded:
        """Load a model again from its folder; the old one serves until the new one is ready."""
        given = request.headers.get("x-admin-key", "")
        if not hmac.compare_digest(given.encode(), key.encode()):
            guard.count(f"admin {guard.address(request.scope, request.headers)}")
            raise ApiError(401, "send the admin key as  X-Admin-Key")
        if model not in service.models.folders:
            raise ApiError(404, f"there is no model {model!r}")
        try:
            await asyncio.to_thread(load, model)
        except Exception as error:
            log.exception("model not replaced", extra={"fields": {"model": model}})
            shared = f": {error}" if isinstance(error, NotAll) else ""
            raise ApiError(409, f"the model was not replaced{shared}; the log has the details") from None
        return Reloaded(model=model, status="ready")

    return api


async def respond(request: Request, error: Exception) -> Response:
    """The response to an error."""
    match error:
        case ApiError():
            api_error = error
        case RequestValidationError():
            api_error = invalid(error.errors())
        case HTTPException(__cause__=ApiError() as cause):  # raised while the body was read
            api_error = cause
        case HTTPException():
            api_error = ApiError(error.status_code, str(error.detail))
        case _:
            api_error = ApiError(500, "internal error; the log has the details", code="internal_error")
            log.error("internal error", exc_info=error)
    return error_response(request.scope, api_error)
