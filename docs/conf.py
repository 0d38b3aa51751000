"""Builds the course into a website that needs no network: python -m sphinx -W docs docs/_build"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

project = "Sidespin"
extensions = ["myst_parser", "sphinx_design", "extension"]
myst_enable_extensions = ["dollarmath", "deflist"]
myst_heading_anchors = 4  # links to #headings work as they do on a code host
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "Sidespin"
html_logo = html_favicon = "_static/logo.svg"
html_static_path = ["_static"]
html_css_files = ["course.css"]
html_math_renderer = "mathml"
html_show_search_summary = False  # a page may not fetch others from file://
html_copy_source = html_show_sourcelink = html_show_copyright = False
highlight_language = "text"  # of blocks that name none
pygments_style, pygments_dark_style = "extension.Colors", "github-dark"
math_numfig, math_eqref_format = False, "equation ({number})"
