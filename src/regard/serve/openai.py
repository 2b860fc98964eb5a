"""The OpenAI-compatible routes: /v1/models, /v1/completions, /v1/embeddings.

A client of that API works unchanged with `base_url="http://HOST:PORT/v1"`. Completions are those of `regard generate`:
`temperature = 0` is greedy, otherwise tokens are sampled, and the same `seed` gives the same text. There is no chat: a
model of this size is not trained for it, so /v1/chat/completions responds with 404 in the same format.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import random
import struct
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field

from regard.errors import UserError
from regard.predict.config import SearchConfig
from regard.predict.generator import Generator, Sample, Token
from regard.serve.errors import ApiError, DetailedError, asked_language, documented, error_body
from regard.serve.models import Served
from regard.serve.service import Service
from regard.text.tokenizer import Tokenizer

log = logging.getLogger("regard.serve")
REASONS = {"end": "stop", "stop": "stop", "limit": "length", "context": "length"}
MOST = 128  # prompts or inputs in a request
# Fields that would change the output, but are not offered; these values change nothing.
UNOFFERED: dict[str, tuple[Any, ...]] = {
    "best_of": (None, 1), "suffix": (None, ""), "presence_penalty": (None, 0), "frequency_penalty": (None, 0),
    "logit_bias": (None, {}), "repetition_penalty": (None, 1), "min_p": (None, 0), "min_tokens": (None, 0),
}  # fmt: skip
Text = Annotated[str, Field(min_length=0)]  # pydantic checks its characters because of the constraint
Strings = Annotated[list[Text], Field(max_length=2048, fail_fast=True)]
Ids = Annotated[list[int], Field(max_length=100_000, fail_fast=True)]


Prompts = Text | Ids | Strings | Annotated[list[Ids], Field(max_length=2048, fail_fast=True)]


class CompletionRequest(BaseModel):
    """A prompt, or several, as text or as token ids."""

    model_config = ConfigDict(extra="allow", strict=True)  # clients send more fields, without a meaning here: `user`

    model: str
    prompt: Prompts
    max_tokens: Annotated[int, Field(ge=1, le=100_000)] | None = Field(16, description="tokens to generate at most")
    temperature: Annotated[float, Field(ge=0, le=100)] | None = Field(1.0, description="0 is greedy decoding")
    top_p: Annotated[float, Field(ge=0, le=1)] | None = Field(
        1.0, description="sample among the fewest tokens whose probabilities sum to this"
    )
    top_k: Annotated[int, Field(ge=0)] | None = Field(0, description="sample among this many tokens; 0: among all")
    n: Annotated[int, Field(ge=1, le=MOST)] | None = Field(1, description="samples for each prompt")
    stop: Text | Annotated[list[Text], Field(max_length=16)] | None = Field(
        None, description="where to end a text; it does not contain these"
    )
    seed: int | None = Field(None, description="the same seed gives the same text")
    echo: bool | None = Field(False, description="begin the text with the prompt")
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = Field(None, description="return log-probabilities")
    stream: bool | None = Field(False, description="send tokens as they are sampled, as server-sent events")
    stream_options: dict[str, Any] | None = Field(None, description="{include_usage: true} adds the token counts")


class EmbeddingRequest(BaseModel):
    """A text, or several, as text or as token ids."""

    model_config = ConfigDict(extra="ignore", strict=True)

    model: str
    input: Prompts
    encoding_format: Literal["float", "base64"] | None = "float"
    dimensions: int | None = Field(None, description="only the size of the model's vectors")


class Model(BaseModel):
    """A model of this server; what it can do is known when it is ready."""

    id: str
    object: Literal["model"] = "model"
    created: int = Field(0, description="when it was loaded, in seconds since 1970")
    owned_by: str = "regard"
    status: Literal["ready", "loading", "failed"]
    kind: str | None = Field(None, description="the command that does the same: generate, translate, classify …")
    input: Literal["text", "image", "numbers"] | None = None
    embeddings: bool | None = Field(None, description="whether /v1/embeddings accepts it")
    languages: tuple[str, str] | None = Field(None, description="of a translation model: from which to which")
    channels: int | None = Field(None, description="of a forecasting model: numbers per step")


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model]


class LogProbabilities(BaseModel):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class Choice(BaseModel):
    index: int
    text: str
    logprobs: LogProbabilities | None
    finish_reason: Literal["stop", "length"] | None


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionResponse(BaseModel):
    """The continuations of every prompt, `n` of each."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[Choice]
    usage: Usage


class EmbeddingItem(BaseModel):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str = Field(description="a string: base64 of float32 values, little-endian")


class EmbeddingUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class EmbeddingResponse(BaseModel):
    object: Literal["list"] = "list"
    data: list[EmbeddingItem]
    model: str
    usage: EmbeddingUsage


STREAM = {  # the schema of one event
    "text/event-stream": {
        "schema": {
            "type": "object",
            "properties": {
                "data": {"type": "string", "description": "with `stream`: `{…}` for each token, then `[DONE]`"}
            },
            "required": ["data"],
        }
    }
}


def router(service: Service) -> APIRouter:
    api = APIRouter(prefix="/v1", tags=["OpenAI"], responses=documented(DetailedError, 400, 401, 413, 429))
    failures = documented(DetailedError, 404, 503, 504)

    @api.get("/models", response_model_exclude_none=True)
    def models() -> ModelList:
        """The models of this server."""
        return ModelList(data=[describe(service, name) for name in service.models.folders])

    @api.get("/models/{name}", response_model_exclude_none=True, responses=documented(DetailedError, 404))
    def model(name: str) -> Model:
        """One model of this server."""
        if name not in service.models.folders:
            raise ApiError(404, f"there is no model {name!r}", param="model", code="model_not_found")
        return describe(service, name)

    @api.post("/completions", response_model=CompletionResponse, responses={200: {"content": STREAM}, **failures})
    async def completions(request: Request, body: CompletionRequest) -> Response | dict[str, Any]:
        """Continue a prompt."""
        served = service.model(body.model, "generate")
        prompts, config, stops = await asyncio.to_thread(read_completion, served, body)
        completion = Completion(served, body, prompts, asked_language(request.scope))
        tokens = service.stream(request, served, prompts, config, stops, body.logprobs or 0)
        if not body.stream:
            async for number, token in tokens:
                completion.take(number, token)
            return completion.whole()
        first = await anext(tokens)  # an error before the first token is an ordinary response
        return StreamingResponse(completion.events(first, tokens), media_type="text/event-stream")

    @api.post("/embeddings", responses=failures)
    async def embeddings(request: Request, body: EmbeddingRequest) -> EmbeddingResponse:
        """A unit vector for each text: the mean of the encoder's states."""
        served = service.model(body.model, "embed")
        inputs = await asyncio.to_thread(read_inputs, served, body)
        outputs = await service.predict(request, served, inputs, method="embed")
        total = sum(one.tokens for one in outputs)

        def write(values: list[float]) -> Any:
            if body.encoding_format == "base64":
                return base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()
            return values

        data = [EmbeddingItem(index=at, embedding=write(one.values)) for at, one in enumerate(outputs)]
        usage = EmbeddingUsage(prompt_tokens=total, total_tokens=total)
        return EmbeddingResponse(data=data, model=served.name, usage=usage)

    return api


def describe(service: Service, name: str) -> Model:
    served = service.models.ready.get(name)
    if served is None:
        return Model(id=name, status="failed" if name in service.models.failed else "loading")
    inputs: dict[str, Literal["text", "image", "numbers"]] = {"tokens": "text", "patches": "image"}
    return Model(
        id=name,
        created=served.created,
        status="ready",
        kind=served.kind,
        input="numbers" if served.kind == "predict" else inputs.get(served.bundle.config.input),
        embeddings=served.embedder is not None,
        languages=served.languages,
        channels=served.bundle.config.feature_dim if served.kind == "predict" else None,
    )


def read_completion(served: Served, body: CompletionRequest) -> tuple[list[list[int]], SearchConfig, list[str]]:
    """The ids of the prompts, how to sample, and the stop strings."""
    generator = served.generator
    for name, values in UNOFFERED.items():
        if (value := (body.model_extra or {}).get(name)) not in (*values, body.n if name == "best_of" else None):
            raise ApiError(400, f"{name} = {str(value)[:40]}: is not offered here; remove it", param=name)
    if body.logprobs and not generator.RANKS:
        raise ApiError(
            400,
            f"logprobs = {body.logprobs}: CTranslate2 gives the log-probability of the sampled token only; use "
            "logprobs = 0, or a model that is served from its run",
            param="logprobs",
        )
    prompts = several(body.prompt)
    if body.echo and body.logprobs is not None:
        raise ApiError(
            400, "echo with logprobs: those of the prompt's tokens are not offered here; remove one", param="logprobs"
        )
    if not 1 <= len(prompts) * (body.n or 1) <= MOST:
        raise ApiError(400, f"prompt: {len(prompts)} prompts; pass 1 to {MOST // (body.n or 1)}", param="prompt")
    ids = [
        read_prompt(generator, prompt, "prompt" if len(prompts) == 1 else f"prompt.{number}")
        for number, prompt in enumerate(prompts)
    ]
    try:
        greedy = body.temperature == 0 or body.top_p == 0
        config = SearchConfig(
            sample=True,
            n_best=body.n or 1,
            max_length=body.max_tokens or 16,
            temperature=1.0 if greedy or body.temperature is None else body.temperature,
            top_k=1 if greedy else body.top_k or 0,
            top_p=1.0 if greedy or body.top_p is None else body.top_p,
            seed=(random.randrange(2**32) if generator.SEEDS else 1) if body.seed is None else body.seed % 2**32,
        )
    except UserError as error:
        raise ApiError(400, served.shown(error), code="invalid_input") from None
    return ids, config, [body.stop] if isinstance(body.stop, str) else body.stop or []


def read_inputs(served: Served, body: EmbeddingRequest) -> list[Any]:
    """The texts to embed, or the ids of each."""
    assert served.embedder is not None
    size, most = served.bundle.config.dim, served.embedder.max_length
    if body.dimensions not in (None, size):
        raise ApiError(
            400, f"dimensions = {body.dimensions}: the vectors of {served.name!r} have {size}", param="dimensions"
        )
    inputs = several(body.input)
    if not inputs or [] in inputs:
        raise ApiError(400, "input: is empty; pass a text, token ids, or a list of either", param="input")
    for ids in inputs:
        if not isinstance(ids, str):
            check_ids(served.embedder.tokenizer, ids, "input")
    return [one if isinstance(one, str) else one[:most] for one in inputs]


def several(inputs: Any) -> list[Any]:
    """Texts, or lists of ids, of which there may be only one."""
    return [inputs] if isinstance(inputs, str) or (inputs and isinstance(inputs[0], int)) else inputs


def read_prompt(generator: Generator, prompt: str | Sequence[int], where: str) -> list[int]:
    """The ids of a prompt, or an error that names the field `where`."""
    ids = generator.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
    if not ids:
        raise ApiError(400, f"{where}: is empty; pass at least one character to continue", param=where)
    if len(ids) > generator.context:
        message = f"{where}: has {len(ids):,} tokens, but the model attends to {generator.context:,}; shorten it"
        raise ApiError(400, message, param=where, code="context_length_exceeded")
    check_ids(generator.tokenizer, ids, where)
    return ids


def check_ids(tokenizer: Tokenizer, ids: Sequence[int], where: str) -> None:
    try:
        tokenizer.decode(ids)
    except UserError as error:
        raise ApiError(400, f"{where}: {error}", param=where, code="invalid_input") from None


def token_text(tokenizer: Tokenizer, id: int) -> str:
    """A token as OpenAI writes it: its text, or of a part of a character its bytes, such as bytes:\\xea."""
    if tokenizer.byte_level and (raw := tokenizer.token_bytes(id)):
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
    return tokenizer.decode([id]) or tokenizer.token(id)


Taken = tuple[Token, int]  # and where its text begins


class Completion:
    """The choices of a response, from the tokens of each prompt."""

    def __init__(self, served: Served, body: CompletionRequest, prompts: list[list[int]], language: str) -> None:
        self.body, self.prompts, self.tokenizer, self.language = body, prompts, served.generator.tokenizer, language
        self.head = {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time())}
        self.head["model"] = served.name
        count = body.n or 1
        self.samples = [Sample(self.echo(number)) for number in range(len(prompts)) for _ in range(count)]
        self.taken: list[list[Taken]] = [[] for _ in self.samples]

    def echo(self, prompt: int) -> str:
        return self.tokenizer.decode(self.prompts[prompt]) if self.body.echo else ""

    def take(self, prompt: int, token: Token) -> int:
        """Add a token; the index of its choice."""
        index = prompt * (self.body.n or 1) + token.sample
        if self.body.logprobs is not None:
            self.taken[index].append((token, len(self.samples[index].text)))
        self.samples[index].take(token)
        return index

    def choice(self, index: int, text: str, taken: list[Taken], ended: str | None) -> dict[str, Any]:
        reason = None if ended is None else REASONS[ended]
        logprobs = None if self.body.logprobs is None else self.logprobs(taken)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def logprobs(self, taken: list[Taken]) -> dict[str, Any]:
        """By token: text, log-probability, the most probable tokens in its place and itself, and where it begins."""
        tops = []
        for token, _ in taken:
            top: dict[str, float] = {}
            for id, value in (*token.top, (token.id, token.log_probability)):
                top.setdefault(token_text(self.tokenizer, id), value)  # of two with one text, the more probable
            tops.append(top)
        return {
            "tokens": [token_text(self.tokenizer, token.id) for token, _ in taken],
            "token_logprobs": [token.log_probability for token, _ in taken],
            "top_logprobs": tops,
            "text_offset": [offset for _, offset in taken],
        }

    def usage(self) -> dict[str, int]:
        read, written = sum(map(len, self.prompts)), sum(len(sample.ids) for sample in self.samples)
        return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}

    def whole(self) -> dict[str, Any]:
        choices = [self.choice(index, one.text, self.taken[index], one.ended) for index, one in enumerate(self.samples)]
        return {**self.head, "choices": choices, "usage": self.usage()}

    async def events(self, first: tuple[int, Token], tokens: AsyncIterator[tuple[int, Token]]) -> AsyncIterator[str]:
        """Server-sent events: a chunk for each token, the usage if it was asked for, [DONE]."""
        try:
            begun = set[int]()
            item: tuple[int, Token] | None = first
            while item is not None:
                number, token = item
                index = self.take(number, token)
                text = token.text if index in begun else self.echo(number) + token.text
                begun.add(index)
                choice = self.choice(index, text, self.taken[index][-1:], token.ended)
                yield event({**self.head, "choices": [choice]})
                item = await anext(tokens, None)
            if (self.body.stream_options or {}).get("include_usage"):
                yield event({**self.head, "choices": [], "usage": self.usage()})
            yield "data: [DONE]\n\n"
        except ApiError as error:
            yield event(error_body(error, self.language))
        except Exception:  # the status is already sent
            log.exception("internal error")
            failure = ApiError(500, "internal error; the log has the details", code="internal_error")
            yield event(error_body(failure, self.language))


def event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"
