"""The playground, /docs and the OpenAPI that both rely on."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("playwright", reason="needs the package playwright")
pytest.importorskip("fastapi", reason="install it with  pip install 'regard[serve]'")
pytest.importorskip("prometheus_client", reason="install it with  pip install 'regard[serve]'")

from PIL import Image
from playwright.sync_api import expect

import regard
from explorer import TEXT, make_decoder, make_translator
from prediction_models import make_run
from regard.page import PAGE, page_missing
from regard.serve.guard import Guard, Keys
from serving import Server, make_tagger, serving
from variants import mostly_slow, slow

pytest_plugins = ["browser"]

KEY = "0123456789abcdef"
# model: (its kind, an input with what a shell or a program might change, a locator of the output)
HARD = 'one\'s "two" $HOME \\n <b>&amp; `three` 고양이 😀'
MODELS = {
    "lm": ("generate", HARD, "[data-testid=sample]"),
    "translate": ("translate", f"{HARD}\nfour five", "[data-testid=hypothesis]"),
    "classify": ("classify", f"one\r\n\n{HARD}", "[data-testid=label]"),
    "images": ("classify", "a.png", "[data-testid=label]"),
    "fill": ("fill", "one <mask> 'three'", "[data-testid=filled]"),
    "caption": ("caption", "a.png", "[data-testid=hypothesis]"),
    "predict": ("predict", "1, 2.5\n3 4", "[data-testid=values]"),
    "tags": ("tag", HARD, "[data-testid=output] li"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    torch.manual_seed(4)  # weights whose outputs are not empty
    found = {"lm": make_decoder(folder / "lm", max_length=50_000), "translate": make_translator(folder / "translate")}
    for kind in ("classify", "images", "fill", "caption", "predict"):
        (folder / kind).mkdir()
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder / kind)
            make_run(kind, **({"feature_dim": 2} if kind == "predict" else {}))
        found[kind] = folder / kind / "run"
    recipe = found["predict"] / "recipe.toml"
    text = recipe.read_text().replace("mean = [5.0]", "mean = [5.0, 5.0]").replace("std = [2.0]", "std = [2.0, 2.0]")
    recipe.write_text(text.replace("context = 3", "context = 2"))
    return {**found, "tags": make_tagger(folder / "tags")}


@pytest.fixture(scope="module")
def server(runs: dict[str, Path]) -> Iterator[Server]:
    with serving(runs) as one:
        yield one


@pytest.fixture(scope="module")
def guarded(runs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that needs a key."""
    file = tmp_path_factory.mktemp("keys") / "keys.txt"
    file.write_text(KEY)
    with serving({"lm": runs["lm"]}, guard=Guard(Keys(str(file)))) as one:
        yield one


@pytest.fixture
def visit(chromium: Any) -> Iterator[Callable[..., Any]]:
    """Opens a page of a server; no error may be in its console, and nothing be asked of another host."""
    if (why := page_missing("playground.html")) is not None:
        pytest.skip(why)
    faults: list[str] = []
    contexts = []

    def visited(server: Server, path: str = "", *, width: int = 1280, locale: str = "en-US", wait: str = "main") -> Any:
        context = chromium.new_context(
            viewport={"width": width, "height": 860}, locale=locale, permissions=["clipboard-read", "clipboard-write"]
        )
        context.set_default_timeout(20_000)
        contexts.append(context)
        page, address = context.new_page(), f"http://127.0.0.1:{server.port}/"
        page.on("pageerror", lambda error: faults.append(f"error: {error}"))
        page.on(
            "console", lambda m: faults.append(m.text) if m.type == "error" and "Failed to load" not in m.text else None
        )
        page.on(
            "request",
            lambda one: None if one.url.startswith((address, "data:", "blob:")) else faults.append(f"asked {one.url}"),
        )
        page.goto(address + path)
        page.locator(wait).first.wait_for(state="attached")
        return page

    yield visited
    for context in contexts:
        context.close()
    assert not faults


def enter(page: Any, runs: dict[str, Path], model: str, text: str | None = None) -> None:
    """Choose a model and give it its input."""
    page.locator(f"#model option[value={model}]").wait_for(state="attached")
    page.select_option("#model", model)
    text = MODELS[model][1] if text is None else text
    if text.endswith(".png"):
        page.locator("input[type=file]").set_input_files(runs[model].parent / text)
        page.locator("img").wait_for()
    else:
        page.fill("#text", text)


def send(page: Any) -> Any:
    """Send, wait for the end, and return the request."""
    with page.expect_request(lambda request: request.method == "POST") as info:
        page.get_by_role("button", name="Send").click()
    page.locator("[data-testid=outcome][aria-busy=false]").wait_for(state="attached")
    return info.value


# --- what the server sends


def test_openapi_documents_every_response(guarded: Server) -> None:
    status, schema = guarded.get("/openapi.json")
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


def test_the_page_is_open_and_may_load_nothing_from_elsewhere(guarded: Server) -> None:
    if (why := page_missing("playground.html")) is not None:
        pytest.skip(why)
    (script,) = (PAGE / "assets").glob("playground-*.js")
    for path in ("/", "/docs", "/icon.svg", f"/assets/{script.name}"):
        status, _, headers = guarded.request("GET", path)
        assert status == 200, path
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert headers["X-Content-Type-Options"] == "nosniff"
    assert guarded.get("/v1/models")[0] == 401
    for path in ("/assets/../playground.html", "/assets/%2e%2e/index.html", "/assets//etc/passwd", "/index.html"):
        assert guarded.get(path)[0] in (401, 404), path


def test_without_the_page_it_says_how_to_build_it(
    guarded: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("regard.page.PAGE", tmp_path / "nothing")
    status, content = guarded.get("/")
    assert status == 404 and "the page is not built" in content
    assert guarded.get("/v1/models", Authorization=f"Bearer {KEY}")[0] == 200


# --- the page


@pytest.mark.parametrize("model", mostly_slow(MODELS, ["translate", "tags"]))
def test_the_outputs_of_every_kind_fit_a_phone(
    server: Server, runs: dict[str, Path], visit: Callable[..., Any], model: str
) -> None:
    page = visit(server, width=390)
    enter(page, runs, model)
    request = send(page)
    page.locator(MODELS[model][2]).first.wait_for(state="attached")  # its text may be empty
    assert request.response().status == 200 and page.get_by_test_id("problem").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth") == 390


def test_the_numbers_on_the_page_are_the_models(
    server: Server, runs: dict[str, Path], visit: Callable[..., Any]
) -> None:
    page = visit(server)
    enter(page, runs, "translate", TEXT)
    page.fill("#set-beam", "4")
    page.fill("#set-n_best", "2")
    send(page)
    (expected,) = regard.load(runs["translate"]).predict([TEXT], beam=4, n_best=2)
    assert page.get_by_test_id("hypothesis").all_inner_texts() == [one.text for one in expected.n_best]
    assert f"score {expected.score:.3f}".replace("-", "−") in page.get_by_test_id("outcome").inner_text()

    page.get_by_label("Align the words of input and output").check()
    send(page)
    (links,) = regard.load(runs["translate"]).predictor.align([(TEXT, expected.text)])
    for index, word in enumerate(TEXT.split()):
        words = [expected.text.split()[target] for source, target in links if source == index]
        name = f"{word}: {', '.join(words) or '–'}"
        assert page.get_by_test_id("alignment").get_by_role("button", name=name, exact=True).count()
    assert links

    enter(page, runs, "classify", "one two")
    send(page)
    (label,) = regard.load(runs["classify"]).predict(["one two"])
    assert page.get_by_test_id("label").inner_text() == label.label
    assert f"{100 * label.probabilities['good']:.1f} %" in page.get_by_test_id("outcome").inner_text()

    page.get_by_role("button", name="embeddings").click()
    page.fill("#text", "one two\nfour five")
    send(page)
    vectors = server.post("/v1/embeddings", {"model": "classify", "input": ["one two", "four five"]})[1]["data"]
    cosine = sum(a * b for a, b in zip(*(one["embedding"] for one in vectors), strict=True))
    shown = float(page.get_by_test_id("similarity").inner_text().replace("−", "-"))
    assert shown == pytest.approx(cosine, abs=1e-3)

    enter(page, runs, "predict")
    send(page)
    (forecast,) = regard.load(runs["predict"]).predict([[[1, 2.5], [3, 4]]])
    shown = page.get_by_test_id("values").inner_text().replace("−", "-").split()
    values = [value for step in forecast.values for value in step]
    assert [float(word) for word in shown if word != "/"] == pytest.approx(values, abs=1e-3)
    page.fill("#text", "1 two 3")
    expect(page.get_by_role("alert")).to_have_text("“two” is not a number.")
    expect(page.get_by_role("button", name="Send")).to_be_disabled()


def test_a_text_appears_as_it_is_generated_and_can_be_cancelled(
    server: Server, runs: dict[str, Path], visit: Callable[..., Any]
) -> None:
    page = visit(server)
    enter(page, runs, "lm", TEXT)
    page.fill("#set-max_tokens", "20000")
    page.fill("#set-temperature", "0")  # repeats itself without an end
    page.locator("#text").press("Control+Enter")
    outcome = page.get_by_test_id("outcome")
    page.get_by_test_id("sample").first.wait_for()
    lengths = []
    for _ in range(3):
        lengths.append(len(outcome.inner_text()))
        page.wait_for_timeout(300)
    assert lengths == sorted(set(lengths)), "the text grows"
    assert server.service.admission.tokens > 0
    page.get_by_role("button", name="Cancel").click()
    page.get_by_test_id("cancelled").wait_for()
    deadline = time.monotonic() + 5
    while server.service.admission.tokens and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server.service.admission.tokens == 0, "the server stops too"
    whole = outcome.inner_text()
    page.wait_for_timeout(300)
    assert outcome.inner_text() == whole and len(whole) >= lengths[-1]
    page.fill("#set-max_tokens", "9")
    page.fill("#set-n", "2")
    page.fill("#set-temperature", "0.5")
    page.fill("#set-seed", "3")
    send(page)
    body = {"model": "lm", "prompt": TEXT, "max_tokens": 9, "n": 2, "temperature": 0.5, "seed": 3}
    texts = [TEXT + one["text"] for one in server.post("/v1/completions", body)[1]["choices"]]
    assert page.get_by_test_id("sample").all_text_contents() == texts


class Recorder(BaseHTTPRequestHandler):
    """Notes the requests that it gets."""

    requests: list[tuple[str, str | None, str | None, Any]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.requests.append((self.path, self.headers["Content-Type"], self.headers["Authorization"], body))
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(b"{}\n")

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def recorder() -> Iterator[tuple[int, list[Any]]]:
    received: list[Any] = []
    server = HTTPServer(("127.0.0.1", 0), type("Own", (Recorder,), {"requests": received}))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server.server_port, received
    server.shutdown()
    server.server_close()
    thread.join()


def execute(form: str, code: str, folder: Path) -> None:
    """Run a copied program, with a key in the environment."""
    programs = {"curl": ("bash", "call.sh"), "Python": (sys.executable, "call.py"), "JavaScript": ("node", "call.mjs")}
    program, name = programs[form]
    if shutil.which("curl" if form == "curl" else program) is None:
        return
    (folder / name).write_text(code, encoding="utf-8")
    environment = {"PATH": "/usr/bin:/bin:/usr/local/bin", "REGARD_API_KEY": KEY}
    done = subprocess.run([program, name], cwd=folder, capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("model", mostly_slow(MODELS, ["lm", "caption", "predict"]))
def test_a_copied_call_is_the_request_of_the_page(
    server: Server, runs: dict[str, Path], visit: Callable[..., Any], recorder: tuple[int, list[Any]], model: str,
    tmp_path: Path,
) -> None:  # fmt: skip
    port, received = recorder
    page = visit(server)
    enter(page, runs, model)
    if model == "lm":
        page.fill("#set-stop", "a'\\n")
        page.fill("#set-max_tokens", "5")
    if model == "translate":
        page.get_by_label("Sample instead of searching").check()
        page.fill("#set-seed", "7")
    sent = send(page)
    assert sent.response().status == 200
    for form in ("curl", "Python", "JavaScript"):
        page.get_by_role("button", name=form, exact=True).click()
        page.get_by_test_id("copy").click()
        expect(page.get_by_test_id("copy")).to_have_text("Copied")
        code = page.evaluate("navigator.clipboard.readText()")
        if not MODELS[model][1].endswith(".png"):
            assert page.get_by_test_id("code").text_content() == code
        execute(form, code.replace(f":{server.port}/", f":{port}/"), tmp_path)
    wanted = (sent.url.partition(str(server.port))[2], "application/json", None, sent.post_data_json)
    assert received and all(one == wanted for one in received)


def test_a_key_is_asked_for_and_kept_in_memory_only(
    guarded: Server, runs: dict[str, Path], visit: Callable[..., Any], recorder: tuple[int, list[Any]], tmp_path: Path
) -> None:
    page = visit(guarded, wait="#key")
    expect(page.get_by_test_id("problem")).to_contain_text("401 this server needs a key")
    page.fill("#key", "a wrong key")
    page.get_by_role("button", name="Use this key").click()
    expect(page.get_by_test_id("problem")).to_contain_text("401")
    page.fill("#key", KEY)
    page.get_by_role("button", name="Use this key").click()
    enter(page, runs, "lm", "a")
    page.fill("#set-max_tokens", "2")
    assert send(page).headers["authorization"] == f"Bearer {KEY}"
    expect(page.get_by_test_id("problem")).to_have_count(0)
    port, received = recorder
    for form in ("curl", "Python", "JavaScript"):
        page.get_by_role("button", name=form, exact=True).click()
        code = page.get_by_test_id("code").text_content()
        assert KEY not in code
        execute(form, code.replace(f":{guarded.port}/", f":{port}/"), tmp_path)
    assert {one[2] for one in received} == {f"Bearer {KEY}"}
    assert KEY not in page.evaluate("JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie])")
    page.reload()
    page.locator("#key").wait_for()
    assert page.locator("#key").input_value() == ""


def test_refusals_are_shown_as_the_server_words_them(
    server: Server, runs: dict[str, Path], visit: Callable[..., Any]
) -> None:
    page = visit(server)
    enter(page, runs, "translate")
    page.fill("#set-beam", "2")
    request = send(page)
    message = request.response().json()["error"]["message"]
    assert "n_best = 3" in message
    expect(page.get_by_test_id("problem")).to_have_text(f"400 {message}")
    page.fill("#set-n_best", "2")
    send(page)
    expect(page.get_by_test_id("problem")).to_have_count(0)

    with serving({"lm": runs["lm"]}, guard=Guard(Keys(), rate=8)) as limited:
        page = visit(limited)
        enter(page, runs, "lm", "a")
        send(page)
        send(page)
        expect(page.get_by_test_id("problem")).to_contain_text("429 more than 8 requests per minute")
        expect(page.get_by_test_id("problem")).to_contain_text(re.compile(r"Try again in [1-8] s\."))
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_test_id("problem")).to_have_text("The server does not respond.")


@pytest.mark.slow
def test_loading_and_failed_models(runs: dict[str, Path], visit: Callable[..., Any]) -> None:
    with serving({"lm": runs["lm"], "mt": runs["translate"]}, loaded=False) as slow:
        page = visit(slow, wait="#model option")
        expect(page.get_by_text("The model is being loaded …")).to_be_visible()
        slow.service.models.failed["mt"] = "its weights are damaged"
        slow.service.models.reload("lm")
        enter(page, runs, "lm", "a")
        page.fill("#set-max_tokens", "2")
        assert send(page).response().status == 200
        page.select_option("#model", "mt")
        expect(page.get_by_role("alert")).to_have_text(
            "This model could not be loaded; the log of the server says why."
        )


def test_a_table_loses_its_header_and_an_error_its_file(
    server: Server, runs: dict[str, Path], visit: Callable[..., Any], tmp_path: Path
) -> None:
    page = visit(server)
    tables = {
        "time,a,b\n2024-01-01 00:00,1,2.5\n2024-01-01 01:00,3,4\n": "1 2.5\n3 4",
        "a b\n1 2.5\n3 4": "1 2.5\n3 4",
        "1,2.5\n3,4\n": "1,2.5\n3,4\n",
    }
    for text, shown in tables.items():
        enter(page, runs, "predict", "")
        (tmp_path / "table.csv").write_text(text)
        page.locator("input[type=file]").set_input_files(tmp_path / "table.csv")
        expect(page.locator("#text")).to_have_value(shown)
        assert send(page).post_data_json["input"] == [[1, 2.5], [3, 4]]
    page.locator("input[type=file]").set_input_files(runs["images"].parent / "a.png")
    expect(page.get_by_role("alert")).to_have_text("a.png: not a text in UTF-8")
    page.select_option("#model", "images")
    expect(page.get_by_role("alert")).to_have_count(0)


@pytest.mark.slow
def test_files_can_be_dropped(server: Server, runs: dict[str, Path], visit: Callable[..., Any], tmp_path: Path) -> None:
    page = visit(server)
    enter(page, runs, "classify", "")
    expect(page.get_by_role("button", name="Send")).to_be_disabled()
    drop = """([name, bytes]) => {
        const data = new DataTransfer();
        data.items.add(new File([new Uint8Array(bytes)], name));
        return data;
    }"""
    text = page.evaluate_handle(drop, ["lines.txt", list("\ufeffone two\nfour 고양이\n".encode())])
    page.locator("h1").dispatch_event("drop", {"dataTransfer": text})  # anywhere
    expect(page.locator("#text")).to_have_value("one two\nfour 고양이\n")
    assert send(page).post_data_json["input"] == ["one two", "four 고양이"]
    (tmp_path / "again.txt").write_text("five")
    page.locator("input[type=file]").set_input_files(tmp_path / "again.txt")
    expect(page.locator("#text")).to_have_value("five")
    page.locator("input[type=file]").set_input_files(runs["images"].parent / "a.png")
    expect(page.get_by_role("alert")).to_have_text("a.png: not a text in UTF-8")
    expect(page.locator("#text")).to_have_value("five")
    page.select_option("#model", "images")
    page.get_by_role("button", name="Use the example image").click()
    image = page.evaluate_handle(drop, ["a.png", list((runs["images"].parent / "a.png").read_bytes())])
    page.locator(".field").dispatch_event("drop", {"dataTransfer": image})
    expect(page.locator("img")).to_have_attribute("alt", "The image to be sent: a.png")
    assert send(page).response().status == 200
    noise = np.random.default_rng(0).integers(0, 256, (900, 1500, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "large.png")
    page.locator("input[type=file]").set_input_files(tmp_path / "large.png")
    expect(page.get_by_text("Reduced to 1024 × 614 pixels before it is sent.")).to_be_visible()
    assert send(page).response().status == 200
    (tmp_path / "broken.png").write_bytes(bytes(3_000_000))
    page.locator("input[type=file]").set_input_files(tmp_path / "broken.png")
    expect(page.get_by_role("alert")).to_have_text("broken.png: not an image that this browser can read")


@pytest.mark.parametrize("width", [390, *slow(1440)])
def test_korean(server: Server, runs: dict[str, Path], visit: Callable[..., Any], width: int) -> None:
    page = visit(server, locale="ko-KR", width=width)
    enter(page, runs, "lm", "고양이가")
    page.fill("#set-max_tokens", "5")
    page.get_by_role("button", name="보내기").click()
    expect(page.get_by_text("최대 길이에 도달")).to_be_visible()
    assert page.evaluate("document.documentElement.lang") == "ko"
    page.fill("#set-max_tokens", "100001")
    page.get_by_role("button", name="보내기").click()
    expect(page.get_by_test_id("problem")).to_have_text("400 max_tokens = 100001: 100,000 이하여야 합니다")
    page.get_by_role("button", name="Show the page in English").click()
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_test_id("problem")).to_have_text("400 max_tokens = 100001: must be 100,000 or less")


@pytest.mark.parametrize("width", [390, *slow(1440)])
def test_the_reference_lists_every_operation(guarded: Server, visit: Callable[..., Any], width: int) -> None:
    page = visit(guarded, "docs", wait="section", width=width)
    paths = guarded.get("/openapi.json")[1]["paths"]
    operations = {f"{method.upper()} {path}" for path, methods in paths.items() for method in methods}
    assert {" ".join(text.split()) for text in page.locator("h3").all_inner_texts()} == operations
    section = page.locator("#post-v1-classify")
    expect(section).to_contain_text("outputs[].probabilities")
    expect(section).to_contain_text("object of number")
    assert page.evaluate("document.documentElement.scrollWidth") == width
    page.get_by_role("button", name="한국어").click()
    expect(section).to_contain_text("텍스트나 이미지를 분류합니다")
    page.get_by_role("link", name="POST /v1/tag").click()
    expect(page.locator("#post-v1-tag")).to_be_focused()


def test_it_works_with_the_keyboard_alone(server: Server, visit: Callable[..., Any]) -> None:
    page = visit(server, wait="#model option")
    page.locator("#text").wait_for()
    reached = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        element = page.evaluate("(e => e.id || e.textContent.trim())(document.activeElement)")
        reached.add(element)
        if element == "text":
            page.keyboard.type("abc")
    assert {"model", "text", "set-max_tokens", "Send", "curl", "Copy"} <= reached
    named = "[...document.querySelectorAll('input, select, textarea')].map(e => e.labels.length)"
    assert 0 not in page.evaluate(named)
