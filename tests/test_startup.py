"""Start-up: which modules a command imports. Times depend on the machine, modules do not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import startup

# what takes long to import, and what a prediction has no use for
UNUSED = (
    "torch._dynamo", "torch._inductor", "torch._decomp.decompositions", "torch._export",
    "torch.distributed.tensor", "torch.distributed.checkpoint", "torch.onnx",
    "torch.utils.tensorboard", "sympy", "sacrebleu", "pandas", "pyarrow", "matplotlib", "PIL", "onnx", "transformers",
    "sentencepiece", "tensorboard", "wandb", "regard.explore.report", "regard.explore.server", "regard.interop",
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


COMPILE = """
import sys
from regard.start import import_torch
import_torch(defer=True)
import torch
assert "torch._refs" not in sys.modules
with torch.device("meta"):
    layer = torch.nn.Linear(3, 4)
assert layer(torch.ones(2, 3, device="meta")).shape == (2, 4)
if sys.argv[1] == "read":
    assert torch.export.Dim and not hasattr(torch.export, "nothing")
else:
    x = torch.randn(3, 3, requires_grad=True)
    compiled = torch.compile(lambda x: torch.nn.functional.gelu(x @ x.T).softmax(-1)[0, 0], backend="aot_eager")
    torch.testing.assert_close(compiled(x), torch.nn.functional.gelu(x @ x.T).softmax(-1)[0, 0])
    assert "torch._refs" in sys.modules
"""


@pytest.mark.parametrize("how", ["read", "compile"])
def test_deferred_modules_are_there_when_they_are_needed(how):
    done = subprocess.run([sys.executable, "-c", COMPILE, how], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_the_phases_of_a_command_are_measured(folders):
    """Ours is a fraction of `import torch`: a tenth, or a third where Python compiles our modules every time."""
    interpreter, torch, *ours = startup.phases("classify", folders["classify"])
    assert len(ours) == 3 and 0 < interpreter < torch
    assert sum(ours) < torch
