"""Routes for one token at a time: what it becomes in a forward pass, and which one follows.

POST  api/flow         every activation of the selected tokens, from the embedding to the output, as a frame
POST  api/generate     the next tokens after a prefix, with their distributions and the size of the KV cache
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import Field

from regard.explore.server.models import Models
from regard.explore.server.questions import Asked, Frame
from regard.explore.server.work import Work


class AskedFlow(Asked):
    at: dict[Literal["source", "target"], int] = Field(default_factory=dict)


class AskedGeneration(Asked):
    prefix: list[int] = Field(default_factory=list, max_length=4096)
    count: int = 1
    sampling: dict[str, Any] = Field(default_factory=dict)  # temperature, top_k, top_p, seed


def add_routes(api: FastAPI, base: str, models: Models, work: Work) -> None:
    @api.post(f"{base}/flow")
    async def flow(asked: AskedFlow, request: Request) -> Response:
        def compute() -> bytes:
            from regard.explore.flow import Flow
            from regard.explore.server.responses import flow_response

            return flow_response(Flow.of(asked.look(models), asked.at.get("source"), asked.at.get("target")))

        return Frame(await work.run(request, compute))

    @api.post(f"{base}/generate")
    async def generate(asked: AskedGeneration, request: Request) -> list[dict[str, Any]]:
        def compute() -> list[dict[str, Any]]:
            from regard.explore.generation import generate_steps
            from regard.predict.config import SearchConfig
            from regard.settings import from_dict

            config = from_dict(SearchConfig, {**asked.sampling, "sample": True})
            steps = generate_steps(asked.look(models), config, asked.prefix, asked.count, work.check)
            return [asdict(step) for step in steps]

        return await work.run(request, compute)
