"""The page on which any two scripts stand next to each other: its frame, and the scripts' lines.

The browser aligns the lines that the reader chooses: see _static/reader.js.
"""

import json
from pathlib import Path

from pygments.lexers import PythonLexer
from pygments.token import STANDARD_TYPES

ROOT = Path(__file__).parent.parent
ALGORITHMS = ("vpg", "ppo", "trpo", "ddpg", "td3", "sac")
SCRIPTS = [f"{algo}_{framework}" for framework in ("torch", "tf1") for algo in ALGORITHMS]
BODY = """
<p>
<a href="#vpg_torch,ppo_torch">VPG → PPO</a> ·
<a href="#ppo_torch,trpo_torch">PPO → TRPO</a> ·
<a href="#ddpg_torch,td3_torch">DDPG → TD3</a> ·
<a href="#td3_torch,sac_torch">TD3 → SAC</a> ·
<a href="#ppo_torch,ppo_tf1">PPO: PyTorch and TF1</a> ·
<a href="#sac_torch,sac_tf1">SAC: PyTorch and TF1</a>
</p>
<form id="reader-bar">
  <select id="reader-left" aria-label="Left script"></select>
  <button type="button" id="reader-swap" title="Swap the scripts (s)">&#x21c4;</button>
  <select id="reader-right" aria-label="Right script"></select>
  <span>
    <button type="button" id="reader-previous" title="Previous difference (p)">&#x2191;</button>
    <button type="button" id="reader-next" title="Next difference (n)">&#x2193;</button>
  </span>
  <output id="reader-count"></output>
  <label title="Fold equal lines (f)"><input type="checkbox" id="reader-fold"> fold</label>
  <select id="reader-section" aria-label="Go to a section"></select>
</form>
<div id="reader-frame">
  <div id="reader" class="highlight"></div>
  <div id="reader-map" title="Where the scripts differ"></div>
</div>
<p class="reader-keys">Keys: <kbd>n</kbd> next difference, <kbd>p</kbd> previous difference,
<kbd>f</kbd> fold equal lines, <kbd>s</kbd> swap the scripts.</p>
<noscript>This page needs JavaScript.</noscript>
<script src="_static/lines.js"></script>
<script src="_static/reader.js"></script>
"""


def lines(source):
    """Return lines as lists of pieces, each with its class in Pygments' style sheet."""
    lines = [[]]
    for kind, text in PythonLexer(stripnl=False).get_tokens(source):
        for n, piece in enumerate(text.split("\n")):
            lines += [[]] if n else []
            lines[-1] += [[piece, STANDARD_TYPES[kind]]] if piece else []
    return lines[:-1]


def data():
    """Return the lines of all scripts as JavaScript."""
    shown = {script: lines((ROOT / f"{script}.py").read_text()) for script in SCRIPTS}
    return f"const LINES = {json.dumps(shown, separators=(',', ':'))};\n"
