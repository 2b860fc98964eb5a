"""Make public/example.bin: the answer that the page paints before any model is loaded.

    python web/prepare.py runs/demo

It is a real answer of the demo's model, recorded once; the page says so while it is on show.
"""

from __future__ import annotations

import sys
from pathlib import Path

from regard.explore.inside import Inside
from regard.explore.server.answer import answer_look
from regard.files import write_whole

if __name__ == "__main__":
    look = Inside.open(sys.argv[1]).look("March 3rd, 2021")
    write_whole(Path(__file__).parent / "public" / "example.bin", answer_look("", look, look))
