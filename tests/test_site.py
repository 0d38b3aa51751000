"""The course's site in a browser: what a reader sees, from file:// and without a network.

Needs Chromium or Chrome, and chromedriver (Debian: apt-get install chromium chromium-driver).
"""

import difflib
import json
import re
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request

import pytest
from helpers import ROOT, SCRIPTS
from test_docs import built_site

pytestmark = pytest.mark.skipif(
    shutil.which("chromedriver") is None,
    reason="needs a browser: apt-get install chromium chromium-driver",
)
FLAGS = """--headless --no-sandbox --disable-gpu --disable-background-networking
    --disable-component-update --disable-sync --no-first-run"""
PAGES = sorted(
    str(path.relative_to(ROOT / "docs").with_suffix("")) for path in ROOT.glob("docs/**/*.md")
)
ALGORITHMS = ("vpg", "ppo", "trpo", "ddpg", "td3", "sac")
PAIRS = [("ddpg_torch", "td3_torch"), ("ppo_torch", "ppo_tf1"), ("vpg_tf1", "trpo_tf1")]


class Browser:
    """A browser without a window, driven by the WebDriver protocol, which is JSON over HTTP."""

    def __init__(self, site, driver, profile):
        self.site = site
        lines = iter(driver.stdout.readline, "")
        port = next(found[1] for line in lines if (found := re.search(r"on port (\d+)\.", line)))
        self.url = f"http://127.0.0.1:{port}/session"
        self.open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
        capabilities = {
            "goog:chromeOptions": {"args": [*FLAGS.split(), f"--user-data-dir={profile}"]},
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
        }
        session = self("", capabilities={"alwaysMatch": capabilities})
        self.url += f"/{session['sessionId']}"

    def __call__(self, path, method="POST", **body):
        data = json.dumps(body).encode() if method == "POST" else None
        request = urllib.request.Request(self.url + path, data, method=method)
        try:
            with self.open(request, timeout=120) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(json.load(error)["value"]["message"]) from None

    def js(self, code, *args):
        """Run JavaScript in the page, and return what it returns."""
        return self("/execute/sync", script=code, args=list(args))

    def wait(self, code, *args):
        """Wait until JavaScript returns something, and return that."""
        for _ in range(300):
            if answer := self.js(code, *args):
                return answer
            time.sleep(0.1)
        raise AssertionError(f"not within 30 s: {code}")

    def look(self, width=1400, dark=False):
        """Choose the width of the window, or of a phone, and the colours; scroll at once."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        features = [
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
            {"name": "prefers-reduced-motion", "value": "reduce"},
        ]
        for command, params in (
            ("Emulation.setDeviceMetricsOverride", size),
            ("Emulation.setEmulatedMedia", {"features": features}),
        ):
            self("/goog/cdp/execute", cmd=command, params=params)

    def go(self, page, link=""):
        """Open a page afresh: another link to the same page would not load it."""
        self("/url", url="about:blank")
        self("/url", url=f"file://{self.site}/{page}.html{link}")
        self.wait("return document.fonts.status === 'loaded' && document.readyState === 'complete'")

    def log(self, kind):
        """Return what was logged since the last call."""
        return self("/se/log", type=kind)

    def errors(self):
        """Return the errors that the console has shown since the last call."""
        return [entry["message"] for entry in self.log("browser") if entry["level"] == "SEVERE"]

    def type(self, selector, keys):
        (element,) = self("/element", using="css selector", value=selector).values()
        self(f"/element/{element}/value", text=keys)

    def press(self, key):
        """Press a key; unlike typing into an element, this leaves the focus where it is."""
        actions = [{"type": kind, "value": key} for kind in ("keyDown", "keyUp")]
        self("/actions", actions=[{"type": "key", "id": "keyboard", "actions": actions}])

    def click(self, selector):
        (element,) = self("/element", using="css selector", value=selector).values()
        self(f"/element/{element}/click")


@pytest.fixture(scope="module")
def browser():
    site, command = built_site(), ["chromedriver", "--port=0"]
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile,
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver,
    ):
        try:
            browser = Browser(site, driver, profile)
            yield browser
            browser("", method="DELETE")  # ends the browser itself
        finally:
            driver.terminate()


PROBLEMS = r"""
const problems = [], article = document.querySelector("article"), text = article.cloneNode(true);
text.querySelectorAll("code, pre, script, style").forEach((node) => node.remove());
for (const [tex] of text.textContent.matchAll(/\$[^$]|\\[a-zA-Z]+/g)) problems.push(`TeX: ${tex}`);
for (const formula of article.querySelectorAll("math")) {
  const { width, height } = formula.getBoundingClientRect();
  if (!formula.closest("details:not([open])") && (width < 3 || height < 5))
    problems.push(`a formula without size: ${formula.textContent}`);
}
for (const image of article.querySelectorAll("img"))
  if (!image.naturalWidth) problems.push(`no image: ${image.src}`);
return problems;
"""
OVERFLOW = r"""
const scrolls = (node) => node && !node.matches(".content, body") &&
  (/auto|scroll/.test(getComputedStyle(node).overflowX) || scrolls(node.parentElement));
return [...document.querySelectorAll("article *, article")].filter((node) =>
  node.getBoundingClientRect().right > innerWidth + 1 && !scrolls(node.parentElement)
).map((node) => node.outerHTML.slice(0, 200)).concat(
  document.documentElement.scrollWidth > innerWidth ? ["the page is wider than the screen"] : []);
"""
CONTRAST = r"""
const light = (color) => color.slice(0, 3)
  .map((x) => x / 255).map((x) => x <= 0.04 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4)
  .reduce((sum, x, i) => sum + x * [0.2126, 0.7152, 0.0722][i], 0);
const numbers = (color) => color.match(/[\d.]+/g).map(Number);
const behind = (node) => {
  if (!node) return [255, 255, 255];
  const [r, g, b, alpha = 1] = numbers(getComputedStyle(node).backgroundColor);
  const below = alpha < 1 ? behind(node.parentElement) : [0, 0, 0];
  return [r, g, b].map((x, i) => alpha * x + (1 - alpha) * below[i]);
};
const contrast = (node) => {
  const both = [light(numbers(getComputedStyle(node).color)), light(behind(node))];
  return (Math.max(...both) + 0.05) / (Math.min(...both) + 0.05);
};
const nodes = document.querySelectorAll("article :is(h1, p, math, pre, td, a, code, span:not(.w))");
return [light(behind(document.body)), Math.min(...[...nodes].map(contrast))];
"""


@pytest.mark.parametrize("page", PAGES)
def test_page_is_whole(page, browser):
    """No error, no request to the network, formulas, no overflow, and colours that can be read."""
    browser.errors(), browser.log("performance")
    browser.look()
    browser.go(page)
    assert browser.js(PROBLEMS) == []
    background, contrast = browser.js(CONTRAST)
    assert background > 0.8
    assert contrast > 3
    browser.look(width=390, dark=True)
    assert browser.wait("return innerWidth") == 390
    assert browser.js(OVERFLOW) == []
    background, contrast = browser.js(CONTRAST)
    assert background < 0.2
    assert contrast > 3
    assert browser.errors() == []
    events = [json.loads(entry["message"])["message"] for entry in browser.log("performance")]
    sent = [e["params"] for e in events if e["method"] == "Network.requestWillBeSent"]
    urls = [x["request"]["url"] for x in sent if x["documentURL"].startswith("file:")]
    assert f"file://{browser.site}/{page}.html" in urls
    assert [url for url in urls if not re.match("file:|data:", url)] == []


def test_formulas_have_their_own_font(browser):
    browser.look()
    browser.go("introduction/key_concepts")
    assert browser.js("return [...document.fonts].map((font) => [font.family, font.status])") == [
        ["STIX Two Math", "loaded"]
    ]
    heights = browser.js("""
        return [...document.querySelectorAll("div.math mo")].filter((x) => x.textContent === "∑")
          .map((x) => x.getBoundingClientRect().height / parseFloat(getComputedStyle(x).fontSize))
    """)
    assert max(heights) > 1.3  # sums grow in displayed formulas
    assert "\N{MATHEMATICAL DOUBLE-STRUCK CAPITAL E}" in browser.js(
        "return document.body.textContent"
    )


def test_search_finds(browser):
    browser.errors()
    browser.look()
    browser.go("index")
    browser.type(".sidebar-search", "conjugate gradient\ue007")
    found = browser.wait("""
        const status = document.querySelector(".search-summary, #search-results p")?.textContent;
        return location.pathname.endsWith("search.html") && /found/.test(status) &&
          [...document.querySelectorAll("#search-results li a")].map((link) => link.textContent)
    """)
    assert any("TRPO" in title for title in found)
    assert browser.errors() == []


def test_tabs_switch_the_whole_page(browser):
    browser.look()
    browser.go("algorithms/ppo")
    shown = """
        return [...document.querySelectorAll(".sd-tab-content .code-block-caption")]
          .filter((caption) => caption.offsetParent).map((caption) => caption.innerText.trim())
    """
    assert set(browser.js(shown)) == {"ppo_torch.py"}
    browser.js("document.querySelectorAll('.sd-tab-label[data-sync-id=tf1]')[1].click()")
    assert set(browser.js(shown)) == {"ppo_tf1.py"}


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_equations_lead_to_their_code_and_back(algo, browser):
    browser.look()
    browser.go(f"algorithms/{algo}")
    equations = browser.js("""
        return [...document.querySelectorAll("div.math[id]")].map((equation) => equation.id)
    """)
    assert len(equations) >= 4
    for equation in equations:
        code = equation.replace("equation-", "code-")
        in_sight = """
            const { top, bottom } = document.getElementById(arguments[0]).getBoundingClientRect();
            return location.hash === `#${arguments[0]}` && bottom > 0 && top < innerHeight;
        """
        browser.js(f"document.querySelector('#{equation} ~ p a[href=\"#{code}\"]').click()")
        browser.wait(in_sight, code)
        lines = f"return document.querySelector('#{code} .highlight, #{code} ~ * .highlight')"
        assert browser.js(f"{lines}.textContent.trim()")
        browser.js(f"document.querySelector('a[href=\"#{equation}\"]').click()")
        browser.wait(in_sight, equation)


def test_diffs_show_lines_and_open_the_reader(browser):
    browser.look()
    browser.go("algorithms/td3")
    assert "+            q_targ = torch.min(" in browser.js("""
        return document.querySelector(".highlight-diff").textContent
    """)
    browser.click("a[href$='side_by_side.html#ddpg_torch,td3_torch']")
    assert browser.wait("return document.getElementById('reader-count')?.textContent")


ROWS = """
const side = (row, name) => [...row.querySelectorAll(`.${name} code`)].map((line) =>
  [Number(line.dataset.n), line.textContent.slice(0, -1)]);
return [...document.querySelectorAll(".reader-row")].map((row) =>
  [row.classList[1], side(row, "left"), side(row, "right")]);
"""


@pytest.mark.parametrize(("left", "right"), PAIRS)
def test_reader_shows_the_right_lines(left, right, browser):
    browser.look()
    browser.go("side_by_side", f"#{left},{right}")
    rows = browser.js(ROWS)
    scripts = [(ROOT / f"{name}.py").read_text().splitlines() for name in (left, right)]
    for n, script in enumerate(scripts, 1):
        assert [line for row in rows for line in row[n]] == [
            [number, line] for number, line in enumerate(script, 1)
        ]
    # What is equal stands in one row: no fewer lines than difflib pairs, and all headings
    same = [x[0][1] for kind, x, y in rows if kind == "equal"]
    assert all(x[0][1] == y[0][1] for kind, x, y in rows if kind == "equal")
    blocks = difflib.SequenceMatcher(None, *scripts, autojunk=False).get_matching_blocks()
    assert len(same) >= 0.98 * sum(block.size for block in blocks)
    headings = [{x for x in script if re.match("(class|def) ", x)} for script in scripts]
    assert headings[0] & headings[1] <= set(same)
    removed, added = (len(script) - len(same) for script in scripts)
    count = browser.js("return document.getElementById('reader-count').textContent")
    assert re.fullmatch(rf"\d+ differences, \u2212{removed} \+{added} lines", count)


def test_reader_marks_the_words_that_differ(browser):
    browser.look()
    browser.go("side_by_side", "#ppo_torch,ppo_tf1")
    rows = browser.js("""
        const same = (side) => [...side.querySelectorAll("span:not(.differs)")]
          .map((word) => word.textContent).join("");
        return [...document.querySelectorAll(".reader-row.changed")]
          .map((row) => [...row.children].map(same))
    """)
    assert len(rows) > 20
    assert all(left == right and left.strip() for left, right in rows)
    mark = "return getComputedStyle(document.querySelector('.right .differs')).backgroundColor"
    assert browser.js(mark) != browser.js(mark.replace(".differs", "span:not(.differs)"))


def test_reader_aligns_while_it_scrolls(browser):
    browser.look(width=1000)  # so narrow that lines wrap
    browser.go("side_by_side", "#td3_torch,sac_torch")
    tops = """
        window.scrollTo({ top: arguments[0], behavior: "instant" });
        return [...document.querySelectorAll(".reader-row")].map((row) =>
          [...row.children].map((side) => side.getBoundingClientRect()))
          .filter(([x, y]) => x.bottom > 0 && x.top < innerHeight)
          .map(([x, y]) => [x.top, y.top, x.bottom, y.bottom, x.right <= y.left])
    """
    for top in (0, 1000, 2500):
        rows = browser.js(tops, top)
        assert len(rows) > 5
        for left_top, right_top, left_bottom, right_bottom, beside in rows:
            assert (left_top, left_bottom, beside) == (right_top, right_bottom, True)


def visible_lines(browser):
    return browser.js("""
        return [...document.querySelectorAll("#reader .left code")].filter((x) => x.offsetParent &&
          x.checkVisibility()).length
    """)


def test_reader_folds_on_demand(browser):
    browser.look()
    browser.go("side_by_side", "#ddpg_torch,td3_torch")
    everything = visible_lines(browser)
    assert everything == len((ROOT / "ddpg_torch.py").read_text().splitlines())
    browser.press("f")
    folded = visible_lines(browser)
    assert folded < everything / 2
    assert browser.js("return location.hash") == "#ddpg_torch,td3_torch,fold"
    assert browser.js("""
        const differences = [...document.querySelectorAll(".reader-difference")];
        return differences.every((difference) => difference.checkVisibility())
    """)
    browser.click("#reader summary")
    assert folded < visible_lines(browser) < everything
    browser.go("side_by_side", "#ddpg_torch,td3_torch,fold")
    assert visible_lines(browser) == folded
    browser.press("f")
    assert visible_lines(browser) == everything


def test_reader_goes_from_difference_to_difference(browser):
    browser.look()
    browser.go("side_by_side", "#ddpg_torch,td3_torch")
    at = """
        const all = [...document.querySelectorAll(".reader-difference")];
        const { top } = document.activeElement.getBoundingClientRect();
        const bar = document.getElementById("reader-bar").getBoundingClientRect();
        const visible = top >= bar.bottom && top < innerHeight;
        return [all.indexOf(document.activeElement), all.length, visible];
    """
    count = browser.js(at)[1]
    for n in range(count):
        browser.press("n")
        assert browser.js(at) == [n, count, True]
    browser.press("n")  # there is none after the last
    browser.press("p")
    assert browser.js(at) == [count - 2, count, True]
    browser.click("#reader-next")
    assert browser.js(at) == [count - 1, count, True]
    status = browser.js("return document.getElementById('reader-count').textContent")
    assert status.startswith(f"{count} of {count} differences")


def choice(browser):
    return browser.js("""
        return ["left", "right"].map((side) => document.getElementById(`reader-${side}`).value)
          .concat(location.hash)
    """)


def test_every_choice_of_the_reader_is_a_link(browser):
    browser.look()
    browser.go("side_by_side")
    assert choice(browser) == ["ddpg_torch", "td3_torch", "#ddpg_torch,td3_torch"]
    assert browser.js("return [...document.getElementById('reader-left')].map((x) => x.value)") == (
        SCRIPTS
    )
    browser.js("""
        const right = document.getElementById("reader-right");
        right.value = "sac_tf1";
        right.dispatchEvent(new Event("change"));
    """)
    assert choice(browser) == ["ddpg_torch", "sac_tf1", "#ddpg_torch,sac_tf1"]
    browser.press("s")
    assert choice(browser) == ["sac_tf1", "ddpg_torch", "#sac_tf1,ddpg_torch"]
    browser.click("#reader-swap")
    assert choice(browser) == ["ddpg_torch", "sac_tf1", "#ddpg_torch,sac_tf1"]
    browser.click("article a[href='#vpg_torch,ppo_torch']")
    browser.wait("return document.getElementById('reader-right').value === 'ppo_torch'")
    assert choice(browser) == ["vpg_torch", "ppo_torch", "#vpg_torch,ppo_torch"]
    assert browser.js(ROWS)[0][2][0][1] == '"""Proximal Policy Optimization (PPO-clip), in PyTorch.'


def test_reader_goes_to_sections(browser):
    browser.look()
    browser.go("side_by_side", "#ddpg_torch,td3_torch,fold")
    names = "return [...document.getElementById('reader-section')].map((x) => x.text)"
    sections = browser.js(names)
    assert {"Args", "Policy", "ReplayBuffer", "Networks", "Update", "Loop"} <= set(sections)
    for section in ("ReplayBuffer", "Args"):
        browser.js(
            """
            const select = document.getElementById("reader-section");
            select.value = arguments[0];
            select.dispatchEvent(new Event("change"));
            """,
            section,
        )
        line = browser.js("""
            const { bottom } = document.getElementById("reader-bar").getBoundingClientRect();
            return [...document.querySelectorAll(".right [data-section]")].filter((line) => {
              const { top } = line.getBoundingClientRect();
              return line.checkVisibility() && top > bottom && top < bottom + 100;
            }).map((line) => line.dataset.section)
        """)
        assert line == [section]


def test_reader_on_a_phone(browser):
    browser.look(width=390)
    browser.go("side_by_side", "#ddpg_torch,td3_torch")
    for _ in range(3):
        browser.click("#reader-next")
    assert browser.js(OVERFLOW) == []
    lines = browser.js("""
        return [...document.querySelectorAll("#reader code")].filter((x) => x.checkVisibility())
          .map((line) => line.textContent.slice(0, -1))
    """)
    scripts = [(ROOT / f"{name}.py").read_text().splitlines() for name in PAIRS[0]]
    kept = list(difflib.unified_diff(*scripts, n=1000, lineterm=""))[3:]
    assert abs(len(lines) - len(kept)) <= 5  # one column: equal lines stand there once
    top, height = browser.js("""
        const { top, height } = document.getElementById("reader-bar").getBoundingClientRect();
        return [top, height]
    """)
    assert top == 0  # the bar stays on the screen
    assert height < 100
