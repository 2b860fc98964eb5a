"""Errors as responses, in the format of the API that was called.

/v1/…          OpenAI's format    {"error": {"message": …, "type": …, "param": …, "code": …}}
elsewhere      LibreTranslate's   {"error": "…"}
"""

from __future__ import annotations

from typing import Any

from fastapi.responses import JSONResponse, Response


class ApiError(Exception):
    """A response other than success; how it is written depends on the API that was called."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry_after: int = 0
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.retry_after = status, message, param, code, retry_after


def error_body(error: ApiError) -> dict[str, Any]:
    """An error as OpenAI's clients read it."""
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def error_response(path: str, error: ApiError) -> Response:
    """An error in the format of the API that `path` belongs to."""
    body: Any = error_body(error) if path.startswith("/v1/") else {"error": error.message}
    headers = {"Retry-After": str(error.retry_after)} if error.retry_after else None
    return JSONResponse(body, error.status, headers)
