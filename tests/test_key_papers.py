"""The reading list: Markdown and CSV agree, and every entry is complete and plausible."""

import csv
import re
from collections import Counter

import pytest
from helpers import ROOT, SCRIPTS, TORCH

DOCS = ROOT / "docs"
MARKDOWN = (DOCS / "key_papers.md").read_text()
with (DOCS / "key_papers.csv").open(newline="", encoding="utf-8") as file:
    PAPERS = list(csv.DictReader(file))
FIRST_PASS = "A first pass: ten papers and six scripts"
FIVE_DIGITS_SINCE = "1501"  # until 2014 arXiv numbers ended in four digits


def entry(paper):
    """What the Markdown says of a paper, on one line: paste it there, wrapped."""
    algorithm = "" if paper["algorithm"] in paper["title"] else f" ({paper['algorithm']})"
    number = f"arXiv:{paper['arxiv']}" if paper["arxiv"] else paper["venue"]
    return (
        f"- **{paper['title']}**{algorithm}. {paper['authors']}, {paper['year']}, "
        f"[{number}]({paper['url']}). {paper['why']}"
    )


def sections():
    """Split the Markdown at its headings into (topic, subtopic, text)."""
    topic = subtopic = ""
    for part in re.split(r"^(?=##)", MARKDOWN, flags=re.M)[1:]:
        heading, text = part.split("\n", 1)
        if heading.startswith("### "):
            subtopic = heading[4:]
        else:
            topic, subtopic = heading[3:], ""
        yield topic, subtopic, text


def list_items(text):
    """The items of a list, each on one line."""
    items = re.split(r"^(?=- |\d+\. )", text, flags=re.M)
    return [" ".join(item.split()) for item in items if item.strip()]


def links(text):
    return re.findall(r"\]\(([^)\s]+)\)", text)


def test_markdown_and_csv_agree():
    in_markdown = [
        (topic, subtopic, item)
        for topic, subtopic, text in sections()
        if topic != FIRST_PASS
        for item in list_items(text)
    ]
    in_csv = [(paper["topic"], paper["subtopic"], entry(paper)) for paper in PAPERS]
    assert in_markdown == in_csv


def test_every_topic_has_papers():
    topics = Counter(paper["topic"] for paper in PAPERS)
    headings = dict.fromkeys(topic for topic, *_ in sections() if topic != FIRST_PASS)
    assert list(headings) == list(topics)
    assert len(topics) >= 12
    assert min(topics.values()) >= 3
    assert 90 <= len(PAPERS) <= 150
    for topic, subtopic, text in sections():
        has_subtopics = any(paper["subtopic"] for paper in PAPERS if paper["topic"] == topic)
        assert list_items(text) or (has_subtopics and not subtopic), (topic, subtopic)


def test_sections_stay_together_and_are_in_order_of_publication():
    runs = [("", "")]
    years = {}
    for paper in PAPERS:
        section = paper["topic"], paper["subtopic"]
        if section != runs[-1]:
            runs.append(section)
        years.setdefault(section, []).append(int(paper["year"]))
    assert len(runs) == len(set(runs))
    for section, of_section in years.items():
        assert of_section == sorted(of_section), section


@pytest.mark.parametrize("field", ["title", "arxiv", "url", "why"])
def test_nothing_is_listed_twice(field):
    values = Counter(paper[field].lower() for paper in PAPERS if paper[field])
    assert [value for value, times in values.items() if times > 1] == []


def test_arxiv_numbers_are_well_formed_and_fit_the_year():
    for paper in PAPERS:
        if not paper["arxiv"]:
            continue
        match = re.fullmatch(r"(\d\d)(\d\d)\.(\d{4,5})", paper["arxiv"])
        assert match, paper
        year, month, serial = match.groups()
        assert 1 <= int(month) <= 12, paper
        assert len(serial) == (5 if year + month >= FIVE_DIGITS_SINCE else 4), paper
        assert int(serial) > 0, paper
        assert abs(2000 + int(year) - int(paper["year"])) <= 1, paper
        assert paper["url"] == f"https://arxiv.org/abs/{paper['arxiv']}", paper
        assert not paper["venue"], paper


def test_papers_without_an_arxiv_number_have_a_venue_and_a_link():
    for paper in PAPERS:
        if paper["arxiv"]:
            continue
        assert paper["venue"], paper
        assert re.fullmatch(r"https://[\w.-]+/[^\s()]+", paper["url"]), paper
        assert "arxiv" not in paper["url"], paper


def test_every_paper_has_authors_a_year_and_a_source_for_its_identifier():
    for paper in PAPERS:
        assert all(value == " ".join(value.split()) for value in paper.values()), paper
        assert paper["authors"][0].isupper(), paper
        assert "et al" not in paper["authors"] or paper["authors"].endswith(" et al."), paper
        assert 1950 <= int(paper["year"]) <= 2030, paper
        kind = "number" if paper["arxiv"] else "venue"
        assert re.match(rf"title and {kind}: \S", paper["checked"]), paper


def test_every_paper_has_a_line_on_why_it_matters():
    for paper in PAPERS:
        why = paper["why"]
        assert 60 <= len(why) <= 180, (len(why), why)
        assert why[0].isupper() and why.endswith("."), why
        assert why.count(". ") <= 1, why
        assert not re.search(r"seminal|groundbreaking|landmark|impressive|elegant", why, re.I), why


def test_first_pass_is_ten_papers_in_order_next_to_six_scripts():
    ranked = {int(paper["first_pass"]): paper for paper in PAPERS if paper["first_pass"]}
    assert sorted(ranked) == list(range(1, 11))
    (text,) = [text for topic, _, text in sections() if topic == FIRST_PASS]
    items = list_items(text)
    assert len(items) == 10
    for number, item in enumerate(items, 1):
        assert item.startswith(f"{number}. ")
        assert links(item)[0] == ranked[number]["url"]
        assert f", {ranked[number]['year']}. " in item
    assert {f"../{script}.py" for script in TORCH} < set(links(text))


def test_links_to_our_files_lead_somewhere():
    ours = [link for link in links(MARKDOWN) if "://" not in link]
    assert "key_papers.csv" in ours
    assert [link for link in ours if not (DOCS / link).exists()] == []
    named = re.findall(r"`(\w+\.py)", MARKDOWN)
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_papers_cited_by_the_scripts_are_listed():
    listed = {paper["url"] for paper in PAPERS}
    for script in SCRIPTS:
        cited = re.findall(r"https://arxiv\.org/abs/[\d.]*\d", (ROOT / f"{script}.py").read_text())
        assert cited, script
        assert set(cited) <= listed, script
