"""The routes of the page. All of them start with the token, /TOKEN/, which the guard checks.

    GET   /                the page and its files
    GET   api/alive        the version, to see whether the server runs
    GET   api/runs         the models
    POST  api/look         labels, maps and output of one question, as a frame
    POST  api/maps         whole maps of some heads, where the look was too large to hold them all
    POST  api/steps        one query of one head, stage by stage
    POST  api/search       the search tree of a beam search
    POST  api/image        store the pixels of an image; returns the name by which a question refers to it
    GET   api/image/NAME   the pixels again

A question is {"run", "text", "target", "image", "changes"}, and equal questions are computed once. An error is
{"error": "a sentence"} with a 4xx status: 404 for an unknown run, 422 for any other mistake in the request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException

import regard
from regard import page
from regard.errors import UserError
from regard.explore.server.models import Models

if TYPE_CHECKING:
    from regard.explore.inside import Look


class Frame(Response):
    media_type = "application/octet-stream"


class Asked(BaseModel):
    """A question. A field of another type or name is refused."""

    model_config = ConfigDict(extra="forbid", strict=True)

    run: str
    text: str | None = None
    target: str | None = None
    image: str | None = None
    changes: dict[str, Any] = Field(default_factory=dict)

    def look(self, models: Models, *, unchanged: bool = False) -> Look:
        from regard.explore.changes import Changes

        changes = Changes.from_dict({} if unchanged else self.changes)
        return models.look((self.run, self.text, self.target, self.image), changes)


class AskedMaps(Asked):
    part: Literal["encoder", "decoder", "cross"]
    layer: int
    heads: list[int] = Field(min_length=1, max_length=1024)


class AskedSteps(Asked):
    part: Literal["encoder", "decoder", "cross"]
    layer: int
    head: int
    query: int


class AskedSearch(Asked):
    beam: int = 4


def make_app(models: Models, token: str) -> FastAPI:
    """The application without its guard."""
    api = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    for kind in (UserError, RequestValidationError, HTTPException, Exception):
        api.add_exception_handler(kind, _report)
    base = f"/{token}/api"

    @api.get(f"{base}/alive")
    def alive() -> dict[str, str]:
        return {"version": regard.__version__}

    @api.get(f"{base}/runs")
    def runs() -> dict[str, Any]:
        return {"version": regard.__version__, "runs": [models.describe(name) for name in models.folders]}

    @api.post(f"{base}/look")
    def look(asked: Asked) -> Response:
        from regard.explore.server.responses import look_response

        changed = asked.look(models)
        return Frame(look_response(asked.run, asked.look(models, unchanged=True), changed))

    @api.post(f"{base}/maps")
    def maps(asked: AskedMaps) -> Response:
        from regard.explore.server.responses import maps_response

        return Frame(maps_response(asked.look(models), asked.part, asked.layer, asked.heads))

    @api.post(f"{base}/steps")
    def query_steps(asked: AskedSteps) -> Response:
        from regard.explore.server.responses import steps_response

        return Frame(steps_response(asked.look(models).steps(asked.part, asked.layer, asked.head, asked.query)))

    @api.post(f"{base}/search")
    def search(asked: AskedSearch) -> dict[str, Any]:
        from regard.explore.server.responses import search_tree

        return search_tree(asked.look(models), asked.beam)

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
