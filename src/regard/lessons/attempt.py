"""A learner's solutions and what the checks say about them.

`check(4, split_heads)` in a notebook shows the result below the cell. `check_file(4, "my.py")`, which `regard lesson
check` calls, checks every exercise in a process of its own, because the file may contain anything: a mistake in its
syntax, an exception, an endless loop. The process reports the result of each exercise as soon as it has one; if none
arrives in time it is ended, and a new one continues with the next exercise.
"""

from __future__ import annotations

import functools
import json
import os
import queue
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, Literal

from regard.errors import UserError, suggest
from regard.explore.html import escape
from regard.lessons.course import LANGUAGES, chosen_language, find_lesson

Text = tuple[str, str]  # in English and in Korean
Status = Literal["passed", "failed", "not attempted"]
STATUS: dict[Status, Text] = {
    "passed": ("passed", "통과"),
    "failed": ("not yet", "아직 틀림"),
    "not attempted": ("not attempted", "아직 풀지 않음"),
}
SIGNS: dict[Status, str] = {"passed": "✓", "failed": "✗", "not attempted": "·"}
START_SECONDS = 120.0  # to import PyTorch on a busy machine


@dataclass(frozen=True)
class Result:
    """Of one exercise; `hint`, in English and Korean, says what is wrong with a solution that failed."""

    number: int
    name: str
    status: Status
    hint: Text = ("", "")

    def line(self, lesson: int, language: str) -> str:
        at = LANGUAGES.index(language)
        head = f"{SIGNS[self.status]} {lesson}.{self.number} {self.name}: {STATUS[self.status][at]}"
        return f"{head}\n    {self.hint[at]}" if self.hint[at] else head


@dataclass(frozen=True)
class Results:
    """Of a lesson's exercises; a notebook shows it as a list."""

    lesson: int
    exercises: tuple[Result, ...]
    language: str = "en"

    @property
    def passed(self) -> int:
        return sum(one.status == "passed" for one in self.exercises)

    def __repr__(self) -> str:
        return "\n".join(one.line(self.lesson, self.language) for one in self.exercises)

    def _repr_html_(self) -> str:
        items = (escape(one.line(self.lesson, self.language)).replace("\n", "<br>") for one in self.exercises)
        colours = {"passed": "#1f8a5b", "failed": "#c8453f", "not attempted": "#7a8494"}
        styles = (f"border-left: 4px solid {colours[one.status]}; padding: .2em .8em" for one in self.exercises)
        pairs = zip(styles, items, strict=True)
        return "".join(f'<div style="{style}; margin: .3em 0">{item}</div>' for style, item in pairs)

    def to_json(self) -> dict[str, Any]:
        at = LANGUAGES.index(self.language)
        rows = [
            {"number": one.number, "name": one.name, "status": one.status, "hint": one.hint[at] or None}
            for one in self.exercises
        ]
        return {"lesson": self.lesson, "passed": self.passed, "exercises": rows}


# --- one function


def attempt(exercise: Any, function: Callable[..., Any]) -> Result:
    """Check one function; whatever it does wrong becomes a hint."""
    import torch

    from regard.lessons.checker import Hint

    returned: list[Any] = []

    @functools.wraps(function)
    def recorded(*inputs: Any, **options: Any) -> Any:
        returned[:] = [function(*inputs, **options)]
        return returned[0]

    def result(status: Status, hint: Text = ("", "")) -> Result:
        return Result(exercise.number, exercise.name, status, hint)

    if _is_empty(function):
        return result("not attempted")
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            exercise.check(recorded)
    except Hint as hint:
        return result("failed", (hint.en, hint.ko))
    except NotImplementedError:
        return result("not attempted")
    except (Exception, SystemExit) as error:
        return result("failed", _explanation(error, function, returned))
    return result("passed")


def _codes(answer: Any) -> list[CodeType]:
    """The code of a function, or of the methods of a class."""
    functions = vars(answer).values() if isinstance(answer, type) else (answer,)
    return [one.__code__ for one in functions if isinstance(one, FunctionType)]


def _is_empty(answer: Any) -> bool:
    """Whether a function, or every method of a class, has nothing but `...`, `pass` or a docstring inside."""

    def empty() -> None: ...

    codes = _codes(answer)
    return bool(codes) and all(one.co_code == empty.__code__.co_code and one.co_consts[-1] is None for one in codes)


def _explanation(error: BaseException, answer: Any, returned: list[Any]) -> Text:
    """Where and why a solution, or the check of its result, raised an exception."""
    what = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}".removesuffix(": None").rstrip(": ")
    files = {code.co_filename for code in _codes(answer)}
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename in files]
    if lines:
        return f"Line {lines[-1]} raised {what}", f"{lines[-1]}번째 줄에서 예외가 발생했습니다. {what}"
    if returned and not isinstance(error, SystemExit):
        kind = type(returned[0]).__name__
        return (
            f"The check cannot use the result, which is of type {kind}. {what}",
            f"반환값(형식 {kind})을 검사할 수 없습니다. {what}",
        )
    return f"The call raised {what}", f"호출할 때 예외가 발생했습니다. {what}"


def check(lesson: int, *functions: Callable[..., Any], lang: str | None = None) -> Results:
    """Check functions in a notebook, each by its name: `check(4, split_heads)`. `lang`: "en" or "ko" (by locale)."""
    from regard.lessons.checker import exercises

    language = chosen_language(lang)
    by_name = {one.name: one for one in exercises(find_lesson(lesson).number)}
    if not functions:
        raise UserError(f"check({lesson}): pass your functions, such as check({lesson}, {next(iter(by_name))})")
    results = []
    for function in functions:
        name = getattr(function, "__name__", str(function))
        if name not in by_name:
            raise UserError(f"{name}: is not an exercise of lesson {lesson}; {suggest(name, by_name)}")
        results.append(attempt(by_name[name], function))
    return Results(lesson, tuple(results), language)


# --- a file, in a process of its own


def check_file(lesson: int, path: Path, language: str = "en", seconds: float = 20.0) -> Results:
    """Check the functions that a file defines; `seconds` is the limit for each exercise."""
    if path.suffix == ".ipynb":
        raise UserError(f"{path}: is a notebook; call  check({lesson}, your_function)  in one of its cells")
    if not path.is_file():
        raise UserError(f"{path}: no such file; write your functions into a Python file")
    try:
        compile(path.read_bytes(), str(path), "exec")
    except (SyntaxError, ValueError) as error:
        raise UserError(_broken(path, error)[LANGUAGES.index(language)]) from None
    results: list[Result] = []
    while not _one_process(lesson, path, language, seconds, results):
        pass
    return Results(lesson, tuple(results), language)


def _one_process(lesson: int, path: Path, language: str, seconds: float, results: list[Result]) -> bool:
    """Append the results of the exercises that follow; False: the process was ended, and there may be more."""
    command = [sys.executable, "-m", "regard.lessons.attempt", str(lesson), str(path), str(len(results))]
    with ExitStack() as stack:
        environment = os.environ | {"PYTHONIOENCODING": "utf-8:replace"}
        process = stack.enter_context(
            subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=environment)
        )
        stack.callback(process.kill)
        messages = _messages(process)
        pending: list[Any] = []  # the exercise that is being checked: [number, name]
        limit = START_SECONDS
        while True:
            try:
                kind, *values = messages.get(timeout=limit)
            except queue.Empty:
                kind, values = "timeout", []
            limit = seconds
            if kind == "begin":
                pending = values
            elif kind == "result":
                number, name, status, hint = values
                results.append(Result(number, name, status, (hint[0], hint[1])))
                pending = []
            elif kind == "broken":
                raise UserError(values[0][LANGUAGES.index(language)])
            elif kind == "end":
                return True
            elif kind in ("timeout", "ended"):
                hint = _stopped(kind, seconds, process)
                if not pending:
                    raise UserError(f"{path}: {hint[LANGUAGES.index(language)]}")
                number, name = pending
                results.append(Result(number, name, "failed", hint))
                return False


def _stopped(kind: str, seconds: float, process: subprocess.Popen[bytes]) -> Text:
    if kind == "timeout":
        return (
            f"It did not end within {seconds:g} s: look for an endless loop.",
            f"{seconds:g}초 안에 끝나지 않았습니다. 무한 루프가 있는지 확인하세요.",
        )
    code = process.wait()
    return f"It ended the process (exit code {code}).", f"프로세스가 종료되었습니다(종료 코드 {code})."


def _messages(process: subprocess.Popen[bytes]) -> queue.Queue[list[Any]]:
    """The lines that a process prints, read by a thread so that waiting for one can have a limit."""
    messages: queue.Queue[list[Any]] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            messages.put(json.loads(line))
        messages.put(["ended"])

    threading.Thread(target=read, daemon=True).start()
    return messages


def _load(path: Path) -> ModuleType:
    """Run a learner's file as a module."""
    module = ModuleType("solutions")
    module.__file__ = str(path)
    sys.modules["solutions"] = module
    sys.path.insert(0, str(path.resolve().parent))
    exec(compile(path.read_bytes(), str(path), "exec"), module.__dict__)
    return module


def _broken(path: Path, error: BaseException) -> Text:
    """Why a file cannot be run, with the line."""
    frames = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    line = error.lineno if isinstance(error, SyntaxError) else next(reversed(frames), None)
    reason = error.msg if isinstance(error, SyntaxError) else str(error)
    what = f"{type(error).__name__}: {next(iter(reason.splitlines()), '')}".rstrip(": ")
    where, ort = (f"{path}, line {line}", f"{path}, {line}번째 줄") if line else (str(path), str(path))
    return (
        f"{where}: {what}; correct the file, then run the check again",
        f"{ort}: {what}. 파일을 고친 뒤 다시 실행하세요.",
    )


def _run(lesson: int, path: Path, done: int) -> Iterator[list[Any]]:
    """What the process reports: the results of all exercises but the first `done`."""
    from regard.lessons.checker import exercises

    listed = exercises(lesson)[done:]
    yield ["ready"]
    try:
        module = _load(path)
    except (Exception, SystemExit) as error:
        yield ["broken", _broken(path, error)]
        return
    for one in listed:
        yield ["begin", one.number, one.name]
        function = getattr(module, one.name, None)
        result = attempt(one, function) if callable(function) else Result(one.number, one.name, "not attempted")
        yield ["result", result.number, result.name, result.status, result.hint]
    yield ["end"]


def main() -> None:
    """The process: messages to its standard output; what the learner prints goes to standard error instead."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for message in _run(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])):
        print(json.dumps(message), file=out, flush=True)


if __name__ == "__main__":
    main()
