"""The page on which any two scripts stand next to each other: its lines, and how they align."""

import difflib
import itertools
import json
from pathlib import Path

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

ROOT = Path(__file__).parent.parent
ALGORITHMS = ("vpg", "ppo", "trpo", "ddpg", "td3", "sac")
SCRIPTS = [f"{algo}_{framework}" for framework in ("torch", "tf1") for algo in ALGORITHMS]
BODY = """
<form id="reader-choice">
  <select id="reader-left" aria-label="Left script"></select>
  <button type="button" id="reader-swap" title="Swap the scripts (s)">&#x21c4;</button>
  <select id="reader-right" aria-label="Right script"></select>
  <label><input type="checkbox" id="reader-fold"> fold equal lines</label>
  <button type="button" id="reader-previous" title="Previous difference (p)">&#x2191;</button>
  <button type="button" id="reader-next" title="Next difference (n)">&#x2193;</button>
  <span id="reader-count" role="status"></span>
</form>
<p class="reader-keys">Keys: <kbd>n</kbd> next and <kbd>p</kbd> previous difference,
<kbd>f</kbd> fold, <kbd>s</kbd> swap.</p>
<div id="reader" class="highlight"></div>
<noscript>This page needs JavaScript.</noscript>
<script src="_static/lines.js"></script>
<script src="_static/reader.js"></script>
"""


def align(left, right):
    """Return pairs of line numbers, counted from 0, that stand next to each other, None for none.

    Equal lines are next to each other; between them, so are lines that are similar.
    """
    pairs = []
    matcher = difflib.SequenceMatcher(None, left, right, autojunk=False)
    for kind, i1, i2, j1, j2 in matcher.get_opcodes():
        if kind == "equal":
            pairs += zip(range(i1, i2), range(j1, j2))
        else:
            pairs += align_similar(left, right, range(i1, i2), range(j1, j2))
    return pairs


def align_similar(left, right, rows, columns):
    """Align two blocks of lines so that the sum of the pairs' similarities is largest."""
    best = {}
    for i in reversed(range(len(rows) + 1)):
        for j in reversed(range(len(columns) + 1)):
            ways = [(0.0, [])] if i == len(rows) and j == len(columns) else []
            if i < len(rows):
                ways.append((best[i + 1, j][0], (rows[i], None)))
            if j < len(columns):
                ways.append((best[i, j + 1][0], (None, columns[j])))
            if i < len(rows) and j < len(columns):
                like = similarity(left[rows[i]], right[columns[j]])
                ways.append((best[i + 1, j + 1][0] + like, (rows[i], columns[j])))
            best[i, j] = max(ways, key=lambda way: way[0])
    pairs, i, j = [], 0, 0
    while i < len(rows) or j < len(columns):
        pair = best[i, j][1]
        pairs.append(pair)
        i, j = i + (pair[0] is not None), j + (pair[1] is not None)
    return pairs


def similarity(x, y):
    """Return how alike two lines are, from 0 to 1; lines that are hardly alike count as -1."""
    ratio = difflib.SequenceMatcher(None, x.strip(), y.strip(), autojunk=False).ratio()
    return ratio if ratio > 0.5 else -1.0


def data():
    """Return the scripts' lines, in colour, and the alignment of all pairs, as JavaScript."""
    lines = {script: (ROOT / f"{script}.py").read_text().splitlines() for script in SCRIPTS}
    formatter = HtmlFormatter(nowrap=True)
    shown = {
        script: highlight("\n".join(text), PythonLexer(stripnl=False), formatter).splitlines()
        for script, text in lines.items()
    }
    pairs = {f"{x},{y}": align(lines[x], lines[y]) for x, y in itertools.combinations(SCRIPTS, 2)}
    return f"const LINES = {json.dumps(shown)};\nconst PAIRS = {json.dumps(pairs)};\n"
