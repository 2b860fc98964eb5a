"""Messages in Korean: how the language is chosen, and that every entry of the tables fits the English it translates."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import types
from bisect import bisect_left
from collections.abc import Iterator
from pathlib import Path

import pytest

import regard
from regard import cli
from regard.messages import PART, VARIABLE, _read, entries, language, localize
from regard.models.config import ModelConfig
from regard.models.transformer import build
from regard.terminal import screen_width

COMMANDS = tuple(cli.COMMANDS)


@pytest.fixture
def locale(monkeypatch):
    """Call with the variables of a locale; the others are unset."""

    def choose(**variables: str) -> None:
        for name in (VARIABLE, "LC_ALL", "LC_MESSAGES", "LANG"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return choose


@pytest.fixture
def korean(monkeypatch):
    monkeypatch.setenv(VARIABLE, "ko")


# --- the language


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, "en"),
        ({"LANG": "ko_KR.UTF-8"}, "ko"),
        ({"LANG": "ko"}, "ko"),
        ({"LANG": "kok_IN"}, "en"),  # Konkani
        ({"LC_MESSAGES": "ko_KR", "LANG": "en_US.UTF-8"}, "ko"),
        ({"LC_ALL": "C", "LANG": "ko_KR.UTF-8"}, "en"),
        ({"LC_ALL": "", "LANG": "ko_KR.UTF-8"}, "ko"),
        ({"REGARD_LANG": "en", "LC_ALL": "ko_KR.UTF-8"}, "en"),
        ({"REGARD_LANG": "ko", "LC_ALL": "C"}, "ko"),
    ],
)
def test_the_language_is_that_of_the_variable_or_of_the_locale(locale, variables, expected):
    locale(**variables)
    assert language() == expected


def test_the_option_decides_and_lasts_for_its_command(locale, capsys):
    locale(LANG="en_US.UTF-8")
    for options in (["--lang", "ko"], ["--lang=ko"], ["--debug", "--lang", "ko"], ["--lang", "en", "--lang", "ko"]):
        assert cli.main([*options, "runs", "--help"]) == 0
        assert capsys.readouterr().out.startswith("사용법: regard runs")
        assert language() == "en"
    locale(REGARD_LANG="ko")
    assert cli.main(["--lang", "en", "--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: regard ") and language() == "ko"


@pytest.mark.parametrize(("variable", "options"), [("en", ["--lang", "fr"]), ("fr", [])])
def test_an_unknown_language_is_an_error(locale, capsys, variable, options):
    locale(REGARD_LANG=variable)
    assert cli.main([*options, "runs"]) == 2
    error = capsys.readouterr().err
    assert "fr: unknown language" in error and "en, ko" in error


# --- the tables


def test_every_group_summary_and_description_has_a_korean_text(korean):
    for group, commands in cli.GROUPS.items():
        for text in (group, *commands.values()):
            assert localize(text) != text, text
    assert _read("descriptions").keys() == {"regard", "exit_codes", *COMMANDS}


@pytest.mark.parametrize("name", COMMANDS)
def test_help_in_korean_has_the_same_options_and_fits_the_terminal(korean, capsys, name):
    assert cli.main([name, "--help"]) == 0
    text = capsys.readouterr().out
    parser = cli.Parser(f"regard {name}", "", importlib.import_module(cli.COMMANDS[name][0]).ARGUMENTS)
    for action in parser._actions:
        assert all(option in text for option in action.option_strings)
    assert max(map(screen_width, text.partition("\n예시:\n")[0].splitlines())) <= 120


def test_the_parts_of_both_languages_are_the_same():
    for english, korean in entries().items():
        parts = PART.findall(english)
        assert len(parts) == len(set(parts)), english
        assert {*parts} - {"s"} == {*PART.findall(korean)}, english


def strings(constant: object) -> Iterator[str]:
    """The strings in compiled code; of an f-string, its fixed pieces."""
    match constant:
        case str():
            yield constant
        case tuple() | frozenset():
            for one in constant:
                yield from strings(one)
        case types.CodeType():
            yield from strings(constant.co_consts)


def test_every_message_of_the_tables_is_one_of_ours():
    """Its words occur in the source, in at most three strings that are put together (argparse and the system have some
    messages, too): one that was reworded there would silently stay English."""
    paths = [Path(argparse.__file__), *Path(regard.__file__).parent.rglob("*.py")]
    texts = {text for path in paths for text in strings(compile(path.read_text("utf-8"), path.name, "exec"))}
    datasets = (Path(regard.__file__).parent / "data/datasets.toml").read_text("utf-8")  # listed by `regard data`
    source = "\n".join([*texts, datasets, *map(os.strerror, range(40))])
    for english in entries():
        for words in (words.strip() for piece in PART.split(english)[::2] for words in re.split("[;:,()]", piece)):
            rest = "" if words.replace(" ", "_") in source else words  # valid_loss
            for _ in range(3):
                found = bisect_left(range(1, len(rest) + 1), True, key=lambda end, rest=rest: rest[:end] not in source)
                rest = rest[found:].strip()
            assert not rest, f"{english!r}: {words!r}"


# --- what is translated


def test_values_are_copied(korean):
    """A message with numbers, names and paths in it is translated by its own entry, with the same values."""
    for english, expected in entries().items():
        values = {name: "" if name == "s" else f"x y/{at}.z" for at, name in enumerate(PART.findall(english))}
        values |= {name: f"{at},120.5" for at, name in enumerate(values) if re.fullmatch(r"n\d*", name)}
        assert localize(english.format(**values)) == expected.format(**values), english
    assert localize("a text that has no entry: 1") == "a text that has no entry: 1"


def test_a_message_in_a_message_is_translated_and_a_name_is_not(korean):
    text = localize("error: unknown command 'loss': did you mean 'tokens'? Choose one of: tokens, words")
    assert text == "오류: 알 수 없는 명령 'loss': 혹시 'tokens'인가요? 다음 중에서 고르세요: tokens, words"
    assert localize("note: 3 steps of mine") == "참고: 3 steps of mine"
    assert localize("mine\nthree things to try next:") == "mine\n다음으로 해 볼 것:"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["trian"], ["오류: 알 수 없는 명령 'trian'", "혹시 'train'인가요?"]),
        (["train"], ["다음 인자가 필요합니다: RECIPE", "regard train --help"]),
        (["train", "--stepz", "3"], ["regard train에는 '--stepz' 옵션이 없습니다", "혹시 '--set'인가요?"]),
        (["train", "missing/mine.toml"], ["missing/mine.toml: 그런 파일이나 폴더가 없습니다"]),
        (["train", "recipe.toml"], ["train.stepz: 알 수 없는 설정입니다. 혹시 'steps'인가요?"]),
        (["train", "other.toml"], ["train.tsv: 그런 파일이 없습니다", "--data DIR"]),
        (["translate", "nothing", "hello"], ["nothing: 그런 폴더가 없습니다", "recipe.toml"]),
        (["translate", "recipe.toml", "hello"], ["recipe.toml: 폴더가 아니라 파일입니다"]),
        (["serve", "nothing"], ["nothing은(는) 학습한 모델이 아닙니다(recipe.toml이 없습니다)"]),
        (["translate", "nothing", "--beam", "x", "hi"], ["--beam", "'x'은(는) 올바른 int 값이 아닙니다"]),
        (["runs", "nothing"], ["nothing: 그런 폴더가 없습니다"]),
    ],
)
def test_mistakes_of_a_newcomer_are_explained_in_korean(korean, capsys, empty_folder, monkeypatch, arguments, named):
    """The exit code is that of the English message, and no English sentence is left."""
    data = '[data]\ntrain = ["train.tsv"]\n'
    (empty_folder / "recipe.toml").write_text(f"{data}[train]\nstepz = 3\n")
    (empty_folder / "other.toml").write_text(data)
    code, error = cli.main(arguments), capsys.readouterr().err.replace(str(empty_folder), "")
    assert all(part in error for part in named), error
    assert not re.search(r"\b(?:the|is|of|did|pass|such)\b", error), error
    monkeypatch.setenv(VARIABLE, "en")
    assert cli.main(arguments) == code == 2
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize(
    ("files", "recipe", "named"),
    [
        (
            {"a.en": "a\n\nb", "a.ko": "가\n나\n다"},
            "",
            ["문제 1개, 정상적인 문장 쌍 2개", "a.en 2번째 줄: 비어 있지만"],
        ),
        ({"a.en": "a\nb", "a.ko": "가"}, "", ["a.ko 1번째 줄: 파일이 여기서 끝나지만", "2줄이 있습니다"]),
        ({"b.en": "a", "a.ko": "가"}, "", ["a.en: 그런 파일이 없습니다. 혹시 'b.en'"]),
        ({"a.en": "a", "a.ko": "가"}, "valid = 'v.en'", ["data.valid = 'v.en': 목록으로 쓰세요"]),
        ({"a.en": "a", "a.ko": "가"}, "encoding = 'utf9'", ["알 수 없는 인코딩입니다"]),
    ],
)
def test_problems_of_data_are_explained_in_korean(korean, capsys, empty_folder, files, recipe, named):
    for name, content in files.items():
        Path(name).write_text(content, encoding="utf-8")
    Path("recipe.toml").write_text(f'[data]\ntrain = ["a.en", "a.ko"]\n{recipe}\n', encoding="utf-8")
    assert cli.main(["data", "check", "recipe.toml"]) == 2
    error = capsys.readouterr().err
    assert all(part in error for part in named), error
    assert not re.search(r"\b(?:the|is|line|has|did|pass|such)\b", error.replace(str(empty_folder), "")), error


def test_refusals_of_an_export_are_explained_in_korean(korean, capsys, empty_folder):
    config = ModelConfig(architecture="encoder", dim=8, heads=2, layers=1, ff_dim=8, vocab_size=9, output_head="none")
    regard.save(build(config), "run")
    assert cli.main(["export", "run", "--ctranslate2", ""]) == 2
    assert "저장할 폴더의 이름이 비어 있습니다" in capsys.readouterr().err
    assert cli.main(["export", "run", "--ctranslate2", "run", "--force"]) == 2
    assert "지금 읽는 run이(가) 그 안에 있습니다" in capsys.readouterr().err
    (empty_folder / "mine").mkdir()
    (empty_folder / "mine" / "thesis.txt").touch()
    assert cli.main(["export", "run", "--ctranslate2", "mine", "--force"]) == 2
    assert "이 명령이 만든 폴더가 아니어서" in capsys.readouterr().err
    assert cli.main(["export", "run", "--ctranslate2", "out"]) == 2
    assert "run: CTranslate2로 내보낼 수 없습니다: architecture = 'encoder'" in capsys.readouterr().err


def test_json_and_exit_codes_do_not_depend_on_the_language(monkeypatch, capsys, tmp_path):
    """An argument that is not UTF-8 is an error in both; its message is translated for people alone."""
    from explorer import make_translator

    folder = str(make_translator(tmp_path / "model"))
    arguments = ["translate", folder, "the cat", "\udcff\udcfe", "--device", "cpu", "--json"]
    results = {}
    for chosen in ("en", "ko"):
        monkeypatch.setenv(VARIABLE, chosen)
        results[chosen] = (cli.main(arguments), *capsys.readouterr())
    (code, out, error), (korean_code, korean_out, korean_error) = results["en"], results["ko"]
    assert (code, out) == (korean_code, korean_out) and code == 3
    assert "is not UTF-8: byte 0xff" in out and "note: 1 of 2 inputs failed" in error
    assert (
        "UTF-8이 아닙니다: 1번째 바이트 0xff" in korean_error
        and "참고: 입력 2개 중 1개를 처리하지 못했습니다" in korean_error
    )


def report_page() -> str:
    from regard.explore import html
    from regard.explore.chart import line_chart
    from regard.explore.heatmap import head_grid, heat_map
    from regard.explore.report import _part
    from regard.training import results

    weights = [[0.25, 0.75], [0.5, 0.5]]
    table = results.Table(["class", "loss"], [["loss", 0.125], ["text", 7]], fixed=1)  # of a class called loss
    parts = [
        html.figure(
            line_chart({"a": [(1, 3.5), (2, 1.5)]}, title="Loss", x_label="step", y_label="nats per token"), ""
        ),
        html.figure(heat_map(weights, "ab", "cd", title="Cross-attention, layer 1, head 3"), "3 steps; 0.5."),
        head_grid([[weights]], "ab", "cd"),
        html.examples_table([("loss", "text", "key")]),
        html.attention_note(),
        _part(table),
    ]
    sections = [html.Section("Learning curve", "".join(parts))] * 4
    return html.page("loss", [("parameters", "1,234")], sections, created="2026-01-01")


def test_a_report_in_korean_has_the_same_numbers_and_data(korean, monkeypatch):
    """What comes from the data is left alone, even where it is one of our words."""
    korean_page = report_page()
    monkeypatch.setenv(VARIABLE, "en")
    english_page = report_page()
    assert '<html lang="ko">' in korean_page and '<html lang="en">' in english_page
    english, hangul = (re.sub("<style>.*?</style>", "", page, flags=re.DOTALL) for page in (english_page, korean_page))
    texts = [re.findall(r">([^<>]+)<", page) for page in (english, hangul)]
    assert len(texts[0]) == len(texts[1])
    for text, translated in zip(*texts, strict=True):
        assert sorted(re.findall(r"\d+", text)) == sorted(re.findall(r"\d+", translated))
        if len(re.findall(r"[a-z]{3,}", text)) > 3:  # a sentence
            assert re.search("[가-힣]", translated), text
    assert "<h1>loss</h1>" in hangul and ">loss</th>" in hangul and ">class</th>" not in hangul
    assert {">loss</td>", ">text</td>"} <= set(re.findall(r">\w+</td>", hangul))
