"""Build the site: stage the sources, run Sphinx with every warning as an error, check links and resources.

    python docs/site/build.py [FOLDER]        default: build/docs

It needs no network.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import check
import stage
from sphinx.cmd.build import main as sphinx


def build(folder: Path) -> int:
    source = folder.with_name(f"{folder.name}-source")
    staged = stage.Stage(source)
    staged.run()
    os.environ["REGARD_SITE_SOURCE"] = str(source)
    shutil.rmtree(folder, ignore_errors=True)
    here = str(Path(__file__).parent)
    code = sphinx(
        ["-q", "-W", "--keep-going", "-b", "html", "-c", here, "-d", f"{source}/doctrees", str(source), str(folder)]
    )
    if code:
        return code
    for page in (*folder.rglob("*.ko.html"), *folder.glob("ko/*.html")):
        page.write_text(page.read_text(encoding="utf-8").replace('lang="en"', 'lang="ko"', 1), encoding="utf-8")
    (folder / ".nojekyll").touch()  # GitHub Pages would leave out folders that begin with an underscore
    found = [*staged.missing, *check.problems(folder)]
    print("\n".join(found), file=sys.stderr) if found else print(f"{folder / 'index.html'}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(build(Path(sys.argv[1] if len(sys.argv) > 1 else "build/docs").resolve()))
