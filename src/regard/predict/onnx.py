"""Exported models: graphs in ONNX files, computed by ONNX Runtime, with the interface of the models they come from.

    encoder           model                 ids, mask -> logits
    decoder           model                 ids, mask, keys and values so far -> logits, keys and values
    encoder-decoder   encoder_model         ids, mask -> states
                      decoder_model_merged  ids, states, mask, keys and values so far -> logits, keys and values

A step of a graph is a function without memory: the keys and values that a `Cache` would store are inputs, empty at
first, and outputs, which are the inputs of the next step (`past_key_values.N.…` and `present.N.…`, as transformers.js
calls them). So every search and every predictor runs on them as on a model. `regard.interop.onnx_folder` writes such a
folder; a graph with weights in 8 bits has the suffix `_quantized`.

    past [batch, kv_heads, length, head_dim]      ids [batch, n]      mask [batch, length + n], 0 = padding
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import MissingExtra, UserError
from regard.models.config import ModelConfig
from regard.models.recipe import RECIPE, model_config
from regard.text.tokenizer import Tokenizer

FOLDER = "onnx"  # of the graphs
SOURCES = {"tokens": "input_ids", "patches": "pixel_values", "features": "input_features"}  # by ModelConfig.input
PAST, PRESENT = "past_key_values.", "present."  # the beginnings of the names of keys and values
OUTPUTS = {"none": "last_hidden_state", "pooled": "pooler_output", "values": "values"}  # by output_head; else "logits"


def is_exported(folder: str | Path) -> bool:
    return (Path(folder) / FOLDER).is_dir()


def load_exported(folder: str | Path, recipe: Mapping[str, Any]) -> tuple[Exported, dict[str, Tokenizer]]:
    """The model in a folder of graphs, and its tokenizers; `recipe`: the tables of its recipe."""
    folder = Path(folder)
    config = model_config(recipe, folder / RECIPE)
    kind = {"decoder": ExportedDecoder, "encoder": ExportedEncoder}.get(config.architecture, ExportedEncoderDecoder)
    source, target = folder / "tokenizer.json", folder / "target" / "tokenizer.json"
    if target.is_file():
        paths = {"source": source, "target": target} if source.is_file() else {"tokenizer": target}
    else:
        paths = {"tokenizer": source} if source.is_file() else {}
    return kind(config, folder), {name: Tokenizer.load(path) for name, path in paths.items()}


class Graph:
    """One graph of a folder: a function from named tensors to named tensors."""

    def __init__(self, folder: Path, name: str) -> None:
        paths = [folder / FOLDER / f"{name}{suffix}.onnx" for suffix in ("", "_quantized")]
        self.path = next((path for path in paths if path.is_file()), paths[0])
        self._sessions: dict[int, Any] = {}  # by process
        self.inputs: dict[str, list[int | str]] = {one.name: one.shape for one in self.session.get_inputs()}
        self.outputs: list[str] = [one.name for one in self.session.get_outputs()]

    @property
    def session(self) -> Any:
        """Opened once per process: a fork has none of the threads of its parent's session.

        That one is kept: its destructor would wait for these threads forever.
        """
        process = os.getpid()
        if process not in self._sessions:
            self._sessions[process] = _open(self.path)
        return self._sessions[process]

    def __call__(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        values = self.session.run(None, {name: value.numpy() for name, value in inputs.items() if name in self.inputs})
        return {name: torch.from_numpy(value) for name, value in zip(self.outputs, values, strict=True)}

    def empty(self, rows: int) -> dict[str, Tensor]:
        """The keys and values before the first token."""
        shapes = {name: shape for name, shape in self.inputs.items() if name.startswith(PAST)}
        return {name: torch.empty(rows, int(shape[1]), 0, int(shape[3])) for name, shape in shapes.items()}


def _open(path: Path) -> Any:
    try:
        import onnxruntime
    except ModuleNotFoundError:
        raise MissingExtra("onnx", "onnxruntime", str(path.parent.parent)) from None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3  # errors
    try:
        return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its classes of errors are not public
        raise UserError(f"{path}: ONNX Runtime cannot read it: {error}; export the model again") from None


@dataclass
class GraphState:
    """What the next step reads besides its tokens, one row per hypothesis: keys, values and masks."""

    inputs: dict[str, Tensor] = field(default_factory=dict)
    length: int = 0  # tokens read so far

    @property
    def cache(self) -> GraphState:
        return self  # a model's state has its length there

    def reorder(self, rows: Tensor, sources: Tensor | None = None) -> None:
        self.inputs = {name: value.index_select(0, rows) for name, value in self.inputs.items()}


class Exported(nn.Module):
    """What the three kinds share.

    A graph includes the output head, so `states` and `encode` give its outputs, and `output_head` leaves them as they
    are. Predictors find the device of a model by its parameters, so it has an empty one.
    """

    def __init__(self, config: ModelConfig, folder: Path) -> None:
        super().__init__()
        self.config, self.folder, self.output_head = config, folder, nn.Identity()
        self.nothing = nn.Parameter(torch.empty(0), requires_grad=False)

    def source(self, source: Tensor, is_real: Tensor | None, types: Tensor | None = None) -> dict[str, Tensor]:
        """The inputs of an encoder."""
        if self.config.input == "patches":  # a graph reads a grayscale image as RGB
            return {"pixel_values": source.expand(-1, 3, -1, -1).contiguous() if source.shape[1] == 1 else source}
        self.check_length(source.shape[1])
        mask = torch.ones(source.shape[:2]) if is_real is None else is_real
        types = torch.zeros(source.shape[:2]) if types is None else types
        return {
            SOURCES[self.config.input]: source, "attention_mask": mask.long(), "token_type_ids": types.long()
        }  # fmt: skip

    def check_length(self, length: int) -> None:
        """A graph would read the last of its learned positions again."""
        limit = self.config.position_limit
        if limit is not None and length > limit:
            raise UserError(f"sequence of {length} tokens is longer than max_length = {limit} of the learned positions")

    def advance(self, graph: Graph, tokens: Tensor, state: GraphState) -> Tensor:
        """Read more tokens, or values [B, n, feature_dim]; the output after each."""
        self.check_length(state.length + tokens.shape[1])
        if not state.length:
            state.inputs |= graph.empty(tokens.shape[0])
        outputs = graph({"input_ids": tokens, "input_values": tokens, **state.inputs})
        state.length += tokens.shape[1]
        for name, value in outputs.items():
            if name.startswith(PRESENT):
                state.inputs[PAST + name.removeprefix(PRESENT)] = value
        return outputs[OUTPUTS.get(self.config.output_head, "logits")]


class ExportedEncoder(Exported):
    def __init__(self, config: ModelConfig, folder: Path) -> None:
        super().__init__(config, folder)
        self.graph = Graph(folder, "model")

    def forward(self, source: Tensor, is_real: Tensor | None = None, types: Tensor | None = None) -> Tensor:
        return self.encode(source, is_real, types)

    def encode(self, source: Tensor, is_real: Tensor | None = None, types: Tensor | None = None) -> Tensor:
        return self.graph(self.source(source, is_real, types))[OUTPUTS.get(self.config.output_head, "logits")]


class ExportedDecoder(Exported):
    def __init__(self, config: ModelConfig, folder: Path) -> None:
        super().__init__(config, folder)
        self.graph = Graph(folder, "model")

    def forward(self, tokens: Tensor, is_real: Tensor | None = None) -> Tensor:
        return self.states(tokens, is_real)

    def states(self, tokens: Tensor, is_real: Tensor | None = None) -> Tensor:
        return self.step(tokens, self.start(), is_real)

    def start(self, capacity: int = 0) -> GraphState:
        return GraphState()

    def step(self, tokens: Tensor, state: GraphState, is_real: Tensor | None = None, last: bool = False) -> Tensor:
        mask = torch.ones_like(tokens) if is_real is None else is_real.long()
        known = state.inputs.get("attention_mask", mask[:, :0])
        state.inputs["attention_mask"] = torch.cat((known, mask), dim=1)
        logits = self.advance(self.graph, tokens, state)
        return logits[:, -1:] if last else logits


class ExportedEncoderDecoder(Exported):
    def __init__(self, config: ModelConfig, folder: Path) -> None:
        super().__init__(config, folder)
        self.encoder, self.decoder = Graph(folder, "encoder_model"), Graph(folder, "decoder_model_merged")

    def forward(self, source: Tensor, target: Tensor, source_is_real: Tensor | None = None) -> Tensor:
        """Teacher forcing; padding on the right of the target needs no mask."""
        return self.states(target, self.encode(source, source_is_real))

    def states(self, target: Tensor, memory: GraphState) -> Tensor:
        return self.step(target, memory)

    def encode(self, source: Tensor, is_real: Tensor | None = None) -> GraphState:
        return self.start(source, is_real)

    def start(self, source: Tensor, is_real: Tensor | None = None, capacity: int = 0) -> GraphState:
        inputs = self.source(source, is_real)
        states = self.encoder(inputs)["last_hidden_state"]
        mask = {"encoder_attention_mask": inputs["attention_mask"]} if "attention_mask" in inputs else {}
        return GraphState({"encoder_hidden_states": states, **mask})

    def step(self, tokens: Tensor, state: GraphState) -> Tensor:
        output = self.advance(self.decoder, tokens, state)
        # The first step has projected these to keys and values, so the next ones have none to project.
        state.inputs["encoder_hidden_states"] = state.inputs["encoder_hidden_states"][:, :0]
        return output
