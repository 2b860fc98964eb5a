"""The files around the code agree with each other: versions, make targets, pinned packages."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

import regard

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).parent.parent


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z]+):.*## ", read("Makefile"), re.MULTILINE))


def test_versions_agree():
    assert yaml.safe_load(read("CITATION.cff"))["version"] == regard.__version__
    assert re.findall(r"^## \[(.+?)\]", read("CHANGELOG.md"), re.MULTILINE)[0] == regard.__version__


@pytest.mark.parametrize(
    "name",
    [
        ".github/workflows/docs.yml",
        ".github/workflows/test.yml",
        ".pre-commit-config.yaml",
        ".ci/run",
        "CONTRIBUTING.md",
    ],
)
def test_only_existing_make_targets_are_called(name):
    called = set(re.findall(r"(?:run:|entry:|exec|`|^\s*)\s*make ([a-z]+)", read(name), re.MULTILINE))
    assert called and called <= make_targets()


def test_every_make_target_is_documented():
    assert make_targets() <= set(re.findall(r"`make ([a-z]+)", read("CONTRIBUTING.md")))


def test_every_dependency_is_pinned():
    project = tomllib.loads(read("pyproject.toml"))["project"]
    wanted = [
        *project["dependencies"],
        *(name for extra in project["optional-dependencies"].values() for name in extra),
    ]
    pinned = {line.split("==")[0].lower().replace("_", "-") for line in read("constraints.txt").splitlines()}
    names = {re.match(r"[A-Za-z0-9-]+", requirement)[0] for requirement in wanted} - {"regard"}
    assert names <= pinned


@pytest.mark.parametrize("path", sorted(ROOT.glob(".github/**/*.yml")), ids=lambda path: path.name)
def test_github_files_are_yaml(path):
    assert yaml.safe_load(path.read_text(encoding="utf-8"))
