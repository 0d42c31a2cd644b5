"""All pages of the site in Chromium, and what a reader does with their figures. `make site-check` pictures them."""

import socket
import subprocess
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

pytest.importorskip("playwright", reason="browsers are driven by playwright")

from playwright.sync_api import Browser, Page

from shardwright.learn.idea_pages import IDEAS, OTHERS, IdeaPage
from shardwright.learn.page_search import section_index, sections_with
from shardwright.learn.playable_figures import PLAYABLE
from support.asked_pages import ASKED
from support.browser import NEEDS_CHROMIUM, started_chromium, watched_page
from support.learn_pages import pictures
from support.site_in_browser import QuietFiles, opened, operate, options, served

pytestmark = NEEDS_CHROMIUM


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    with served(site, is_searched=False) as address:
        yield address


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with started_chromium() as browser:
        yield browser


@pytest.fixture
def page(browser: Browser, address: str, request: pytest.FixtureRequest) -> Iterator[Page]:
    """A page of a width and a colour scheme, in which nothing may go wrong."""
    width, scheme = getattr(request, "param", (1400, "light"))
    with watched_page(browser, (address, "data:", "blob:"), **options(width, scheme)) as shown:
        yield shown


def test_a_browser_that_stops_listening_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(bytes(2**23))
    browser_end, server_end = socket.socketpair()
    with server_end:
        with browser_end:
            browser_end.sendall(b"GET /large HTTP/1.0\r\n\r\n")
        QuietFiles(server_end, ("127.0.0.1", 0), None, directory=str(tmp_path), instead={})  # type: ignore[arg-type]


def numbers(page: Page) -> list[str]:
    return page.locator(".playable dd").all_inner_texts()


# The smallest letters of each picture and of each playable figure of a page, in pixels of the window. A picture is read
# once, for windows of all widths.
SMALLEST_LETTERS = """async () => {
    const sizes = {};
    window.shares ??= new Map();
    for (const image of document.querySelectorAll("article img[src$='.svg']")) {
        if (!window.shares.has(image)) {
            await image.decode();
            const drawn = new DOMParser().parseFromString(await (await fetch(image.src)).text(), "image/svg+xml");
            const letters = [...drawn.querySelectorAll("text[font-size]")].map((one) => one.getAttribute("font-size"));
            window.shares.set(image, Math.min(...letters) / drawn.documentElement.viewBox.baseVal.width);
        }
        sizes[image.src] = image.clientWidth * window.shares.get(image);
    }
    for (const figure of document.querySelectorAll("figure.playable")) {
        const written = (one) => [...one.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
        const letters = [...figure.querySelectorAll("*")].filter(written);
        sizes[figure.ariaLabel] = Math.min(...letters.map((one) => parseFloat(getComputedStyle(one).fontSize)));
    }
    return sizes;
}"""


@pytest.mark.parametrize(("page", "language"), [((1400, "light"), "en"), ((390, "dark"), "zh")], indirect=["page"])
def test_every_page_fits_says_nothing_wrong_and_has_figures_that_obey(
    page: Page, address: str, language: str, request: pytest.FixtureRequest
) -> None:
    """English pages in a wide window, by keyboard; Chinese ones on a phone, by touch, with letters large enough to read
    there and in wider windows: one walk through them, for a page takes half a second to open. Of English pages, which
    have the same figures, every second one; `make site-check` opens all in all windows."""
    folder, is_chinese = "" if language == "en" else f"{language}/", language == "zh"
    small, names = list[tuple[str, int, float]](), set[str]()
    is_whole = is_chinese or request.config.getoption("--all-cases")
    for name in (*IDEAS, *OTHERS, "index")[:: 1 if is_whole else 2]:
        opened(page, f"{address}{folder}{name}.html")
        for width, least_px in ((1400, 11), (900, 11), (390, 10)) if is_chinese else ():  # the last is the phone's
            page.set_viewport_size({"width": width, "height": 900})
            sizes = page.evaluate(SMALLEST_LETTERS)
            names |= sizes.keys()
            small += [(figure, width, size) for figure, size in sizes.items() if size < least_px - 0.1]
        playable = [figure for figure in pictures(IdeaPage(name, language).markdown) if figure in PLAYABLE]
        assert operate(page, taps=is_chinese) == len(playable)
    assert len(names) > 40 or not is_chinese
    assert not small


def test_a_pipeline_is_chosen_stepped_and_played_by_keyboard(page: Page, address: str) -> None:
    opened(page, address + "pipelines.html")
    first = numbers(page)
    page.focus(".playable select")
    page.keyboard.press("ArrowUp")
    gpipe = numbers(page)
    assert gpipe != first and gpipe[0].endswith(" s")
    page.keyboard.press("Tab")
    page.keyboard.press("ArrowRight")
    assert page.locator(".playable svg .lane").count() == 8 and numbers(page) != gpipe
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press(" ")  # the button
    playing = page.inner_text(".playable-player button")
    page.keyboard.press(" ")
    page.keyboard.press("Tab")
    page.keyboard.press("Home")
    assert page.inner_text(".playable-player output") == "0.000 s"
    faint = page.locator(".playable svg g[opacity='0.12']").count()
    page.keyboard.press("ArrowRight")
    assert 0 < page.locator(".playable svg g[opacity='0.12']").count() < faint
    assert playing == "Pause"
    page.keyboard.press(" ")  # the slider
    assert page.inner_text(".playable-player button") == "Pause"


@pytest.mark.parametrize("page", [(390, "light")], indirect=True)
def test_the_rank_that_is_slow_is_chosen_by_keyboard(page: Page, address: str) -> None:
    opened(page, address + "monitoring.html")
    for rank in (1, 0):
        page.focus(".playable-controls input >> nth=0")
        page.keyboard.press("ArrowLeft")
        waits = [float(wait.split()[0]) for wait in numbers(page)[2:]]
        assert min(range(4), key=waits.__getitem__) == rank
    page.focus(".playable-controls input >> nth=1")
    page.keyboard.press("Home")
    assert numbers(page)[1] == "0.0 %" and len(set(numbers(page)[2:])) == 1
    assert page.inner_text(".playable-player output") == "33.000 F"


@pytest.mark.parametrize("page", [(390, "dark")], indirect=True)
def test_ranks_are_chosen_by_touch(page: Page, address: str) -> None:
    opened(page, address + "zh/mesh.html")
    page.tap(".playable-nodes button >> nth=13")
    assert page.inner_text(".playable-player output") == "13"
    assert "12 13 14 15" in page.inner_text(".playable-legend")
    touched = ".playable select, .playable input, .playable-player button, .playable-nodes button"
    heights = page.locator(touched).evaluate_all("all => all.map((one) => one.offsetHeight)")
    assert len(heights) == 37 and min(heights) >= 36


def test_a_wide_character_of_an_output_has_the_width_of_two(page: Page, address: str) -> None:
    if not subprocess.run(["fc-list", ":lang=zh"], capture_output=True, check=False).stdout:
        pytest.skip("no font here has Chinese characters")
    opened(page, address + "zh/zero.html")
    widths = page.locator(".highlight .wide").evaluate_all(
        """all => all.map((wide) => {
          const narrow = document.createElement("span");
          narrow.textContent = "0".repeat(2 * wide.textContent.length);
          wide.before(narrow);
          const widths = [wide, narrow].map((one) => one.getBoundingClientRect().width);
          narrow.remove();
          return widths;
        })"""
    )
    assert widths and all(abs(wide - narrow) < 0.1 for wide, narrow in widths)


def test_a_plan_that_is_refused_says_why(page: Page, address: str) -> None:
    opened(page, address + "zh/pipelines.html")
    page.select_option(".playable select", label="dualpipe")
    page.focus(".playable input >> nth=1")
    page.keyboard.press("Home")
    assert "dualpipe" in page.inner_text(".playable-fault") and not numbers(page)
    page.keyboard.press("End")
    assert len(numbers(page)) == 5


# The key of the search, again and again: one before the page's script has begun is lost.
PRESSED_UNTIL_READY = """() => {
    document.body.dispatchEvent(new KeyboardEvent("keydown", {key: "f", code: "KeyF", keyCode: 70, bubbles: true}));
    return document.activeElement.matches(".md-search__input");
}"""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("is_served", [True, False], ids=["served", "file"])
@pytest.mark.parametrize(
    ("name", "words", "target"),
    [
        ("zero", "goodput", "failures"),
        ("zh/zero", "显存", "zh/"),
        ("zh/zero", "气泡率怎么算", "zh/first-questions"),
    ],
)
def test_words_are_searched_for(
    browser: Browser, site: Path, is_served: bool, name: str, words: str, target: str
) -> None:
    with (
        served(site) if is_served else nullcontext(f"file://{site}/") as address,
        watched_page(browser, (address, "data:", "blob:", "about:")) as page,
    ):
        page.goto(f"{address}{name}.html")
        page.wait_for_function(PRESSED_UNTIL_READY, polling=100)
        page.keyboard.type(words)
        page.keyboard.press("End")  # the page asks at the end of a key, which words that are typed at once lack
        page.wait_for_selector(".md-search-result__link")
        links = page.locator(".md-search-result__link").evaluate_all("all => all.map((one) => one.href)")
        assert any(link.startswith(address + target) for link in links)
        assert all(link.startswith(f"{address}zh/") == name.startswith("zh/") for link in links)


# The answers of the search's worker to questions, each as the addresses of its results, the best first.
ANSWERS = """async ([folder, questions]) => {
    const worker = new Worker("play/search_worker.js");
    const said = (message) => new Promise((done) => {
        worker.onmessage = ({ data }) => done(data);
        worker.postMessage(message);
    });
    await said({ type: 0, data: await (await fetch(`${folder}search/search_index.json`)).json() });
    const answers = [];
    for (const question of questions) answers.push((await said({ type: 2, data: question })).data.items);
    worker.terminate();
    return answers.map((items) => items.flat().filter(({ score }) => score)
        .sort((one, other) => other.score - one.score).map(({ title }) => title));
}"""


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_site_and_the_terminal_rank_alike(browser: Browser, site: Path, language: str) -> None:
    asked = [words for words, _, _ in ASKED if words.isascii() == (language == "en")]
    asked += [section.heading for section in section_index(language)[0]]
    with served(site) as address, watched_page(browser, (address, "data:", "blob:")) as page:
        page.goto(f"{address}index.html")
        answers = page.evaluate(ANSWERS, ["" if language == "en" else "zh/", asked])
    assert len(answers) > 150
    for question, titles in zip(asked, answers, strict=True):
        expected = [section.heading for section in sections_with(question, language)]
        assert titles[: len(expected)] == expected, question


def test_a_command_is_copied_and_its_output_is_not(page: Page, address: str) -> None:
    opened(page, address + "zero.html")
    page.wait_for_selector(".language-sh .md-code__nav")
    assert page.locator(".language-text .md-code__nav").count()
    assert not page.locator(".language-text .md-code__nav").filter(visible=True).count()


def test_without_scripts_the_picture_stays(browser: Browser, address: str) -> None:
    with watched_page(browser, (address, "data:"), java_script_enabled=False) as page:
        page.goto(address + "zero.html")
        assert page.locator("img[src$='zero.svg']").is_visible() and not page.locator(".playable").count()
