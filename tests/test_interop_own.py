"""Models of Regard exported to transformers: the same outputs there, and after importing them again."""

from __future__ import annotations

import pytest
import torch

from regard.interop import compare, export_folder, read_folder
from regard.models.recipe import preset
from regard.models.transformer import build

pytestmark = pytest.mark.grid

transformers = pytest.importorskip("transformers", reason="install it with  pip install 'regard[hf]'")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


@pytest.fixture(autouse=True)
def one_thread(seed):
    """Tensors are tiny: more threads would be slower."""
    torch.set_num_threads(1)


def randomise(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


TINY = {"dim": 12, "heads": 3, "layers": 2, "ff_dim": 10, "vocab_size": 31, "max_length": 40}
OWN = {
    "gpt2": preset("gpt2", **TINY),
    "bert": preset("bert-base", **TINY, token_types=0),
    "bert-masked": preset("bert-base", **TINY, output_head="tokens", head_layer=True, pooler=False, logit_bias=False),
    "longformer": preset("bert-base", **TINY, window=4, global_tokens=1, global_projections=True, token_types=1),
    "fnet": preset("bert-base", **TINY, mixer="fourier", embed_projection=True, attention_dropout=0.0),
    "vit": preset("vit-tiny", **{**TINY, "vocab_size": None}, image_size=12, patch_size=4, classes=3),
    "paper": preset("base", **TINY, decoder_layers=1),
    "paper-untied": preset("base", **TINY, tie_embeddings=False),
    "paper-two-tables": preset("base", **TINY, share_embeddings=False, target_vocab_size=37),
    "paper-separate": preset("base", **TINY, share_embeddings=False, tie_embeddings=False, target_vocab_size=37,
    logit_bias=True),
    "bart": preset("base", **TINY, position="learned", embed_norm=True, activation="gelu", tie_embeddings=False),
    "t5": preset("t5-small", **TINY, logit_scale=12**-0.5),
    "t5-undivided": preset("t5-small", **TINY, logit_scale=1.0, activation="geglu"),
    "t5-1.1": preset("t5-small", **TINY, logit_scale=1.0, tie_embeddings=False, activation="swiglu", head_dim=3),
}  # fmt: skip


@pytest.mark.parametrize("name", OWN)
def test_import_inverts_export(name, tmp_path):
    model = randomise(build(OWN[name]))
    export_folder(model, tmp_path)
    assert compare(model, tmp_path).within_tolerance
    again = read_folder(tmp_path)
    assert not again.unused or again.unused == ["shared.weight"]
    images = torch.randn(2, 3, 12, 12)
    ids = torch.randint(31, (2, 7))
    given = {"encoder": (images,) if name == "vit" else (ids,), "decoder": (ids,)}.get(
        model.config.architecture, (ids, ids)
    )
    with torch.no_grad():
        torch.testing.assert_close(again.model(*given), model(*given), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("padding", [0, 1, 4])
def test_a_longformer_counts_positions_from_the_padding_of_its_tokenizer(padding, tmp_path):
    """As transformers does: in the tokenizers of Regard padding has the id 0, in those of RoBERTa 1."""
    model = randomise(build(OWN["longformer"])).double()
    export_folder(model, tmp_path, metadata={"pad_token_id": padding})
    peer = transformers.AutoModel.from_pretrained(tmp_path, dtype=torch.double)
    assert peer.config.pad_token_id == padding
    ids = torch.randint(5, 31, (2, 40))  # as long as there are positions
    first = torch.zeros_like(ids)
    first[:, 0] = 1
    again = read_folder(tmp_path).model
    with torch.no_grad():
        states = peer(ids, global_attention_mask=first).last_hidden_state
        torch.testing.assert_close(model.encode(ids), states, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(again.encode(ids), model.encode(ids))


def test_interleaved_positions_are_exported_by_a_permutation(tmp_path):
    """The residual stream is reordered for Marian; in float64 the outputs agree to 1e-10."""
    config = preset("base", **TINY)
    assert config.pairs == "interleaved"
    model = randomise(build(config)).double()
    export_folder(model, tmp_path)
    again = read_folder(tmp_path).model
    assert again.config.pairs == "halves" and next(again.parameters()).dtype == torch.float64
    source, target = torch.randint(31, (2, 9)), torch.randint(31, (2, 6))
    with torch.no_grad():
        assert (again(source, target) - model(source, target)).abs().max() < 1e-10


@pytest.mark.parametrize("config", [OWN["paper"], OWN["t5"], OWN["gpt2"]], ids=["paper", "t5", "gpt2"])
def test_transformers_generates_the_same_tokens(config, tmp_path):
    """Greedy decoding by transformers' `generate` and by our cached steps."""
    model = randomise(build(config))
    export_folder(model, tmp_path, metadata={"pad_token_id": 0, "decoder_start_token_id": 2, "eos_token_id": 31 - 1})
    auto = transformers.AutoModelForCausalLM if config.architecture == "decoder" else transformers.AutoModelForSeq2SeqLM
    peer = auto.from_pretrained(tmp_path)
    prompt = torch.randint(30, (1, 6))
    seen = torch.ones_like(prompt)
    theirs = peer.generate(prompt, attention_mask=seen, max_new_tokens=8, do_sample=False, num_beams=1)
    state = model.start() if config.architecture == "decoder" else model.start(prompt)
    ours = prompt if config.architecture == "decoder" else torch.tensor([[2]])
    step = ours
    with torch.no_grad():
        while ours.shape[1] < theirs.shape[1]:
            step = model.step(step, state)[:, -1:].argmax(-1)
            ours = torch.cat((ours, step), dim=1)
    assert torch.equal(ours, theirs)


def test_compare_detects_a_wrong_weight(tmp_path):
    """`compare` must be able to fail."""
    model = randomise(build(OWN["gpt2"]))
    export_folder(model, tmp_path)
    assert compare(model, tmp_path).within_tolerance
    with torch.no_grad():
        model.decoder.blocks[1].attention.qkv.weight[0, 0] += 0.1
    difference = compare(model, tmp_path)
    assert not difference.within_tolerance and difference.largest > 1e-4
