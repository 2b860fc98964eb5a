"""What translate, classify, generate, caption, fill and predict share: inputs, outputs, a prompt, inputs that fail."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import select
import shutil
import signal
import sys
import termios
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import regard
from prediction_models import make_run
from regard import cli
from regard.cli import main
from regard.commands import prediction

# kind of model: (command with options, good inputs, a bad one, what is wrong with it, changes of the model)
OPTIONS = {
    "translate": (["translate", "--max-length", "3"], ["one two", "three"], "one " * 12, "split the line"),
    "generate": (["generate", "--max-tokens", "3", "--context", "8"], ["one two", "four"], "one " * 12, "shorten it"),
    "classify": (["classify"], ["one two", "셋 🙂"], None, ""),
    "images": (["classify"], ["a.png", "b.png"], "none.png", "none.png: no such file"),
    "fill": (["fill", "--top", "1"], ["one <mask>", "<mask> five"], "no gap", "write <mask>"),
    "caption": (["caption", "--max-length", "3"], ["a.png", "b.png"], "none.png", "none.png: no such file"),
    "predict": (["predict"], ["1 2 3", "4 5 6"], "1 x 3", "number 2 is 'x', not a number"),
}


@dataclass(frozen=True)
class Case:
    """A command with a model in the folder "run", and inputs."""

    kind: str
    command: list[str]
    good: list[str]
    bad: str
    reason: str

    def __call__(self, *arguments: str) -> int:
        return main([self.command[0], "run", *self.command[1:], *arguments, "--device", "cpu"])

    @property
    def header(self) -> int:
        """Lines before the first output, without --json."""
        return int(self.kind in ("classify", "images", "fill"))


@pytest.fixture(params=OPTIONS)
def case(request: pytest.FixtureRequest, empty_folder: Path) -> Case:
    command, good, bad, reason = OPTIONS[request.param]
    make_run(request.param, **({"position": "learned", "max_length": 8} if request.param == "translate" else {}))
    shutil.copy("a.png", "b.png")
    return Case(request.param, command, good, bad or "", reason)


@pytest.fixture
def failing(case: Case) -> Case:
    if not case.bad:
        pytest.skip("every text has a class")
    return case


def feed(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


def test_arguments_files_and_standard_input_give_the_same(
    case: Case, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert case(*case.good) == 0
    expected = capsys.readouterr().out
    assert expected.count("\n") == case.header + 2
    content = "".join(line + "\r\n" for line in case.good).encode()
    feed(monkeypatch, content)
    assert case("-o", "stdin.txt") == 0
    outputs = ["stdin.txt"]
    if case.kind != "predict":  # whose model reads a time series from a file
        Path("in.txt").write_bytes(content)
        Path("in.jsonl").write_text("".join(json.dumps({"x": line}) + "\n" for line in case.good))
        assert case("--files", "in.txt", "-o", "files.txt") == 0
        assert case("--files", "in.jsonl", "--column", "x", "-o", "table.txt") == 0
        outputs += ["files.txt", "table.txt"]
    assert capsys.readouterr() == ("", "")
    assert [Path(name).read_text(encoding="utf-8") for name in outputs] == [expected] * len(outputs)
    feed(monkeypatch, content)
    assert case("--json") == 0
    assert len([json.loads(line) for line in capsys.readouterr().out.splitlines()]) == 2


def test_one_bad_input_is_reported_and_the_rest_are_done(
    failing: Case, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    case, several = failing, failing.kind in ("images", "fill")
    assert case(*case.good) == 0
    good = capsys.readouterr().out.split("\n")[case.header : -1]
    mixed = [case.bad, case.good[0], case.bad, case.good[1]]
    assert case(*mixed) == 3
    out, err = capsys.readouterr()
    lines = out.split("\n")[case.header : -1]
    if case.kind == "fill":  # rows start with the number of their text
        assert [line.split("\t")[0] for line in lines] == ["1", "2", "3", "4"]
        lines, good = ([line.partition("\t")[2] for line in some] for some in (lines, good))
    assert lines[1::2] == good
    assert all(line.strip() in ("", "none.png") if several else line == "" for line in lines[::2])
    assert err.count(case.reason) == 2 and err.endswith("note: 2 of 4 inputs failed\n")
    feed(monkeypatch, "\n".join(mixed).encode())
    assert case("--json", "-o", "out.jsonl") == 3
    err = capsys.readouterr().err
    assert "standard input, line 3: " in err or "none.png: no such file" in err
    objects = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    assert [case.reason in one.get("error", "") for one in objects] == [True, False, True, False]
    assert mixed[0] in objects[0].values()


def test_when_all_arguments_are_bad_there_is_no_output(failing: Case, capsys: pytest.CaptureFixture[str]) -> None:
    for inputs, lines in (([failing.bad], 1), ([failing.bad] * 3, 4)):
        for options in ([], ["--json"], ["-o", "out.txt"]):
            assert failing(*inputs, *options) == 2
            out, err = capsys.readouterr()
            assert out == "" and failing.reason in err and err.count("\n") == lines and err.startswith("error: ")
    assert not Path("out.txt").exists()


def test_a_line_that_is_not_utf_8_is_one_bad_input(
    case: Case, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    content = f"{case.good[0]}\n".encode() + b"\xb0\xa1\n" + case.good[1].encode()
    feed(monkeypatch, content)
    assert case("--json") == 3
    out, err = capsys.readouterr()
    assert ["error" in json.loads(line) for line in out.splitlines()] == [False, True, False]
    assert "error: standard input, line 2: is not UTF-8: byte 0xb0" in err and "--encoding cp949" in err
    if case.kind != "predict":
        Path("in.txt").write_bytes(content)
        assert case("--files", "in.txt") == 3
        out, err = capsys.readouterr()
        assert "error: in.txt, line 2: is not UTF-8" in err and out.count("\n") == case.header + 3


def test_an_interrupted_command_leaves_no_file(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    Path("out.txt").write_text("from before")
    monkeypatch.setattr(prediction.Chunk, "texts", property(interrupted))
    monkeypatch.setattr(prediction.Chunk, "each", interrupted)
    before = sorted(Path.cwd().iterdir())
    assert case(*case.good, "-o", "out.txt") == 130
    assert Path("out.txt").read_text() == "from before" and sorted(Path.cwd().iterdir()) == before


@pytest.mark.parametrize(("arguments", "message"), [
    (["-o", "none/out.txt"], "-o none/out.txt: is a folder, or in one that does not exist"),
    (["-o", "."], "-o .: is a folder"), (["--column", "a"], "--column a: is a column of --files"),
    (["--files", "a.png"], "--files a.png: there are inputs as arguments too"),
])  # fmt: skip
def test_wrong_options_are_one_line(case: Case, capsys: pytest.CaptureFixture[str], arguments, message) -> None:
    assert case(case.good[0], *arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"error: {message}") and err.count("\n") == 1


def test_files_that_cannot_be_read_are_known_before_the_first_output(
    case: Case, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("in.tsv").write_text("a\tb\n1\t2\n")
    Path("none.txt").touch()
    for files, message in (
        (["gone.txt"], "gone.txt: no such file"),
        (["in.tsv", "--column", "c"], "column 'c' is missing"),
        (["none.txt"], "none.txt: no inputs"),
    ):
        if case.kind != "predict" or files[0] == "gone.txt":
            assert case("--files", *files, "-o", "out.txt") == 2
            out, err = capsys.readouterr()
            assert out == "" and message in err and not Path("out.txt").exists()


def test_the_name_of_a_file_is_not_a_text(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    if case.kind in ("images", "caption"):
        return
    Path("test.en").write_text("one\n")
    assert case("test.en") == 2
    assert capsys.readouterr().err == "error: 'test.en' is the name of a file: read its lines with  --files test.en\n"
    assert case("test.en", "a.png") == 2
    assert (
        "'test.en', 'a.png' are names of files: read their lines with  --files test.en a.png" in capsys.readouterr().err
    )
    case("test.en", case.good[0])
    assert "note: test.en: the name of a file, and the name itself is the input" in capsys.readouterr().err


def test_images_are_listed_by_files_relative_to_their_folder(
    empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run("caption")
    Path("sub").mkdir()
    shutil.move("a.png", "sub/b.png")
    Path("sub/list.txt").write_text("b.png\nnone.png\n")
    Path("sub/list.jsonl").write_text('{"image": "b.png", "caption": "x"}\n')
    command = ["caption", "run", "--max-length", "2", "--json", "--device", "cpu", "--files"]
    assert main([*command, "sub/list.txt", "sub/b.png", "sub/list.jsonl"]) == 3
    out, err = capsys.readouterr()
    objects = [json.loads(line) for line in out.splitlines()]
    assert [one["file"] for one in objects] == ["sub/b.png", "sub/none.png", "sub/b.png", "sub/b.png"]
    assert "error: sub/list.txt, line 2: sub/none.png: no such file" in err
    assert objects[0] == objects[2] == objects[3]


def test_a_sample_does_not_depend_on_bad_images(empty_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run("caption")
    command = ["caption", "run", "--max-length", "5", "--sample", "--json", "--device", "cpu"]
    assert main([*command, "a.png", "a.png", "a.png"]) == 0
    expected = capsys.readouterr().out.splitlines()
    assert main([*command, "none.png", "a.png", "a.png"]) == 3
    assert capsys.readouterr().out.splitlines()[1:] == expected[1:]


def test_sequences_are_lines_or_cells(empty_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run("predict")
    data = {"mean": [5.0], "std": [2.0], "train": ["pairs.tsv"]}
    regard.save(regard.load("run").model, "pairs", recipe={"data": data})
    command = ["predict", "pairs", "--device", "cpu"]
    assert main([*command, "1 2", "3"]) == 0
    expected = capsys.readouterr().out
    Path("in.jsonl").write_text('{"source": [1, 2.0]}\n{"source": "3"}\n')
    assert main([*command, "--files", "in.jsonl"]) == 0
    assert capsys.readouterr().out == expected
    Path("in.txt").write_text("1 2\n\nx\n3\n")
    assert main([*command, "--files", "in.txt"]) == 3
    out, err = capsys.readouterr()
    lines = out.split("\n")[:-1]
    assert (lines[0] + "\n" + lines[3] + "\n", lines[1:3]) == (expected, ["", ""])
    assert err.startswith("error: in.txt, line 3: number 1 is 'x', not a number") and "1 of 4" in err


def test_every_file_is_a_time_series(empty_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run("predict")
    Path("a.csv").write_text("x\n1\n2\n3\n4\n")
    Path("short.csv").write_text("x\n1\n")
    assert main(["predict", "run", "2 3 4", "--device", "cpu"]) == 0
    numbers = capsys.readouterr().out.split()
    assert main(["predict", "run", "--files", "short.csv", "a.csv", "-o", "next.csv", "--device", "cpu"]) == 3
    assert "error: short.csv: 1 steps are too few" in capsys.readouterr().err
    rows = [f"a.csv,{number}" for number in numbers]
    assert Path("next.csv").read_text().splitlines() == ["file,x", *rows]
    assert main(["predict", "run", "--files", "a.csv", "--column", "x", "--device", "cpu"]) == 2
    assert "data.columns of the recipe" in capsys.readouterr().err


def test_a_device_file_is_not_replaced(empty_folder: Path) -> None:
    make_run("predict")
    os.mkfifo("pipe")
    reader = os.open("pipe", os.O_RDONLY | os.O_NONBLOCK)
    assert main(["predict", "run", "1 2 3", "-o", "pipe", "--device", "cpu"]) == 0
    assert os.read(reader, 1000).endswith(b"\n") and Path("pipe").is_fifo()
    os.close(reader)
    Path("link.txt").symlink_to("real.txt")
    assert main(["predict", "run", "1 2 3", "-o", "link.txt", "--device", "cpu"]) == 0
    assert Path("link.txt").is_symlink() and Path("real.txt").is_file()


def test_the_exit_code_is_documented() -> None:
    assert f"\n  {prediction.SOME_FAILED}    some inputs" in cli.EXIT_CODES
    docs = Path(__file__).parent.parent / "docs" / "commands.md"
    assert f"| {prediction.SOME_FAILED} | some inputs" in docs.read_text(encoding="utf-8")


# --- pipes and terminals: the command in a process of its own, which starts as a copy of this one


@dataclass
class Process:
    pid: int
    send: int  # file descriptors: its standard input,
    receive: int  # and its standard output
    seen: bytes = b""

    def write(self, text: str | bytes) -> None:
        os.write(self.send, text if isinstance(text, bytes) else text.encode())

    def read(self, until: str, count: int = 1) -> str:
        """What it has written until there are `count` of a text."""
        end = time.monotonic() + 60
        while self.seen.count(until.encode()) < count:
            ready, _, _ = select.select([self.receive], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"waited for {until!r}, got {self.seen!r}"
            try:
                piece = os.read(self.receive, 1000)
            except OSError:  # the terminal of a process that has ended
                piece = b""
            assert piece, f"waited for {until!r}, got {self.seen!r}"
            self.seen += piece
        text, self.seen = self.seen.decode(), b""
        return text

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def become(arguments: list[str]) -> None:
    """Run the command with the file descriptors 0, 1 and 2, and end the process."""
    code = 70
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        torch.set_num_threads(1)
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115
        code = main(arguments)
        sys.stdout.flush()
    finally:
        os._exit(code)


@pytest.fixture
def start() -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def begin(case: Case, *options: str, terminal: bool, out: bool = True) -> Process:
        arguments = [case.command[0], "run", *case.command[1:], *options, "--device", "cpu"]
        if terminal:
            pid, fd = pty.fork()
            if pid == 0:
                termios.tcsetwinsize(0, (24, 80))
                if not out:
                    os.dup2(os.open("out.txt", os.O_WRONLY | os.O_CREAT), 1)
                become(arguments)
            started.append(Process(pid, fd, fd))
        else:
            (read, send), (receive, write) = os.pipe(), os.pipe()
            pid = os.fork()
            if pid == 0:
                os.close(send)
                os.dup2(read, 0)
                os.dup2(write, 1)
                become(arguments)
            os.close(read)
            os.close(write)
            started.append(Process(pid, send, receive))
        return started[-1]

    yield begin
    for process in started:
        for fd in {process.send, process.receive}:
            with contextlib.suppress(OSError):  # a test has closed it
                os.close(fd)


def test_a_slow_pipe_is_answered_line_by_line(case: Case, start: Callable[..., Process]) -> None:
    process = start(case, terminal=False)
    for number, line in enumerate([*case.good, case.bad or case.good[0]]):
        process.write(line + "\n")
        process.read("\n", 1 + (case.header if number == 0 else 0))  # before the next line is written
    os.close(process.send)
    assert process.wait() == (3 if case.bad else 0)


def test_a_prompt_in_a_terminal(case: Case, start: Callable[..., Process]) -> None:
    process = start(case, terminal=True)
    hint = process.read("\n> ")
    assert "per line; Ctrl-D ends" in hint
    process.write(case.good[0] + "\n")
    first = process.read("\n> ")
    assert len(first.splitlines()) >= 3  # the echo, the output, the prompt
    process.write("\n")
    assert process.read("\n> ").split() == [">"]  # nothing for a blank line
    if case.bad:
        process.write(case.bad + "\n")
        assert "error: " in process.read("\n> ")
    process.write("\x04")
    assert process.wait() == 0


def test_a_prompt_has_line_editing_for_korean(empty_folder: Path, start: Callable[..., Process]) -> None:
    pytest.importorskip("readline")
    make_run("classify")
    process = start(Case("classify", ["classify", "--json"], [], "", ""), terminal=True)
    process.read("\n> ")
    process.write("한국말\x7f어\x1b[D\x1b[D대\n")  # erase a syllable, go two to the left, insert one
    assert json.loads(process.read("}\r\n> ").splitlines()[-2])["text"] == "한대국어"
    time.sleep(0.5)  # readline shows the prompt before it waits for a key, and a signal in between waits for the next
    process.write("\x03")
    process.read("interrupted")
    assert process.wait() == 130


def test_a_prompt_leaves_a_redirected_output_alone(empty_folder: Path, start: Callable[..., Process]) -> None:
    make_run("predict")
    process = start(Case("predict", ["predict"], [], "", ""), terminal=True, out=False)
    process.read("\n> ")
    process.write("1 2 3\n")
    process.read("\n> ")
    process.write("\x04")
    assert process.wait() == 0
    assert len(Path("out.txt").read_text().split()) == 2 and Path("out.txt").read_text().count("\n") == 1


def test_a_progress_bar_beside_a_file(empty_folder: Path, start: Callable[..., Process]) -> None:
    make_run("translate")
    Path("in.txt").write_text("one two\n" * 300)
    case = Case("translate", ["translate", "--max-length", "3"], [], "", "")
    process = start(case, "--files", "in.txt", "-o", "out.txt", "--batch", "16", terminal=True)
    assert "/300" in process.read("inputs/s")
    assert process.wait() == 0 and Path("out.txt").read_text().count("\n") == 300
