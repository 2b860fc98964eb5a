"""ONNX folders: graphs for ONNX Runtime, in Python and in the browser, with everything that is needed to use them.

    onnx/…                         the graphs (`regard.predict.onnx` lists them)
    config.json                    which code of transformers.js reads the folder; names of classes
    generation_config.json         first and last token, greedy search
    tokenizer.json, tokenizer_config.json, target/…, preprocessor_config.json
    recipe.toml                    [model] and what prediction needs, so that `regard.load` reads the folder too
    export.json                    the result of the verification

transformers.js creates the empty keys and values of the first step from the graph itself, so that any decoder of ours
can be called gpt2 and any encoder-decoder marian, whatever its positions, norms and heads.

Weights in 8 bits: each column of a matrix becomes integers from -64 to 63 and a scale, activations are quantised as
they come.

    W_ij ≈ s_j q_ij,   s_j = (max_i W_ij - min_i W_ij) / 127          (x W)_j ≈ s_x s_j Σ_i (q_x,i - z_x) (q_ij - z_j)

The filters of a convolution are stored as integers too, one scale each, and computed in floating point.

7 of the 8 bits (`reduce_range`) keep the sums of products within 16 bits on CPUs without VNNI, which would saturate.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from regard.files import make_folder
from regard.interop.family import Json
from regard.interop.folder import PREPROCESSOR, preprocessor_config, special_ids, write_json, write_tokenizers
from regard.interop.onnx_graph import quiet, write_graphs
from regard.models.recipe import RECIPE
from regard.predict.bundle import Bundle
from regard.predict.onnx import FOLDER, OUTPUTS, SOURCES
from regard.settings import to_dict, write_toml


def export_onnx(bundle: Bundle, folder: str | Path, *, int8: bool = False, attention: bool = False) -> None:
    """Save the model of `bundle` as graphs in `folder`; `attention`: with attention weights as outputs."""
    folder, config = Path(folder), bundle.config
    make_folder(folder / FOLDER)
    for path in write_graphs(bundle.model, folder / FOLDER, attention=attention):
        if int8:
            _quantize(path)
    write_tokenizers(folder, config, bundle.tokenizers, bundle.limits.source)
    if config.input == "patches":  # the graph normalises the pixels
        write_json(folder / PREPROCESSOR, {**preprocessor_config(config), "do_normalize": False})
    ids = {**special_ids(config, bundle.tokenizers), **_ids(bundle.tables["hf"])}
    dtype = {"dtype": "q8" if int8 else "fp32"}
    write_json(folder / "config.json", {**_config(bundle), **ids, "transformers.js_config": dtype})
    if config.output_head == "tokens" and config.architecture != "encoder":
        longest = bundle.limits.context if config.architecture == "decoder" else config.max_length
        write_json(folder / "generation_config.json", {**ids, "max_length": longest, "do_sample": False})
    write_toml(folder / RECIPE, _recipe(bundle))


def _ids(table: Mapping[str, Any]) -> Json:
    return {name: value for name, value in table.items() if name.endswith("_token_id")}


def _recipe(bundle: Bundle) -> dict[str, Any]:
    """The tables that prediction reads, without the folder of the data."""
    tables = bundle.tables
    kept = {name: tables[name] for name in ("decode", "hf") if tables[name]}
    data = {name: value for name, value in tables["data"].items() if name != "folder"}
    pack = {"train": {"pack": tables["train"]["pack"]}} if tables["train"].get("pack") else {}
    task = {"task": bundle.recipe["task"]} if "task" in bundle.recipe else {}
    return {**task, "model": to_dict(bundle.config), **({"data": data} if data else {}), **kept, **pack}


def _config(bundle: Bundle) -> Json:
    """config.json for transformers.js; "regard" for inputs or outputs that it does not know."""
    config = bundle.config
    layers = config.layers if config.decoder_layers is None else config.decoder_layers
    seq2seq = {
        "decoder_layers": layers, "encoder_layers": config.layers, "decoder_attention_heads": config.heads,
        "encoder_attention_heads": config.heads, "d_model": config.dim, "is_encoder_decoder": True,
    }  # fmt: skip
    encoder = {"hidden_size": config.dim, "num_hidden_layers": config.layers, "num_attention_heads": config.heads}
    vocab_size = {"vocab_size": config.target_size, "max_position_embeddings": config.max_length}
    classes = {}
    if config.output_head == "classes":
        names = dict(enumerate(bundle.classes))
        classes = {
            "id2label": {str(id): name for id, name in names.items()},
            "label2id": {v: k for k, v in names.items()},
        }
    match config.architecture, config.input, config.output_head:
        case "decoder", _, _:
            sizes = {"n_layer": config.layers, "n_head": config.heads, "n_embd": config.dim}
            return {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **sizes, **vocab_size}
        case "encoder-decoder", "tokens", "tokens":
            return {"model_type": "marian", "architectures": ["MarianMTModel"], **seq2seq, **vocab_size}
        case "encoder-decoder", "patches", "tokens":
            decoder = {"model_type": "trocr", **seq2seq, **vocab_size}
            kind = {"model_type": "vision-encoder-decoder", "architectures": ["VisionEncoderDecoderModel"]}
            return {**kind, "is_encoder_decoder": True, "decoder": decoder, "encoder": {"model_type": "vit", **encoder}}
        case "encoder", "tokens", head:
            kinds = {"classes": "BertForSequenceClassification", "tokens": "BertForMaskedLM"}
            name = "BertForTokenClassification" if config.per_token else kinds.get(head, "BertModel")
            kind = {"model_type": "bert", "architectures": [name]}
            return {**kind, **encoder, **vocab_size, **classes}
        case "encoder", "patches", head:
            kind = {"model_type": "vit", "architectures": ["ViTForImageClassification" if classes else "ViTModel"]}
            return {**kind, **encoder, "image_size": config.image_size, "patch_size": config.patch_size, **classes}
    inputs = {"input": SOURCES[config.input], "output": OUTPUTS.get(config.output_head, "logits")}
    return {"model_type": "regard", **inputs, **(seq2seq if config.architecture == "encoder-decoder" else encoder)}


def _quantize(path: Path) -> None:
    """Replace a graph by one with weights in 8 bits."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    model = onnx.load(path)
    _gather_columns(model.graph)
    _store_filters(model.graph)
    with quiet():
        quantize_dynamic(
            model, path.with_name(f"{path.stem}_quantized.onnx"), op_types_to_quantize=["MatMul", "Gather"],
            weight_type=QuantType.QInt8, reduce_range=True, per_channel=True,
        )  # fmt: skip
    path.unlink()


def _store_filters(graph: Any) -> None:
    """The weights of convolutions [out, in, …] as integers with a scale for each output channel."""
    from onnx import helper, numpy_helper

    matrices = {one.name: one for one in graph.initializer}
    for node in [one for one in graph.node if one.op_type == "Conv" and one.input[1] in matrices]:
        name = node.input[1]
        weight = numpy_helper.to_array(matrices[name])
        scale = np.abs(weight).max(axis=tuple(range(1, weight.ndim)), initial=1e-12) / 127
        shape = (-1, *(1,) * (weight.ndim - 1))
        integers = np.round(weight / scale.reshape(shape)).astype(np.int8)
        graph.initializer.remove(matrices[name])
        graph.initializer.append(numpy_helper.from_array(integers, f"{name}_int8"))
        graph.initializer.append(numpy_helper.from_array(scale.astype(np.float32), f"{name}_scale"))
        inputs = [f"{name}_int8", f"{name}_scale"]
        graph.node.insert(0, helper.make_node("DequantizeLinear", inputs, [name], axis=0))


def _gather_columns(graph: Any) -> None:
    """An embedding matrix E that is also the output layer is stored once, as Eᵀ, which the matmul reads as it is.

        E[ids] = transpose(gather(Eᵀ, ids, axis=1))

    Otherwise the output layer would transpose E at every step, and do it in floating point.
    """
    from onnx import helper, numpy_helper

    matrices = {one.name: one for one in graph.initializer}
    for node in [one for one in graph.node if one.op_type == "Transpose" and one.input[0] in matrices]:
        name, users = node.input[0], [one for one in graph.node if node.input[0] in one.input]
        gathers = [one for one in users if one.op_type == "Gather" and one.input[0] == name]
        if len(users) != 1 + len(gathers) or not gathers:
            continue
        matrix = np.ascontiguousarray(numpy_helper.to_array(matrices[name]).T)
        matrices[name].CopyFrom(numpy_helper.from_array(matrix, name))
        for user in graph.node:
            for at, given in enumerate(user.input):
                if given == node.output[0]:
                    user.input[at] = name
        for gather in gathers:
            output, columns = gather.output[0], f"{gather.output[0]}_columns"
            gather.output[0] = columns
            del gather.attribute[:]
            gather.attribute.append(helper.make_attribute("axis", 1))
            at = list(graph.node).index(gather) + 1
            graph.node.insert(at, helper.make_node("Transpose", [columns], [output], perm=[1, 2, 0]))
        graph.node.remove(node)
