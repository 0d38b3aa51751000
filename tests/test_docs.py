"""The course builds into a site whose links, formulas and code are right.

Needs the packages of docs/requirements.txt; without them, these tests are skipped.
"""

import html.parser
import json
import re
import shutil
import subprocess
import sys

import pytest
from helpers import ROOT, SCRIPTS, once, session_folder

pytest.importorskip("sphinx", reason="pip install -r docs/requirements.txt")


def build(docs, out):
    command = [sys.executable, "-m", "sphinx", "-q", "-W", docs, out]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def built_site():
    """Return the folder of the site, built once per session."""
    folder = session_folder() / "site"
    with once(folder) as needed:
        if needed:
            built = build(ROOT / "docs", folder)
            assert built.returncode == 0, built.stderr
            assert not built.stderr
    return folder


@pytest.fixture(scope="module")
def site():
    return built_site()


class Page(html.parser.HTMLParser):
    """What a page links to, its anchors, and its text apart from code and formulas."""

    def __init__(self, path):
        super().__init__()
        self.links, self.sources, self.anchors, self.text = [], [], set(), []
        self.formulas, self.inside = 0, []
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.anchors |= {attrs["id"]} if "id" in attrs else set()
        self.links += [attrs["href"]] if tag == "a" and "href" in attrs else []
        if tag in ("script", "img", "link", "iframe"):
            self.sources += [attrs[key] for key in ("src", "href") if attrs.get(key)]
        self.formulas += tag == "math"
        if tag in ("code", "pre", "math", "script", "style"):
            self.inside.append(tag)

    def handle_endtag(self, tag):
        if self.inside and self.inside[-1] == tag:
            self.inside.pop()

    def handle_data(self, data):
        if not self.inside:
            self.text.append(data)


@pytest.fixture(scope="module")
def pages(site):
    return {path: Page(path) for path in site.rglob("*.html")}


def test_every_markdown_file_is_a_page(site, pages):
    files = {path.relative_to(ROOT / "docs").with_suffix("") for path in ROOT.glob("docs/**/*.md")}
    shown = {path.relative_to(site).with_suffix("") for path in pages}
    assert files <= shown


def test_every_internal_link_resolves(pages):
    broken, checked = [], 0
    for path, page in pages.items():
        for link in page.links + page.sources:
            if re.match("[a-z]+:", link):
                continue
            name, _, anchor = link.partition("#")
            target = (path.parent / name.partition("?")[0]).resolve() if name else path
            checked += 1
            if not target.exists():
                broken.append((path.name, link))
            elif anchor and target in pages and target.name != "side_by_side.html":
                broken += [(path.name, link)] if anchor not in pages[target].anchors else []
    assert not broken
    assert checked > 500


def test_nothing_comes_from_the_network(site, pages):
    for path, page in pages.items():
        assert not [x for x in page.sources if re.match("(https?:)?//", x)], path
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*['\"]?(https?:)?//", sheet.read_text()), sheet


def test_formulas_are_rendered(site, pages):
    for path, page in pages.items():
        text = "".join(page.text)
        assert not re.search(r"\\(frac|mathbb|pi|theta|left|sum|begin)|\$\$", text), path
    sources = ROOT.glob("docs/**/*.md")
    expected = sum(source.read_text().count("$$") // 2 for source in sources)
    assert sum(page.formulas for page in pages.values()) > expected > 50


def copy_of_project(folder):
    """Copy what the pages show; what they only link to is linked."""
    for path in ROOT.iterdir():
        if path.suffix == ".py":
            shutil.copy(path, folder)
        elif path.name != "docs":
            (folder / path.name).symlink_to(path)
    shutil.copytree(ROOT / "docs", folder / "docs", ignore=shutil.ignore_patterns("_build"))


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("ppo_torch.py", "compute_loss_pi", "loss_of_pi", "ppo_torch.py: .* named compute_loss_pi"),
        ("sac_tf1.py", "class Policy", "class Actor", "sac_tf1.py: .* named Policy"),
        ("docs/algorithms/vpg.md", r"\frac{", r"\fraction{", r"vpg.md:\d+: .*fraction"),
        ("vpg_tf1.py", "    # Networks", "    # Nets", None),
    ],
)
def test_a_renamed_part_or_a_wrong_formula_stops_the_build(file, old, new, said, tmp_path):
    copy_of_project(tmp_path)
    path = tmp_path / file
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    built = build(tmp_path / "docs", tmp_path / "site")
    if said is None:  # no page shows that line
        assert built.returncode == 0, built.stderr
    else:
        assert built.returncode != 0
        assert re.search(said, built.stderr), built.stderr


def test_equations_and_code_link_to_each_other(pages):
    for path, page in pages.items():
        equations = {x for x in page.anchors if x.startswith("equation-eq-")}
        for equation in equations:
            code = equation.replace("equation-", "code-")
            if code in page.anchors:
                assert f"#{code}" in page.links, path
                assert f"#{equation}" in page.links, path
    linked = [x for page in pages.values() for x in page.anchors if x.startswith("code-eq-")]
    assert len(linked) > 20


def test_the_reader_has_all_scripts(site):
    text = (site / "_static" / "lines.js").read_text()
    lines = json.loads(text.removeprefix("const LINES = ").removesuffix(";\n"))
    assert list(lines) == SCRIPTS
    for script, shown in lines.items():
        text = ["".join(piece for piece, _ in line) for line in shown]
        assert text == (ROOT / f"{script}.py").read_text().splitlines()
