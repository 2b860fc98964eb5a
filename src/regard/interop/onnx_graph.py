"""From a model to ONNX: PyTorch records the forward pass as a graph of operations with symbolic sizes.

A graph holds what an example input runs through, so an `if` over a size, or a Python loop, would be recorded as it
was decided for the example. The forward path reads sizes as `.shape`, which stay symbols: one graph serves every batch
size and length. Its inputs and outputs (`regard.predict.onnx`) are tensors alone, so the cache becomes `Past`, which
concatenates instead of writing into buffers:

    k = [k_past; k_new]        present.N.key [batch, kv_heads, past + n, head_dim]

The keys and values of the encoder's output are computed in the first step and handed on: a later step projects
states[:, past:], which is empty. So one graph serves the first step and all others.

With `attention`, the weights of every layer are outputs too: `attentions.N` [batch, heads, n, past + n], or those of a
decoder over its input, `cross_attentions.N` [batch, heads, n, source].
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard.data.images import LUMA
from regard.errors import MissingExtra, UserError
from regard.models.config import ModelConfig
from regard.models.folder import fill, weights_of
from regard.models.transformer import Decoder, Encoder, EncoderDecoder, Model, build
from regard.nn.block import Block, Memory, Stack
from regard.nn.cache import Cache, Pair
from regard.nn.config import SOFTMAX
from regard.nn.mask import Positions
from regard.nn.multihead import MultiHead
from regard.nn.trace import trace
from regard.predict.onnx import OUTPUTS, PAST, PRESENT, SOURCES

ROWS, LENGTH, READ = 2, 5, 3  # of the example that is recorded; sizes that differ, so that none is taken for another
LARGEST = 2**31  # bytes of an ONNX file, which is a protobuf message


class Past(Cache):
    """Keys and values as inputs and outputs. `layers`: for each layer (k, v), or (k, v, memory k, memory v)."""

    def __init__(self, layers: list[tuple[Tensor, ...]], positions: Positions) -> None:
        super().__init__()
        self.layers, self.present, self.all_positions = layers, dict[int, Pair](), positions

    def add(self, new: Positions) -> Positions:
        return self.all_positions

    def extend(self, layer: int, k: Tensor, v: Tensor) -> Pair:
        known_k, known_v = self.layers[layer][:2]
        self.present[layer] = torch.cat((known_k, k), dim=2), torch.cat((known_v, v), dim=2)
        return self.present[layer]

    def attend_memory(self, layer: int, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        (known_k, known_v), (k, v) = self.layers[layer][2:], self.memory[layer]
        self.memory[layer] = torch.cat((known_k, k), dim=2), torch.cat((known_v, v), dim=2)
        return q, *self.memory[layer]

    def outputs(self) -> Iterator[Tensor]:
        for layer in range(len(self.layers)):
            yield from self.present[layer]
            yield from self.memory.get(layer, ())


class GraphOf(nn.Module):
    """The forward pass of a model as a function of tensors; `weights` names the attention weights among its outputs."""

    def __init__(self, model: Any, weights: str = "") -> None:
        super().__init__()
        self.model, self.weights = model, weights

    def recorded(self) -> AbstractContextManager[Any]:
        return trace(self.model, only=self.weights) if self.weights else nullcontext({})


class EncoderGraph(GraphOf):
    """The whole of an encoder, or the encoder of an encoder-decoder."""

    def forward(
        self, source: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        is_real = None if attention_mask is None else attention_mask.bool()
        if self.model.config.input == "patches" and self.model.config.channels == 1:  # programs send RGB
            source = (source * source.new_tensor(LUMA)[:, None, None]).sum(dim=1, keepdim=True)
        if isinstance(self.model, EncoderDecoder):
            return (self.model.encode(source, is_real).states,)
        with self.recorded() as seen:
            output: Tensor = self.model(source, is_real, token_type_ids)
        return output, *(seen[name] for name in seen)


class DecoderGraph(GraphOf):
    """A language model: the mask covers the tokens read before and those that are new."""

    def forward(self, tokens: Tensor, attention_mask: Tensor, past: list[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        keys = Positions.of(attention_mask.shape[1], tokens.device, attention_mask.bool())
        assert keys.is_real is not None
        first = past[0][0].shape[2]
        cache = Past(past, keys)
        x = self.model.embedding(tokens)
        with self.recorded() as seen:
            x = self.model.decoder(x, Positions(keys.pos[:, first:], keys.is_real[:, first:]), cache=cache)
        return self.model.output_head(x), *(seen[name] for name in seen), *cache.outputs()


class TargetGraph(GraphOf):
    """The decoder of an encoder-decoder: reads tokens, or values."""

    def forward(
        self,
        target: Tensor,
        encoder_hidden_states: Tensor,
        past: list[tuple[Tensor, ...]],
        encoder_attention_mask: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        first, device = past[0][0].shape[2], target.device
        pos = torch.arange(first + target.shape[1], device=device)[None]  # without `start`, which would be a number
        states = encoder_hidden_states[:, past[0][2].shape[2] :]
        if encoder_attention_mask is None:
            memory = Positions.of(past[0][2].shape[2] + states.shape[1], device)
        else:
            memory = Positions.of(encoder_attention_mask.shape[1], device, encoder_attention_mask.bool())
        cache, x = Past(past, Positions(pos)), self.model.target_embedding(target)
        with self.recorded() as seen:
            x = self.model.decoder(x, Positions(pos[:, first:]), memory=Memory(states, memory), cache=cache)
        return self.model.output_head(x), *(seen[name] for name in seen), *cache.outputs()


def _check_mixers(config: ModelConfig, attention: bool) -> None:
    """Raise for layers that a graph cannot record: states of decoders, loops over lengths, missing weights."""
    kinds = {config.mixer_of(layer) for layer in range(config.layers)} - {*SOFTMAX}
    if config.architecture == "encoder" and not attention:
        kinds &= {"fourier"}
    if kinds:
        why = "has no attention weights to show" if attention else "is computed by PyTorch only"
        raise UserError(f"mixer = {config.mixer!r}: {min(kinds)} {why}; it cannot be exported, use the run with Regard")


def write_graphs(model: Model, folder: Path, *, attention: bool = False) -> list[Path]:
    """The graphs of `model` as files in `folder`; `attention`: with attention weights as outputs."""
    config = model.config
    if config.architecture == "recurrent":
        raise UserError(
            "architecture = 'recurrent': its decoder loops over time, which a graph would record for one length only; "
            "only Transformers are exported to ONNX"
        )
    if not config.causal:
        raise UserError("causal = false: a model that sees the tokens it has to predict is no use to other programs")
    _check_mixers(config, attention)
    size = 4 * sum(weight.numel() for weight in weights_of(model).values())
    if size >= LARGEST:
        raise UserError(f"the weights have {size / 2**30:.1f} GiB, but an ONNX file holds at most 2: export with --hf")
    # A copy without gradients: attention with a bias that needs one is recorded in a layout that cannot be lowered.
    own = build(replace(config, attention="fused" if config.attention_score == "dot" else "reference"))
    fill(own, weights_of(model), "model")
    own = own.float().eval().requires_grad_(False)

    def weights(name: str, stack: Stack) -> list[str]:
        return [f"{name}.{layer}" for layer in range(len(stack.blocks))] if attention else []

    match own:
        case Encoder():
            outputs = [OUTPUTS.get(config.output_head, "logits"), *weights("attentions", own.encoder)]
            graph: nn.Module = EncoderGraph(own, "encoder.*.attention.weights" * attention)
            return [_write(graph, folder / "model.onnx", _source(own), outputs)]
        case Decoder():
            past, names = _past(own.decoder)
            ids, mask = torch.zeros(ROWS, LENGTH, dtype=torch.long), torch.ones(ROWS, READ + LENGTH, dtype=torch.long)
            inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": mask, "past": past}
            graph, outputs = DecoderGraph(own, "decoder.*.attention.weights" * attention), ["logits"]
            return [_write(graph, folder / "model.onnx", inputs, outputs + weights("attentions", own.decoder), names)]
        case EncoderDecoder():
            encoder = _write(EncoderGraph(own), folder / "encoder_model.onnx", _source(own), ["last_hidden_state"])
            past, names = _past(own.decoder, memory=True)
            inputs = {"input_ids": torch.zeros(ROWS, LENGTH, dtype=torch.long)}
            if config.output_head == "values":
                inputs = {"input_values": torch.zeros(ROWS, LENGTH, config.feature_dim)}
            inputs |= {"encoder_hidden_states": torch.zeros(ROWS, 2 * LENGTH + 1, config.dim), "past": past}
            if config.input != "patches":
                inputs["encoder_attention_mask"] = torch.ones(ROWS, 2 * LENGTH + 1, dtype=torch.long)
            outputs = [OUTPUTS.get(config.output_head, "logits"), *weights("cross_attentions", own.decoder)]
            graph = TargetGraph(own, "decoder.*.cross.weights" * attention)
            return [encoder, _write(graph, folder / "decoder_model_merged.onnx", inputs, outputs, names)]
        case _:
            raise TypeError(type(own))


def _source(model: Encoder | EncoderDecoder) -> dict[str, Tensor]:
    """An example of what an encoder reads."""
    config = model.config
    if config.input == "patches":
        channels = 3 if config.channels == 1 else config.channels
        return {"pixel_values": torch.zeros(ROWS, channels, config.image_size, config.image_size)}
    ids = torch.zeros(ROWS, LENGTH, dtype=torch.long)
    source = torch.zeros(ROWS, LENGTH, config.feature_dim) if config.input == "features" else ids
    inputs = {SOURCES[config.input]: source, "attention_mask": torch.ones_like(ids)}
    # each a tensor of its own: of one that is given twice, only one input would be recorded
    types = {"token_type_ids": torch.zeros_like(ids)} if config.token_types and isinstance(model, Encoder) else {}
    return inputs | types


def _past(stack: Stack, memory: bool = False) -> tuple[list[tuple[Tensor, ...]], list[list[str]]]:
    """By layer an example of keys and values, and the end of their names: those of pruned layers have fewer heads."""
    config = stack.config
    layers, names = list[tuple[Tensor, ...]](), list[list[str]]()
    for number, block in enumerate(stack.blocks):
        assert isinstance(block, Block) and isinstance(block.attention, MultiHead)
        parts = {f"{number}.decoder." if memory else f"{number}.": (block.attention.key_heads, READ)}
        if block.cross is not None:
            parts[f"{number}.encoder."] = (block.cross.key_heads, READ + 1)
        layer, ends = list[Tensor](), list[str]()
        for name, (heads, length) in parts.items():
            for part, size in (("key", config.key_dim), ("value", config.val_dim)):
                layer.append(torch.zeros(ROWS, heads, length, size))
                ends.append(name + part)
        layers.append(tuple(layer))
        names.append(ends)
    return layers, names


def _write(
    module: nn.Module, path: Path, inputs: Mapping[str, Any], outputs: list[str], past: Sequence[list[str]] = ()
) -> Path:
    """Record `module` for these inputs; axis 0 is called batch_size, the others by what they are."""
    try:
        import onnx
        import onnxruntime  # noqa: F401 - what was exported is compared with it
        import onnxscript  # noqa: F401 - of the exporter
        from onnx_ir.passes.common import DeduplicateInitializersPass
    except ModuleNotFoundError as error:
        raise MissingExtra("onnx", str(error.name), "--onnx") from None
    lengths = {
        "attention_mask": "total_length" if past else "sequence_length", "encoder_attention_mask": "encoder_length",
        "encoder_hidden_states": "encoder_length", "pixel_values": None,
    }  # fmt: skip
    names, shapes = list[str](), list[Any]()
    for name in inputs:
        if name == "past":
            names += [PAST + part for part in chain(*past)]
            shapes.append([tuple(map(_past_axes, layer)) for layer in past])
        else:
            names.append(name)
            length = lengths.get(name, "sequence_length")
            shapes.append({0: "batch_size"} | ({1: length} if length else {}))
    with quiet():
        program = torch.onnx.export(
            module, tuple(inputs.values()), dynamo=True, dynamic_shapes=tuple(shapes), input_names=names,
            output_names=[*outputs, *(PRESENT + part for part in chain(*past))], external_data=False, verbose=False,
        )  # fmt: skip
        assert program is not None
        DeduplicateInitializersPass(size_limit=2**16)(program.model)  # such as the angles of every layer
        proto = program.model_proto
    # without notes on where in which file each operation was recorded, and without shapes that quantisation changes
    for part in (*proto.graph.node, *proto.graph.initializer, *proto.graph.input, *proto.graph.output, proto.graph):
        del part.metadata_props[:]
    del proto.graph.value_info[:]
    onnx.save(proto, path)
    return path


def _past_axes(name: str) -> dict[int, str]:
    return {0: "batch_size", 2: "past_encoder_length" if "encoder" in name.split(".") else "past_length"}


@contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings of the exporter and of the quantisation, which are about themselves."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
