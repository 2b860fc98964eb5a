"""The vocabulary of code, messages and documentation: standard terms instead of private ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {"src/regard": ("*.py", "*.toml"), "docs": ("*.md",), "web/src": ("*.ts", "*.svelte"), "recipes": ("*.toml",)}
# pattern of a private term: the standard one
WORDS = {
    r"fillers?": "padding",
    r"foretells?|foretold|foresees?|foreseen": "predict, forecast",
    r"heretofore": "so far",
    r"mends?|mended|mending": "correct",
    r"shall": "should, must",
    r"likeliest|likelier": "most probable, more probable",
    r"surprises?|surprised": "cross-entropy, log-probability",
    r"free-running": "autoregressive",
    r"go on|goes on|went on|going on": "continue, resume",
    r"wiring": "architecture",
    r"answerers?": "predictor",
    r"visibility": "attention mask",
    r"recognisers?": "classifier",
    r"whoever": "who",
    r"nats an? \w+": "nats per token",
    r"(?:tokens|frames|steps|sentences|pairs|rows|images|texts|characters|operations|bytes) a second": "per second, /s",
    r"(?:numbers|bytes|rows|tokens|pairs) a (?:row|token|step|head|word|text|block|batch|layer|image|sentence)": "per",
}


def files() -> list[Path]:
    found = [path for folder, names in FOLDERS.items() for name in names for path in (ROOT / folder).rglob(name)]
    built = {ROOT / "src/regard/explore/page", ROOT / "src/regard/interop/page"}
    return [
        *sorted(path for path in found if not built.intersection(path.parents)),
        ROOT / "README.md",
        ROOT / "README.ko.md",
    ]


@pytest.fixture(scope="module")
def lines() -> list[tuple[str, str]]:
    """(file:line, text) of everything."""
    return [
        (f"{path.relative_to(ROOT)}:{number}", line)
        for path in files()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
    ]


@pytest.mark.parametrize("pattern", WORDS)
def test_private_terms_are_not_used(lines, pattern: str) -> None:
    word = re.compile(rf"\b(?:{pattern})\b", re.IGNORECASE)
    matches = [f"{where}: {text.strip()[:80]}" for where, text in lines if word.search(text)]
    assert not matches, f"use {WORDS[pattern]!r}:\n" + "\n".join(matches)


# pattern of a Korean term: the one of docs/glossary.md
KOREAN = {
    "매개변수": "파라미터",
    "부류": "클래스",
    "미리 학습": "사전 학습",
    "영화평": "리뷰",
    "시험 집합|시험 세트": "테스트 세트",
    "훈련": "학습",
    "라벨": "레이블",
    "윈도(?!우)": "윈도우",
    "프로젝션": "투영",
    "빔 서치": "빔 탐색",
    "교차 어텐션": "크로스 어텐션",
    "자기 어텐션": "셀프 어텐션",
    "코퍼스": "말뭉치",
    "컨볼루션": "합성곱",
    "바이어스": "편향",
    "파인튜닝": "미세 조정",
    "티처 포싱|교사 강제": "교사 강요",
    "정확 일치": "완전 일치",
    "혼란도": "퍼플렉서티",
    "보는 쪽|보이는 쪽": "쿼리, 키",
    r"\d층 \d번|층 정규화": "레이어",
}


@pytest.fixture(scope="module")
def korean() -> list[tuple[str, str]]:
    """(file, text) of everything that is written in Korean."""
    names = (
        "README.ko.md", "docs/ko/*.md", "docs/glossary.md", "src/regard/lessons/*.ko.md",
        "src/regard/messages/ko/*.toml",
        "web/src/lib/*.ko.ts", "web/src/lib/glossary.ts", "web/src/browser/words.svelte.ts",
    )  # fmt: skip
    return [
        (str(path.relative_to(ROOT)), path.read_text(encoding="utf-8"))
        for name in names
        for path in sorted(ROOT.glob(name))
    ]


@pytest.mark.parametrize("pattern", KOREAN)
def test_korean_terms_are_those_of_the_glossary(korean, pattern: str) -> None:
    found = [
        f"{name}: {match[0]}" for name, text in korean for match in re.finditer(f".{{0,9}}(?:{pattern}).{{0,9}}", text)
    ]
    if pattern == "라벨":  # named as what other texts say
        found = [one for one in found if not one.startswith("docs/glossary.md")]
    assert not found, f"use {KOREAN[pattern]!r}:\n" + "\n".join(found)


def test_the_glossary_has_each_term_once() -> None:
    text = (ROOT / "docs/glossary.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    rows = [row for row in rows if row[0] != "English"]
    assert all(len(row) == 4 and all(cell.strip() for cell in row) for row in rows)
    for column in (0, 1):
        terms = [row[column] for row in rows]
        assert len(terms) == len(set(terms)), sorted(term for term in terms if terms.count(term) > 1)
