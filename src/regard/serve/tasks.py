"""One route for each task: /v1/translate, /v1/classify, /v1/tag, /v1/fill, /v1/caption, /v1/forecast.

The outputs are those of the commands with `--json`. Texts, images and series come as one input or as a list; an image
is base64, alone or as a data URL (`data:image/png;base64,…`). A path is never read.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from regard.predict.bundle import TextPrediction
from regard.predict.classifier import ClassPrediction
from regard.predict.mask_predictor import MaskPrediction
from regard.predict.regressor import Forecast
from regard.predict.tagger import TagPrediction
from regard.serve.errors import ApiError, DetailedError, documented
from regard.serve.models import Served
from regard.serve.service import Service

MOST = 256  # inputs in a request
Text = Annotated[str, Field(max_length=100_000)]
Inputs = Text | Annotated[list[Text], Field(min_length=1, max_length=MOST, fail_fast=True)]
Image = Annotated[str, Field(max_length=20_000_000)]
Images = Image | Annotated[list[Image], Field(min_length=1, max_length=MOST, fail_fast=True)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Channels = Annotated[list[Number], Field(max_length=10_000, fail_fast=True)]
Numbers = Annotated[list[Number | Channels], Field(min_length=1, max_length=100_000, fail_fast=True)]


class TaskRequest(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = Field(None, description="by default the first that can do it")


class Search(TaskRequest):
    """How an output is found; what is left out is as in the model's recipe."""

    beam: Annotated[int, Field(ge=1, le=64)] | None = Field(None, description="hypotheses kept at every step")
    n_best: Annotated[int, Field(ge=1, le=64)] | None = Field(None, description="outputs for each input")
    length_penalty: Annotated[float, Field(ge=-10, le=10)] | None = Field(
        None, description="greater values prefer longer outputs; 0.6 to 1 is usual"
    )
    max_length: Annotated[int, Field(ge=1, le=10_000)] | None = Field(None, description="tokens")
    sample: bool | None = Field(
        None, description="sample instead of searching, with temperature, top_k, top_p and seed"
    )
    temperature: Annotated[float, Field(gt=0, le=100)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**32)] | None = None

    def options(self) -> dict[str, Any]:
        names = Search.model_fields.keys() - {"model"}
        return {name: value for name in sorted(names) if (value := getattr(self, name)) is not None}


class TranslateRequest(Search):
    input: Inputs
    alignments: bool = Field(
        False, description="also links (source word, target word) of each best output, numbered from 0"
    )


class ClassifyRequest(TaskRequest):
    """Texts, or images as base64, whichever the model reads."""

    input: Images


class TagRequest(TaskRequest):
    input: Inputs


class FillRequest(TaskRequest):
    input: Inputs
    top: Annotated[int, Field(ge=1, le=100)] = Field(5, description="candidates for each mask")


class CaptionRequest(Search):
    input: Images


class ForecastRequest(TaskRequest):
    """A sequence of numbers, or the steps of a series with a list of channels each."""

    input: Numbers
    steps: Annotated[int, Field(ge=1, le=10_000)] | None = Field(
        None, description="by default as many as the input has, or the horizon of a time series"
    )


@dataclass(frozen=True)
class AlignedTranslation(TextPrediction):
    """The outputs of a search, best first, and with `alignments` the links of the best one."""

    alignment: tuple[tuple[int, int], ...] | None = None


class TaskResponse(BaseModel):
    model: str = Field(description="the model that was used")


class TranslateResponse(TaskResponse):
    outputs: list[AlignedTranslation]


class ClassifyResponse(TaskResponse):
    outputs: list[ClassPrediction]


class TagResponse(TaskResponse):
    outputs: list[TagPrediction]


class FillResponse(TaskResponse):
    outputs: list[MaskPrediction]


class CaptionResponse(TaskResponse):
    outputs: list[TextPrediction]


class ForecastResponse(TaskResponse):
    outputs: list[Forecast]


def router(service: Service) -> APIRouter:
    errors = documented(DetailedError, 400, 401, 404, 413, 429, 503, 504)
    api = APIRouter(prefix="/v1", tags=["tasks"], responses=errors)

    @api.post("/translate", response_model_exclude_none=True)
    async def translate(request: Request, body: TranslateRequest) -> TranslateResponse:
        """Translate texts: for each the n best outputs with score and log-probability."""
        served, options = service.model(body.model, "translate"), body.options()
        # samples depend on the index of a line, so that a sampled text is computed alone
        texts = listed(body.input)
        found = await service.predict(request, served, texts, alone=bool(body.sample), **options)
        outputs = [AlignedTranslation(**vars(one)) for one in found]
        if body.alignments:
            pairs = [(text, one.text) for text, one in zip(texts, outputs, strict=True)]
            links = await service.predict(request, served, pairs, method="align")
            outputs = [replace(one, alignment=some) for one, some in zip(outputs, links, strict=True)]
        return TranslateResponse(model=served.name, outputs=outputs)

    @api.post("/classify")
    async def classify(request: Request, body: ClassifyRequest) -> ClassifyResponse:
        """Classify texts or images: for each the label and the probability of every class."""
        served = service.model(body.model, "classify")
        outputs = await service.predict(request, served, readable(served, listed(body.input)))
        return ClassifyResponse(model=served.name, outputs=outputs)

    @api.post("/tag")
    async def tag(request: Request, body: TagRequest) -> TagResponse:
        """Tag the words of texts: for each its words with their tags, and its entities."""
        served = service.model(body.model, "tag")
        return TagResponse(model=served.name, outputs=await service.predict(request, served, listed(body.input)))

    @api.post("/fill")
    async def fill(request: Request, body: FillRequest) -> FillResponse:
        """Predict masked tokens: for each <mask> of each text the most probable tokens."""
        served = service.model(body.model, "fill")
        outputs = await service.predict(request, served, listed(body.input), top=body.top)
        return FillResponse(model=served.name, outputs=outputs)

    @api.post("/caption")
    async def caption(request: Request, body: CaptionRequest) -> CaptionResponse:
        """Describe images: for each the n best captions."""
        served, options = service.model(body.model, "caption"), body.options()
        items = readable(served, listed(body.input))
        outputs = await service.predict(request, served, items, alone=bool(body.sample), **options)
        return CaptionResponse(model=served.name, outputs=outputs)

    @api.post("/forecast")
    async def forecast(request: Request, body: ForecastRequest) -> ForecastResponse:
        """Predict the numbers that follow a sequence."""
        served = service.model(body.model, "predict")
        options: dict[str, Any] = {} if body.steps is None else {"steps": body.steps}
        outputs = await service.predict(request, served, [body.input], **options)
        return ForecastResponse(model=served.name, outputs=outputs)

    return api


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def readable(served: Served, items: Sequence[str]) -> list[Any]:
    """The inputs as the model reads them: texts, or the bytes of images."""
    kind = served.bundle.config.input
    if kind == "tokens":
        return list(items)
    if kind != "patches":
        raise ApiError(400, f"the model {served.name!r} reads features of another model, which cannot be sent here")
    images = []
    for number, item in enumerate(items):
        text = item.partition(",")[2] if item.startswith("data:") else item
        try:
            images.append(base64.b64decode(text, validate=True))
        except (binascii.Error, ValueError):
            raise ApiError(400, f"input.{number}: is not base64", param=f"input.{number}") from None
    return images
