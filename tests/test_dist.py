"""The wheel works without a checkout: installed into a fresh environment, it has the page and predicts the same."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("hatchling")
pytest.importorskip("uvicorn")

import regard
from explorer import TEXT, make_translator
from regard.cli import main

ROOT = Path(__file__).parent.parent


def call(*words: object, cwd: Path) -> str:
    """What a command prints; it sees neither the checkout nor the variables that lead to it."""
    hidden = {"PYTHONPATH", "VIRTUAL_ENV"}
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run([str(word) for word in words], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def dist(once) -> Path:
    """The folder with the sdist and the wheel, as `make dist` builds them."""
    return once("dist", lambda folder: call(sys.executable, "-m", "hatchling", "build", "-d", folder, cwd=ROOT))


@pytest.fixture(scope="module")
def installed(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`bin` of a fresh environment with the wheel; a .pth file adds the packages of this one, such as torch."""
    folder = tmp_path_factory.mktemp("fresh environment")
    call(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
    python = folder / "bin" / "python"
    (wheel,) = dist.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-index", "--no-deps"]
    call(*pip, wheel, cwd=folder)
    packages = Path(call(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip())
    paths = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (packages / "others.pth").write_text("".join(f"{path}\n" for path in paths))
    return python.parent


def test_wheel_and_sdist_have_every_file(dist):
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    assert wheel.name == f"regard-{regard.__version__}-py3-none-any.whl"
    in_wheel = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("regard/")}
    with tarfile.open(sdist) as file:
        in_sdist = {name.split("/", 1)[1] for name in file.getnames() if "/" in name}
    files = {str(path.relative_to(ROOT)) for path in ROOT.glob("src/regard/**/*") if path.is_file()}
    files = {name for name in files if "__pycache__" not in name}  # the built page is among them
    assert files <= {f"src/{name}" for name in in_wheel} <= in_sdist
    assert {"pyproject.toml", "Makefile", "constraints.txt", "LICENSE", "tests/conftest.py"} <= in_sdist


def test_the_installed_wheel_works_without_a_checkout(installed, tmp_path, capsys):
    where = call(installed / "python", "-c", "import regard; print(regard.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(installed.parent)
    assert call(installed / "regard", "--version", cwd=tmp_path) == f"regard {regard.__version__}\n"
    assert "usage: regard demo" in call(installed / "regard", "demo", "--help", cwd=tmp_path)

    words = ["translate", make_translator(tmp_path / "run"), TEXT, "--device", "cpu"]
    prediction = call(installed / "regard", *words, cwd=tmp_path)
    assert main([str(word) for word in words]) == 0
    assert prediction.strip() and prediction == capsys.readouterr().out
