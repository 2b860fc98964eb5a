"""Prefixes, required and forbidden phrases: against brute force, in any batch and in every search."""

from __future__ import annotations

import itertools
import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import torch

from regard.cli import main
from regard.errors import UserError
from regard.models.config import ModelConfig
from regard.models.folder import save
from regard.models.transformer import EncoderDecoder
from regard.predict import Bundle, SearchConfig, Translator, sample
from regard.predict.allocation import Automaton, rank_within
from regard.predict.beam import beam
from regard.predict.constraints import START, Constraints, occurs, read_phrase, read_phrases, read_prefix
from regard.predict.ensemble import Ensemble
from regard.text.tokenizer import Tokenizer
from test_beam import BOS, EOS, log_probability, padded, penalty, recurrent, transformer, with_end

pytestmark = pytest.mark.grid


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def satisfied(tokens: list[int], constraints: Constraints, row: int = 0) -> bool:
    read = [START, *tokens]
    return (
        tokens[: len(constraints.prefixes[row])] == list(constraints.prefixes[row])
        and all(any(occurs(pattern, read) for pattern in phrase) for phrase in constraints.required[row])
        and not any(occurs(pattern, read) for pattern in constraints.forbidden)
    )


CASES = {
    "one": Constraints([[]], [[((1,),)]]),
    "two": Constraints([[]], [[((1,),), ((2,),)]]),
    "phrase": Constraints([[]], [[((1, 2),)]]),
    "overlapping": Constraints([[]], [[((0, 1),), ((1, 2),)]]),
    "repeating": Constraints([[]], [[((0, 0, 1),)]]),
    "start": Constraints([[]], [[((START, 2), (0, 2))]]),
    "prefix": Constraints([[2, 1]], [[]]),
    "prefix and phrase": Constraints([[1]], [[((0,),)]]),
    "forbidden": Constraints([[]], [[]], [(1,), (0, 2), (START, 0)]),
    "all": Constraints([[2]], [[((1,),)]], [(0, 0)]),
}


@pytest.mark.parametrize("alpha", [0.0, 0.8])
@pytest.mark.parametrize("name", CASES)
def test_a_wide_beam_finds_what_brute_force_finds(name: str, alpha: float) -> None:
    vocab_size, longest, constraints = 4, 4, CASES[name]
    model, source = transformer(vocab_size), torch.tensor([[1, 2, 0]])
    others = [token for token in range(vocab_size) if token != EOS]
    endings = [[*before, EOS] for size in range(longest) for before in itertools.product(others, repeat=size)]
    endings += [list(whole) for whole in itertools.product(others, repeat=longest)]  # cut off at the limit
    endings = [one for one in endings if satisfied([token for token in one if token != EOS], constraints)]
    ranked = sorted(((log_probability(model, source, None, one), one) for one in endings),
                    key=lambda pair: -pair[0] / penalty(len(pair[1]), alpha))  # fmt: skip
    config = SearchConfig(beam=vocab_size**longest, n_best=100, max_length=longest, length_penalty=alpha)
    found = beam(model, source, None, config, BOS, EOS, constraints=constraints)[0]
    if name == "overlapping":  # near the limit, phrases are not expected to share tokens
        found, ranked = found[:1], ranked[:1]
    assert [with_end(one) for one in found] == [one for _, one in ranked][:100]
    for one, (total, tokens) in zip(found, ranked, strict=False):
        assert one.log_probability == pytest.approx(total, abs=1e-9)
        assert one.score == pytest.approx(total / penalty(len(tokens), alpha), abs=1e-9)


def random_constraints(rows: int, vocab_size: int = 20) -> Constraints:
    generator = torch.Generator().manual_seed(rows)
    number = lambda most: int(torch.randint(0, most + 1, (), generator=generator))  # noqa: E731
    token = lambda: int(torch.randint(4, vocab_size, (), generator=generator))  # noqa: E731
    phrases = [[(tuple(token() for _ in range(1 + number(2))),) for _ in range(number(3))] for _ in range(rows)]
    return Constraints([[token() for _ in range(number(3))] for _ in range(rows)], phrases)


@pytest.mark.parametrize("limit", [12, 30])
@pytest.mark.parametrize("beams", [1, 2, 5, 12])
def test_every_hypothesis_has_every_phrase(beams: int, limit: int) -> None:
    model, (source, is_real), constraints = transformer(), padded(20), random_constraints(20)
    config = SearchConfig(beam=beams, n_best=beams, max_length=limit, length_penalty=0.6)
    found = beam(model, source, is_real, config, BOS, EOS, constraints=constraints)
    for row, some in enumerate(found):
        assert some and all(satisfied(one.tokens, constraints, row) for one in some)
        for one in some:
            total = log_probability(model, source[row : row + 1], is_real[row : row + 1], with_end(one))
            assert one.log_probability == pytest.approx(total, abs=1e-9)
        assert len({tuple(with_end(one)) for one in some}) == len(some)


@pytest.mark.parametrize("beams", [3, 6])
def test_the_batch_changes_nothing(beams: int) -> None:
    model, (source, is_real), constraints = transformer(), padded(9), random_constraints(9)
    config = SearchConfig(beam=beams, n_best=2, max_length=16)
    whole = beam(model, source, is_real, config, BOS, EOS, constraints=constraints)
    for row in range(9):
        one = source[row : row + 1, is_real[row]]
        alone = beam(model, one, None, config, BOS, EOS, constraints=constraints.of([row]))[0]
        assert [h.tokens for h in alone] == [h.tokens for h in whole[row]]
        assert [h.score for h in alone] == pytest.approx([h.score for h in whole[row]], abs=1e-9)


@pytest.mark.cuda
def test_a_gpu_finds_the_same() -> None:
    models, (source, is_real), constraints = [transformer(), recurrent()], padded(20), random_constraints(20)
    config = SearchConfig(beam=5, n_best=5, max_length=20)
    cpu = beam(Ensemble(models), source, is_real, config, BOS, EOS, constraints=constraints)
    models = [model.cuda() for model in models]
    gpu = beam(Ensemble(models), source.cuda(), is_real.cuda(), config, BOS, EOS, constraints=constraints)
    assert [[one.tokens for one in some] for some in gpu] == [[one.tokens for one in some] for some in cpu]


@pytest.mark.parametrize("beams", [1, 4])
def test_without_effect_the_search_is_the_plain_one(beams: int) -> None:
    model, (source, is_real) = transformer(), padded(9)
    config = SearchConfig(beam=beams, n_best=beams, max_length=12)
    plain = beam(model, source, is_real, config, BOS, EOS)
    prefixes = [some[0].tokens[:3] for some in plain]  # what greedy search says anyway
    same = beam(model, source, is_real, config, BOS, EOS, constraints=Constraints(prefixes, [[]] * 9))
    if beams == 1:
        assert same == plain
    assert [some[0].tokens for some in same] == [some[0].tokens for some in plain]
    nothing = Constraints([[]] * 9, [[]] * 9)
    assert beam(model, source, is_real, config, BOS, EOS, constraints=nothing) == plain


@pytest.mark.parametrize("options", [{}, {"top_k": 1}, {"top_k": 5}, {"top_p": 0.5, "n_best": 3}])
def test_samples_have_their_prefix_and_nothing_forbidden(options: dict[str, object]) -> None:
    model, (source, is_real) = transformer(), padded(12)
    prefixes = random_constraints(12).prefixes
    constraints = Constraints(prefixes, [[]] * 12, [(5,), (6, 7), (START, 8)])
    config = SearchConfig(sample=True, max_length=12, **options)  # type: ignore[arg-type]
    prefixes[0][:] = [9, 9, 9]
    found = sample(model, source, is_real, config, BOS, EOS, constraints=constraints)
    for row, some in enumerate(found):
        for one in some:
            assert one.tokens[: len(prefixes[row])] == prefixes[row]
            rest = [START, *one.tokens] if not prefixes[row] else one.tokens[len(prefixes[row]) :]
            assert not any(occurs(pattern, rest) for pattern in constraints.forbidden)
            total = log_probability(model, source[row : row + 1], is_real[row : row + 1], with_end(one))
            assert one.log_probability == pytest.approx(total, abs=1e-9)
    with pytest.raises(UserError, match="need beam search"):
        sample(model, source, is_real, config, BOS, EOS, constraints=Constraints([[]] * 12, [[((5,),)]] * 12))


def test_ensembles_and_other_rules_obey_too() -> None:
    (source, is_real), constraints = padded(9), random_constraints(9)
    ensemble = Ensemble([transformer(), recurrent()])
    config = SearchConfig(beam=5, max_length=20, min_length=6, no_repeat_ngram=3)
    for row, some in enumerate(beam(ensemble, source, is_real, config, BOS, EOS, constraints=constraints)):
        assert satisfied(some[0].tokens, constraints, row) and len(some[0].tokens) >= 6
    covered = SearchConfig(beam=5, max_length=20, coverage_penalty=0.2)
    for row, some in enumerate(beam(transformer(), source, is_real, covered, BOS, EOS, constraints=constraints)):
        assert satisfied(some[0].tokens, constraints, row)


def test_what_is_impossible_has_no_output() -> None:
    model, source = transformer(), torch.tensor([[5, 6], [7, 8]])
    config = SearchConfig(beam=3, max_length=10)
    both = Constraints([[], []], [[((5, 6),)], [((7,),)]], [(5, 6)])
    first, second = beam(model, source, None, config, BOS, EOS, constraints=both)
    assert first == [] and satisfied(second[0].tokens, both, 1)
    tight = Constraints([[], []], [[(tuple(range(4, 15)),)], []])
    assert beam(model, source, None, config, BOS, EOS, constraints=tight)[0] == []


def test_logits_that_are_not_numbers_are_named() -> None:
    model = transformer()
    with torch.no_grad():
        model.output_head.project.weight.fill_(float("nan"))
    with pytest.raises(UserError, match="not numbers"):
        beam(model, *padded(2), SearchConfig(beam=3), BOS, EOS, constraints=Constraints([[]] * 2, [[((5,),)]] * 2))


def test_a_long_phrase_of_few_tokens_and_a_narrow_beam() -> None:
    model, (source, is_real) = transformer(), padded(3)
    constraints = Constraints([[]] * 3, [[((5, 6) * 10,), ((6, 6, 5) * 5,)]] * 3)
    config = SearchConfig(beam=2, n_best=2, max_length=50)
    for some in beam(model, source, is_real, config, BOS, EOS, constraints=constraints):
        assert some and all(satisfied(one.tokens, constraints) for one in some)


@pytest.mark.parametrize("seed", range(20))
def test_automata_read_as_a_search_in_the_text(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    draw = lambda count: tuple(torch.randint(0, 2, (count,), generator=generator).tolist())  # noqa: E731
    phrase = ((START, *draw(1 + seed % 3)), draw(1 + seed % 4))
    one = Automaton(phrase, [0, 1])
    state, read = one.first, [START]
    for token in torch.randint(0, 3, (12,), generator=generator).tolist():
        shortest = one.left[state]
        for size in range(shortest):  # nothing shorter completes it
            for more in itertools.product((0, 1), repeat=size):
                assert not any(occurs(pattern, [*read, *more]) for pattern in phrase)
        state, read = one.moves[state][token], [*read, token]
        assert (one.left[state] == 0) == any(occurs(pattern, read) for pattern in phrase)


def test_ranks_in_banks() -> None:
    banks = torch.randint(0, 4, (7, 30))
    for row, ranks in zip(banks.tolist(), rank_within(banks).tolist(), strict=True):
        assert ranks == [row[:at].count(bank) for at, bank in enumerate(row)]


TEXT = ["the cat is here", "Das Haus ist gross, sehr gross", "학교에 갑니다", "a cat, a house", "学校へ行く"] * 20


@pytest.mark.parametrize("kind", ["word", "char", "byte", "bpe", "unigram"])
def test_phrases_occur_where_the_words_do(kind: str) -> None:
    tokenizer = Tokenizer.train(TEXT, kind, {"bpe": 300, "unigram": 80}.get(kind))  # type: ignore[arg-type]
    spaced = {
        "cat": ["cat", "the cat", "a cat, a house"],
        "Haus": ["Haus", "Das Haus ist"],
        "학교": ["학교에", "a 학교"],
    }
    for word, texts in spaced.items() if kind != "word" else [("cat", ["cat", "a cat"])]:
        phrase = read_phrase(tokenizer, word)
        for text in texts:
            tokens = [START, *tokenizer.encode(text)]
            if kind in ("char", "byte", "word"):  # other kinds may segment a word otherwise in a text
                assert any(occurs(pattern, tokens) for pattern in phrase), (word, text)
        for pattern in phrase:
            assert word in tokenizer.decode(token for token in pattern if token != START)
        assert read_phrase(tokenizer, unicodedata.normalize("NFD", word)) == phrase
    if kind in ("char", "byte"):
        inside = [START, *tokenizer.encode("acat")]
        assert not any(occurs(pattern, inside) for pattern in read_phrase(tokenizer, "cat"))
        after = [START, *tokenizer.encode("a学校")]
        assert any(occurs(pattern, after) for pattern in read_phrase(tokenizer, "学校"))


def test_texts_that_cannot_be_constraints() -> None:
    tokenizer = Tokenizer.train(TEXT, "word")
    assert read_prefix(tokenizer, " ") == [] and read_phrases(tokenizer, []) == []
    assert len(read_phrases(tokenizer, ["cat", " cat ", "house"])) == 2
    cat = read_phrase(tokenizer, "cat")
    for read, message in (
        (lambda: read_prefix(tokenizer, "dog"), "prefix 'dog': contains a word or character that is not in the target"),
        (lambda: read_phrases(tokenizer, ["dog"]), "constraint 'dog'"),
        (lambda: read_phrases(tokenizer, ["🙂"], name="forbid"), "forbid '🙂'"),
        (lambda: read_phrases(tokenizer, [" "]), "constraint '': is empty"),
        (lambda: read_phrases(tokenizer, [None]), "constraint None: is empty or not a text"),
        (lambda: read_prefix(tokenizer, None), "prefix None: must be a text"),
        (lambda: read_phrases(tokenizer, "cat"), "pass a list"),
        (lambda: read_prefix(tokenizer, "the cat", cat), "prefix 'the cat': contains a phrase that is forbidden"),
        (lambda: read_phrases(tokenizer, ["a cat"], cat), "constraint 'a cat': contains a phrase that is forbidden"),
    ):
        with pytest.raises(UserError, match=message):
            read()


@pytest.fixture(scope="module", params=["word", "bpe"])
def translator(request: pytest.FixtureRequest) -> Translator:
    torch.manual_seed(2)
    tokenizer = Tokenizer.train(TEXT, request.param, 290 if request.param == "bpe" else None)
    sizes = {"dim": 16, "layers": 1, "heads": 2, "ff_dim": 32, "dropout": 0.0, "embed_dropout": 0.0}
    model = EncoderDecoder(ModelConfig(**sizes, vocab_size=len(tokenizer), logit_scale=2.0)).double()  # type: ignore[arg-type]
    return Translator(Bundle(model, {"tokenizer": tokenizer}))


@pytest.fixture(scope="module")
def run(translator: Translator, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("run")
    save(translator.model, folder, tokenizers=translator.bundle.tokenizers)
    return str(folder)


LINES = ["a cat", "", "the house is here", "Das Haus", "gross", "cat"]
WORDS = [["house", "Haus"], ["cat"], [], ["the cat"], ["sehr gross", "is", "a"], []]


@pytest.mark.parametrize("options", [{}, {"beam": 4, "n_best": 3}, {"beam": 12, "length_penalty": 0.6}])
def test_translations_contain_their_phrases(translator: Translator, options: dict[str, Any]) -> None:
    found = translator.predict(LINES, constraints=WORDS, max_length=14, **options)
    for line, words, one in zip(LINES, WORDS, found, strict=True):
        for scored in one.n_best if line else ():
            assert all(f" {word}" in f" {scored.text}" for word in words), (scored.text, words)
    texts = [[scored.text for scored in one.n_best] for one in found]
    smaller = translator.predict(LINES, constraints=WORDS, batch=2, max_length=14, **options)
    assert [[scored.text for scored in one.n_best] for one in smaller] == texts
    for row in range(len(LINES)):
        alone = translator.predict([LINES[row]], constraints=[WORDS[row]], max_length=14, **options)[0]
        assert [scored.text for scored in alone.n_best] == texts[row]
    plain = translator.predict(LINES, max_length=14, **options)
    assert [found[row].text for row in (1, 2, 5)] == [plain[row].text for row in (1, 2, 5)] and texts[1] == [""]
    nothing = translator.predict(LINES, prefixes=[""] * 6, constraints=[[]] * 6, max_length=14, **options)
    assert nothing == plain


@pytest.mark.parametrize("options", [{}, {"beam": 4, "n_best": 3}, {"sample": True, "n_best": 2}])
def test_translations_begin_with_their_prefix(translator: Translator, options: dict[str, Any]) -> None:
    prefixes = ["Das Haus", "the", "", " the cat is ", "a", "the"]
    found = translator.predict(LINES, prefixes=prefixes, forbid=["gross", "here"], max_length=9, **options)
    for line, prefix, one in zip(LINES, prefixes, found, strict=True):
        for scored in one.n_best if line else ():
            assert scored.text.startswith(prefix.strip())
            assert not any(f" {word}" in f" {scored.text}" for word in ("gross", "here"))


def test_constraints_that_a_line_cannot_have(translator: Translator) -> None:
    for arguments, message in (
        ({"constraints": [["cat"], ["a cat is here"] * 1], "max_length": 3}, "line 2: .*limited to 3 by max_length"),
        ({"constraints": [["cat"]]}, "constraints: must be a list with an entry for each of the 2 inputs"),
        ({"prefixes": "cat"}, "prefixes: must be a list"),
        ({"constraints": ["cat", "cat"]}, "line 1: constraint 'cat': pass a list of words"),
        ({"constraints": [["cat"], []], "sample": True}, "need beam search; remove sample = true"),
        ({"constraints": [["cat"], ["a cat"]], "forbid": ["cat"]}, "line 1: constraint 'cat': contains a phrase"),
        ({"constraints": [[], ["a is", "is a"]], "forbid": ["is"]}, "line 2: constraint 'a is': contains a phrase"),
        ({"forbid": [""]}, "forbid '': is empty"),
        (
            {"constraints": [["is"], ["is a is a"]], "no_repeat_ngram": 1},
            "line 2: no output of up to 54 tokens satisfies",
        ),
    ):
        with pytest.raises(UserError, match=message):
            translator.predict(["a", "cat"], **arguments)
    failed: dict[int, str] = {}
    found = translator.predict(
        ["a"] * 3, constraints=[["is a is a"], ["cat"], ["cat "] * 2], no_repeat_ngram=1, failed=failed
    )
    assert list(failed) == [0] and found[0].text == "" and "cat" in found[1].text and found[1].text == found[2].text


def test_options_of_translate(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--prefix", "the cat", "--constraint", "Haus", "--constraint", "a house", "--forbid", "gross"]
    assert main(["translate", run, "a", "cat", *options, "--max-length", "20", "--json"]) == 0
    for line in map(json.loads, capsys.readouterr().out.splitlines()):
        text = line["translation"]
        assert text.startswith("the cat") and " Haus" in text and " a house" in text and " gross" not in text
    assert main(["translate", run, "a", "--prefix", "the", "--sample", "--max-length", "4"]) == 0
    assert capsys.readouterr().out.startswith("the")


def test_columns_of_tables(run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [("a", "the", ["Haus", "is"]), ("cat", None, []), ("a cat", "Das", ["a | b"]), ("gross", "", None)]
    lines = [json.dumps({"text": text, "p": prefix, "c": phrases}) for text, prefix, phrases in rows[:2] + rows[3:]]
    (tmp_path / "in.jsonl").write_text("\n".join(lines), encoding="utf-8")
    (tmp_path / "in.tsv").write_text("text\tp\tc\na\tthe\tHaus | is\ncat\t\t\ngross\t\t \n", encoding="utf-8")
    columns = ["--column", "text", "--prefix-column", "p", "--constraint-column", "c", "--max-length", "14"]
    outputs = []
    for name in ("in.jsonl", "in.tsv"):
        assert main(["translate", run, "--files", str(tmp_path / name), *columns]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]
    first = outputs[0].splitlines()[0]
    assert first.startswith("the") and " Haus" in first and " is" in first
    assert main(["translate", run, "cat", "--max-length", "14"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == outputs[0].splitlines()[1]


def test_a_line_whose_constraints_cannot_be_used_is_reported(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.tsv").write_text("source\tc\na\tcat\ncat\thouse is here\na\t\n", encoding="utf-8")
    options = [
        "--files",
        str(tmp_path / "in.tsv"),
        "--constraint-column",
        "c",
        "--max-length",
        "2",
        "--forbid",
        "house",
    ]
    assert main(["translate", run, *options]) == 3
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 3 and out.splitlines()[1] == ""
    assert "in.tsv, line 3: constraint 'house is here': contains a phrase that is forbidden" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["a", "--prefix-column", "p"], "--prefix-column p: is a column of --files"),
        (["--files", "x.tsv", "--prefix-column", "p", "--constraint-column", "p"], "p: the column is used"),
        (["--files", "x.tsv", "--constraint-column", "source"], "--constraint-column source: the column is used twice"),
        (["a", "--constraint", " "], "constraint '': is empty"),
        (["a", "--forbid", "cat", "--constraint", "the cat"], "contains a phrase that is forbidden"),
        (["a", "--constraint", "cat", "--sample"], "need beam search; remove sample"),
    ],
)  # fmt: skip
def test_options_that_do_not_fit(
    run: str, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert main(["translate", run, *options]) == 2
    assert message in capsys.readouterr().err
