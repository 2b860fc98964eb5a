"""Explore: what every head of a model attends to, as it is and under interventions, in figures, reports and a page.

`Inside` opens a model, and some functions analyse what it computes (`logit_lens`, `activation_patching`, …); the other
names draw. They take plain numbers and strings, so that the weights of any model can
be drawn. Each name is imported on first use, so that a figure does not wait for PyTorch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from regard.explore.ablation import heads_off
    from regard.explore.attribution import direct_logit_attribution
    from regard.explore.changes import Changes
    from regard.explore.chart import line_chart
    from regard.explore.embeddings import embedding_map, position_picture
    from regard.explore.flow import Flow
    from regard.explore.generation import generate_steps
    from regard.explore.heatmap import head_grid, heat_map
    from regard.explore.html import Section, attention_note, examples_table, figure, page, paragraph, table, write_page
    from regard.explore.inside import Inside
    from regard.explore.lens import logit_lens
    from regard.explore.neurons import neuron_activations
    from regard.explore.patching import activation_patching
    from regard.explore.saliency import attention_rollout, gradient_times_input, token_saliency
    from regard.explore.scores import copying_scores, head_scores, induction_scores
    from regard.explore.svg import svg_file

__all__ = [
    "Changes", "Flow", "Inside", "Section", "activation_patching", "attention_note", "attention_rollout",
    "copying_scores", "direct_logit_attribution", "embedding_map", "examples_table", "figure", "generate_steps",
    "gradient_times_input", "head_grid", "head_scores", "heads_off", "heat_map", "induction_scores", "line_chart",
    "logit_lens", "neuron_activations", "page", "paragraph", "position_picture", "svg_file", "table", "token_saliency",
    "write_page",
]  # fmt: skip
_MODULES = {
    "Flow": "flow", "generate_steps": "generation", "heads_off": "ablation",
    "Changes": "changes", "Inside": "inside", "head_grid": "heatmap", "heat_map": "heatmap", "line_chart": "chart",
    "svg_file": "svg", "activation_patching": "patching", "attention_rollout": "saliency", "copying_scores": "scores",
    "direct_logit_attribution": "attribution", "embedding_map": "embeddings", "gradient_times_input": "saliency",
    "head_scores": "scores", "induction_scores": "scores", "logit_lens": "lens",
    "neuron_activations": "neurons", "position_picture": "embeddings", "token_saliency": "saliency",
}  # fmt: skip


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"regard.explore.{_MODULES.get(name, 'html')}"), name)
