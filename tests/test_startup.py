"""Start-up: which modules a command imports. Times depend on the machine, modules do not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import startup
import torch

from regard.models.config import ModelConfig
from regard.models.folder import WithoutRandomWeights
from regard.models.transformer import build
from regard.start import TESTED, torch_version
from regard.tasks.registry import PREDICTORS, TASKS, predictor_of, task_of
from variants import slow

# what takes long to import, and what a prediction has no use for
UNUSED = (
    "torch._dynamo", "torch._inductor", "torch._decomp.decompositions", "torch._export", "torch.distributed.tensor",
    "torch.distributed.checkpoint", "torch.onnx", "torch.optim.optimizer", "torch.utils.data.dataloader",
    "torch.utils.tensorboard", "torch.profiler.profiler", "torch.distributions.distribution", "torch.ao.quantization",
    "torch.ao.nn.quantized", "torch.masked.maskedtensor", "sympy", "sacrebleu", "pandas", "pyarrow", "matplotlib",
    "PIL", "onnx", "transformers", "sentencepiece", "tensorboard", "wandb", "regard.training", "regard.metrics",
    "regard.data.encode", "regard.explore.report", "regard.explore.server", "regard.interop",
)  # fmt: skip
CODE = """
import json, sys, gc
from regard.cli import main
code = main(json.loads(sys.argv[1]))
assert gc.isenabled() and code == 0, code
print(json.dumps(sorted(sys.modules)))
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    return startup.make_folders(tmp_path_factory.mktemp("startup"))


@pytest.mark.parametrize("command", startup.MODELS)
def test_a_prediction_imports_only_what_it_needs(folders, command):
    arguments = json.dumps([command, folders[command], "a small model", "--device", "cpu"])
    done = subprocess.run([sys.executable, "-c", CODE, arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    modules = json.loads(done.stdout.splitlines()[-1])
    assert "torch" in modules
    assert [name for name in modules if name in UNUSED] == []


def test_a_folder_for_ctranslate2_needs_no_pytorch(tmp_path, capsys):
    """The same outputs and messages as the predictor's, which does import it."""
    pytest.importorskip("ctranslate2", reason="install it with  pip install 'regard[ctranslate2]'")
    import regard
    from explorer import ENGLISH, make_decoder, make_translator
    from regard.cli import main
    from regard.interop.ctranslate2 import export_ctranslate2

    for name, make in (("mt", make_translator), ("lm", make_decoder)):
        (tmp_path / f"{name}-ct2").mkdir()
        export_ctranslate2(regard.load(make(tmp_path / name)), tmp_path / f"{name}-ct2")
    folder, texts = str(tmp_path / "mt-ct2"), [ENGLISH, "the cat", "", "고양이 😀 cat", "cat " * 2000]
    arguments = ["translate", folder, *texts, "--device", "cpu", "--beam", "3", "--n-best", "2", "--json"]
    done = subprocess.run(
        [sys.executable, "-c", CODE.replace("code == 0", "code == 3"), json.dumps(arguments)],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    *lines, modules = done.stdout.splitlines()
    assert {"torch", "torch._C"}.isdisjoint(json.loads(modules))
    outputs, failed = [json.loads(line) for line in lines], dict[int, str]()
    expected = regard.load(folder).predict(texts, beam=3, n_best=2, failed=failed)
    assert list(failed) == [4] and outputs[4]["error"] == failed[4]
    for output, own in zip(outputs[:4], expected, strict=False):
        assert [(one["translation"], one["score"]) for one in output["n_best"]] == [
            (one.text, pytest.approx(one.score, abs=1e-5)) for one in own.n_best
        ]
    mistakes = (["--sample"], "sample = True"), (["--beam", "0"], "beam = 0"), (["--alignments"], "alignments need")
    for options, message in (*mistakes, (["--constraint", "cat"], "constraint"), (["--n-best", "9"], "n_best = 9")):
        assert main(["translate", folder, "cat", *options]) == 2 and message in capsys.readouterr().err
    assert main(["translate", str(tmp_path / "lm-ct2"), "cat"]) == 2 and "regard generate" in capsys.readouterr().err


PLUGIN = """
import atexit, sys
from regard import cli
main = cli.main
cli.main = lambda arguments: atexit.register(print, "called at exit") and main(arguments)
cli.start()
"""


@pytest.mark.parametrize(("inputs", "code"), [(["a small model"], 0), (["a small model", "--beam", "0"], 2)])
def test_a_prediction_ends_at_once_but_not_before_its_work_is_done(folders, tmp_path, inputs, code):
    """What was printed arrives, functions registered with `atexit` are called, and the exit code is that of `main`."""
    arguments = ["translate", folders["translate"], *inputs, "--device", "cpu", "-o", str(tmp_path / "out.txt")]
    done = subprocess.run([sys.executable, "-c", PLUGIN, *arguments], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (code, "called at exit\n"), done.stderr
    assert ("error" in done.stderr) == bool(code) and (tmp_path / "out.txt").exists() == (code == 0)


def test_predictors_are_those_of_the_tasks():
    assert PREDICTORS.keys() <= TASKS.keys()
    for name in PREDICTORS:
        assert predictor_of(name) is task_of({"task": name}).predictor


@pytest.mark.parametrize("architecture", ["encoder-decoder", "decoder", "encoder", "recurrent"])
def test_a_model_to_be_loaded_draws_no_random_weights(architecture):
    config = ModelConfig(**startup.SIZES, architecture=architecture, vocab_size=9)
    before = torch.get_rng_state()
    with WithoutRandomWeights():
        build(config)
        assert torch.equal(before, torch.get_rng_state()) or architecture == "recurrent"  # orthogonal matrices
        assert torch.zeros(9).normal_().abs().min() > 0  # what is not a parameter


COMPILE = """
import sys
from regard.start import import_torch
import_torch(defer=True)
import torch
assert "torch._refs" not in sys.modules
assert torch.randperm(4, generator=torch.Generator().manual_seed(1)).shape == (4,)  # `regard explore` shuffles with one
with torch.device("meta"):
    layer = torch.nn.Linear(3, 4)
assert layer(torch.ones(2, 3, device="meta")).shape == (2, 4)
if sys.argv[1] == "read":
    from torch.optim import *
    import torch.utils.data.sampler
    assert torch.export.Dim and not hasattr(torch.export, "nothing")
    assert AdamW is torch.optim.AdamW and torch.utils.data.sampler.Sampler is torch.utils.data.Sampler
    assert torch.distributions.Normal(0, 1).sample().shape == () and torch.nn.quantized.Linear
elif sys.argv[1] == "names":
    import json
    from regard.start import DEFERRED
    for name in DEFERRED:
        hasattr(sys.modules[name], "anything")
    print(json.dumps({name: sorted(set(dir(sys.modules[name])) - {"__warningregistry__"}) for name in DEFERRED}))
else:
    x = torch.randn(3, 3, requires_grad=True)
    compiled = torch.compile(lambda x: torch.nn.functional.gelu(x @ x.T).softmax(-1)[0, 0], backend="aot_eager")
    torch.testing.assert_close(compiled(x), torch.nn.functional.gelu(x @ x.T).softmax(-1)[0, 0])
    assert "torch._refs" in sys.modules
"""


@pytest.mark.parametrize("how", ["read", *slow("compile")])
def test_deferred_modules_are_there_when_they_are_needed(how):
    done = subprocess.run([sys.executable, "-c", COMPILE, how], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_deferred_module_has_all_of_its_names():
    """Those that it has where PyTorch is imported as usual; only names of submodules, imported later, may be more."""
    done = subprocess.run([sys.executable, "-c", COMPILE, "names"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for name, names in json.loads(done.stdout).items():
        assert set(names) <= set(dir(sys.modules[name])), name


def test_modules_are_deferred_where_that_was_tested():
    assert torch.__version__.startswith(torch_version()) and torch_version() in TESTED


def test_the_phases_of_a_command_are_measured(folders):
    """Ours is a fraction of `import torch`: a tenth, or a third where Python compiles our modules every time."""
    interpreter, torch, *ours = startup.phases("classify", folders["classify"])
    assert len(ours) == 3 and 0 < interpreter < torch
    assert sum(ours) < torch
