"""What each mixer has a GPU do, counted without one: kernels, the bytes that they read and write, and what is stored.

    python benchmarks/traffic.py -o benchmarks/results/traffic-mixers.json

Forward + backward of the layer of `benchmarks/mixers.py` in bfloat16 runs on meta tensors, which have shapes and no
numbers, and every operation that is not a view counts as a kernel that reads its inputs and writes its outputs once.
Layers of this kind are limited by memory and by starting kernels, so the count says which of two ways is faster; times
need a GPU. Softmax attention is left out, since its kernels do not exist for meta tensors.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import measure
import mixers
import table
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

MIXERS = ("linear", "performer", "gated-linear", "linear, encoder", "performer, encoder", "gated-linear, encoder")
FREE = ("alias", "arange", "as_strided", "detach", "empty", "empty_like", "new_empty", "unbind", "_unsafe_view")


class Traffic(TorchDispatchMode):
    """Counts the kernels of the operations under it, and their bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = self.bytes = 0

    def __torch_dispatch__(
        self, operation: Any, types: Sequence[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = operation(*args, **(kwargs or {}))
        if not (operation.is_view or operation.overloadpacket.__name__ in FREE):
            self.kernels += 1
            self.bytes += sum(size_of(x) for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor))
        return out


def size_of(x: Tensor) -> int:
    """Bytes that a kernel reads of a tensor: of an expanded one, those that it is made of."""
    return min(x.numel() * x.element_size(), x.untyped_storage().nbytes())


def counted(name: str, length: int, args: argparse.Namespace) -> dict[str, Any]:
    with torch.device("meta"), patch.object(torch, "autocast", lambda *_, **__: nullcontext()):  # meta has none
        layer = mixers.Ours(name, "mixer", length, args).to(torch.bfloat16)
        x = torch.randn(1, length, args.dim, dtype=torch.bfloat16, requires_grad=True)
        own = {parameter.untyped_storage()._cdata for parameter in layer.parameters()}
        kept: dict[int, torch.UntypedStorage] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in own:
                kept[storage._cdata] = storage  # held, so that no number is used twice
            return tensor

        traffic = Traffic()
        with traffic:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                out = layer(x)
            out.backward(torch.empty_like(out))
    return {
        "kernels": traffic.kernels, "read_and_written_gb": round(traffic.bytes / 1e9, 3),
        "stored_gb": round(sum(storage.nbytes() for storage in kept.values()) / 1e9, 3),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mixers", nargs="+", default=MIXERS, choices=MIXERS, metavar="MIXER")
    parser.add_argument("--lengths", nargs="+", type=int, default=[2048, 65536], help="tokens (default: 2048 65536)")
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--smoke", action="store_true", help="a small layer, as a test")
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="FILE", help="write the result file here")
    args = parser.parse_args(namespace=argparse.Namespace(layers=1, compile=False, window=256, device="meta"))
    if args.smoke:
        args.dim, args.heads = 32, 2
    rows = [
        {"length": length, "mixer": name, **counted(name, length, args)}
        for length in args.lengths
        for name in args.mixers
    ]
    result = {"kind": "traffic", "machine": measure.machine("cpu"), "dim": args.dim, "heads": args.heads, "rows": rows}
    measure.write(args.out, result)
    print(table.table(args.out))


if __name__ == "__main__":
    main()
