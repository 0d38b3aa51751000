"""What the course adds to Sphinx: code of the scripts by name, their diffs, and MathML.

    ```{from-script}
    :equation: eq-ppo-clip
    compute_loss_pi in ppo_torch.py, ppo_tf1.py
    ```

shows a function, class or method, one tab per script, and links it with an equation. If it has
another name in a script, write that too: "mlp in ppo_torch.py, MLP in ppo_tf1.py". With
":from: text" and ":to: text" it shows only the lines between; "a|b" is a in one and b in the other.

    ```{diff-of}
    :part: update
    diff ddpg_torch.py td3_torch.py
    ```

shows the diff of two scripts, or of one part. A name that a script does not have stops the build.
What these blocks say inside is what a code host shows in their place.
"""

import ast
import difflib
import html
from pathlib import Path
from typing import ClassVar

import reader
from docutils import nodes
from docutils.parsers.rst import directives
from math_core import LatexError, LatexToMathML
from pygments.styles.friendly import FriendlyStyle
from pygments.token import Comment, Generic, Name, Number, String
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective
from sphinx.util.nodes import make_refnode

ROOT = Path(__file__).parent.parent
FRAMEWORKS = {"torch": "PyTorch", "tf1": "TF1"}  # the end of a script's name, and its tab
CONVERTER = LatexToMathML(fancy_error=False)
logger = logging.getLogger(__name__)


class Colors(FriendlyStyle):
    """Colours of code on a light page: friendly, and dark enough to be read."""

    background_color = "#f8f9fb"
    styles: ClassVar = {
        **FriendlyStyle.styles,
        Comment: "italic #3f7183",
        Name.Class: "bold #0b6a94",
        Name.Namespace: "bold #0b6a94",
        Number: "#1f7a55",
        String.Interpol: "#3f7183",
        Generic.Inserted: "#00750f",
    }


def find(source, name):
    """Return the first and the last line of a function, class or method, given its dotted name.

    Without a name, it is the whole script. Functions inside functions are found by their own name,
    because a name is used only once.
    """
    if not name:
        return 1, len(source.splitlines())
    found = [ast.parse(source)]
    for part in name.split("."):
        found = [
            node
            for parent in found
            for node in ast.walk(parent)
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == part
        ]
    if len(found) != 1:
        raise LookupError(f"there are {len(found)} parts named {name}")
    (node,) = found
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return first, node.end_lineno


def narrow(source, first, last, start=None, end=None):
    """Narrow a range to the lines from one that contains start to one that contains end."""
    lines = source.splitlines()
    if start:
        first = next((n for n in range(first, last + 1) if start in lines[n - 1]), None)
    if end and first:
        last = next((n for n in range(first, last + 1) if end in lines[n - 1]), None)
    if not first or not last:
        raise LookupError(f"no line contains {end if first else start}")
    return first, last


def either(text, framework):
    """Return the framework's half of "torch|tf1", or the whole if both share it."""
    return text.split("|")[-1 if framework == "tf1" else 0] if text else text


class Block(SphinxDirective):
    """A directive whose text names scripts; a mistake in it is reported with its line."""

    has_content = True

    def run(self):
        try:
            return self.show(" ".join(self.content))
        except (LookupError, OSError) as error:
            raise self.error(str(error)) from error

    def read(self, script, name, *ends):
        """Return a part of a script, and the numbers of its first and its last line."""
        path = ROOT / script
        self.env.note_dependency(str(path))
        source = path.read_text()
        try:
            first, last = narrow(source, *find(source, name), *ends)
        except LookupError as error:
            raise LookupError(f"{script}: {error}") from error
        return source.splitlines()[first - 1 : last], first, last


class FromScript(Block):
    option_spec: ClassVar = dict.fromkeys(("equation", "from", "to"), directives.unchanged)

    def show(self, text):
        equation, name = self.options.get("equation"), None
        page = [f"(code-{equation})="] if equation else []
        page.append("`````{tab-set}\n:sync-group: framework")
        for item in text.split(", "):
            new_name, _, script = item.rpartition(" in ")
            name, framework = new_name or name, script.removesuffix(".py").rpartition("_")[2]
            ends = (either(self.options.get(key), framework) for key in ("from", "to"))
            _, first, last = self.read(script, name, *ends)
            page.append(
                f"````{{tab-item}} {FRAMEWORKS[framework]}\n:sync: {framework}\n\n"
                f"```{{literalinclude}} /../{script}\n:language: python\n"
                f":lines: {first}-{last}\n:lineno-match:\n:dedent:\n"
                f":caption: {script}\n```\n````"
            )
        page.append("`````")
        shown = self.parse_text_to_nodes("\n".join(page))
        if equation:
            shown += self.parse_text_to_nodes(f"implements {{eq}}`{equation}`")
            shown[-1]["classes"].append("below")
        return shown


class DiffOf(Block):
    option_spec: ClassVar = {"part": directives.unchanged}

    def show(self, text):
        _, *scripts = text.split()  # diff, and two names
        parts = [self.read(script, self.options.get("part"))[0] for script in scripts]
        diff = "\n".join(difflib.unified_diff(*parts, *scripts, lineterm="", n=2))
        block = nodes.literal_block(diff, diff, language="diff")
        pair = ",".join(script.removesuffix(".py") for script in scripts)
        page = "../" * self.env.docname.count("/") + f"side_by_side.html#{pair}"
        link = nodes.reference("", "Open both scripts side by side", refuri=page)
        return [block, nodes.paragraph("", "", link, classes=["below"])]


def link_equations(app, doctree, docname):
    """Put a link to the code behind every equation that a part of a script implements."""
    labels = app.env.get_domain("std").anonlabels
    for node in list(doctree.findall(nodes.math_block)):
        code = f"code-{node.get('label')}"
        if code in labels:
            target, anchor = labels[code][:2]
            link = make_refnode(
                app.builder, docname, target, anchor, nodes.Text("the code of this equation")
            )
            node.parent.insert(
                node.parent.index(node) + 1,
                nodes.paragraph("", "", link, classes=["below"]),
            )


class SideBySide(SphinxDirective):
    has_content = True  # for a code host

    def run(self):
        self.env.note_dependency(reader.__file__)
        return [nodes.raw("", reader.BODY, format="html")]


def write_lines(app, error):
    """Write what the page side_by_side shows, for its script to read."""
    if not error:
        (Path(app.outdir) / "_static" / "lines.js").write_text(reader.data())


def mathml(node, **how):
    """Return a formula as MathML, which browsers show without scripts."""
    try:
        return CONVERTER.convert_with_local_state(node.astext(), **how)
    except LatexError as error:
        logger.warning("%s: %s", error, node.astext(), location=node)
        return ""


def visit_math(translator, node):
    translator.body.append(mathml(node, displaystyle=False))
    raise nodes.SkipNode


def visit_math_block(translator, node):
    number = f'<span class="eqno">({node["number"]})</span>' if node.get("number") else ""
    anchor = "".join(f' id="{html.escape(name)}"' for name in node.get("ids", [])[:1])
    formula = mathml(node, displaystyle=True)
    translator.body.append(f'<div class="math"{anchor}>{formula}{number}</div>\n')
    raise nodes.SkipNode


def setup(app):
    app.add_directive("from-script", FromScript)
    app.add_directive("diff-of", DiffOf)
    app.add_directive("side-by-side", SideBySide)
    app.add_html_math_renderer("mathml", (visit_math, None), (visit_math_block, None))
    app.connect("doctree-resolved", link_equations)
    app.connect("build-finished", write_lines)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
