"""The models of a server, each under its name.

A model is loaded in the background and becomes ready after a first prediction, which loads libraries and allocates
memory; until then requests for it get 503. `reload` loads the folder again beside the model that is running, and
swaps the two when the new one is ready: no request is lost, and those in progress finish with the old one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from regard.errors import UserError, suggest
from regard.predict.bundle import Bundle, Predictor, SearchPredictor
from regard.predict.continuous import ContinuousBatch
from regard.predict.ctranslate2 import CTranslate2Generator, CTranslate2Model
from regard.predict.embedder import Embedder
from regard.predict.generator import Generator, Token
from regard.predict.onnx import Exported, ExportedDecoder
from regard.predict.translator import Translator
from regard.serve.processes import Processes
from regard.serve.work import Batcher, Generations, Observe, Prompt, Streams, Worker
from regard.tasks.registry import load

log = logging.getLogger("regard.serve")


class NotReady(Exception):
    """The model is being loaded, or could not be loaded."""


@dataclass(frozen=True)
class Limits:
    """What one batch may hold: `tokens`, padding included, and `rows`."""

    tokens: int = 4096
    rows: int = 64


class Served:
    """A loaded model: its predictor, and the worker that computes in threads or processes of its own."""

    def __init__(
        self,
        bundle: Bundle,
        name: str,
        limits: Limits,
        observe: Observe,
        languages: tuple[str, str] | None = None,
        cores: int = 1,
    ) -> None:
        self.bundle, self.name, self.limits, self.created = bundle, name, limits, int(time.time())
        self.languages = languages or languages_of(bundle)
        config = bundle.config
        is_encoder = (config.architecture, config.input) == ("encoder", "tokens")
        has_states = config.output_head == "none" or not isinstance(bundle.model, Exported)
        self.embedder = Embedder(bundle) if is_encoder and has_states else None  # beside whatever else it does
        self.predictor: Predictor[Any, Any] | None = None if bundle.predictor_class is None else bundle.predictor
        if self.predictor is None and self.embedder is None:
            raise UserError(f"{bundle.name}: there is no predictor for this kind of model")
        self.kind = self.predictor.COMMAND if self.predictor is not None else "embed"
        self.worker: Worker
        self.processes: Processes | None = None
        if isinstance(self.predictor, CTranslate2Generator) or isinstance(bundle.model, ExportedDecoder):
            self.worker = Streams(name, self._stream, most=cores, observe=observe)
        elif isinstance(self.predictor, Generator):
            # A matmul that is split among all cores waits for the one that the event loop occupies: one is left to it.
            batch, own = ContinuousBatch(self.predictor), max(1, cores - 1)
            self.worker = Generations(name, batch, most=limits.rows, observe=observe, cores=own)
        else:
            # A search is many short steps: on a CPU, batches side by side on one core each (`predict.workers`).
            is_split = isinstance(self.predictor, SearchPredictor) and bundle.device.type == "cpu" and cores > 1
            sizes: dict[str, Any] = {"threads": cores, "cores": 1} if is_split else {"cores": cores}
            if is_split and bundle.path is not None and not isinstance(bundle.model, Exported | CTranslate2Model):
                self.processes = Processes(bundle.path, cores)
                sizes["ended"] = self.processes.end_one
            batcher = Batcher(name, self._predict, tokens=limits.tokens, most=limits.rows, observe=observe, **sizes)
            if isinstance(self.predictor, SearchPredictor):
                self.predictor.interrupt = batcher.interrupt
            if isinstance(self.predictor, Translator):
                decode, deliver = self.predictor.decode, batcher.deliver
                self.predictor.finished = lambda row, found: deliver(row, decode(found)) if found else None
            self.worker = batcher

    def _predict(self, items: Sequence[Any], method: str = "predict", **options: Any) -> Sequence[Any]:
        """One output for each item: `method` is one of the predictor's, or "embed"."""
        if method == "embed":
            assert self.embedder is not None
            return self.embedder.predict(items, **options)
        if self.processes is not None:
            assert isinstance(self.worker, Batcher)
            return self.processes.predict((items, method, options), self.worker.interrupt, self.worker.deliver)
        outputs: Sequence[Any] = getattr(self.predictor, method)(items, **options)
        return outputs

    def _stream(self, prompt: Prompt) -> Iterator[Token]:
        generator = self.generator
        ids = list(prompt.ids)
        return generator._stream(ids, prompt.config, prompt.stops, "stop", generator.context, 0, prompt.top)

    @property
    def generator(self) -> Generator:
        assert isinstance(self.predictor, Generator)
        return self.predictor

    def shown(self, error: UserError) -> str:
        """An error as a client reads it: with the name of the model instead of its folder."""
        return str(error).replace(self.bundle.where, self.name).replace(self.bundle.name, self.name)

    def count_tokens(self, item: Any) -> int:
        """What an input costs: its tokens with </s>, the patches of an image, the steps of a series, both of a pair.

        Of a text that the predictor truncates, what is left of it.
        """
        if isinstance(item, tuple):
            return len(self.bundle.source.encode(item[0])) + len(self.bundle.target.encode(item[1])) + 2
        if isinstance(item, str):
            count = len(self.bundle.source.encode(item)) + 1
            most = None if self.kind == "tag" else getattr(self.predictor or self.embedder, "max_length", None)
            return count if most is None else min(count, most)
        if isinstance(item, bytes):
            config = self.bundle.config
            return (config.image_size // config.patch_size) ** 2
        return len(item)

    def warm_up(self) -> None:
        """A first prediction, of a text if the model reads text."""
        if isinstance(self.predictor, Generator):
            next(iter(self.predictor.stream(["a"], max_length=1, begin=False)), None)
        elif self.processes is None and self.bundle.config.input == "tokens" and self.bundle.tokenizers:
            self._predict(["a" if self.kind != "fill" else "<mask>"], "embed" if self.predictor is None else "predict")


def languages_of(bundle: Bundle) -> tuple[str, str] | None:
    """The languages of a translation model, from the columns or file names of its training data: train.en, train.de."""
    data = bundle.tables["data"]
    files = data.get("train") or []
    endings = [Path(str(file).removesuffix(".gz")).suffix[1:] for file in files if isinstance(file, str)]
    for pair in (endings, [str(data.get("source")), str(data.get("target"))]):
        if len(pair) == 2 and all(len(code) == 2 and code.isalpha() for code in pair) and pair[0] != pair[1]:
            return pair[0], pair[1]
    return None


class Models:
    """Served models by name; the first is the default."""

    def __init__(
        self,
        folders: Mapping[str, Path],
        languages: Mapping[str, tuple[str, str]],
        device: torch.device,
        limits: Limits = Limits(),  # noqa: B008 - immutable
        observe: Callable[[str], Observe] = lambda name: lambda metric, value: None,
    ) -> None:
        self.folders, self.languages = dict(folders), dict(languages)
        self.device, self.limits, self.observe = device, limits, observe
        self.ready: dict[str, Served] = {}
        self.failed: dict[str, str] = {}
        self.cores = torch.get_num_threads()  # before the threads of models change what PyTorch reports
        self._loading = threading.Lock()  # one at a time: loading is limited by the disk

    def load_all(self) -> None:
        """Load every model, one after the other; an error concerns its model only."""
        for name in self.folders:
            try:
                self.reload(name)
            except UserError as error:  # says what to do; where it was raised says nothing
                log.error("model not loaded", extra={"fields": {"model": name, "error": str(error)}})
                self.failed[name] = str(error)
            except Exception as error:
                log.exception("model not loaded", extra={"fields": {"model": name}})
                self.failed[name] = str(error) or type(error).__name__

    def reload(self, name: str) -> None:
        """Load a model, again if it is already there: the old one is replaced when the new one is ready."""
        with self._loading:
            bundle = load(self.folders[name], self.device)
            served = Served(bundle, name, self.limits, self.observe(name), self.languages.get(name), self.cores)
            served.warm_up()
            old = self.ready.get(name)
            self.ready[name] = served
            self.failed.pop(name, None)
        if old is not None:
            old.worker.close()

    def get(self, name: str | None, kinds: Sequence[str]) -> Served:
        """The model with this name, or without one the first that does one of `kinds`."""
        if name is not None and name not in self.folders:
            raise LookupError(f"there is no model {name!r}; {suggest(name, list(self.folders))}")
        names = list(self.folders) if name is None else [name]
        for candidate in names:
            served = self.ready.get(candidate)
            if served is None and candidate not in self.failed:
                raise NotReady(f"the model {candidate!r} is being loaded")
            if served is not None and (served.kind in kinds or ("embed" in kinds and served.embedder is not None)):
                return served
        if failed := [candidate for candidate in names if candidate not in self.ready]:
            raise NotReady(f"the model {failed[0]!r} could not be loaded; the log has the details")
        raise LookupError(
            f"the model {name!r} cannot do this: it can {self.ready[names[0]].kind}"
            if name is not None
            else f"no model here can {' or '.join(kinds)}"
        )

    def close(self) -> None:
        """Finish what is in progress and end all threads."""
        for served in self.ready.values():
            served.worker.close()
        for served in self.ready.values():
            served.worker.join()
