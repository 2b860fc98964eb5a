"""Errors of import and export name the key or field, its value and the supported ones."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.errors import UserError
from regard.interop.convert import FAMILIES, config_from_hf, config_to_hf, family_of, weights_from_hf, weights_to_hf
from regard.models.config import ModelConfig
from regard.models.folder import weights_of
from regard.models.recipe import PRESETS, preset
from regard.models.transformer import build

GPT = {
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 12, "n_head": 3, "n_layer": 1,
    "vocab_size": 11, "n_positions": 9,
}  # fmt: skip
BERT = {
    "model_type": "bert", "architectures": ["BertForMaskedLM"], "hidden_size": 12, "num_attention_heads": 3,
    "num_hidden_layers": 1, "intermediate_size": 5, "vocab_size": 11, "max_position_embeddings": 9,
}  # fmt: skip
VIT = {"model_type": "vit", "architectures": ["ViTModel"]}
MARIAN = {
    "model_type": "marian", "architectures": ["MarianMTModel"], "d_model": 12, "encoder_layers": 1, "decoder_layers": 1,
    "encoder_attention_heads": 3, "decoder_attention_heads": 3, "encoder_ffn_dim": 5, "decoder_ffn_dim": 5,
    "vocab_size": 11,
}  # fmt: skip
BART = {**MARIAN, "model_type": "bart", "architectures": ["BartForConditionalGeneration"]}
T5 = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}


@pytest.mark.parametrize(
    "hf, changes, words",
    [
        ({}, {"model_type": "llama"}, ["model_type", "'llama'", "gpt2", "marian"]),
        ({}, {}, ["model_type", "None"]),
        (GPT, {"architectures": ["GPT2ForSequenceClassification"]}, ["architectures", "GPT2LMHeadModel"]),
        (GPT, {"architectures": None}, ["architectures", "GPT2LMHeadModel"]),
        (GPT, {"activation_function": "quick_gelu"}, ["activation_function", "'quick_gelu'", "gelu_new"]),
        (GPT, {"scale_attn_by_inverse_layer_idx": True}, ["scale_attn_by_inverse_layer_idx", "True", "False"]),
        (GPT, {"add_cross_attention": True}, ["add_cross_attention", "True"]),
        (GPT, {"n_head": 5}, ["GPT-2", "heads = 5", "dim = 12"]),
        (GPT, {"n_embd": "12"}, ["dim = '12'", "integer"]),
        (
            BERT,
            {"position_embedding_type": "relative_key"},
            ["position_embedding_type", "relative_key", "absolute"],
        ),
        (BERT, {"is_decoder": True}, ["is_decoder", "True"]),
        (BERT, {"hidden_act": "relu"}, ["hidden_act", "'relu'", "'gelu'"]),
        (BERT, {"architectures": ["BertForMultipleChoice"]}, ["BertForMultipleChoice", "BertModel"]),
        (
            BERT,
            {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "score"}},
            ["num_labels", "1", "2 or more"],
        ),
        (VIT, {"image_size": [224, 192]}, ["image_size", "[224, 192]", "square images"]),
        (VIT, {"image_size": 225}, ["patch_size = 16", "image_size = 225"]),
        (VIT, {"qkv_bias": False}, ["qkv_bias", "False", "True"]),
        (VIT, {"pooler_act": "relu"}, ["pooler_act", "'relu'", "'tanh'"]),
        (VIT, {"pooler_output_size": 5}, ["pooler_output_size", "5", "hidden_size"]),
        (MARIAN, {"decoder_ffn_dim": 7}, ["decoder_ffn_dim", "7", "5"]),
        (MARIAN, {"decoder_attention_heads": 4}, ["decoder_attention_heads", "4", "3"]),
        (MARIAN, {"normalize_before": True}, ["normalize_before", "True", "False"]),
        (MARIAN, {"d_model": 15}, ["dim = 15", "odd"]),
        (BART, {"static_position_embeddings": True}, ["static_position_embeddings", "True", "False"]),
        (BART, {"add_final_layer_norm": True}, ["add_final_layer_norm", "True"]),
        (T5, {"architectures": ["T5EncoderModel"]}, ["T5EncoderModel", "T5ForConditionalGeneration"]),
        (T5, {"is_encoder_decoder": False}, ["is_encoder_decoder", "False", "True"]),
        (T5, {"feed_forward_proj": "gated-relu"}, ["feed_forward_proj", "'gated-relu'", "gated-gelu"]),
        (T5, {"feed_forward_proj": "mish"}, ["feed_forward_proj", "'mish'", "relu"]),
    ],
)
def test_unsupported_options_are_named(hf, changes, words):
    with pytest.raises(UserError) as caught:
        config_from_hf({**hf, **changes})
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "config, nearest, fields",
    [
        (preset("gpt2", position="rope", activation="swiglu"), "GPT-2", ["position = 'rope'", "activation = 'swiglu'"]),
        (preset("gpt2", position="alibi"), "GPT-2", ["position = 'alibi' (GPT-2 has 'learned')"]),
        (preset("gpt2", kv_heads=4, window=16), "GPT-2", ["kv_heads = 4", "window = 16"]),
        (preset("gpt2", experts=4), "GPT-2", ["experts = 4"]),
        (preset("gpt2", qk_norm=True), "GPT-2", ["qk_norm = True (GPT-2 has False)"]),
        (preset("gpt2", attention_scale=0.5), "GPT-2", ["attention_scale = 0.5"]),
        (preset("gpt2", embed_scale=True), "GPT-2", ["embed_scale = True"]),
        (preset("gpt2", head_dim=7), "GPT-2", ["head_dim = 7"]),
        (preset("gpt2", residual=False, norm="none"), "GPT-2", ["residual = False", "norm = 'none'"]),
        (preset("gpt2", final_norm=False), "GPT-2", ["final_norm = False (GPT-2 has True)"]),
        (preset("bert-base", pooling="mean"), "BERT", ["pooling = 'mean'"]),
        (preset("bert-base", output_head="tokens", pooler=False), "BERT", ["head_layer = False"]),
        (preset("bert-base", output_head="classes", classes=2, pooler=False), "BERT", ["pooler = False"]),
        (preset("vit-base", pooling="mean", max_length=196), "ViT", ["pooling = 'mean'"]),
        (preset("vit-base", pooler=True), "ViT", ["pooler = True"]),
        (preset("base", norm_order="pre"), "Marian", ["norm_order = 'pre'", "final_norm = True"]),
        (preset("base", norm_eps=1e-6), "Marian", ["norm_eps = 1e-06"]),
        (preset("base", embed_norm=True), "Marian", ["embed_norm = True"]),
        (
            preset("base", position="learned", embed_norm=True, share_embeddings=False),
            "BART",
            ["share_embeddings = False"],
        ),
        (preset("t5-small", bias=True), "T5", ["bias = True"]),
        (preset("t5-small", logit_scale=0.5), "T5", ["logit_scale = 0.5", "1 / sqrt(dim)"]),
        (preset("t5-small", attention_scale=None), "T5", ["attention_scale"]),
        (preset("base", input="patches", position="learned", embed_norm=True), "BART", ["input = 'patches'"]),
    ],
)
def test_the_error_lists_why_no_family_can_represent_a_model(config, nearest, fields):
    with pytest.raises(UserError, match="no Hugging Face family") as caught:
        config_to_hf(config)
    assert f"The most similar one, {nearest}," in str(caught.value)
    for field in fields:
        assert field in str(caught.value)


def test_every_preset_has_a_family():
    kinds = {name: family_of(preset(name)).model_type for name in PRESETS if preset(name).architecture != "recurrent"}
    wanted = {"base": "marian", "big": "marian", "tiny": "marian", "small": "marian"}
    for name, kind in kinds.items():
        assert kind == wanted.get(name, name.partition("-")[0]), name


def test_import_inverts_the_export_of_a_config():
    fields = {"dropout": 0.25, "embed_dropout": 0.25, "attention_dropout": 0.25}
    for name in PRESETS:
        config = preset(name, **fields)
        if config.architecture == "recurrent":
            continue  # refused: see test_recurrent
        again = config_from_hf(config_to_hf(config))
        expected = {"init": "normal", "final_norm": config.ends_with_norm}
        if config.architecture == "encoder-decoder":
            expected["decoder_layers"] = config.layers
        if name.startswith("t5"):
            expected |= {"head_dim": config.key_dim}
        elif family_of(config).model_type == "marian":
            expected |= {"pairs": "halves", "logit_bias": True}
        if config.input == "patches":
            assert again.source_length == config.max_length
        assert again == replace(config, **expected), name


# --- weights that do not fit


@pytest.fixture
def config() -> ModelConfig:
    return config_from_hf(GPT)


@pytest.fixture
def tensors(config) -> dict[str, torch.Tensor]:
    return weights_to_hf(config, weights_of(build(config)))


def test_import_inverts_the_export_of_weights(config, tensors):
    ours = weights_of(build(config))
    again, _ = weights_from_hf(config, weights_to_hf(config, ours))
    assert again.keys() == ours.keys() and all(torch.equal(ours[name], again[name]) for name in ours)
    assert all(name.startswith("transformer.") for name in tensors)


def test_missing_tensors_are_named(config, tensors):
    del tensors["transformer.h.0.attn.c_attn.bias"]
    with pytest.raises(UserError, match=re.escape("missing weights: h.0.attn.c_attn.bias")):
        weights_from_hf(config, tensors)
    with pytest.raises(UserError, match="and 13 more"):
        weights_from_hf(config, {})


def test_unknown_tensors_are_named(config, tensors):
    tensors["transformer.h.0.crossattention.c_attn.weight"] = torch.zeros(1)
    with pytest.raises(UserError, match=re.escape("unknown weights: h.0.crossattention.c_attn.weight")):
        weights_from_hf(config, tensors)


def test_wrong_shapes_are_named(config, tensors):
    tensors["transformer.h.0.mlp.c_fc.weight"] = tensors["transformer.h.0.mlp.c_fc.weight"].T
    with pytest.raises(UserError, match=re.escape("h.0.mlp.c_fc.weight has shape (48, 12)") + r".*\(12, 48\)"):
        weights_from_hf(config, tensors)


def test_a_tied_matrix_that_differs(config, tensors):
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"] + 1
    with pytest.raises(UserError, match=r"lm_head\.weight differs from wte\.weight.*tie_word_embeddings"):
        weights_from_hf(config, tensors)
    assert not config_from_hf(GPT, tensors).tie_embeddings  # with the weights, the config follows them
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"].clone()
    assert config_from_hf(GPT, tensors).tie_embeddings
    assert "output_head.project.weight" not in weights_from_hf(config, tensors)[0]


def test_a_duplicate_tensor(config, tensors):
    tensors["wte.weight"] = tensors["transformer.wte.weight"]
    with pytest.raises(UserError, match=r"wte\.weight twice"):
        weights_from_hf(config, tensors)


def test_position_embeddings_of_marian_must_be_sinusoidal():
    """Marian may store its position embeddings, sin(pos / 10000^(2i/d)) and, in the second half, the cosines."""
    config = config_from_hf({**MARIAN, "max_position_embeddings": 6})
    tensors = weights_to_hf(config, weights_of(build(config)))
    angle = torch.arange(6)[:, None] / 10000 ** (torch.arange(0, 12, 2) / 12)
    name = "model.encoder.embed_positions.weight"
    weights_from_hf(config, {**tensors, name: torch.cat((angle.sin(), angle.cos()), dim=1).half()})
    interleaved = torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(1)
    with pytest.raises(UserError, match="not the sinusoidal embeddings"):
        weights_from_hf(config, {**tensors, name: interleaved})


def test_class_names_must_match_the_classes():
    config = preset("bert-base", output_head="classes", classes=2)
    assert config_to_hf(config, {"id2label": {"0": "bad", "1": "good"}})["label2id"] == {"bad": 0, "good": 1}
    assert config_to_hf(config)["id2label"] == {"0": "LABEL_0", "1": "LABEL_1"}
    with pytest.raises(UserError, match=r"id2label.*classes = 2"):
        config_to_hf(config, {"id2label": {"0": "bad", "1": "neutral", "2": "good"}})


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 40),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=2), st.integers(), max_size=2),
)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), base=st.sampled_from([GPT, BERT, VIT, MARIAN, BART, T5]))
def test_any_config_json_is_imported_or_a_user_error(data, base):
    family = FAMILIES[base["model_type"]]
    keys = {*base, *family.supported, *(theirs for _, theirs, _ in family.keys)}
    keys |= {"tie_word_embeddings", "id2label", "num_labels", "n_inner", "image_size", "patch_size"}
    keys |= {"feed_forward_proj", "decoder_vocab_size", "num_decoder_layers", "pooler_act", "scale_decoder_outputs"}
    changes = data.draw(st.dictionaries(st.sampled_from(sorted(keys)), JUNK, min_size=1, max_size=3))
    try:
        config_from_hf({**base, **changes})
    except UserError as error:
        assert len(str(error)) > 20


def test_full_attention_has_a_family_however_it_is_written() -> None:
    own = preset("gpt2", vocab_size=11, attention_dropout=0.0)
    assert family_of(replace(own, mixer="full, full")).name == family_of(own).name == "GPT-2"
    assert dict(FAMILIES["gpt2"].mismatches(replace(own, window=8))).keys() == {"window"}
    assert dict(FAMILIES["gpt2"].mismatches(replace(own, mixer="linear"))) == {"mixer": "'full'"}
