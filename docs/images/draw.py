"""Draw the figures of the documentation from a finished demo run.

    python docs/images/draw.py runs/demo                        alignment.svg, heads.svg
    python docs/images/draw.py runs/demo --browser chromium     and report.png, the top of the run's report

Colours follow the reader's light or dark setting; report.png is light.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from pathlib import Path

from regard.explore import Inside, head_grid, heat_map, svg_file

HERE = Path(__file__).parent
LINE = "March 3rd, 2021"


def draw(run: Path) -> None:
    look = Inside.open(run).look(LINE)
    cross = look.parts["cross"]
    mean, title = cross.weights[-1].mean(dim=0), f"{LINE} → {look.output.generated}"  # [output, source], last layer
    alignment = heat_map(mean, cross.rows, cross.columns, title=title, row_label="output", column_label="source")
    svg_file(HERE / "alignment.svg", alignment)
    svg_file(HERE / "heads.svg", head_grid(cross.weights, cross.rows, cross.columns, title="Cross-attention"))


def photograph(browser: str, page: Path, picture: Path, width: int, height: int) -> None:
    """The top of a page, as a browser without a window shows it."""
    with tempfile.TemporaryDirectory() as profile:
        command = [browser, "--headless", "--no-sandbox", "--hide-scrollbars", f"--user-data-dir={profile}"]
        command += [f"--screenshot={picture}", f"--window-size={width},{height}", page.resolve().as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a finished demo")
    parser.add_argument("--browser", help="the name of a Chromium, for report.png")
    args = parser.parse_args()
    draw(args.run)
    if args.browser:
        photograph(args.browser, args.run / "report.html", HERE / "report.png", 1100, 1390)


if __name__ == "__main__":
    main()
