"""The playground, /docs and the OpenAPI that both rely on."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

pytest.importorskip("fastapi", reason="install it with  pip install 'regard[serve]'")
pytest.importorskip("prometheus_client", reason="install it with  pip install 'regard[serve]'")

from explorer import make_decoder
from regard.serve.guard import Guard, Keys
from serving import Server, serving

KEY = "0123456789abcdef"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that needs a key."""
    folder = tmp_path_factory.mktemp("guarded")
    (folder / "keys.txt").write_text(KEY)
    with serving({"lm": make_decoder(folder / "lm")}, guard=Guard(Keys(str(folder / "keys.txt")))) as server:
        yield server


def test_openapi_documents_every_response(guarded: Server) -> None:
    status, schema = guarded.get("/openapi.json", Authorization=f"Bearer {KEY}")
    assert status == 200
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            responses = operation["responses"]
            assert "422" not in responses, "an invalid request gets 400"
            assert operation["description"], (method, path)
            if path.startswith("/v1/"):
                assert responses.keys() >= {"200", "400", "401", "413", "429"}, path
            if method == "post":
                assert responses.keys() >= {"404", "503"}, path
            if path not in ("/health", "/ready"):
                assert operation["security"], path
    names = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(schema)))
    assert names == schema["components"]["schemas"].keys(), "no reference without its schema, and no schema unused"
