"""The routes of the page. All of them start with the token, /TOKEN/, which the guard checks.

    GET   /                the page and its files
    GET   api/alive        the version, to see whether the server runs
    GET   api/runs         the models
    POST  api/examples     inputs for a model that has none of its own
    POST  api/look         labels, maps and output of one question, as a frame
    POST  api/maps         whole maps of some heads, where the look was too large to hold them all
    POST  api/steps        one query of one head, stage by stage
    POST  api/search       the search tree of a beam search
    POST  api/roles        pattern, score and importance of every head, over examples
    POST  api/off          the heads of one layer, each off once, as a frame
    GET   api/training/RUN the loss of a run by step, and the steps of its snapshots
    POST  api/lens, …      what is computed from activations: `regard.explore.server.analysis`
    POST  api/image        store the pixels of an image; returns the name by which a question refers to it
    GET   api/image/NAME   the pixels again

A question is {"run", "text", "target", "image", "changes", "step"}, where `step` is that of a snapshot; equal questions
are computed once. An error is {"error": "a sentence"} with a 4xx status: 404 for an unknown run, 422 for any other
mistake in the request; 503 with Retry-After if too many requests wait. Whatever computes is run by `Work`, one request
at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.staticfiles import StaticFiles
from pydantic import Field
from starlette.exceptions import HTTPException

import regard
from regard import page
from regard.errors import UserError
from regard.explore.server.analysis import ANALYSIS
from regard.explore.server.models import Models
from regard.explore.server.questions import Asked, Frame, PartName
from regard.explore.server.work import Work


class AskedMaps(Asked):
    part: PartName
    layer: int
    heads: list[int] = Field(min_length=1, max_length=1024)


class AskedSteps(Asked):
    part: PartName
    layer: int
    head: int
    query: int


class AskedLayer(Asked):
    part: PartName
    layer: int


class AskedSearch(Asked):
    beam: int = 4


def examples(asked: Asked, models: Models) -> list[dict[str, Any]]:
    return models.examples(asked.run)


def look(asked: Asked, models: Models) -> Response:
    from regard.explore.server.responses import look_response

    changed = asked.look(models)
    return Frame(look_response(asked.run, asked.look(models, unchanged=True), changed))


def maps(asked: AskedMaps, models: Models) -> Response:
    from regard.explore.server.responses import maps_response

    return Frame(maps_response(asked.look(models), asked.part, asked.layer, asked.heads))


def steps(asked: AskedSteps, models: Models) -> Response:
    from regard.explore.server.responses import steps_response

    return Frame(steps_response(asked.look(models).steps(asked.part, asked.layer, asked.head, asked.query)))


def search(asked: AskedSearch, models: Models) -> dict[str, Any]:
    from regard.explore.server.responses import search_tree

    return search_tree(asked.look(models), asked.beam)


def roles(asked: Asked, models: Models) -> dict[str, Any]:
    from regard.explore.server.heads import roles_response

    return roles_response(asked.look(models, unchanged=True), models.pairs(asked.run))


def off(asked: AskedLayer, models: Models) -> Response:
    from regard.explore.server.heads import off_response

    return Frame(off_response(asked.look(models), asked.part, asked.layer))


# What is computed: each gets the question and the models, in the thread of `Work`
COMPUTED: dict[str, tuple[type[Asked], Callable[..., Any]]] = {
    "examples": (Asked, examples),
    "look": (Asked, look),
    "maps": (AskedMaps, maps),
    "steps": (AskedSteps, steps),
    "search": (AskedSearch, search),
    "roles": (Asked, roles),
    "off": (AskedLayer, off),
    **ANALYSIS,
}


def make_app(models: Models, token: str, work: Work) -> FastAPI:
    """The application without its guard."""
    api = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    for kind in (UserError, RequestValidationError, HTTPException, Exception):
        api.add_exception_handler(kind, _report)
    base = f"/{token}/api"

    models.interrupt = work.check

    @api.get(f"{base}/alive")
    async def alive() -> dict[str, str]:
        return {"version": regard.__version__}

    @api.get(f"{base}/runs")
    def runs() -> dict[str, Any]:
        described = [models.describe(name) for name in models.folders]
        return {"version": regard.__version__, "command": models.command, "runs": described}

    @api.get(f"{base}/training/{{run}}")
    def training(run: str) -> dict[str, Any]:
        from regard.explore.server.heads import training_response

        models.recipe(run)  # raises for an unknown one
        return training_response(models.folders[run])

    def add(path: str, kind: type[Asked], compute: Callable[..., Any]) -> None:
        async def respond(asked: Any, request: Request) -> Any:
            return await work.run(request, lambda: compute(asked, models))

        respond.__annotations__ = {"asked": kind, "request": Request}
        api.post(f"{base}/{path}")(respond)

    for path, route in COMPUTED.items():
        add(path, *route)

    @api.post(f"{base}/image")
    async def image(request: Request) -> dict[str, str]:
        return {"name": models.keep_image(await request.body())}

    @api.get(f"{base}/image/{{name}}")
    def kept_image(name: str) -> Response:
        if name not in models.images:
            raise HTTPException(404, "the server does not have this image any more")
        return Frame(models.images[name])

    api.mount(f"/{token}", StaticFiles(directory=page.PAGE, html=True))
    return api


async def _report(request: Request, error: Exception) -> Response:
    """Every error is one sentence under the key "error"."""
    match error:
        case HTTPException():
            return JSONResponse({"error": str(error.detail)}, error.status_code, error.headers)
        case RequestValidationError():
            first = error.errors()[0]
            where = ".".join(str(step) for step in first["loc"] if step != "body")[:200]
            return JSONResponse({"error": f"{where or 'the request'}: {first['msg']}"}, 422)
        case UserError():
            return JSONResponse({"error": str(error)}, 422)
    return JSONResponse({"error": f"{type(error).__name__}: {error}; this is a bug in Regard"}, 500)
