"""`regard export --web`: without a network, the page in Chromium predicts what the run does; its tokenizer in Node."""

from __future__ import annotations

import functools
import http.server
import json
import random
import re
import shutil
import subprocess
import threading
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("onnxruntime", reason="pip install 'regard[onnx]'")
pytest.importorskip("onnxscript", reason="pip install 'regard[onnx]'")
pytest.importorskip("playwright", reason="needs the package playwright")

import regard
from browser import CHROMIUM
from regard.cli import main
from regard.interop import web_folder
from regard.interop.check import TEXTS
from regard.nn.trace import trace
from regard.page import EXPORTED, page_missing
from regard.predict.alignment import alignment_layer
from regard.predict.beam import greedy
from regard.predict.bundle import Bundle
from regard.text.tokenizer import Tokenizer
from test_onnx import save_run

ROOT = Path(__file__).resolve().parent.parent
ROLLDOWN = ROOT / "web/node_modules/.bin/rolldown"
TEXT = TEXTS[0]


class Quiet(http.server.SimpleHTTPRequestHandler):
    """What `python -m http.server` runs, without its log."""

    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright import sync_api

    if CHROMIUM is None:
        pytest.skip("needs Chromium:  apt install chromium")
    if (reason := page_missing(folder=EXPORTED)) is not None:
        pytest.skip(reason)
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield opened
        opened.close()


class Site:
    """The page of an exported folder in Chromium, and the same model in Python."""

    def __init__(self, bundle: Bundle, page: Any) -> None:
        self.bundle, self.page = bundle, page

    def by(self, name: str) -> Any:
        return self.page.get_by_test_id(name)

    def finished(self) -> None:
        self.page.locator("[data-testid=result][data-done=true], [data-testid=problem]").first.wait_for()

    def run(self, text: str) -> None:
        self.by("input").fill(text)
        self.by("run").click()
        self.finished()

    def bars(self) -> list[list[tuple[str, float]]]:
        """Names and percentages of each list of bars."""
        lists = []
        for part in self.by("bars").all():
            items = (item.locator("span").all_inner_texts() for item in part.locator("li").all())
            lists.append([(texts[0], float(texts[-1].removesuffix(" %"))) for texts in items])
        return lists


Open = Callable[..., Site]


@pytest.fixture
def site(once, browser: Any, capsys: pytest.CaptureFixture[str]) -> Iterator[Open]:
    """Opens the page of a task's model: no error in the console, and nothing that another host is asked for."""
    faults, ends = list[str](), list[Callable[[], object]]()

    def opened(task: str, *options: str, **context: Any) -> Site:
        run = once(f"onnx-run-{task}", lambda folder: save_run(task, folder))

        def export(folder: Path) -> None:
            assert main(["export", str(run), "--web", str(folder), *options]) == 0, capsys.readouterr().err

        folder = once(f"web-{task}{''.join(options)}", export)
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}/"
        own = browser.new_context(**{"viewport": {"width": 900, "height": 900}, "locale": "en-US", **context})
        own.set_default_timeout(60_000)

        def answer(route: Any) -> None:
            if route.request.url.startswith((address, "blob:", "data:")):
                route.continue_()
            else:
                faults.append(f"asked {route.request.url}")
                route.abort()

        own.route("**/*", answer)
        page = own.new_page()
        page.on("pageerror", lambda error: faults.append(f"error: {error}"))
        page.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
        page.goto(address)
        page.get_by_test_id("file" if task.startswith("image") else "input").wait_for(state="attached")
        ends.extend((own.close, server.shutdown, server.server_close))
        return Site(regard.load(folder if "--fp32" not in options else run), page)

    yield opened
    for end in ends:
        end()
    assert not faults


@pytest.mark.slow
def test_translation_with_greedy_and_beam_search_and_its_attention(site: Open):
    view = site("translation", "--fp32")
    bundle = view.bundle
    for beam in ("1", "4"):
        view.by("beam").select_option(beam)
        view.run(TEXT)
        expected = bundle.predict([TEXT], beam=int(beam))[0].text
        assert expected and view.by("output").text_content() == expected
    view.by("beam").select_option("1")
    view.run(TEXT)
    shown = [
        [float(cell.get_attribute("data-weight")) for cell in row.locator("td").all()]
        for row in view.by("heat").locator("tbody tr").all()[:5]
    ]
    source = torch.tensor([[*bundle.source.encode(TEXT), bundle.source.eos]])
    begin, end = bundle.target_frame
    (tokens,) = greedy(bundle.model, source, None, bos=begin, eos=end, limit=2 * source.shape[1] + 50)  # type: ignore[arg-type]
    name = alignment_layer(bundle.model)
    with torch.no_grad(), trace(bundle.model, only=name) as seen:
        bundle.model(source, torch.tensor([[begin, *tokens]]))
    expected = seen[name][0].mean(dim=0)[:5, : len(shown[0])]
    torch.testing.assert_close(torch.tensor(shown), expected, atol=1e-3, rtol=0)


@pytest.mark.slow
def test_int8_gives_what_python_gives_with_the_same_folder(site: Open):
    view = site("translation")
    view.run(TEXT)
    assert view.by("output").text_content() == view.bundle.predict([TEXT], beam=1)[0].text
    assert "8-bit" in view.page.locator("header").inner_text()


@pytest.mark.slow
def test_generation_greedy_and_its_probabilities(site: Open):
    view = site("language-modeling", "--fp32")
    view.by("temperature").fill("0")
    view.by("count").fill("12")
    view.run("A dog 한국")
    (sample,) = view.bundle.predictor.generate("A dog 한국", top_k=1, max_length=12)  # type: ignore[attr-defined]
    assert view.by("output").text_content() == sample.text and len(sample.ids) == 12
    name, percent = view.bars()[0][0]  # of the last token
    last = sample.ids[-1]
    assert name == view.bundle.tokenizer.token(last)
    assert percent == pytest.approx(100 * torch.tensor(sample.log_probabilities[-1]).exp().item(), abs=0.06)
    view.by("temperature").fill("1")
    view.by("count").fill("5")
    view.run("A dog")
    assert "limit" in view.by("result").inner_text()


def test_classification_of_text(site: Open):
    view = site("text-classification", "--fp32")
    for text in (TEXT, "한국어 😀 " * 200):  # the second is truncated, as in Python
        view.run(text)
        expected = view.bundle.predict([text])[0].probabilities
        assert {name: value for name, value in view.bars()[0]} == pytest.approx(
            {name: 100 * value for name, value in expected.items()}, abs=0.06
        )


@pytest.mark.slow
def test_masked_tokens_and_what_the_page_refuses(site: Open):
    view = site("masked-language-modeling", "--fp32", locale="ko-KR")
    view.run(f"{TEXT} <mask> a <mask>")
    expected = view.bundle.predict([f"{TEXT} <mask> a <mask>"], top=8)[0].masks
    assert [[name for name, _ in bars] for bars in view.bars()] == [[one.token for one in mask] for mask in expected]
    for text, message in (("", "텍스트"), ("no mask", "<mask>"), ("<mask> " * 300, "토큰")):
        view.run(text)
        assert message in view.by("problem").inner_text()


@pytest.mark.slow
def test_tags(site: Open):
    view = site("token-classification", "--fp32")
    view.run(TEXT)
    shown = view.by("result").locator(".tagged small").all_inner_texts()
    assert shown == list(view.bundle.predict([TEXT])[0].tags)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["image-captioning", "image-classification"])
def test_images_of_another_size(site: Open, tmp_path: Path, task: str):
    image = pytest.importorskip("PIL.Image")
    rows = torch.randint(256, (29, 21, 4), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    rows[:, :, 3] = 255
    image.fromarray(rows.numpy()).save(tmp_path / "image.png")
    view = site(task, "--fp32")
    view.by("file").set_input_files(tmp_path / "image.png")
    view.finished()
    if task == "image-captioning":
        expected = view.bundle.predict([tmp_path / "image.png"], beam=1)[0].text
        assert view.by("output").text_content() == expected
        assert view.by("patches").locator("span").count() == 4
    else:
        probabilities = view.bundle.predict([tmp_path / "image.png"])[0].probabilities
        assert dict(view.bars()[0]) == pytest.approx({n: 100 * p for n, p in probabilities.items()}, abs=0.06)
    (tmp_path / "broken.png").write_bytes(b"this is no image")
    view.by("file").set_input_files(tmp_path / "broken.png")
    assert "cannot be read" in view.by("problem").inner_text()


@pytest.mark.slow
def test_forecast(site: Open):
    view = site("regression", "--fp32")
    series = [[float(step), 2.0 - step] for step in range(6)]
    view.run("\n".join(f"{a}, {b}" for a, b in series))
    shown = [[*map(float, one.split(" / "))] for one in view.by("values").locator("span").all_inner_texts()]
    expected = view.bundle.predict([torch.tensor(series)])[0].values
    torch.testing.assert_close(torch.tensor(shown), torch.tensor(expected), rtol=1e-3, atol=1e-3)
    view.run("1 2\n3")
    assert view.by("problem").is_visible()


@pytest.mark.slow
def test_languages_colours_and_a_phone(site: Open):
    view = site("translation", viewport={"width": 360, "height": 740})
    view.run(TEXT)
    assert view.page.evaluate("document.documentElement.scrollWidth") <= 360
    view.by("language").click()
    assert view.page.evaluate("document.documentElement.lang") == "ko" and view.by("run").inner_text() == "번역"
    light = view.page.evaluate("getComputedStyle(document.body).backgroundColor")
    view.by("theme").click()
    view.by("theme").click()
    assert view.page.evaluate("getComputedStyle(document.body).backgroundColor") != light


@pytest.mark.slow
def test_the_folder_is_an_onnx_folder_too_and_loads_nothing_from_elsewhere(site: Open, once, capsys):
    site("translation")
    folder = once("web-translation", lambda folder: None)
    assert main(["translate", str(folder), TEXT]) == 0 and capsys.readouterr().out.strip()
    assert json.loads((folder / "export.json").read_text())["compared"] > 0
    page = (folder / "index.html").read_text(encoding="utf-8")
    assert "default-src 'none'" in page and not re.search(r"(src|href)=\"(https?:)?//", page)


def test_what_has_no_page_is_refused(once, tmp_path: Path, capsys, monkeypatch):
    run = once("onnx-run-translation", lambda folder: save_run("translation", folder))
    monkeypatch.setattr(web_folder, "EXPORTED", tmp_path / "none")
    assert main(["export", str(run), "--web", str(tmp_path / "out")]) == 2
    assert "the page is not built" in capsys.readouterr().err
    monkeypatch.setattr(web_folder, "page_missing", lambda folder: None)
    own = tmp_path / "own"
    shutil.copytree(run, own)
    content = json.loads((own / "target.json").read_text(encoding="utf-8"))
    content["pre_tokenizer"] = {"type": "CharDelimiterSplit", "delimiter": "-"}
    (own / "target.json").write_text(json.dumps(content), encoding="utf-8")
    assert main(["export", str(own), "--web", str(tmp_path / "out")]) == 2
    assert "CharDelimiterSplit" in capsys.readouterr().err
    assert main(["export", str(run), "--web", str(tmp_path / "out"), "--int8"]) == 2
    assert "--int8: has no effect with --web" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# --- the tokenizer of the page


def strings() -> list[str]:
    """Words of several scripts, odd characters, and strings of random ones."""
    chance = random.Random(0)
    odd = "aZ 09 .,'\"<>/\\\t\n\réßﬁ①Ａ한글ᄒ\u1161\u11ab가か\u3099日😀👩‍👧🇰🇷\u0301½²٣▁"
    odd += "\u200b\u00a0\u3000\u2028\x85\x00\ufeff"  # spaces and what looks like them
    units = [*odd, "<s>", "</s>", "<unk>", "<mask>", "'s", "'ll", "  ", "hello", " world", "안녕"]
    made = ["".join(chance.choices(units, k=chance.randrange(30))) for _ in range(300)]
    decomposed = [unicodedata.normalize("NFD", text) for text in (*TEXTS, "안녕하세요, café")]
    return ["", " ", *TEXTS, *decomposed, *made]


@pytest.mark.skipif(not ROLLDOWN.exists() or shutil.which("node") is None, reason="needs web/node_modules:  make page")
def test_the_tokenizer_of_the_page_gives_the_ids_of_python(tmp_path: Path):
    texts, tokenizers = strings(), dict[str, Tokenizer]()
    for kind in ("word", "char", "byte", "bpe", "unigram"):
        for form in ("NFC", "NFKC", "none"):
            size = {"bpe": 330, "unigram": 400}.get(kind)
            tokenizers[f"{kind}-{form}"] = Tokenizer.train([*TEXTS, *texts], kind, size, normalize=form)  # type: ignore[arg-type]
    tokenizers["mask"] = tokenizers["unigram-NFC"].with_special_tokens(["<mask>"])
    given = {name: json.loads(one.json) for name, one in tokenizers.items()}
    (tmp_path / "in.json").write_text(json.dumps({"texts": texts, "tokenizers": given}), encoding="utf-8")
    (tmp_path / "run.mjs").write_text(
        "import { readFileSync } from 'node:fs'; import { Tokenizer } from './tokenizer.mjs';\n"
        "const { texts, tokenizers } = JSON.parse(readFileSync('in.json'));\n"
        "const run = (one) => texts.map((text) => { const ids = one.encode(text);"
        " return [ids, one.decode(ids), ids.map((id) => one.token(id))]; });\n"
        "const made = Object.entries(tokenizers).map(([name, json]) => [name, run(new Tokenizer(json))]);\n"
        "process.stdout.write(JSON.stringify(Object.fromEntries(made)));\n"
    )
    bundle = [str(ROLLDOWN), str(ROOT / "web/src/browser/tokenizer.ts"), "--format", "esm", "--file", "tokenizer.mjs"]
    subprocess.run(bundle, cwd=tmp_path, check=True, capture_output=True)
    output = subprocess.run(["node", "run.mjs"], cwd=tmp_path, check=True, capture_output=True).stdout
    for name, rows in json.loads(output).items():
        own = tokenizers[name]
        for text, (ids, decoded, tokens) in zip(texts, rows, strict=True):
            assert ids == own.encode(text), (name, text)
            assert decoded == own.decode(ids), (name, text)
            assert tokens == own.tokens(text) or "\\x" in "".join(tokens), (name, text)  # parts of characters
