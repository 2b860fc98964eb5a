"""The lessons of the course and what their files contain.

A lesson is a Markdown file per language. Its title is the first heading; an exercise is a heading `### Exercise 4.2: …`
(`### 연습 문제 4.2: …`) whose solution is the Python code in the <details> below it; the other Python blocks are the
code of the lesson.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from regard.errors import UserError
from regard.messages import LANGUAGES, check_language, language

FOLDER = Path(__file__).parent
# What a lesson is about, in English and Korean.
TOPICS = {
    1: ("query, key and value; the formula by hand", "쿼리 · 키 · 값, 손으로 계산하는 어텐션"),
    2: ("variance of q·k, softmax, gradients", "q·k의 분산, 소프트맥스, 그래디언트"),
    3: ("causal, padding and window masks", "인과 · 패딩 · 윈도우 마스크"),
    4: ("fused projections, shapes, parameters", "통합 투영, 텐서 모양, 파라미터 수"),
    5: ("sinusoidal, learned, relative, RoPE, ALiBi", "사인파 · 학습형 · 상대 위치, RoPE, ALiBi"),
    6: ("residual connections, LayerNorm, feed-forward", "잔차 연결, LayerNorm, 피드포워드"),
    7: ("seq2seq, the bottleneck, additive attention", "seq2seq, 병목, 가산 어텐션"),
    8: ("teacher forcing, label smoothing, warm-up", "교사 강요, 레이블 스무딩, 웜업"),
    9: ("the KV cache, Shakespeare, Hugging Face", "KV 캐시, 셰익스피어, Hugging Face"),
    10: ("greedy and beam search, temperature, top-k, top-p", "그리디 · 빔 탐색, 온도, top-k, top-p"),
    11: ("masked language models, fine-tuning, NSMC", "마스크 언어 모델, 미세 조정, NSMC"),
    12: ("patches, Swin windows, captions", "패치, Swin 윈도우, 캡션"),
    13: ("patterns, ablated heads, logit lens, attribution", "패턴, 헤드 끄기, 로짓 렌즈, 기여도"),
    14: ("O(n²), FlashAttention, Table 3", "O(n²), FlashAttention, 표 3"),
}

_FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```[ \t]*$", re.M | re.S)
_DETAILS = re.compile(r"<details>.*?</details>", re.S)
EXERCISE = re.compile(r"^### (?:Exercise|연습 문제) (\d+)\.(\d+)", re.M)


@dataclass(frozen=True)
class Lesson:
    """Lesson `number`, whose files begin with `name`, such as 04-many-heads."""

    number: int
    name: str

    def path(self, language: str) -> Path:
        return FOLDER / f"{self.name}.{language}.md"

    def text(self, language: str) -> str:
        return self.path(language).read_text(encoding="utf-8")

    def title(self, language: str) -> str:
        """The first heading without the number: "Many heads"."""
        heading = re.search(r"^# +(.+)$", self.text(language), re.M)
        return re.sub(r"^(?:Lesson |레슨 )?\d+(?:강|과)?[.:]? *", "", heading[1]) if heading else self.name

    def topics(self, language: str) -> str:
        return TOPICS[self.number][LANGUAGES.index(language)]

    def minutes(self, language: str) -> int:
        """To read and run it, as the lesson states before its first section."""
        introduction = self.text(language).split("\n## ")[0]
        stated = re.search(r"(\d+)(?: minutes|분)", introduction)
        if stated is None:
            raise UserError(f"{self.path(language)}: state the time it takes before the first section")
        return int(stated[1])


def chosen_language(option: str | None) -> str:
    """That of an option `--lang`, or if there is none, that of messages."""
    return language() if option is None else check_language(option, "--lang")


@cache
def lessons() -> tuple[Lesson, ...]:
    """All lessons, in order."""
    names = sorted(path.name.removesuffix(".en.md") for path in FOLDER.glob("[0-9][0-9]-*.en.md"))
    return tuple(Lesson(int(name[:2]), name) for name in names)


def find_lesson(number: int | str) -> Lesson:
    for lesson in lessons():
        if str(number) in (str(lesson.number), lesson.name):
            return lesson
    last = max((lesson.number for lesson in lessons()), default=0)
    raise UserError(
        f"lesson {number}: does not exist; choose a number from 1 to {last} (list them with  regard lesson)"
    )


def anchor(heading: str) -> str:
    """The id of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def blocks(text: str) -> Iterator[tuple[str, str]]:
    """(language, code) of every fenced block."""
    return ((match[1], match[2]) for match in _FENCE.finditer(text))


def solutions(text: str) -> dict[int, str]:
    """{number of an exercise: the code of its solution} of a lesson."""
    parts = EXERCISE.split(text)
    return {
        int(number): "".join(code for kind, code in blocks("".join(_DETAILS.findall(part))) if kind == "python")
        for number, part in zip(parts[2::3], parts[3::3], strict=True)
    }


def stub(solution: str, name: str) -> str:
    """The function or class `name` of a solution: signatures and docstrings, with nothing inside."""
    tree = ast.parse(solution)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            for one in ast.walk(node):
                if isinstance(one, ast.FunctionDef):
                    docstring = one.body[:1] if ast.get_docstring(one) else []
                    one.body = [*docstring, ast.Expr(ast.Constant(...))]
            needed = [one for one in tree.body if isinstance(one, ast.Import | ast.ImportFrom)]
            imports = "\n".join(map(ast.unparse, needed))
            return (f"{imports}\n\n\n" if imports else "") + ast.unparse(ast.fix_missing_locations(node)) + "\n"
    raise ValueError(f"the solution does not define {name}")
