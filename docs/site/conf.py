"""How Sphinx builds the site; `build.py` stages the sources and calls it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import korean_search
from sphinx.application import Sphinx

import regard

project = "Regard"
author = "The Regard authors"
release = version = regard.__version__
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
master_doc = "index"
html_theme = "furo"
html_title = "Regard"
SOURCE = os.environ["REGARD_SITE_SOURCE"]
html_static_path = [f"{SOURCE}/_static"]
html_css_files = ["site.css"]
html_extra_path = [f"{SOURCE}/extra"]
exclude_patterns = ["extra", "files", "doctrees"]
html_copy_source = False
smartquotes = False  # --beam is an option, not a dash
html_show_sphinx = False
html_show_copyright = False
html_favicon = f"{SOURCE}/_static/icon.svg"
html_search_language = "en"
html_search_scorer = str(Path(__file__).with_name("scorer.js"))
myst_heading_anchors = 4
myst_enable_extensions = ["attrs_block"]
highlight_language = "none"
pygments_style, pygments_dark_style = "friendly", "github-dark"
FONTS = '"Pretendard", "Noto Sans KR", "Apple SD Gothic Neo", "Malgun Gothic", "Noto Sans CJK KR", sans-serif'
MONO = 'ui-monospace, "SFMono-Regular", Consolas, "Noto Sans Mono CJK KR", monospace'
html_theme_options = {
    "light_css_variables": {
        "font-stack": FONTS,
        "font-stack--monospace": MONO,
        "color-brand-primary": "#215db3",
        "color-brand-content": "#215db3",
    },
    "dark_css_variables": {"color-brand-primary": "#85b7ff", "color-brand-content": "#85b7ff"},
}


def setup(app: Sphinx) -> None:
    korean_search.install(app)
