"""Every family in both directions: outputs of transformers and of Regard with the same weights."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from regard.interop import export_folder, read_folder
from regard.interop.check import encoder_inputs
from regard.interop.convert import config_from_hf
from regard.models import folder as run
from regard.models.config import ModelConfig
from regard.models.recipe import read_recipe
from regard.models.transformer import build

pytestmark = pytest.mark.grid

transformers = pytest.importorskip("transformers", reason="install it with  pip install 'regard[hf]'")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

GPT = {"vocab_size": 31, "n_positions": 40, "n_embd": 12, "n_layer": 2, "n_head": 3, "bos_token_id": 0}
BERT = {
    "vocab_size": 31, "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 10,
    "max_position_embeddings": 40,
}  # fmt: skip
VIT = {
    "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 10, "image_size": 12,
    "patch_size": 4,
}  # fmt: skip
SEQ = {
    "vocab_size": 31, "d_model": 12, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 3,
    "decoder_attention_heads": 3, "encoder_ffn_dim": 10, "decoder_ffn_dim": 10, "max_position_embeddings": 40,
    "pad_token_id": 1, "decoder_start_token_id": 2, "eos_token_id": 3, "forced_eos_token_id": 3,
}  # fmt: skip
FNET = {key: value for key, value in BERT.items() if key != "num_attention_heads"}
LONG = {**BERT, "attention_window": [4, 8], "pad_token_id": 1, "max_position_embeddings": 42}
BIG = {**BERT, "attention_type": "original_full"}
T5 = {"vocab_size": 31, "d_model": 12, "d_kv": 5, "d_ff": 14, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 3}

# name: (class, config class, options of the config, options of the class)
PEERS = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT, {}),
    "gpt2-untied-unscaled": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {**GPT, "tie_word_embeddings": False, "scale_attn_weights": False, "activation_function": "relu"},
        {},
    ),
    "gpt2-headless": ("GPT2Model", "GPT2Config", {**GPT, "n_inner": 7}, {}),
    "bert": ("BertModel", "BertConfig", BERT, {}),
    "bert-no-pooler": ("BertModel", "BertConfig", {**BERT, "hidden_act": "gelu_new"}, {"add_pooling_layer": False}),
    "bert-masked": ("BertForMaskedLM", "BertConfig", BERT, {}),
    "bert-masked-untied": ("BertForMaskedLM", "BertConfig", {**BERT, "tie_word_embeddings": False}, {}),
    "bert-pretraining": ("BertForPreTraining", "BertConfig", BERT, {}),
    "bert-classes": ("BertForSequenceClassification", "BertConfig", {**BERT, "num_labels": 3}, {}),
    "fnet": ("FNetModel", "FNetConfig", FNET, {}),
    "fnet-masked": ("FNetForMaskedLM", "FNetConfig", FNET, {}),
    "fnet-classes": ("FNetForSequenceClassification", "FNetConfig", {**FNET, "num_labels": 3}, {}),
    "longformer": ("LongformerModel", "LongformerConfig", {**LONG, "attention_window": 4}, {}),
    "longformer-masked": ("LongformerForMaskedLM", "LongformerConfig", LONG, {}),
    "longformer-untied": ("LongformerForMaskedLM", "LongformerConfig", {**LONG, "tie_word_embeddings": False}, {}),
    "longformer-classes": ("LongformerForSequenceClassification", "LongformerConfig", {**LONG, "num_labels": 3}, {}),
    "longformer-tags": ("LongformerForTokenClassification", "LongformerConfig", {**LONG, "num_labels": 3}, {}),
    "big-bird": ("BigBirdModel", "BigBirdConfig", BIG, {}),
    "big-bird-masked": ("BigBirdForMaskedLM", "BigBirdConfig", {**BIG, "hidden_act": "gelu"}, {}),
    "big-bird-sparse": ("BigBirdForPreTraining", "BigBirdConfig", {**BERT, "block_size": 4}, {}),
    "big-bird-tags": ("BigBirdForTokenClassification", "BigBirdConfig", {**BIG, "num_labels": 3}, {}),
    "vit": ("ViTModel", "ViTConfig", VIT, {}),
    "vit-classes": ("ViTForImageClassification", "ViTConfig", {**VIT, "num_labels": 5}, {}),
    "vit-gray": ("ViTForImageClassification", "ViTConfig", {**VIT, "num_labels": 5, "num_channels": 1}, {}),
    "marian": ("MarianMTModel", "MarianConfig", {**SEQ, "scale_embedding": True, "activation_function": "swish"}, {}),
    "marian-untied": ("MarianMTModel", "MarianConfig", {**SEQ, "tie_word_embeddings": False}, {}),
    "marian-two-tables": (
        "MarianMTModel",
        "MarianConfig",
        {**SEQ, "share_encoder_decoder_embeddings": False, "decoder_vocab_size": 37},
        {},
    ),
    "bart": ("BartForConditionalGeneration", "BartConfig", SEQ, {}),
    "bart-untied": ("BartForConditionalGeneration", "BartConfig", {**SEQ, "tie_word_embeddings": False}, {}),
    "bart-headless": ("BartModel", "BartConfig", SEQ, {}),
    "t5": ("T5ForConditionalGeneration", "T5Config", T5, {}),
    "t5-1.1": (
        "T5ForConditionalGeneration",
        "T5Config",
        {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        {},
    ),
}


@pytest.fixture(autouse=True)
def one_thread(seed):
    """Tensors are tiny: more threads would be slower."""
    torch.set_num_threads(1)


def make_peer(name: str, **changes):
    """A model of transformers with random weights, including biases and norms."""
    kind, config_kind, options, arguments = PEERS[name]
    peer = getattr(transformers, kind)(getattr(transformers, config_kind)(**{**options, **changes}), **arguments).eval()
    with torch.no_grad():
        for parameter_name, parameter in peer.named_parameters():
            if not (config_kind == "MarianConfig" and "embed_positions" in parameter_name):
                parameter.add_(0.3 * torch.randn_like(parameter))
        if hasattr(peer, "final_logits_bias"):
            peer.final_logits_bias.normal_()
        if name == "t5-1.1":  # transformers 5 ties a new one; those that were published are not tied
            peer.lm_head.weight = torch.nn.Parameter(torch.randn_like(peer.lm_head.weight))
    return peer


def tokens(vocab_size: int, length: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    """ids [3, N] and which are real: rows of full length, of about half and of one token."""
    is_real = torch.arange(length) < torch.tensor([length, (length + 1) // 2, 1])[:, None]
    return torch.randint(vocab_size, (3, length)), is_real


@torch.no_grad()
def outputs(model, peer, length: int = 9) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Ours and theirs on the same input, real tokens only."""
    config, dtype = model.config, next(peer.parameters()).dtype
    if config.input == "patches":
        images = torch.randn(3, config.channels, config.image_size, config.image_size, dtype=dtype)
        theirs = images.expand(-1, peer.config.num_channels, -1, -1)  # what is gray here is exported for RGB
        out, inputs, real = peer(pixel_values=theirs), (images,), slice(None)
    elif config.architecture == "encoder-decoder":
        (source, source_is_real), (target, real) = (
            tokens(config.vocab_size, length),
            tokens(config.target_size, length - 2),
        )
        out = peer(
            input_ids=source,
            attention_mask=source_is_real.long(),
            decoder_input_ids=target,
            decoder_attention_mask=real.long(),
        )
        inputs = (source, target, source_is_real, real)
    elif config.architecture == "decoder":
        ids, real = tokens(config.vocab_size, length)
        out, inputs = peer(input_ids=ids, attention_mask=real.long()), (ids, real)
    else:
        ids, real = tokens(config.vocab_size, length)
        types = torch.randint(config.token_types, ids.shape)
        if peer.config.model_type == "fnet":  # which mixes padding, too
            real = torch.ones_like(real)
        if peer.config.model_type == "longformer":  # which has no position for this id
            ids = ids.masked_fill(ids == 1, 0)
        inputs = (ids, real, types)
        out = peer(**encoder_inputs(peer, ids, real), token_type_ids=types)
    if config.architecture == "encoder" and config.output_head in ("none", "pooled"):
        pairs = [(model.encode(*inputs)[real], out.last_hidden_state[real])]
        return pairs if config.output_head == "none" else [*pairs, (model(*inputs), out.pooler_output)]
    if "logits" not in out and "prediction_logits" not in out:  # a model without output layer: its table is one
        return [(model(*inputs)[real], (out.last_hidden_state @ peer.get_input_embeddings().weight.T)[real])]
    theirs = out.get("logits", out.get("prediction_logits"))
    keep = slice(None) if config.output_head == "classes" and not config.per_token else real
    return [(model(*inputs)[keep], theirs[keep])]


def largest_difference(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    return max(((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1)).item() for ours, theirs in pairs)


def exact_rms(self, x: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:], self.weight, self.variance_epsilon)


def widen(peer, monkeypatch):
    """`peer` in float64, without the two positions where transformers falls back to float32."""
    peer = peer.double()
    if peer.config.model_type == "t5":  # the variance
        monkeypatch.setattr(type(peer.encoder.final_layer_norm), "forward", exact_rms)
    if peer.config.model_type == "marian":  # the table: PE(pos, i) = sin(w_i pos), PE(pos, d/2 + i) = cos(w_i pos)
        length, dim = peer.model.encoder.embed_positions.weight.shape
        angle = np.arange(length)[:, None] / 10000 ** (np.arange(0, dim, 2) / dim)
        table = torch.from_numpy(np.concatenate((np.sin(angle), np.cos(angle)), axis=1))
        for stack in (peer.model.encoder, peer.model.decoder):
            stack.embed_positions.weight = torch.nn.Parameter(table)
    return peer


@pytest.mark.parametrize("name", PEERS)
def test_imported_weights_give_the_same_outputs(name, tmp_path, monkeypatch):
    peer = make_peer(name)
    peer.save_pretrained(tmp_path / "32")
    model = read_folder(tmp_path / "32").model
    assert next(model.parameters()).dtype == torch.float32 and not model.training
    assert largest_difference(outputs(model, peer)) < 1e-5
    peer = widen(peer, monkeypatch)
    peer.save_pretrained(tmp_path / "64")
    model = read_folder(tmp_path / "64").model
    assert next(model.parameters()).dtype == torch.float64
    # the softmax of transformers' Longformer is always in float32
    assert largest_difference(outputs(model, peer)) < (1e-6 if name.startswith("longformer") else 1e-10)


@pytest.mark.parametrize("name", ["longformer-masked", "big-bird-masked", "fnet-masked", "longformer-classes"])
def test_gradients_are_those_of_transformers(name, tmp_path):
    """The gradients of its weights, imported as if they were weights, are ours."""
    peer = make_peer(name).double()
    peer.save_pretrained(tmp_path / "weights")
    model = read_folder(tmp_path / "weights").model
    ids, is_real = tokens(27)
    ids = ids + 4  # the embedding of padding has no gradient there
    if name.startswith("fnet"):  # which mixes padding, too
        is_real = torch.ones_like(is_real)
    ours, theirs = model(ids, is_real, torch.zeros_like(ids)), peer(**encoder_inputs(peer, ids, is_real)).logits
    if ours.dim() == 3:
        ours, theirs = ours[is_real], theirs[is_real]
    weight = torch.randn_like(ours)
    for logits in (ours, theirs):
        (logits * weight).sum().backward()
    for parameter in peer.parameters():
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    peer.save_pretrained(tmp_path / "gradients")
    expected = dict(read_folder(tmp_path / "gradients").model.named_parameters())
    tolerance = 1e-5 if name.startswith("longformer") else 1e-9  # its softmax is always in float32
    for key, parameter in model.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(gradient, expected[key].data, rtol=1e-4, atol=tolerance, msg=key)


RENAMED = {
    "bert-pretraining": "BertForMaskedLM",
    "gpt2-headless": "GPT2LMHeadModel",
    "bart-headless": "BartForConditionalGeneration",
}


@pytest.mark.parametrize("name", [name for name in PEERS if not name.startswith("big-bird")])
def test_export_inverts_import(name, tmp_path):
    """transformers -> Regard -> transformers: weights and outputs are bitwise equal."""
    peer = make_peer(name)
    peer.save_pretrained(tmp_path / "in")
    imported = read_folder(tmp_path / "in")
    export_folder(imported.model, tmp_path / "out", metadata=imported.metadata)
    original, written = (
        {
            re.sub(r"^(transformer|bert|vit|fnet|longformer|model)\.", "", key): value
            for key, value in load_file(path).items()
        }
        for path in (tmp_path / "in" / "model.safetensors", tmp_path / "out" / "model.safetensors")
    )
    for key in set(original) - set(imported.unused):
        skip = 2 * bool(re.match("bart|longformer", name) and re.search("embed_positions|position_embeddings", key))
        if name == "vit-gray" and key.endswith("projection.weight"):  # exported for RGB
            torch.testing.assert_close(written[key].sum(1, keepdim=True), original[key])
            continue
        assert torch.equal(original[key][skip:], written[key][skip:]), key  # `skip`: rows that are never read
    loaded, report = getattr(transformers, RENAMED.get(name, PEERS[name][0])).from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not report["unexpected_keys"] and not report["mismatched_keys"]
    if name not in ("bert-no-pooler", "fnet-masked"):  # for which transformers makes a new pooler
        assert not report["missing_keys"]
    assert largest_difference(outputs(imported.model, loaded)) < 1e-5


@pytest.mark.parametrize("auto, name", [
    ("AutoModelForCausalLM", "gpt2"), ("AutoModelForMaskedLM", "bert-masked"), ("AutoModel", "bert"),
    ("AutoModelForSequenceClassification", "bert-classes"), ("AutoModelForImageClassification", "vit-classes"),
    ("AutoModelForSeq2SeqLM", "marian"), ("AutoModelForSeq2SeqLM", "bart"), ("AutoModelForSeq2SeqLM", "t5-1.1"),
])  # fmt: skip
def test_auto_classes_load_what_was_exported(auto, name, tmp_path):
    make_peer(name).save_pretrained(tmp_path / "in")
    imported = read_folder(tmp_path / "in")
    export_folder(imported.model, tmp_path / "out", metadata=imported.metadata)
    loaded = getattr(transformers, auto).from_pretrained(tmp_path / "out")
    assert type(loaded).__name__ == PEERS[name][0]
    assert largest_difference(outputs(imported.model, loaded)) < 1e-5


@pytest.mark.parametrize("name", ["big-bird", "big-bird-masked", "big-bird-tags"])
def test_a_big_bird_is_exported_as_one_with_full_attention(name, tmp_path):
    make_peer(name).save_pretrained(tmp_path / "in")
    imported = read_folder(tmp_path / "in")
    assert export_folder(imported.model, tmp_path / "out", metadata=imported.metadata) == "BigBird"
    loaded, report = getattr(transformers, PEERS[name][0]).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["unexpected_keys"] and loaded.config.attention_type == "original_full"
    assert all("pooler" in key for key in report["missing_keys"])  # which a masked language model does not use
    assert largest_difference(outputs(imported.model, loaded)) < 1e-5
    again = read_folder(tmp_path / "out")
    assert again.family == "BigBird" and largest_difference(outputs(again.model, loaded)) < 1e-5


def test_a_changed_big_bird_is_exported_as_what_it_is(tmp_path):
    make_peer("big-bird").save_pretrained(tmp_path / "in")
    imported = read_folder(tmp_path / "in")
    config = replace(imported.model.config, output_head="classes", classes=3, pooler=True, pooling="cls")
    assert export_folder(build(config), tmp_path / "out", metadata=imported.metadata) == "BERT"


SIZES = {
    "gpt2": lambda d: {
        "n_embd": d.dim, "n_head": d.heads, "n_layer": d.layers, "n_inner": d.wide, "vocab_size": d.vocab_size,
    },
    "bert-masked": lambda d: {
        "hidden_size": d.dim, "num_attention_heads": d.heads, "num_hidden_layers": d.layers,
        "intermediate_size": d.wide, "vocab_size": d.vocab_size, "type_vocab_size": d.layers, "layer_norm_eps": 1e-3,
    },
    "vit-classes": lambda d: {
        "hidden_size": d.dim, "num_attention_heads": d.heads, "num_hidden_layers": d.layers,
        "intermediate_size": d.wide, "image_size": 5 * d.layers, "patch_size": 5, "num_labels": d.vocab_size,
    },
    "bart": lambda d: {
        "d_model": d.dim, "encoder_attention_heads": d.heads, "decoder_attention_heads": d.heads,
        "encoder_layers": d.layers, "decoder_layers": 1, "encoder_ffn_dim": d.wide, "decoder_ffn_dim": d.wide,
        "vocab_size": d.vocab_size,
    },
    "marian": lambda d: {
        "d_model": 2 * d.dim, "encoder_attention_heads": d.heads, "decoder_attention_heads": d.heads,
        "encoder_layers": 1, "decoder_layers": d.layers, "encoder_ffn_dim": d.wide, "decoder_ffn_dim": d.wide,
        "vocab_size": d.vocab_size,
    },
    "t5": lambda d: {
        "d_model": d.dim, "d_kv": d.wide, "num_heads": d.heads, "num_layers": d.layers, "num_decoder_layers": 1,
        "d_ff": d.wide, "vocab_size": d.vocab_size, "relative_attention_num_buckets": 6,
        "relative_attention_max_distance": 11,
    },
}  # fmt: skip


class Draw:
    """Sizes without common divisors."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.heads, self.layers = draw.choice((1, 3, 5)), draw.choice((1, 2, 3))
        self.dim, self.wide = self.heads * draw.choice((1, 3, 7)), draw.choice((1, 5, 13))
        self.vocab_size = draw.choice((5, 17, 41))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", SIZES)
def test_odd_sizes(name, seed, tmp_path):
    peer = make_peer(name, **SIZES[name](Draw(seed)))
    peer.save_pretrained(tmp_path)
    assert largest_difference(outputs(read_folder(tmp_path).model, peer)) < 2e-5


def test_large_distances_have_the_same_t5_buckets(tmp_path):
    peer = make_peer("t5")
    peer.save_pretrained(tmp_path)
    assert largest_difference(outputs(read_folder(tmp_path).model, peer, length=300)) < 1e-5


def test_half_precision_loses_nothing(tmp_path):
    peer = make_peer("gpt2").half()
    peer.save_pretrained(tmp_path)
    model = read_folder(tmp_path).model
    assert next(model.parameters()).dtype == torch.float32
    assert largest_difference(outputs(model, peer.float())) < 1e-5


def test_metadata_is_kept_in_the_folder(tmp_path):
    peer = make_peer("bert-classes", id2label={0: "부정", 1: "중립", 2: "긍정"})
    peer.save_pretrained(tmp_path / "in")
    imported = read_folder(tmp_path / "in")
    run.save(imported.model, tmp_path / "run", recipe={"hf": imported.metadata})
    metadata = read_recipe(tmp_path / "run")["hf"]
    assert metadata["id2label"] == {"0": "부정", "1": "중립", "2": "긍정"} and metadata["pad_token_id"] == 0
    export_folder(run.load(tmp_path / "run"), tmp_path / "out", metadata=metadata)
    config = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert config.id2label == {0: "부정", 1: "중립", 2: "긍정"} and config.label2id["긍정"] == 2
    assert config.pad_token_id == 0


def test_names_without_prefix_and_tensorflow_names(tmp_path):
    """The published GPT-2 has no prefix and stores its mask; the published BERT calls a norm's weight gamma."""
    norms = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    for name, rename in (
        ("gpt2", lambda key: key.removeprefix("transformer.")),
        ("bert-masked", lambda key: re.sub(r"LayerNorm\.\w+", lambda part: norms[part[0]], key)),
    ):
        peer, folder = make_peer(name), tmp_path / name
        peer.save_pretrained(folder)
        tensors = {rename(key): value for key, value in load_file(folder / "model.safetensors").items()}
        if name == "gpt2":
            tensors["h.0.attn.bias"], tensors["h.1.attn.masked_bias"] = torch.ones(1, 1, 40, 40), torch.tensor(-1e4)
            tensors["lm_head.weight"] = tensors["wte.weight"].clone()
        save_file(tensors, folder / "model.safetensors")
        imported = read_folder(folder)
        assert imported.unused == (["h.0.attn.bias", "h.1.attn.masked_bias"] if name == "gpt2" else [])
        assert largest_difference(outputs(imported.model, peer)) < 1e-5


def test_published_sizes():
    """Parameter counts of the models as published (GPT-2 124M, BERT base 110M, T5 small 60.5M)."""
    sizes = {
        "gpt2": ({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, 124_439_808),
        "bert": ({"model_type": "bert", "architectures": ["BertModel"]}, 109_482_240),
        "t5": ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}, 60_506_624),
        "vit": ({"model_type": "vit", "architectures": ["ViTForImageClassification"], "num_labels": 1000}, 86_567_656),
    }
    for hf, count in sizes.values():
        config = config_from_hf(hf)
        assert isinstance(config, ModelConfig)
        with torch.device("meta"):
            assert sum(tensor.numel() for tensor in build(config).parameters()) == count
