"""The report of a run in Chromium. Skipped where Chromium or Playwright is missing."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("playwright", reason="browsers are driven by playwright")

from playwright.sync_api import Browser, Page

from shardwright.api.estimated import Estimated
from shardwright.api.explained import Explained
from shardwright.config.load import load_job
from shardwright.report.answer_page import answer_page
from shardwright.report.run.run_card import RunCard
from shardwright.report.run.run_record import read_record
from shardwright.report.run.run_report import SECTIONS, report_html
from support.browser import NEEDS_CHROMIUM, started_chromium, watched_page
from support.languages import num_chinese
from support.recorded_run import write_run

pytestmark = NEEDS_CHROMIUM

QUESTIONS = (Explained, Estimated)
PLANS = [{"step_s": 1.5, "fits": True, "plan": {"tp": 2}}, {"step_s": 2.5, "fits": True, "plan": {"tp": 4}}]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with started_chromium() as browser:
        yield browser


@pytest.fixture
def page(browser: Browser, request: pytest.FixtureRequest) -> Iterator[Page]:
    """A page without a network. Nothing may go wrong in it, and nothing may be asked for."""
    width, scheme = request.param
    view = {"width": width, "height": 900}
    with watched_page(browser, ("file:", "data:"), viewport=view, color_scheme=scheme, offline=True) as shown:
        yield shown


@pytest.mark.parametrize("page", [(1400, "light"), (390, "dark")], indirect=True)
def test_a_report_is_whole_without_a_network(page: Page, tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    card = RunCard.read(folder)
    file = folder / "report.html"
    file.write_text(report_html(card, read_record(folder), folder), encoding="utf-8")
    page.goto(file.as_uri())
    shown = [key for key, _ in SECTIONS if page.is_visible(f"#{key}")]
    assert {"loss", "throughput", "measured", "by-rank", "timeline", "health", "card"} <= set(shown)
    assert page.inner_text("#headline dd >> nth=0") == "5 of 5"
    assert page.evaluate("() => document.documentElement.scrollWidth") <= page.viewport_size["width"]
    axes = page.locator(".chart text").all_text_contents()
    assert {"nats a token", "tokens a second", "share of the step", "GiB", "step"} <= set(axes)
    page.hover(".chart >> nth=0")
    assert "training 3.5" in page.inner_text(".told >> nth=0")
    assert_readable(page)


@pytest.mark.parametrize("page", [(1400, "light")], indirect=True)
def test_a_report_in_chinese_shows_no_english_sentence(page: Page, tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    file = folder / "report.html"
    file.write_text(report_html(RunCard.read(folder), read_record(folder), folder, "zh"), encoding="utf-8")
    page.goto(file.as_uri())
    shown = page.locator("h2, figcaption, .keys, dt, th, .chart text, #health p").all_text_contents()
    assert not [text for text in shown if re.search("[a-z]{3,} [a-z]{3,} [a-z]{3,}", text)]
    assert num_chinese("".join(shown)) > 200
    assert_readable(page)


@pytest.mark.parametrize("page", [(390, "light")], indirect=True)
def test_the_page_of_an_answer_is_whole_without_a_network(page: Page, tmp_path: Path) -> None:
    explained, estimated = (question(load_job("quickstart", ("cluster.device=h100-sxm",))) for question in QUESTIONS)
    for name, answer in (("explain", explained.to_dict()), ("estimate", estimated.to_dict()), ("plan", PLANS)):
        file = tmp_path / f"{name}.html"
        file.write_text(answer_page(name, f"shardwright {name}", answer), encoding="utf-8")
        page.goto(file.as_uri())
        assert page.evaluate("() => document.documentElement.scrollWidth") <= 390
        assert_readable(page)
        shown = {key for key in ("step", "by-rank", "money", "rest") if page.is_visible(f"#{key}")}
        assert shown == ({"step", "by-rank", "money", "rest"} if name == "estimate" else {"rest"})
    assert page.locator("#rest > .body > div > .wide th[scope=col]").all_inner_texts() == ["tp", "step"]


@pytest.mark.parametrize("page", [(390, "dark")], indirect=True)
def test_clusters_are_named_and_the_words_of_an_answer_stand_on_its_page(page: Page, tmp_path: Path) -> None:
    devices = (("h100-sxm", 64, 0.004), ("b200-sxm", 32, 12.5))
    clusters = [
        {
            "price": "list",
            "device": name,
            "num_devices": count,
            "plan": {"plan": {"tp": 2}, "run": {"usd": usd}},
            "step": {"usd": usd / 10, "kwh": 3 * count},
        }
        for name, count, usd in devices
    ]
    answer = {"clusters": clusters, "cheapest": 0, "fastest": 1}
    file = tmp_path / "compare.html"
    file.write_text(answer_page("compare", "", answer, text="Cheapest: 64 h100-sxm <&>"), encoding="utf-8")
    page.goto(file.as_uri())
    assert page.locator("#headline dd").all_inner_texts() == ["64 h100-sxm", "32 b200-sxm"]
    assert page.inner_text("pre.printed") == "Cheapest: 64 h100-sxm <&>"
    assert page.locator("#rest th[scope=col]").all_inner_texts()[:3] == ["device", "devices", "whole run USD"]
    assert "$0.004" in page.inner_text("#rest") and "192 kWh" in page.inner_text("#rest")
    assert "$1.25" in page.inner_text("#rest"), "the money of a step is no time"
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 390
    assert_readable(page)


_SCROLLING = """() => [...document.querySelectorAll("main *")].filter((one) => one.clientWidth > 30
  && one.scrollWidth > one.clientWidth + 1 && getComputedStyle(one).overflowX !== "visible")
  .map((one) => one.outerHTML.slice(0, 80))"""
_WORDS = """Recommended: tp 4, pp 4, dp 4, interleaved-1f1b v 10, mb 1, zero 1, recompute selective norm+activation
  60.652 s a step, 1,081 tokens/s/device.

       step  P(1 faster)     MFU  plan
1  60.652 s               52.6 %  tp 4, pp 4, dp 4, interleaved-1f1b v 10, mb 1, zero 1
2  60.946 s         53 %  52.3 %  1 with pp 8, dp 2, dualpipe, uneven
换用软件后的一步    方案 1  方案 2
megatron-core     61.658 s  不支持
This is no row of a table.

2. Part
-------
compute  1.5 s
total    2.5 s

       16 h100-sxm  8 b200-sxm
price  $6.16 (list  $5.00
       of May)"""


@pytest.mark.parametrize("page", [(390, "light"), (390, "dark")], indirect=True)
def test_words_and_tables_of_an_answer_fit_a_phone(page: Page, tmp_path: Path) -> None:
    file = tmp_path / "plan.html"
    many = [row | {f"column {number}": number for number in range(20)} for row in PLANS]
    file.write_text(answer_page("plan", "", many, text="printed", lines=_WORDS), encoding="utf-8")
    page.goto(file.as_uri())
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 390
    assert page.evaluate(_SCROLLING) == []
    assert not page.is_visible("pre.printed")
    assert page.locator(".flowing > p").all_inner_texts() == [
        _WORDS.partition("\n")[0],
        "60.652 s a step, 1,081 tokens/s/device.",
        "This is no row of a table.",
        "2. Part",
    ]
    tables = page.locator(".flowing > .wide")
    assert tables.nth(0).locator("th[scope=col]").all_text_contents() == ["step", "P(1 faster)", "MFU", "plan"]
    rows = tables.nth(0).locator("tbody tr")
    assert rows.nth(0).locator("td").all_text_contents()[:3] == ["60.652 s", "", "52.6 %"]
    assert rows.nth(1).locator("td").all_text_contents()[:3] == ["60.946 s", "53 %", "52.3 %"]
    assert tables.nth(1).locator("td").all_text_contents() == ["61.658 s", "不支持"]
    assert tables.nth(1).locator("td").nth(0).get_attribute("data-name") == "方案 1"
    assert tables.nth(2).locator("tbody tr").all_text_contents() == ["compute1.5 s", "total2.5 s"]
    assert tables.nth(3).locator("th[scope=col]").all_text_contents() == ["16 h100-sxm", "8 b200-sxm"]
    assert tables.nth(3).locator("tbody tr").all_text_contents() == ["price$6.16 (list of May)$5.00"]
    assert rows.nth(0).locator("td").last.bounding_box()["width"] > 300, "a long text has a line of its own"
    assert_readable(page)


@pytest.mark.parametrize("page", [(1400, "light")], indirect=True)
def test_words_of_an_answer_are_as_printed_where_there_is_room(page: Page, tmp_path: Path) -> None:
    file = tmp_path / "plan.html"
    file.write_text(answer_page("plan", "", PLANS, text="printed", lines=_WORDS), encoding="utf-8")
    page.goto(file.as_uri())
    assert page.inner_text("pre.printed") == "printed" and not page.is_visible(".flowing")


def assert_readable(page: Page) -> None:
    """Nothing that is wrong for those who read by ear or by keyboard."""
    checked = pytest.importorskip("axe_playwright_python.sync_playwright").Axe().run(page)
    assert not [(fault["id"], fault["nodes"][0]["html"]) for fault in checked.response["violations"]]
