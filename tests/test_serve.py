"""`regard serve`: the outputs of the commands over HTTP, whatever else is computed, and its errors."""

from __future__ import annotations

import base64
import io
import json
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("fastapi", reason="install it with  pip install 'regard[serve]'")
pytest.importorskip("prometheus_client", reason="install it with  pip install 'regard[serve]'")

import regard
from explorer import ENGLISH, TEXT, make_translator
from regard.serve.detect import detect
from regard.text.tokenizer import Tokenizer
from serving import Server, make_runs, serving

EMPTY_PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n").decode()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def server(runs: dict[str, Path]) -> Iterator[Server]:
    with serving(runs, {"mt": ("en", "ko")}) as one:
        yield one


def complete(server: Server, **fields: Any) -> dict[str, Any]:
    status, content = server.post("/v1/completions", {"model": "lm", **fields})
    assert status == 200, content
    return content


def test_completions_are_those_of_generate(server: Server, runs: dict[str, Path]) -> None:
    (expected,) = regard.load(runs["lm"]).predict([TEXT], n_best=2, max_length=12, seed=5)
    content = complete(server, prompt=TEXT, n=2, max_tokens=12, seed=5)
    assert [choice["text"] for choice in content["choices"]] == [one.text for one in expected.samples]
    counts = [len(Tokenizer.load(runs["lm"] / "tokenizer.json").encode(TEXT)), 24]
    assert content["usage"] == dict(
        zip(("prompt_tokens", "completion_tokens", "total_tokens"), (*counts, sum(counts)), strict=True)
    )
    assert {choice["finish_reason"] for choice in content["choices"]} == {"length"}


def test_a_stream_is_the_whole_in_parts(server: Server) -> None:
    fields = {"prompt": ["the cat", "고양이가"], "n": 2, "max_tokens": 9, "seed": 3, "model": "lm", "echo": True}
    whole = complete(server, **fields)
    status, content = server.post(
        "/v1/completions", {**fields, "stream": True, "stream_options": {"include_usage": True}}
    )
    assert status == 200
    *events, done, rest = content.split("\n\n")
    assert done == "data: [DONE]" and not rest
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole["usage"]
    for choice in whole["choices"]:
        parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["length"]


def test_token_ids_greedy_and_stop(server: Server, runs: dict[str, Path]) -> None:
    tokenizer = Tokenizer.load(runs["lm"] / "tokenizer.json")
    text = complete(server, prompt=TEXT, temperature=0, max_tokens=20)["choices"][0]["text"]
    by_ids = complete(server, prompt=tokenizer.encode(TEXT), temperature=0, max_tokens=20)["choices"][0]
    assert by_ids["text"] == text
    stop = text[5:8]
    stopped = complete(server, prompt=TEXT, temperature=0, max_tokens=20, stop=stop)["choices"][0]
    assert stopped["text"] == text[: text.index(stop)] and stopped["finish_reason"] == "stop"
    known = complete(server, prompt=TEXT, temperature=0, max_tokens=3, logprobs=1)["choices"][0]["logprobs"]
    assert len(known["tokens"]) == len(known["token_logprobs"]) == 3 and max(known["token_logprobs"]) <= 0


def test_log_probabilities_of_the_most_probable_tokens(server: Server, runs: dict[str, Path]) -> None:
    bundle = regard.load(runs["lm"])
    for stream in (False, True):
        fields = {"prompt": TEXT, "temperature": 0, "max_tokens": 6, "logprobs": 3, "stream": stream}
        status, content = server.post("/v1/completions", {"model": "lm", **fields})
        parts = [json.loads(line[6:]) for line in content.split("\n\n")[:-2]] if stream else [content]
        text = "".join(part["choices"][0]["text"] for part in parts)
        known = [part["choices"][0]["logprobs"] for part in parts]
        tokens, values, tops, offsets = (
            [one for part in known for one in part[name]]
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        )
        assert status == 200 and len(tokens) == 6 and offsets[0] == 0 and offsets == sorted(offsets)
        assert text[offsets[0] :].encode().startswith(tokens[0].encode()) or tokens[0].startswith("bytes:")
        ids = bundle.tokenizer.encode(TEXT)
        with torch.inference_mode():
            for token, value, top in zip(tokens, values, tops, strict=True):
                scores = bundle.model(torch.tensor([ids]))[0, -1].log_softmax(-1)
                best = scores.topk(3)
                assert list(top.values()) == pytest.approx(best.values.tolist(), abs=1e-4)
                assert value == pytest.approx(float(best.values[0]), abs=1e-4) and next(iter(top)) == token
                ids.append(int(best.indices[0]))


@pytest.mark.parametrize(
    "name, value, allowed",
    [
        ("best_of", 3, 1), ("suffix", "end", ""), ("presence_penalty", 0.5, 0), ("frequency_penalty", -1, 0.0),
        ("logit_bias", {"50256": -100}, {}), ("repetition_penalty", 1.1, 1.0), ("min_p", 0.1, 0), ("min_tokens", 3, 0),
    ],
)  # fmt: skip
def test_fields_that_are_not_offered(server: Server, name: str, value: Any, allowed: Any) -> None:
    body = {"model": "lm", "prompt": "a", "max_tokens": 1, "user": "anyone"}
    status, content = server.post("/v1/completions", {**body, name: value})
    assert status == 400 and content["error"]["param"] == name
    for harmless in (None, allowed):
        assert server.post("/v1/completions", {**body, name: harmless})[0] == 200


def test_a_timeout_within_a_stream(runs: dict[str, Path]) -> None:
    """The status is sent with the first token, so that the error is the last event."""
    with serving({"lm": runs["lm"]}) as server:
        complete(server, prompt="a", max_tokens=1)
        server.service.timeout = 0.3
        batch = server.service.models.ready["lm"].worker.batch  # type: ignore[attr-defined]
        step = batch.step
        batch.step = lambda: (time.sleep(0.1), step())[1]
        status, content = server.post(
            "/v1/completions", {"model": "lm", "prompt": "a", "max_tokens": 100, "temperature": 0, "stream": True}
        )
        assert status == 200 and json.loads(content.split("\n\n")[-2][6:])["error"]["code"] == "timeout"
        assert 'regard_inputs_total{outcome="timeout"} 1.0' in server.get("/metrics")[1]


def test_outputs_do_not_depend_on_what_else_runs(server: Server, runs: dict[str, Path]) -> None:
    words = ENGLISH.split()
    texts = [" ".join(words[at % 7 : at % 7 + 1 + at % 11]) for at in range(48)]
    prompts = [f"{word} " * (1 + at % 5) for at, word in enumerate(words)]
    translations = [one.text for one in regard.load(runs["mt"]).predict(texts, beam=3)]
    generated = [
        regard.load(runs["lm"]).predict([prompt], max_length=10, seed=at)[0].text for at, prompt in enumerate(prompts)
    ]

    def translate(text: str) -> str:
        return str(server.post("/v1/translate", {"input": text, "beam": 3})[1]["outputs"][0]["n_best"][0]["text"])

    def generate(pair: tuple[int, str]) -> str:
        content = complete(server, prompt=pair[1], max_tokens=10, seed=pair[0])
        return str(content["choices"][0]["text"])

    with ThreadPoolExecutor(24) as pool:
        ours, theirs = pool.map(translate, texts), pool.map(generate, enumerate(prompts))
        assert list(ours) == translations and list(theirs) == generated


def test_alignments(server: Server, runs: dict[str, Path]) -> None:
    (output,) = server.post("/v1/translate", {"input": TEXT, "alignments": True})[1]["outputs"]
    (links,) = regard.load(runs["mt"]).predictor.align([(TEXT, output["n_best"][0]["text"])])
    assert [tuple(link) for link in output["alignment"]] == list(links) and links


def test_embeddings(server: Server) -> None:
    floats = server.post("/v1/embeddings", {"model": "labels", "input": ["the cat", "a mat", "the cat"]})[1]["data"]
    vectors = [one["embedding"] for one in floats]
    assert vectors[0] == vectors[2] != vectors[1]
    assert [sum(value * value for value in vector) for vector in vectors] == pytest.approx([1, 1, 1])
    body = {"model": "labels", "input": "the cat", "encoding_format": "base64"}
    packed = base64.b64decode(server.post("/v1/embeddings", body)[1]["data"][0]["embedding"])
    assert struct.unpack(f"<{len(vectors[0])}f", packed) == pytest.approx(vectors[0], abs=1e-6)


def test_embeddings_of_token_ids(server: Server, runs: dict[str, Path]) -> None:
    tokenizer = Tokenizer.load(runs["labels"] / "tokenizer.json")
    texts = ["the cat", TEXT * 40]  # the second is truncated
    ids = [tokenizer.encode(text) for text in texts]

    def embed(value: Any, **fields: Any) -> Any:
        status, content = server.post("/v1/embeddings", {"model": "labels", "input": value, **fields})
        return content["error"] if status == 400 else [one["embedding"] for one in content["data"]]

    expected = embed(texts)
    assert embed(ids) == [pytest.approx(vector, abs=1e-6) for vector in expected]
    assert embed(ids[0], dimensions=len(expected[0])) == [pytest.approx(expected[0], abs=1e-6)]
    for value in ([len(tokenizer)], [[0], [-1]], [], [[]], [[1], []]):
        assert embed(value)["param"] == "input"
    assert "is not in the vocabulary" in embed([10**6])["message"]
    assert embed("a", dimensions=7)["param"] == "dimensions"


def test_every_task_has_a_route(server: Server, runs: dict[str, Path]) -> None:
    labels = server.post("/v1/classify", {"model": "labels", "input": [TEXT, "mat"]})[1]["outputs"]
    assert [one["label"] for one in labels] == [one.label for one in regard.load(runs["labels"]).predict([TEXT, "mat"])]
    status, content = server.post("/v1/tag", {"input": "a cat sat"})
    (own,) = regard.load(runs["tags"]).predict(["a cat sat"])
    assert status == 200 and content["outputs"][0]["words"] == [pytest.approx(vars(one)) for one in own.words]
    image = io.BytesIO()
    pytest.importorskip("PIL.Image").new("RGB", (40, 30), "red").save(image, "PNG")
    text = base64.b64encode(image.getvalue()).decode()
    for form in (text, f"data:image/png;base64,{text}"):
        status, content = server.post("/v1/caption", {"input": form})
        assert status == 200 and content["outputs"][0]["n_best"][0]["text"]
    assert server.post("/v1/caption", {"input": "/etc/passwd"})[0] == 400
    assert server.post("/v1/caption", {"input": base64.b64encode(b"no image").decode()})[0] == 400


def test_libretranslate(server: Server, runs: dict[str, Path]) -> None:
    (expected,) = (one.text for one in regard.load(runs["mt"]).predict([TEXT]))
    assert server.get("/languages") == (200, [{"code": "en", "name": "English", "targets": ["ko"]}])
    assert server.post("/translate", {"q": TEXT, "source": "en", "target": "ko"}) == (200, {"translatedText": expected})
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    status, content = server.post("/translate", f"q={TEXT.replace(' ', '+')}&source=auto&target=ko", **form)
    assert status == 200 and content["translatedText"] == expected
    assert content["detectedLanguage"]["language"] == "en" and content["detectedLanguage"]["confidence"] > 90
    listed = server.post("/translate", {"q": [TEXT, "mat"], "source": "en", "target": "ko", "alternatives": 2})[1]
    assert listed["translatedText"][0] == expected and len(listed["alternatives"][1]) == 2
    assert server.post("/translate", {"q": TEXT, "source": "ko", "target": "en"})[0] == 400
    assert server.post("/detect", {"q": "고양이가 앉아 있다"}) == (200, [{"confidence": 100.0, "language": "ko"}])


def test_libretranslate_accepts_both_kinds_of_forms(server: Server) -> None:
    kind = {"Content-Type": "multipart/form-data; boundary=x1"}
    fields = {"q": f" --x1 {TEXT}\r\nmat", "source": "auto", "target": "ko", "alternatives": "1", "format": "text"}
    disposition = 'Content-Disposition: form-data; name="{}"'
    parts = [f"--x1\r\n{disposition.format(name)}\r\n\r\n{value}\r\n" for name, value in fields.items()]
    expected = server.post("/translate", {**fields, "alternatives": 1})
    assert expected[0] == 200 and len(expected[1]["alternatives"]) == 1
    assert server.post("/translate", "".join(parts) + "--x1--\r\n", **kind) == expected
    for broken in ("", "".join(parts), "--x1--", "".join(parts * 40) + "--x1--\r\n", parts[0] + "\xff"):
        assert server.post("/translate", broken.encode("latin-1"), **kind)[0] == 400


def test_libretranslate_refuses_html_and_keeps_what_is_translated(server: Server) -> None:
    fields = {"q": "<b>cat</b>", "source": "en", "target": "ko"}
    status, content = server.post("/translate", {**fields, "format": "html"})
    assert status == 400 and content["error"].startswith("format = html: only text")
    assert server.post("/translate", {**fields, "format": None})[0] == 200
    status, content = server.post("/translate", {"q": [TEXT, "mat"], "source": "auto", "target": "en"})
    assert status == 200 and content["translatedText"] == [TEXT, "mat"]
    assert [one["language"] for one in content["detectedLanguage"]] == ["en", "en"]


def test_of_two_models_for_a_pair_of_languages_the_first_translates(runs: dict[str, Path], tmp_path: Path) -> None:
    other = make_translator(tmp_path / "other")
    pairs = {"one": ("en", "ko"), "two": ("en", "ko"), "back": ("ko", "en")}
    with serving({"one": runs["mt"], "two": other, "back": other}, pairs) as server:
        texts = {name: server.post("/v1/translate", {"model": name, "input": TEXT})[1]["outputs"][0] for name in pairs}
        assert texts["one"] != texts["two"]
        first = server.service.models.ready.pop("one")
        server.service.models.ready["one"] = first  # as after a reload of one that could not be loaded at first
        content = server.post("/translate", {"q": TEXT, "source": "en", "target": "ko"})[1]
        assert content["translatedText"] == texts["one"]["n_best"][0]["text"]


@pytest.mark.parametrize(
    "text, language",
    [
        ("The dog is in the garden.", "en"), ("Der Hund ist im Garten und spielt.", "de"), ("나는 학교에 간다", "ko"),
        ("Le chien est dans le jardin.", "fr"), ("El perro está en la casa.", "es"), ("東京に行きます", "ja"),
    ],
)  # fmt: skip
def test_languages_are_told_apart(text: str, language: str) -> None:
    ranked = detect(text, ["de", "en", "es", "fr", "ja", "ko"])
    assert ranked[0][0] == language and sum(confidence for _, confidence in ranked) == pytest.approx(100)


@pytest.mark.parametrize(
    "path, body, status",
    [
        ("/v1/completions", {"model": "nowhere", "prompt": "a"}, 404),
        ("/v1/completions", {"model": "mt", "prompt": "a"}, 404),
        ("/v1/completions", {"model": "lm", "prompt": ""}, 400),
        ("/v1/completions", {"model": "lm", "prompt": []}, 400),
        ("/v1/completions", {"model": "lm", "prompt": [10**9]}, 400),
        ("/v1/completions", {"model": "lm"}, 400),
        ("/v1/completions", {"model": "lm", "prompt": "a" * 50_000}, 400),
        ("/v1/completions", {"model": "lm", "prompt": "a", "max_tokens": 0}, 400),
        ("/v1/completions", "{", 400),
        ("/v1/chat/completions", {"model": "lm", "messages": []}, 404),
        ("/v1/translate", {"input": []}, 400),
        ("/v1/translate", {"input": TEXT, "beam": 2, "n_best": 3}, 400),
        ("/v1/translate", {"input": TEXT, "x": 1}, 400),
        ("/v1/embeddings", {"model": "lm", "input": "a"}, 404),
    ],
)
def test_errors_have_the_format_of_openai(server: Server, path: str, body: Any, status: int) -> None:
    received, content = server.post(path, body)
    assert received == status and content["error"]["message"] and content["error"].keys() == {
        "message", "type", "param", "code"
    }  # fmt: skip


def test_messages_in_korean_where_they_are_asked_for(server: Server) -> None:
    def message(path: str, body: Any, language: str) -> str:
        content = server.post(path, body, **{"Accept-Language": language})[1]["error"]
        return str(content if isinstance(content, str) else content["message"])

    body = {"model": "mt", "input": TEXT, "n_best": 3, "beam": 2}
    assert message("/v1/translate", body, "ko").startswith("n_best = 3: beam = 2인 탐색은")
    assert message("/v1/translate", {**body, "beam": 0}, "ko-KR,ko;q=0.9,en;q=0.8") == "beam = 0: 1 이상이어야 합니다"
    assert message("/v1/caption", {"input": "aGk="}, "ko").startswith("input.0: 이미지로 읽을 수 없습니다(알 수 없는")
    assert message("/v1/completions", {"model": "lm", "prompt": ""}, "ko").startswith("prompt: 비어 있습니다")
    assert message("/v1/completions", {"model": "lm"}, "ko") == "prompt: 반드시 있어야 합니다"
    for language in ("", "en", "en-US,ko;q=0.5", "kok"):
        assert message("/v1/completions", {"model": "lm"}, language) == "prompt: is required"


BAD = "has half a surrogate pair, which is not Unicode text; remove it"


@pytest.mark.parametrize(
    "path, body, param, message",
    [
        ("completions", {"prompt": ""}, "prompt", "is empty; pass at least one character"),
        ("completions", {"prompt": ["a", ""]}, "prompt.1", "is empty; pass at least one character"),
        ("completions", {"prompt": "a" * 50_000}, "prompt", " tokens, but the model attends to"),
        ("completions", {"prompt": "\ud800"}, "prompt", BAD),
        ("completions", {"prompt": ["a", "\ud800"]}, "prompt.1", BAD),
        ("completions", {"prompt": ["a", 3]}, "prompt.1", " = 3: must be a string"),
        ("completions", {"prompt": {"a": 1}}, "prompt", ' = {"a": 1}: must be a string or a list'),
        ("completions", {"prompt": "a", "logprobs": 9}, "logprobs", " = 9: must be 5 or less"),
        ("completions", {"prompt": "a", "logprobs": 1, "echo": True}, "logprobs", "echo with logprobs"),
        ("completions", {"prompt": "a", "stop": [[]]}, "stop.0", " = []: must be a string"),
        ("completions", {}, "prompt", "is required"),
        ("embeddings", {"input": ["a", "\udfff"]}, "input.1", BAD),
        ("classify", {"input": []}, "input", " = []: must not be empty"),
        ("tag", {"input": "가" * 100_001}, "input", "가…: must have at most 100,000 characters"),
        ("classify", {"input": "a", "x": 1}, "x", "there is no such field; remove it"),
        ("forecast", {"input": [1, "a"]}, "input.1", ' = "a": must be a number or a list'),
        ("caption", {"input": [EMPTY_PNG, "aGk="]}, None, "input.0: cannot be read as an image"),
        ("caption", {"input": ["R0lGODlh"]}, None, "(its format is unknown); save it again as PNG or JPEG"),
        ("classify", '{"input": ', None, "the body must be a JSON object, with Content-Type: application/json ("),
        ("classify", "[]", None, "the body must be a JSON object, with Content-Type: application/json"),
    ],
)
def test_messages_name_the_field_the_value_and_the_remedy(
    server: Server, path: str, body: Any, param: str | None, message: str
) -> None:
    names = {"completions": "lm", "embeddings": "labels", "classify": "labels", "forecast": "numbers", "tag": "tags"}
    content = {"model": names.get(path, "captions"), **body} if isinstance(body, dict) else body
    status, reply = server.post(f"/v1/{path}", content, **{"Content-Type": "application/json"})
    error = reply["error"]
    assert status == 400 and error["param"] == param and message in error["message"]
    assert param is None or error["message"].startswith(param) or "echo" in message
    assert not any(word in error["message"] for word in ("0x", "--", "constrained", "valid string", "errors="))


def test_folders_for_ctranslate2(runs: dict[str, Path], tmp_path: Path) -> None:
    pytest.importorskip("ctranslate2", reason="install it with  pip install 'regard[ctranslate2]'")
    from regard.interop.ctranslate2 import export_ctranslate2

    for name in ("lm", "mt"):
        (tmp_path / name).mkdir()
        export_ctranslate2(regard.load(runs[name]), tmp_path / name)
    with serving({name: tmp_path / name for name in ("lm", "mt")}, {"mt": ("en", "ko")}) as server:
        (expected,) = regard.load(runs["lm"]).predict([TEXT], sample=True, top_k=1, max_length=9)
        for stream in (False, True):
            body = {"model": "lm", "prompt": TEXT, "temperature": 0, "max_tokens": 9, "stream": stream}
            status, content = server.post("/v1/completions", body)
            if stream:
                chunks = [json.loads(line[6:]) for line in content.split("\n\n")[:-2]]
                content = {"choices": [{"text": "".join(chunk["choices"][0]["text"] for chunk in chunks)}]}
            assert status == 200 and content["choices"][0]["text"] == expected.text
        assert server.post("/v1/completions", {"model": "lm", "prompt": TEXT, "max_tokens": 3})[0] == 200
        status, content = server.post("/v1/completions", {"model": "lm", "prompt": TEXT, "seed": 7})
        assert status == 400 and "seed = 7" in content["error"]["message"]
        body = {"model": "lm", "prompt": TEXT, "max_tokens": 3}
        status, content = server.post("/v1/completions", {**body, "logprobs": 2})
        assert status == 400 and "logprobs = 0" in content["error"]["message"]
        known = server.post("/v1/completions", {**body, "logprobs": 0})[1]["choices"][0]["logprobs"]
        assert list(map(len, known["top_logprobs"])) == [1] * 3
        (translation,) = regard.load(runs["mt"]).predict([TEXT])
        fields = {"q": TEXT, "source": "en", "target": "ko"}
        assert server.post("/translate", fields) == (200, {"translatedText": translation.text})


def test_folders_of_onnx_have_the_most_probable_tokens(runs: dict[str, Path], tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="install it with  pip install 'regard[onnx]'")
    pytest.importorskip("onnx", reason="install it with  pip install 'regard[onnx]'")
    from regard.interop.onnx_folder import export_onnx

    export_onnx(regard.load(runs["lm"]), tmp_path)
    with serving({"lm": runs["lm"], "onnx": tmp_path}) as server:
        for fields in ({"temperature": 0}, {"seed": 3, "n": 2}):
            body = {"prompt": TEXT, "max_tokens": 5, "logprobs": 3, **fields}
            ours, theirs = (server.post("/v1/completions", {**body, "model": name})[1] for name in ("lm", "onnx"))
            for one, other in zip(ours["choices"], theirs["choices"], strict=True):
                assert one["logprobs"]["tokens"] == other["logprobs"]["tokens"]
                for top, same in zip(one["logprobs"]["top_logprobs"], other["logprobs"]["top_logprobs"], strict=True):
                    assert top == pytest.approx(same, abs=1e-3) and len(top) in (3, 4)
