"""What the course adds to Sphinx: code of the scripts by name, their diffs, and MathML.

    ```{from-script} ppo compute_loss_pi
    :equation: eq-ppo-clip
    ```

shows a part of ppo_torch.py and of ppo_tf1.py in two tabs, and links it with an equation. With
":from: text" and ":to: text" it shows only the lines between; "a|b" is a in one and b in the other.

    ```{diff-of} ddpg_torch td3_torch
    :part: update
    ```

shows the diff of two scripts. A name that a script does not have stops the build.
"""

import ast
import difflib
import html
from pathlib import Path
from typing import ClassVar

import reader
from docutils import nodes
from docutils.parsers.rst import directives
from latex2mathml.converter import convert
from sphinx.util.docutils import SphinxDirective
from sphinx.util.nodes import make_refnode

ROOT = Path(__file__).parent.parent
FRAMEWORKS = {"torch": "PyTorch", "tf1": "TF1"}


def find(source, name):
    """Return the first and the last line of a function, class or method, given its dotted name.

    Functions inside functions are found by their own name, because a name is used only once.
    """
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


def narrow(source, first, last, start, end):
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


class FromScript(SphinxDirective):
    required_arguments = 2  # an algorithm, and a name in its scripts
    option_spec: ClassVar = dict.fromkeys(("equation", "from", "to"), directives.unchanged)

    def run(self):
        algo, name = self.arguments
        equation = self.options.get("equation")
        text = [f"(code-{equation})="] if equation else []
        text.append("`````{tab-set}\n:sync-group: framework")
        for framework, title in FRAMEWORKS.items():
            path = ROOT / f"{algo}_{framework}.py"
            self.env.note_dependency(str(path))
            source = path.read_text()
            ends = (either(self.options.get(key), framework) for key in ("from", "to"))
            try:
                lines = find(source, either(name, framework))
                first, last = narrow(source, *lines, *ends)
            except LookupError as error:
                raise self.error(f"{path.name}: {error}") from error
            text.append(
                f"````{{tab-item}} {title}\n:sync: {framework}\n\n"
                f"```{{literalinclude}} /../{path.relative_to(ROOT)}\n:language: python\n"
                f":lines: {first}-{last}\n:lineno-match:\n:dedent:\n"
                f":caption: {path.relative_to(ROOT)}\n```\n````"
            )
        text.append("`````")
        if equation:
            text.append(f"\nThis is {{eq}}`{equation}`.")
        return self.parse_text_to_nodes("\n".join(text))


class DiffOf(SphinxDirective):
    required_arguments = 2  # two scripts
    option_spec: ClassVar = {"part": directives.unchanged}

    def run(self):
        parts = []
        for script in self.arguments:
            path = ROOT / f"{script}.py"
            self.env.note_dependency(str(path))
            source = path.read_text()
            lines = source.splitlines()
            if "part" in self.options:
                try:
                    first, last = find(source, self.options["part"])
                except LookupError as error:
                    raise self.error(f"{path.name}: {error}") from error
                lines = lines[first - 1 : last]
            parts.append(lines)
        names = (f"{script}.py" for script in self.arguments)
        diff = difflib.unified_diff(*parts, *names, lineterm="", n=2)
        return [nodes.literal_block("\n".join(diff), language="diff")]


def link_equations(app, doctree, docname):
    """Put a link to the code behind every equation that a part of a script implements."""
    labels = app.env.get_domain("std").anonlabels
    for node in list(doctree.findall(nodes.math_block)):
        code = f"code-{node.get('label')}"
        if code in labels:
            target, anchor = labels[code][:2]
            link = make_refnode(
                app.builder, docname, target, anchor, nodes.Text("the code"), "the lines"
            )
            node.parent.insert(
                node.parent.index(node) + 1,
                nodes.paragraph("", "", link, classes=["equation-code"]),
            )


class SideBySide(SphinxDirective):
    def run(self):
        return [nodes.raw("", reader.BODY, format="html")]


def write_lines(app, error):
    """Write what the page side_by_side shows, for its script to read."""
    if not error:
        (Path(app.outdir) / "_static" / "lines.js").write_text(reader.data())


def visit_math(translator, node):
    translator.body.append(convert(node.astext()))
    raise nodes.SkipNode


def visit_math_block(translator, node):
    number = f'<span class="eqno">({node["number"]})</span>' if node.get("number") else ""
    anchor = "".join(f' id="{html.escape(name)}"' for name in node.get("ids", [])[:1])
    formula = convert(node.astext(), display="block")
    translator.body.append(f'<div class="math"{anchor}>{number}{formula}</div>\n')
    raise nodes.SkipNode


def setup(app):
    app.add_directive("from-script", FromScript)
    app.add_directive("diff-of", DiffOf)
    app.add_directive("side-by-side", SideBySide)
    app.add_html_math_renderer("mathml", (visit_math, None), (visit_math_block, None))
    app.connect("doctree-resolved", link_equations)
    app.connect("build-finished", write_lines)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
