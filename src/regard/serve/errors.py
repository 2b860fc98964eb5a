"""Errors as responses, in the format of the API that was called.

/v1/…          OpenAI's format    {"error": {"message": …, "type": …, "param": …, "code": …}}
elsewhere      LibreTranslate's   {"error": "…"}

Messages are in English, or in Korean if the Accept-Language of the request begins with it, as that of the playground.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from starlette.datastructures import Headers
from starlette.types import Scope

from regard.messages import localize

MEANINGS = {
    400: "The request is invalid.",
    401: "A key is missing or unknown.",
    403: "The server is called by another name.",
    404: "There is no model with this name, or it cannot do this.",
    408: "The body did not arrive in time.",
    409: "The model was not replaced.",
    413: "The body is too large.",
    429: "The queue is full, or too many requests per minute: try again after `Retry-After` seconds.",
    431: "The headers are too large.",
    503: "The model is being loaded, or the server is shutting down.",
    504: "There was no output in time.",
}


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class DetailedError(BaseModel):
    """An error in OpenAI's format."""

    error: ErrorDetail


class PlainError(BaseModel):
    """An error in LibreTranslate's format."""

    error: str


KINDS = {  # of errors that say that a value has another type
    "string_type": "a string", "list_type": "a list", "int_type": "an integer", "float_type": "a number",
    "bool_type": "true or false", "dict_type": "an object",
}  # fmt: skip


RULES = {  # of errors that say what a value violates
    "greater_than_equal": "must be {ge:,} or more", "less_than_equal": "must be {le:,} or less",
    "greater_than": "must be greater than {gt:,}", "less_than": "must be less than {lt:,}",
    "too_short": "must not be empty", "too_long": "must have at most {max_length:,} items",
    "string_too_long": "must have at most {max_length:,} characters",
}  # fmt: skip


def documented(model: type[BaseModel], *statuses: int) -> dict[int | str, dict[str, Any]]:
    """The errors of a route, for OpenAPI."""
    wait = {"headers": {"Retry-After": {"description": "seconds", "schema": {"type": "integer"}}}}
    return {
        status: {"model": model, "description": MEANINGS[status], **(wait if status in (429, 503) else {})}
        for status in statuses
    }


class ApiError(Exception):
    """A response other than success; how it is written depends on the API that was called."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry_after: int = 0
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.retry_after = status, message, param, code, retry_after


def invalid(errors: Sequence[Any]) -> ApiError:
    """What is wrong with a request, by the errors of pydantic.

    A value that may have several types has errors for each of them: those count that come furthest into the value.
    """
    first = errors[0]
    field = next((step for step in first["loc"] if step not in ("body", "query")), None)
    if first["type"] == "json_invalid" or field is None:
        reason = f" ({first['ctx']['error']}, at character {field})" if field is not None else ""
        message = f"the body must be a JSON object, with Content-Type: application/json{reason}"
        return ApiError(400, message, code="invalid_request")

    def steps(error: Any) -> list[int]:
        return [step for step in error["loc"] if isinstance(step, int)]

    own = [error for error in errors if field in error["loc"]]
    furthest = max(map(steps, own))
    own = [error for error in own if steps(error) == furthest]
    best = next((error for error in own if error["type"] not in KINDS), own[0])
    where = ".".join(map(str, (field, *furthest)))[:200]
    match best["type"]:
        case "missing":
            message = f"{where}: is required"
        case "extra_forbidden":
            message = f"{where}: there is no such field; remove it"
        case "string_unicode":
            message = f"{where}: has half a surrogate pair, which is not Unicode text; remove it"
        case kind if kind in KINDS:
            kinds = " or ".join(dict.fromkeys(KINDS[error["type"]] for error in own))
            message = f"{where} = {shown(best['input'])}: must be {kinds}"
        case kind:
            rule = RULES[kind].format(**best["ctx"]) if kind in RULES else best["msg"].replace("Input should", "must")
            message = f"{where} = {shown(best['input'])}: {rule}"
    return ApiError(400, message, param=where, code="invalid_request")


def shown(value: Any) -> str:
    """The beginning of a value, as JSON."""
    text = json.dumps(value, ensure_ascii=False, default=str).encode(errors="backslashreplace").decode()
    return text if len(text) <= 60 else f"{text[:59]}…"


def asked_language(scope: Scope) -> str:
    """The language of messages that a request asks for."""
    first = Headers(scope=scope).get("accept-language", "").partition(",")[0].partition(";")[0]
    return "ko" if first.partition("-")[0].strip().lower() == "ko" else "en"


def error_body(error: ApiError, language: str) -> dict[str, Any]:
    """An error as OpenAI's clients read it."""
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    message = localize(error.message, language)
    return {"error": {"message": message, "type": kind, "param": error.param, "code": error.code}}


def error_response(scope: Scope, error: ApiError) -> Response:
    """An error in the format of the API that was called."""
    language = asked_language(scope)
    is_openai = scope["path"].startswith("/v1/")
    body: Any = error_body(error, language) if is_openai else {"error": localize(error.message, language)}
    headers = {"Retry-After": str(error.retry_after)} if error.retry_after else {}
    if error.status in (408, 413):  # the rest of the body is not read, or read and dropped
        headers["Connection"] = "close"
    return JSONResponse(body, error.status, headers)
