"""`regard compare`: rows from run folders, the statistics of `regard.metrics.significance`, refusals."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from finished_runs import classifier_run, corrupted, sentences, translation_run, write_run
from regard.cli import main
from regard.cost.total import cost
from regard.data.columns import Column, Writer
from regard.errors import UserError
from regard.metrics.significance import holm, paired
from regard.study.finished import FinishedRun, choose_test
from regard.study.groups import group_runs
from regard.study.rows import OVER_ITEMS, compare_rows

pytest.importorskip("scipy", reason="install it with  pip install 'regard[study]'")
REFERENCES = sentences(120)
RATES = {  # of wrong words, and the settings
    "base": (0.20, {}),
    "one-head": (0.30, {"model": {"heads": 1}}),
    "rope": (0.20, {"model": {"position": "rope"}}),
}
SEEDS = (1, 2, 3, 4)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Four seeds of three rows, of which the second is worse than the first and the third is not."""
    folder, generator = tmp_path_factory.mktemp("runs"), np.random.default_rng(0)
    for number, (name, (rate, changes)) in enumerate(RATES.items()):
        for seed in SEEDS:
            outputs = corrupted(REFERENCES, rate + 0.01 * generator.normal(), 10 * seed + number)
            translation_run(folder / f"{name}-{seed}", REFERENCES, outputs, seed=seed, settings=changes)
    return folder


def folders(runs, *names, seeds=SEEDS):
    return [str(runs / f"{name}-{seed}") for name in names for seed in seeds]


def compare(capsys, *arguments):
    """The printed text."""
    assert main(["compare", *arguments]) == 0
    return capsys.readouterr().out


def refused(capsys, *arguments):
    """The error message."""
    assert main(["compare", *arguments]) == 2
    return capsys.readouterr().err


# --- rows


def test_runs_that_differ_in_the_seed_alone_form_a_row(runs, tmp_path):
    mixed = [runs / name for name in ("base-2", "rope-1", "base-1", "one-head-3", "rope-2")]
    rows = group_runs(mixed)
    assert [*rows] == ["base", "rope", "one-head-3"]  # the base is the first
    assert {name: [*row] for name, row in rows.items()} == {"base": [2, 1], "rope": [1, 2], "one-head-3": [3]}


def test_folders_of_runs_are_expanded(tmp_path):
    for row, rate in (("base", 0.1), ("wide", 0.2)):
        for seed in (1, 2, 10):
            settings = {"model": {"ff_dim": 64}} if row == "wide" else None
            outputs = corrupted(REFERENCES[:5], rate, seed)
            translation_run(tmp_path / row / str(seed), REFERENCES[:5], outputs, seed=seed, settings=settings)
    rows = group_runs([tmp_path / "base", tmp_path / "wide"])
    assert {name: [*row] for name, row in rows.items()} == {"base": [1, 2, 10], "wide": [1, 2, 10]}
    with pytest.raises(UserError, match=rf"nor a folder of runs; name those in it: {tmp_path}/base {tmp_path}/wide$"):
        group_runs([tmp_path])


def test_the_same_settings_and_seeds_twice_are_two_rows(runs, tmp_path):
    """Before and after a change to the code."""
    for name in ("old-1", "old-2", "new-1", "new-2"):
        translation_run(tmp_path / name, REFERENCES[:5], REFERENCES[:5], seed=int(name[-1]))
    names = ("old-1", "old-2", "new-1", "new-2")
    assert [*group_runs([tmp_path / name for name in names])] == ["old", "new"]


# --- statistics


def test_several_seeds_have_the_statistics_of_paired_differences(runs, capsys):
    found = json.loads(compare(capsys, *folders(runs, "base", "one-head", "rope"), "--json"))
    assert (found["metric"], found["test"], found["higher_is_better"]) == ("BLEU", "test", True)
    base, worse, same = found["rows"]
    scores = {name: [FinishedRun(runs / f"{name}-{seed}").scores["test"]["bleu"] for seed in SEEDS] for name in RATES}
    expected = [paired(scores["base"], scores[name]) for name in ("one-head", "rope")]
    for row, one, p in zip((worse, same), expected, holm([one.p for one in expected]), strict=True):
        assert (row["difference"], row["low"], row["high"], row["p"]) == pytest.approx(
            (one.mean, one.low, one.high, one.p)
        )
        assert row["p_holm"] == pytest.approx(p) and row["p_sign_flip"] == one.p_sign
        assert row["bootstrap_low"] < one.mean < row["bootstrap_high"]
    assert (base["verdict"], worse["verdict"], same["verdict"]) == ("", "worse", "not decided")
    assert worse["seeds_needed"] is None and same["seeds_needed"] != 0
    assert base["mean"] == pytest.approx(np.mean(scores["base"])) and base["sd"] == pytest.approx(
        np.std(scores["base"], ddof=1)
    )
    assert worse["changes"] == {"model.heads": 1} and same["changes"] == {"model.position": "rope"}
    assert base["scores"].keys() == {"1", "2", "3", "4"} and found["folders"]["rope"]["4"] == str(runs / "rope-4")
    assert base["parameters"] == same["parameters"] and base["seconds"] == 2.0


def test_only_common_seeds_are_paired(runs, capsys):
    """The row lacks seeds that the base has."""
    found = json.loads(
        compare(capsys, *folders(runs, "base"), *folders(runs, "rope", seeds=(2, 4)), "--json", "--examples", "0")
    )
    base, row = found["rows"]
    differences = [row["scores"][seed] - base["scores"][seed] for seed in ("2", "4")]
    assert row["difference"] == pytest.approx(np.mean(differences)) and row["n"] == 2
    assert found["notes"] == ["each difference is over the seeds that the row and the base have in common"]
    assert found["disagreements"] == []


def test_one_run_each_is_compared_over_items(runs, capsys):
    """Whatever their seeds; the note says what is not in it."""
    arguments = [str(runs / "base-1"), str(runs / "one-head-2")]
    found = json.loads(compare(capsys, *arguments, "--json"))
    row = found["rows"][1]
    assert row["p"] < 0.01 and row["verdict"] == "worse" and row["bootstrap_high"] < 0 and row["low"] is None
    assert found["notes"] == [OVER_ITEMS] and row["p_over"] == "items"
    assert "randomness of training" in compare(capsys, *arguments)
    rows = {"base": {1: runs / "base-1"}, "one-head": {1: runs / "one-head-1"}}
    one = compare_rows("a study", rows).rows[1]  # in a study, one seed decides nothing
    assert one.verdict == "not decided" and one.p_holm is None and one.difference.mean < 0


def test_a_model_does_not_differ_from_itself(tmp_path, capsys):
    outputs = corrupted(REFERENCES[:30], 0.2)
    for name in ("one", "two"):
        translation_run(tmp_path / name, REFERENCES[:30], outputs)
    text = compare(capsys, str(tmp_path / "one"), str(tmp_path / "two"))
    assert "all runs have the same settings" in text and "not decided" in text and "differ most" not in text


def test_the_text_shows_settings_scores_and_examples(runs, capsys):
    text = compare(capsys, *folders(runs, "base", "one-head"), "--examples", "2")
    settings, _, rest = text.partition("\n\n")
    assert settings.split() == ["setting", "base", "one-head", "model.heads", "2", "1"]
    assert "BLEU on test" in rest and "worse" in rest and "items that differ most (chrF: means over seeds" in rest
    assert text.count("reference ") == 2
    found = json.loads(compare(capsys, *folders(runs, "base", "one-head"), "--json", "--examples", "120"))
    gaps = [abs(one["scores"]["base"] - one["scores"]["one-head"]) for one in found["disagreements"]]
    assert gaps == sorted(gaps, reverse=True) and gaps[-1] > 0
    first = found["disagreements"][0]
    assert first["input"] == first["reference"].upper() and first["outputs"]["base"] != first["outputs"]["one-head"]


def test_classes_are_compared_by_accuracy(tmp_path, capsys):
    labels = ["good", "bad"] * 30
    wrong = ["bad", "good"] * 6 + labels[12:]
    classifier_run(tmp_path / "one", labels, labels)
    classifier_run(tmp_path / "two", labels, wrong, settings={"model": {"layers": 2}})
    arguments = str(tmp_path / "one"), str(tmp_path / "two")
    row = json.loads(compare(capsys, *arguments, "--json"))["rows"][1]
    assert row["difference"] == pytest.approx(-0.2) and row["p"] == pytest.approx(2 / 2**12, abs=0.002)
    text = compare(capsys, *arguments, "--examples", "1")
    assert "(% correct)" in text and "text 0" in text and "-20.00" in text


def test_a_task_without_predictions_is_compared_over_seeds(tmp_path, capsys):
    summary = {"higher": False, "headline": "loss", "test": "loss"}
    for name, losses in {"base": (2.0, 2.1, 2.2), "deep": (1.7, 1.79, 1.91)}.items():
        for seed, loss in enumerate(losses):
            settings = {"model": {"layers": 3}} if name == "deep" else None
            write_run(
                tmp_path / f"{name}-{seed}", {"test": {"loss": loss}}, {}, seed=seed, summary=summary,
                task="language-modeling", settings=settings,
            )  # fmt: skip
    arguments = [str(tmp_path / f"{name}-{seed}") for name in ("base", "deep") for seed in range(3)]
    row = json.loads(compare(capsys, *arguments, "--json"))["rows"][1]
    assert row["difference"] == pytest.approx(-0.3) and row["verdict"] == "better" and row["bootstrap_low"] is None
    text = compare(capsys, arguments[0], arguments[3])
    assert "nothing can be tested" in text and "not decided" in text
    other = {"data": {"folder": "elsewhere"}, "model": {"vocab_size": 60}}
    write_run(
        tmp_path / "other", {"test": {"loss": 3.0}}, {}, summary=summary, task="language-modeling", settings=other
    )
    text = compare(capsys, arguments[0], str(tmp_path / "other"))
    assert "the tokenizers differ" in text and "name the same test set" in text


def test_another_set_and_metric(runs, tmp_path, capsys):
    assert "chrF on test" in compare(capsys, *folders(runs, "base", "rope"), "--metric", "chrf")
    message = refused(capsys, *folders(runs, "base", "rope"), "--metric", "blue")
    assert "metric = 'blue'" in message and "did you mean 'bleu'" in message
    assert "test = 'tset'" in refused(capsys, *folders(runs, "base", "rope"), "--test", "tset")


# --- refusals


def test_other_references_are_refused(tmp_path, capsys):
    translation_run(tmp_path / "one", REFERENCES[:9], REFERENCES[:9])
    translation_run(tmp_path / "two", REFERENCES[1:10], REFERENCES[1:10], settings={"model": {"heads": 1}})
    translation_run(tmp_path / "three", REFERENCES[:8], REFERENCES[:8], settings={"model": {"heads": 4}})
    assert "item 1 of the test set 'test' differs" in refused(capsys, str(tmp_path / "one"), str(tmp_path / "two"))
    assert "the size (9 and 8 items)" in refused(capsys, str(tmp_path / "one"), str(tmp_path / "three"))


def test_what_cannot_be_compared_is_refused(runs, tmp_path, capsys):
    base = str(runs / "base-1")
    assert "no such folder" in refused(capsys, base, str(tmp_path / "none"))
    assert "is not a run" in refused(capsys, base, str(tmp_path))
    assert "this is one run" in refused(capsys, base)
    assert "differ in train.seed alone" in refused(capsys, *folders(runs, "base"))
    assert "is the same run" in refused(capsys, base, f"{runs}/../{runs.name}/base-1")
    assert "--examples -1" in refused(capsys, base, str(runs / "rope-1"), "--examples", "-1")
    message = refused(capsys, *folders(runs, "base", seeds=(1, 2)), *folders(runs, "rope", seeds=(3, 4)))
    assert "base (seeds 1 and 2) and rope (seeds 3 and 4): have no seed in common" in message
    classifier_run(tmp_path / "classes", ["a"], ["b"])
    assert "different tasks" in refused(capsys, base, str(tmp_path / "classes"))
    translation_run(tmp_path / "begun", REFERENCES[:2], REFERENCES[:2])
    (tmp_path / "begun" / "scores.json").unlink()
    assert "it is not finished" in refused(capsys, base, str(tmp_path / "begun"))
    old = [translation_run(tmp_path / name, REFERENCES[:2], REFERENCES[:2]) for name in ("old", "older")]
    for folder in old:
        (folder / "summary.json").unlink()
    assert "has no summary.json; name the metric: bleu, chrf" in refused(capsys, *map(str, old))
    assert "chrF on test" in compare(capsys, *map(str, old), "--metric", "chrf")
    damaged = translation_run(tmp_path / "damaged", REFERENCES, REFERENCES, settings={"model": {"heads": 1}})
    (damaged / "predictions" / "test.jsonl").write_text('{"source"')
    assert "damaged" in refused(capsys, base, str(damaged))


# --- rows that are not complete, as in a study


def test_failed_and_pending_runs_stay_in_the_table(runs, tmp_path):
    bad = translation_run(tmp_path / "bad", REFERENCES, REFERENCES, seed=2)
    (bad / "scores.json").write_text(json.dumps({"test": {"bleu": float("nan")}}))
    begun = translation_run(tmp_path / "begun", REFERENCES, REFERENCES, seed=3)
    (begun / "scores.json").unlink()
    rows = {
        "base": {seed: runs / f"base-{seed}" for seed in SEEDS},
        "partly": {1: runs / "rope-1", 2: bad, 3: begun},
        "never": {},
    }
    table = compare_rows(
        "a study", rows, failed={"never": {1: "loss is nan"}}, pending={"never": [2], "partly": [4]},
        paper={"partly": 25.7}, changes={"partly": {"model.position": "rope"}},
    )  # fmt: skip
    _, partly, never = table.rows
    assert partly.scores.keys() == {1} and partly.failed == {
        2: "bleu is nan",
        3: "not evaluated: scores.json is missing",
    }
    assert partly.paper == 25.7 and partly.changes == {"model.position": "rope"} and partly.pending == (4,)
    assert never.mean is None and never.failed == {1: "loss is nan"} and never.difference is None
    empty = compare_rows("nothing yet", {"base": {}, "row": {}}, pending={"base": [1], "row": [1]})
    assert [row.mean for row in empty.rows] == [None, None]


def test_sizes_and_curves_come_from_the_folder(runs, tmp_path):
    run = FinishedRun(translation_run(tmp_path / "run", REFERENCES[:3], REFERENCES[:3]))
    assert run.curve("valid_loss") == [(10, 0.3), (20, 0.15)] and run.flops is None
    columns = {name: Column("<u2", None) for name in ("source", "target")}
    writer = Writer(run.folder / "data" / "train", columns, "fingerprint")
    for _ in range(10):
        writer.append(source=[[1] * 8], target=[[1] * 16])
    writer.finish()
    writer.close()
    one = cost(run.config, seq=8, target_seq=16)
    assert run.flops == pytest.approx(one.train * 256 / 16 * 20)  # rows of 16 tokens in a batch of 256, 20 steps
    assert run.parameters == sum(one.parameters.values())
    assert choose_test([run]) == "test" and choose_test([]) is None


def test_pytorch_is_not_imported(runs):
    code = "import sys; from regard.cli import main; main(sys.argv[1:]); assert 'torch' not in sys.modules"
    arguments = folders(runs, "base", "rope", seeds=(1, 2))
    done = subprocess.run(
        [sys.executable, "-c", code, "compare", *arguments], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_unreadable_recipes_are_user_errors(tmp_path):
    translation_run(tmp_path / "run", REFERENCES[:2], REFERENCES[:2])
    (tmp_path / "run" / "recipe.toml").write_text("= broken")
    with pytest.raises(UserError, match="not readable as TOML"):
        group_runs([tmp_path / "run"])
