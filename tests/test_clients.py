"""Clients that others wrote work with `regard serve` unchanged: openai, libretranslatepy, curl."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="install it with  pip install 'regard[serve]'")
pytest.importorskip("prometheus_client", reason="install it with  pip install 'regard[serve]'")

import regard
from explorer import TEXT
from regard.serve.guard import VARIABLE, Guard, Keys
from serving import Server, make_runs, serving

KEY = "0123456789abcdef"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def server(runs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    file = tmp_path_factory.mktemp("keys") / "keys.txt"
    file.write_text(KEY)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(VARIABLE, raising=False)
        guard = Guard(Keys(str(file)))
    with serving(runs, {"mt": ("en", "ko")}, guard=guard) as one:
        yield one


@pytest.fixture(scope="module")
def openai() -> Any:
    return pytest.importorskip("openai", reason="install it with  pip install openai")


def options(server: Server, **changes: Any) -> dict[str, Any]:
    return {"base_url": f"http://127.0.0.1:{server.port}/v1", "api_key": KEY, "max_retries": 0, **changes}


def test_openai(openai: Any, server: Server, runs: dict[str, Path]) -> None:
    with openai.OpenAI(**options(server)) as client:
        assert [model.id for model in client.models.list()] == list(runs)
        assert client.models.retrieve("lm").owned_by == "regard"
        (expected,) = regard.load(runs["lm"]).predict([TEXT], n_best=2, max_length=12, seed=5)
        fields = {"model": "lm", "prompt": TEXT, "max_tokens": 12, "n": 2, "seed": 5}
        content = client.completions.create(**fields)
        assert [one.text for one in content.choices] == [one.text for one in expected.samples]
        assert content.usage.completion_tokens == 24
        texts, usage = ["", ""], None
        with client.completions.create(**fields, stream=True, stream_options={"include_usage": True}) as chunks:
            for chunk in chunks:
                usage = chunk.usage or usage
                for choice in chunk.choices:
                    texts[choice.index] += choice.text
        assert texts == [one.text for one in expected.samples] and usage == content.usage
        ids = regard.load(runs["lm"]).tokenizer.encode(TEXT)
        for prompt in (ids, [ids, ids]):
            by_ids = client.completions.create(model="lm", prompt=prompt, max_tokens=12, n=2, seed=5)
            assert [one.text for one in by_ids.choices[:2]] == texts


def test_openai_embeddings(openai: Any, server: Server) -> None:
    """The client asks for base64 by itself and gives numbers."""
    with openai.OpenAI(**options(server)) as client:
        fields = {"model": "labels", "input": ["the cat", "a mat"]}
        packed = client.embeddings.create(**fields)
        plain = client.embeddings.create(**fields, encoding_format="float")
        assert [one.embedding for one in packed.data] == [pytest.approx(one.embedding) for one in plain.data]
        assert packed.usage == plain.usage and packed.usage.prompt_tokens > 0


def test_openai_errors(openai: Any, server: Server) -> None:
    with openai.OpenAI(**options(server)) as client:
        with pytest.raises(openai.NotFoundError, match="no model 'gpt-4'"):
            client.completions.create(model="gpt-4", prompt="a")
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="lm", messages=[{"role": "user", "content": "a"}])
        with pytest.raises(openai.BadRequestError, match="max_tokens") as error:
            client.completions.create(model="lm", prompt="a", max_tokens=0)
        assert error.value.param == "max_tokens"
    with openai.OpenAI(**options(server, api_key="wrong")) as client, pytest.raises(openai.AuthenticationError):
        client.models.list()


def test_openai_many_at_once(openai: Any, server: Server, runs: dict[str, Path]) -> None:
    prompts = [TEXT[: 1 + at % 7] for at in range(24)]
    model = regard.load(runs["lm"])
    expected = [model.predict([one], max_length=8, seed=at)[0].text for at, one in enumerate(prompts)]

    async def complete(client: Any, at: int) -> str:
        fields = {"model": "lm", "prompt": prompts[at], "max_tokens": 8, "seed": at}
        if at % 2:
            return str((await client.completions.create(**fields)).choices[0].text)
        chunks = await client.completions.create(**fields, stream=True)
        return "".join([chunk.choices[0].text async for chunk in chunks])

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(**options(server)) as client:
            return await asyncio.gather(*(complete(client, at) for at in range(len(prompts))))

    assert asyncio.run(all_of_them()) == expected


def test_openai_waits_and_tries_again(openai: Any, runs: dict[str, Path]) -> None:
    """A 429 carries Retry-After, which the client obeys."""
    with serving({"lm": runs["lm"]}, guard=Guard(Keys(), rate=20)) as server:
        fields = {"model": "lm", "prompt": "a", "max_tokens": 1}
        with openai.OpenAI(**options(server)) as client, pytest.raises(openai.RateLimitError) as error:
            for _ in range(30):
                client.completions.create(**fields)
        assert error.value.code == "rate_limit"
        began = time.monotonic()
        with openai.OpenAI(**options(server, max_retries=2)) as client:
            assert client.completions.create(**fields).choices
        assert time.monotonic() - began > 0.5


def test_libretranslatepy(server: Server, runs: dict[str, Path]) -> None:
    module = pytest.importorskip("libretranslatepy", reason="install it with  pip install libretranslatepy")
    client = module.LibreTranslateAPI(f"http://127.0.0.1:{server.port}/", KEY)
    for text in (TEXT, "the cat & the mat = 100 % 고양이 😀\nthe cat", "+"):
        (expected,) = regard.load(runs["mt"]).predict([text])
        assert client.translate(text, "en", "ko") == expected.text
    assert client.detect("고양이가 앉아 있다")[0]["language"] == "ko"
    assert client.languages() == [{"code": "en", "name": "English", "targets": ["ko"]}]


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl(server: Server, runs: dict[str, Path], tmp_path: Path) -> None:
    def curl(path: str, *arguments: str) -> str:
        command = ["curl", "-sS", "--max-time", "30", f"http://127.0.0.1:{server.port}{path}", *arguments]
        return subprocess.run(
            [*command, "-H", f"Authorization: Bearer {KEY}"], capture_output=True, check=True
        ).stdout.decode()

    (expected,) = regard.load(runs["mt"]).predict([TEXT])
    form = ("--data-urlencode", f"q={TEXT}", "-d", "source=en", "-d", "target=ko")
    assert json.loads(curl("/translate", *form)) == {"translatedText": expected.text}
    body = json.dumps({"model": "lm", "prompt": TEXT, "max_tokens": 5, "seed": 1, "stream": True})
    events = curl("/v1/completions", "-N", "--json", body).split("\n\n")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    (own,) = regard.load(runs["lm"]).predict([TEXT], max_length=5, seed=1)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == own.text and events[-2] == "data: [DONE]"
    (tmp_path / "body.json").write_text(json.dumps({"input": ["the cat"] * 200}))
    large = ("--json", f"@{tmp_path / 'body.json'}", "-H", "Transfer-Encoding: chunked", "-H", "Expect: 100-continue")
    assert len(json.loads(curl("/v1/classify", *large))["outputs"]) == 200
    assert curl("/health", "-I", "-o", "/dev/null", "-w", "%{http_code}") in ("200", "405")
