"""Make public/example.bin: the response that the page shows before any model is loaded.

    python web/prepare.py runs/demo

It is a real response for the demo's model, recorded once; the page says so while it shows it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from regard.explore.inside import Inside
from regard.explore.server.responses import look_response
from regard.files import write_atomically

if __name__ == "__main__":
    look = Inside.open(sys.argv[1]).look("March 3rd, 2021")
    write_atomically(Path(__file__).parent / "public" / "example.bin", look_response("", look, look))
