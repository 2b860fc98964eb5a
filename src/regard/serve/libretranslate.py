"""The LibreTranslate-compatible routes: /translate, /detect, /languages.

A translation model is one pair of languages, which the server is told (`regard serve NAME:en-de=RUN`) or reads from the
names of the model's training files (train.en, train.de). A request names its languages, and the model is chosen by
them. Fields come as JSON or as a form, encoded either way; the key is the field `api_key`, as its clients send it. A
text that is in the target language already comes back as it is. HTML, which would lose its tags, is refused.

`/detect` tells the languages of this server apart (`regard.serve.detect`), and no others.
"""

from __future__ import annotations

import json
import re
from email.message import Message
from typing import Any
from urllib.parse import parse_qs

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field

from regard.serve.detect import detect
from regard.serve.errors import ApiError, PlainError, documented
from regard.serve.guard import Guard
from regard.serve.models import Served
from regard.serve.service import Service

MOST = 128  # texts in a request
MOST_FIELDS = 64  # in a form
FORMS = ("application/x-www-form-urlencoded", "multipart/form-data")
NAMES = {
    "ar": "Arabic", "cs": "Czech", "de": "German", "en": "English", "es": "Spanish", "fr": "French", "it": "Italian",
    "ja": "Japanese", "ko": "Korean", "nl": "Dutch", "pl": "Polish", "pt": "Portuguese", "ru": "Russian",
    "tr": "Turkish", "vi": "Vietnamese", "zh": "Chinese",
}  # fmt: skip
FIELDS = {"q": "text, or a list of texts", "source": "language, or auto", "target": "language", "api_key": "key"}
ALTERNATIVES = {"type": ["integer", "null"], "minimum": 0, "maximum": 10, "description": "other outputs of each text"}


class Language(BaseModel):
    code: str
    name: str
    targets: list[str] = Field(description="codes of the languages into which it can be translated")


class Detection(BaseModel):
    confidence: float = Field(description="0 to 100")
    language: str


class TranslationResponse(BaseModel):
    """A list where `q` is a list."""

    translatedText: str | list[str]
    alternatives: list[str] | list[list[str]] | None = None
    detectedLanguage: Detection | list[Detection] | None = None


def openapi(*names: str) -> dict[str, Any]:
    """The body of a route, which is read by hand because it may be JSON or a form."""
    properties = {name: {"type": "string", "description": FIELDS[name]} for name in names}
    if "q" in properties:
        properties["q"] = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}  # type: ignore[dict-item]
    properties["api_key"]["type"] = ["string", "null"]  # type: ignore[assignment]
    if "target" in properties:
        properties["alternatives"] = ALTERNATIVES  # type: ignore[assignment]
        properties["format"] = {"enum": ["text", None]}  # type: ignore[dict-item]
    schema = {"schema": {"type": "object", "properties": properties, "required": [n for n in names if n != "api_key"]}}
    kinds = ("application/json", *FORMS)
    return {"requestBody": {"required": True, "content": dict.fromkeys(kinds, schema)}}


async def read_fields(request: Request) -> dict[str, Any]:
    """The fields of a JSON body or of a form."""
    raw, kind = await request.body(), request.headers.get("content-type", "")
    try:
        if kind.split(";")[0].strip().lower() in FORMS:
            fields: dict[str, Any] = read_form(raw, kind)
            count = fields.pop("alternatives", "")
            return {**fields, "alternatives": int(count[:3]) if count.isascii() and count.isdigit() else count or None}
        fields = json.loads(raw)
        json.dumps(fields, ensure_ascii=False).encode()  # "\ud800" is JSON, but not text
    except UnicodeEncodeError:
        raise ApiError(400, "the body has half a surrogate pair, which is not Unicode text; remove it") from None
    except (ValueError, RecursionError):
        raise ApiError(400, "the body is neither JSON nor a form") from None
    if not isinstance(fields, dict):
        raise ApiError(400, "the body must be a JSON object")
    return fields


def read_form(raw: bytes, kind: str) -> dict[str, str]:
    """The first value of each field of a form; `kind`: its Content-Type, with the boundary between parts."""
    message = Message()
    message["content-type"] = kind
    boundary = message.get_boundary()
    if boundary is None:
        form = parse_qs(raw.decode(), keep_blank_values=True, max_num_fields=MOST_FIELDS)
        return {name: values[0] for name, values in form.items()}
    parts = (b"\r\n" + raw).split(f"\r\n--{boundary}".encode(), MOST_FIELDS + 2)
    if len(parts) > MOST_FIELDS + 2 or not parts[-1].startswith(b"--"):
        raise ValueError("too many fields, or no end")
    fields = dict[str, str]()
    for part in parts[1:-1]:
        head, _, value = part.partition(b"\r\n\r\n")
        if name := re.search(r'[; ]name="([^"]*)"', head.decode()):
            fields.setdefault(name[1], value.decode())
    return fields


def translators(service: Service) -> list[Served]:
    """The models whose languages are known, in the order in which they were named."""
    ready = [service.models.ready[name] for name in service.models.folders if name in service.models.ready]
    return [served for served in ready if served.kind == "translate" and served.languages]


def detected(service: Service, text: str) -> Detection:
    candidates = {code for served in translators(service) for code in served.languages or ()}
    if not candidates:
        service.model(None, "translate")  # 503 while models are loading
        raise ApiError(400, "no model here has languages: name them with  regard serve NAME:en-de=RUN")
    language, confidence = detect(text, candidates)[0]
    return Detection(confidence=round(confidence, 1), language=language)


def choose(service: Service, source: str, target: str) -> Served:
    """The model for a pair of languages; of several the first."""
    pairs = dict[tuple[str, str], str]()
    for served in translators(service):
        if served.languages is not None:
            pairs.setdefault(served.languages, served.name)
    if (source, target) not in pairs:
        service.model(None, "translate")  # 503 while models are loading
        known = ", ".join(f"{one} to {other}" for one, other in pairs)
        raise ApiError(400, f"{source} to {target} is not available; there are: {known or 'none'}")
    return service.model(pairs[source, target], "translate")


def router(service: Service, guard: Guard) -> APIRouter:
    errors = documented(PlainError, 400, 401, 404, 413, 429, 503)
    api = APIRouter(tags=["LibreTranslate"], responses=errors)

    @api.get("/languages")
    def languages() -> list[Language]:
        """The languages that can be translated, and into which."""
        targets: dict[str, set[str]] = {}
        for served in translators(service):
            source, target = served.languages or ("", "")
            targets.setdefault(source, set()).add(target)
        return [
            Language(code=code, name=NAMES.get(code, code), targets=sorted(found)) for code, found in targets.items()
        ]

    @api.post("/detect", openapi_extra=openapi("q", "api_key"))
    async def detect_language(request: Request) -> list[Detection]:
        """The language of a text, among those of this server."""
        fields = await read_fields(request)
        guard.check_field(request.scope, fields.get("api_key"))
        return [detected(service, text) for text in read_texts(fields)]

    @api.post(
        "/translate",
        openapi_extra=openapi("q", "source", "target", "api_key"),
        response_model_exclude_none=True,
        responses=documented(PlainError, 504),
    )
    async def translate(request: Request) -> TranslationResponse:
        """Translate a text, or a list of texts."""
        fields = await read_fields(request)
        guard.check_field(request.scope, fields.get("api_key"))
        texts = read_texts(fields)
        source, target = fields.get("source"), fields.get("target")
        if not isinstance(source, str) or not isinstance(target, str):
            raise ApiError(400, "source and target: pass the codes of two languages; /languages lists them")
        if fields.get("format") not in (None, "text"):
            raise ApiError(
                400, f"format = {str(fields['format'])[:40]}: only text is translated; remove the tags, or the field"
            )
        found = detected(service, " ".join(texts)) if source == "auto" else None
        count = read_alternatives(fields)
        if found is not None and found.language == target:
            outputs, others = texts, [list[str]() for _ in texts]
        else:
            served = choose(service, source if found is None else found.language, target)
            options: dict[str, Any] = {"beam": max(5, count + 1), "n_best": count + 1} if count else {}
            predictions = await service.predict(request, served, texts, where="q", **options)
            outputs = [one.text for one in predictions]
            others = [[other.text for other in one.n_best[1:]] for one in predictions]

        def as_asked(values: list[Any]) -> Any:
            return values[0] if isinstance(fields["q"], str) else values

        return TranslationResponse(
            translatedText=as_asked(outputs),
            alternatives=as_asked(others) if count else None,
            detectedLanguage=None if found is None else as_asked([found] * len(texts)),
        )

    return api


def read_texts(fields: dict[str, Any]) -> list[str]:
    if not isinstance(fields.get("api_key", ""), str | None):
        raise ApiError(400, "api_key: must be a string")
    texts = fields.get("q")
    texts = [texts] if isinstance(texts, str) else texts
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise ApiError(400, "q: pass a text, or in JSON a list of texts")
    if len(texts) > MOST:
        raise ApiError(400, f"q: {len(texts)} texts; pass at most {MOST}")
    return texts


def read_alternatives(fields: dict[str, Any]) -> int:
    count = fields.get("alternatives")
    if count is None:
        return 0
    if type(count) is not int or not 0 <= count <= 10:
        raise ApiError(400, "alternatives: must be an integer from 0 to 10")
    return count
