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
    POST  api/flow, …      one token at a time: `regard.explore.server.passes`
    POST  api/lens, …      what is computed from activations: `regard.explore.server.analysis`
    POST  api/image        store the pixels of an image; returns the name by which a question refers to it
    GET   api/image/NAME   the pixels again

A question is {"run", "text", "target", "image", "changes", "step"}, where `step` is that of a snapshot; equal questions
are computed once. An error is {"error": "a sentence"} with a 4xx status: 404 for an unknown run, 422 for any other
mistake in the request; 503 with Retry-After if too many requests wait. Whatever computes is run by `Work`, one request
at a time.
"""

from __future__ import annotations

from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.staticfiles import StaticFiles
from pydantic import Field
from starlette.exceptions import HTTPException

import regard
from regard import page
from regard.errors import UserError
from regard.explore.server import analysis, passes
from regard.explore.server.models import Models
from regard.explore.server.questions import Asked, Frame
from regard.explore.server.work import Work


class AskedMaps(Asked):
    part: Literal["encoder", "decoder", "cross"]
    layer: int
    heads: list[int] = Field(min_length=1, max_length=1024)


class AskedSteps(Asked):
    part: Literal["encoder", "decoder", "cross"]
    layer: int
    head: int
    query: int


class AskedLayer(Asked):
    part: Literal["encoder", "decoder", "cross"]
    layer: int


class AskedSearch(Asked):
    beam: int = 4


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

    @api.post(f"{base}/examples")
    async def examples(asked: Asked, request: Request) -> list[dict[str, Any]]:
        return await work.run(request, lambda: models.examples(asked.run))

    @api.post(f"{base}/look")
    async def look(asked: Asked, request: Request) -> Response:
        def compute() -> bytes:
            from regard.explore.server.responses import look_response

            changed = asked.look(models)
            return look_response(asked.run, asked.look(models, unchanged=True), changed)

        return Frame(await work.run(request, compute))

    @api.post(f"{base}/maps")
    async def maps(asked: AskedMaps, request: Request) -> Response:
        def compute() -> bytes:
            from regard.explore.server.responses import maps_response

            return maps_response(asked.look(models), asked.part, asked.layer, asked.heads)

        return Frame(await work.run(request, compute))

    @api.post(f"{base}/steps")
    async def query_steps(asked: AskedSteps, request: Request) -> Response:
        def compute() -> bytes:
            from regard.explore.server.responses import steps_response

            return steps_response(asked.look(models).steps(asked.part, asked.layer, asked.head, asked.query))

        return Frame(await work.run(request, compute))

    @api.post(f"{base}/search")
    async def search(asked: AskedSearch, request: Request) -> dict[str, Any]:
        def compute() -> dict[str, Any]:
            from regard.explore.server.responses import search_tree

            return search_tree(asked.look(models), asked.beam)

        return await work.run(request, compute)

    @api.post(f"{base}/roles")
    async def roles(asked: Asked, request: Request) -> dict[str, Any]:
        def compute() -> dict[str, Any]:
            from regard.explore.server.heads import roles_response

            return roles_response(asked.look(models, unchanged=True), models.pairs(asked.run))

        return await work.run(request, compute)

    @api.post(f"{base}/off")
    async def off(asked: AskedLayer, request: Request) -> Response:
        def compute() -> bytes:
            from regard.explore.server.heads import off_response

            return off_response(asked.look(models), asked.part, asked.layer)

        return Frame(await work.run(request, compute))

    @api.get(f"{base}/training/{{run}}")
    def training(run: str) -> dict[str, Any]:
        from regard.explore.server.heads import training_response

        models.recipe(run)  # raises for an unknown one
        return training_response(models.folders[run])

    analysis.add_routes(api, base, models, work)
    passes.add_routes(api, base, models, work)

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
