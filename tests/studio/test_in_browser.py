"""The planning page in Chromium: what a user does with it. Skipped where Chromium or Playwright is missing."""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("starlette", reason="the planning page takes shardwright[studio]")
pytest.importorskip("playwright", reason="browsers are driven by playwright")

from playwright.sync_api import Browser, Page

from shardwright.studio.studio_server import listening, server_at
from support.browser import NEEDS_CHROMIUM, started_chromium, watched_page
from support.languages import num_chinese
from support.tiny_config import TINY_LLAMA

pytestmark = NEEDS_CHROMIUM
IN_VIEW = """() => new Promise((done) => new IntersectionObserver(([canvas]) => canvas.isIntersecting && done())
  .observe(document.querySelector("#timeline canvas")))"""
JOB = "#job=quickstart&device=h100-sxm&devices=4"


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with served("en") as address:
        yield address


@contextmanager
def served(language: str) -> Iterator[str]:
    """A server of the page in a language, by its address."""
    connection = listening(0)
    server = server_at(connection, {"job": "quickstart"}, language)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [connection]}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{connection.getsockname()[1]}/"
    server.should_exit = True
    thread.join(timeout=10)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with started_chromium() as browser:
        yield browser


@pytest.fixture
def page(browser: Browser, address: str) -> Iterator[Page]:
    """A page in the browser. Nothing may go wrong in it, and nothing may be asked of another machine."""
    view = {"width": 1400, "height": 900}
    with watched_page(browser, (address, "data:", "blob:"), viewport=view, base_url=address) as shown:
        shown.set_default_timeout(30_000)
        yield shown


def go(page: Page, address: str) -> None:
    page.goto(address)
    settled(page)


def settled(page: Page) -> None:
    """Wait until the plan of the page's address is on the screen."""
    page.wait_for_function("() => document.body.dataset.shown === location.hash && location.hash")


def test_a_page_in_chinese_says_no_english_sentence(browser: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwright.studio.part_process.os.cpu_count", lambda: 1)  # without the second process
    with served("zh") as address, watched_page(browser, (address, "data:", "blob:"), base_url=address) as page:
        go(page, JOB)
        shown = page.locator("h1, h2, h3, button, label, legend, dt, th, footer, .legend span").all_text_contents()
        assert not [text for text in shown if re.search("[a-z]{3,} [a-z]{3,} [a-z]{3,}", text)]
        assert num_chinese("".join(shown)) > 300
        assert page.input_value("#job") == "quickstart"
        notes = page.locator(".message.note p").all_inner_texts()
        assert notes and all(note.endswith("\u3002") for note in notes)
        with page.expect_download() as saved:
            page.select_option("#export", "text")
        assert num_chinese(Path(saved.value.path()).read_text(encoding="utf-8")) > 100


def headline(page: Page) -> list[str]:
    return page.locator("#headline dd:first-of-type").all_inner_texts()


def test_a_change_by_keyboard_is_shown_and_taken_back(page: Page) -> None:
    go(page, JOB)
    first = headline(page)
    assert first[0].endswith("s") and page.locator("#step .bar").count() == 1
    assert page.locator("#by-rank .rank").count() == 2 and page.locator("#timeline canvas").count() == 1
    page.focus("#plan-microbatch_size")
    page.keyboard.press("ArrowUp")
    settled(page)
    assert "plan.microbatch_size=" in page.url and headline(page) != first
    page.go_back()
    settled(page)
    assert headline(page) == first
    page.focus("[aria-label='Price, slider']")
    page.keyboard.press("ArrowRight")
    settled(page)
    assert "cluster.usd_per_device_hour=" in page.url
    page.locator("body").press("r")
    settled(page)
    assert "usd" not in page.url


def test_no_text_is_missing(page: Page) -> None:
    go(page, JOB)
    texts = page.locator("[data-text], button, summary, label, h2").all_text_contents()
    assert len(texts) > 50 and all(texts)
    assert "undefined" not in page.inner_text("body") and "[object" not in page.inner_text("body")


def test_a_timeline_plays_and_steps_by_keyboard(page: Page) -> None:
    go(page, JOB)
    page.locator("#timeline canvas").scroll_into_view_if_needed()
    page.evaluate(IN_VIEW)  # the page, which began to observe earlier, is told earlier
    answer = page.locator("#timeline .now")
    for key in ("ArrowRight", "ArrowRight", "ArrowRight"):
        page.keyboard.press(key)
    third = answer.inner_text()
    assert "lanes compute" in third and "Begins: rank" in third
    page.keyboard.press("ArrowLeft")
    second = answer.inner_text()
    assert second != third
    page.keyboard.press("ArrowRight")
    assert answer.inner_text() == third
    page.keyboard.press(" ")
    page.wait_for_function("text => document.querySelector('#timeline .now').textContent !== text", arg=third)
    assert page.inner_text("#play") == "pause"
    page.keyboard.press(" ")
    assert page.inner_text("#play") == "play"
    page.focus("#timeline canvas")
    page.keyboard.press("Escape")
    assert answer.inner_text() == ""


def test_fingers_zoom_a_timeline_and_a_tap_tells_a_block(page: Page) -> None:
    go(page, JOB)
    canvas = page.locator("#timeline canvas")
    canvas.scroll_into_view_if_needed()
    box, tools = canvas.bounding_box(), page.context.new_cdp_session(page)
    tools.send("Emulation.setTouchEmulationEnabled", {"enabled": True, "maxTouchPoints": 2})

    def touch(kind: str, *places: float) -> None:
        points = [{"x": box["x"] + x, "y": box["y"] + 34, "id": n} for n, x in enumerate(places)]
        tools.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

    def redrawn(before: str) -> str:
        page.wait_for_function("([node, before]) => node.toDataURL() !== before", arg=[canvas.element_handle(), before])
        return str(canvas.evaluate("(node) => node.toDataURL()"))

    drawn = canvas.evaluate("(node) => node.toDataURL()")
    touch("touchStart", 110)
    touch("touchEnd")
    assert "stage 0" in page.inner_text("#tip") and page.is_visible("#tip")
    marked = redrawn(drawn)
    touch("touchStart", 300, 400)
    for apart in (150, 200, 300):
        touch("touchMove", 350 - apart / 2, 350 + apart / 2)
    touch("touchEnd")
    assert page.is_hidden("#tip")
    redrawn(marked)


def test_a_timeline_is_unpacked_when_it_is_read(page: Page) -> None:
    go(page, JOB)
    lists = page.evaluate("""() => {
      const bytes = (numbers) => String.fromCharCode(...new Uint8Array(Int32Array.from(numbers).buffer));
      const column = (...numbers) => "4" + btoa(bytes(numbers));
      const busy = { lengths: [1, 2], from: column(9, 0, 70000), to: column(10, 70000, 90000), kind: column(0, 0, 0),
        microbatch: "1" + btoa(String.fromCharCode(2, 0, 1)) };
      const section = { tick: 0.5, kinds: [[[3, "F", 1]]], routes: [[0, 1, 0, 0]], num_ranks: 2, lists: { busy },
        messages: { from: column(2), sent: column(4), arrives: column(6), route: column(0), microbatch: column(7) } };
      const [{ ranks, messages }] = unpackedTimelines({ sections: [section] }).sections;
      const isMade = () => "value" in Object.getOwnPropertyDescriptor(ranks[1], "busy");
      return [isMade(), ranks[1].busy, isMade(), messages];
    }""")
    busy = [[0, 35000, [[3, "F", 1, 0]], 0], [35000, 45000, [[3, "F", 1, 1]], 0]]
    assert lists == [False, busy, True, [[0, 1, 0, 1, 2, 3, 0, 7, 0]]]


def test_lanes_and_two_timelines_side_by_side(page: Page) -> None:
    go(page, "#job=quickstart&device=h100-sxm&devices=8&plan.tp=2")
    canvas = page.locator("#timeline canvas")
    height = canvas.bounding_box()["height"]
    page.select_option("#timeline .choices select", "tp")
    assert "4 lanes" in canvas.get_attribute("aria-label")  # of 2 pipeline ranks
    assert canvas.bounding_box()["height"] < height  # for they are low
    page.select_option("#timeline .choices select", "")
    page.click("#keep")
    page.select_option("#plan-zero", "1")
    settled(page)
    page.check("#timeline .choices [type=checkbox]")
    first, second = (page.locator("#timeline canvas").nth(n).bounding_box() for n in (0, 1))
    assert first["y"] == second["y"] and first["x"] + first["width"] < second["x"]
    page.locator("#timeline canvas").first.focus()
    page.keyboard.press("ArrowRight")
    assert all(page.locator("#timeline .now").all_inner_texts())


def test_the_memory_of_a_device_is_a_slider(page: Page) -> None:
    go(page, JOB)
    step, before = headline(page)[0], page.inner_text("#by-rank .body > p")
    page.focus("[aria-label='Its memory, slider']")
    page.keyboard.press("ArrowLeft")
    settled(page)
    assert "memory_gib=" in page.url and page.inner_text("#by-rank .body > p") != before
    assert headline(page)[0] == step
    page.select_option("#device", "a100-sxm-40g")
    settled(page)
    assert "memory_gib=" not in page.url and page.input_value("#memory_gib") == "40"


def test_an_address_alone_shows_the_job_that_was_asked_for_and_reset_keeps_a_model(page: Page) -> None:
    page.goto("/")
    page.wait_for_function("() => document.title.startsWith('quickstart,')")
    go(page, "#job=tiny-llama&device=h100-sxm&devices=4&plan.tp=2")
    assert page.title().startswith("tiny-llama,") and page.input_value("#job") == "tiny-llama"
    page.click("#reset")
    settled(page)
    assert page.input_value("#job") == "tiny-llama" and page.input_value("#plan-tp") == "1"


def test_a_plan_beside_is_in_the_address(page: Page) -> None:
    go(page, JOB)
    page.click("#keep")
    page.select_option("#plan-zero", "1")
    settled(page)
    assert page.locator("#step .bar").count() == page.locator("#timeline canvas").count() == 2
    texts, address = headline(page), page.url
    page.goto("about:blank")
    go(page, address)
    assert headline(page) == texts and page.locator("#headline dd.beside").count() > 3
    page.click("#keep")
    settled(page)
    assert page.locator("#timeline canvas").count() == 1


def test_faults_are_shown_until_they_are_mended(page: Page) -> None:
    go(page, JOB)
    page.fill("#plan-tp", "3")
    page.press("#plan-tp", "Enter")
    page.wait_for_selector("body.faulty .message.bad li")
    assert "use" in page.inner_text(".message.bad")
    page.click("[aria-label='Tensor as the job has it']")
    settled(page)
    assert not page.locator(".message.bad").count() and not page.locator("body.faulty").count()


def test_a_dropped_file_becomes_the_plan_and_is_saved(page: Page, tmp_path: Path) -> None:
    go(page, JOB)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(TINY_LLAMA), encoding="utf-8")
    page.set_input_files("#file", config)
    page.wait_for_selector(".message.note >> text=Read config.json")
    settled(page)
    assert "model.hidden=64" in page.url and headline(page)[0].endswith("s")
    with page.expect_download() as saved:
        page.select_option("#export", "toml")
    assert "hidden = 64" in Path(saved.value.path()).read_text(encoding="utf-8")


def test_a_dropped_file_with_faults_and_a_field_that_no_page_has_are_faults_of_theirs_alone(
    page: Page, tmp_path: Path
) -> None:
    go(page, JOB)
    first = headline(page)
    script = "torchrun pretrain_gpt.py --tensor-model-parallel-size 3 --what"
    for name, text in (("config.json", "{"), ("run.sh", script)):
        (tmp_path / name).write_text(text, encoding="utf-8")
        page.set_input_files("#file", tmp_path / name)
        page.wait_for_selector(f".message.bad strong >> text={name} is not read")
        assert page.locator(".message.bad li").count() and headline(page) == first
    page.evaluate("() => { location.hash = 'job=quickstart&data.path=x'; }")
    page.wait_for_selector(".message.bad li >> text=data.path is no field that a page may set")


def test_the_best_plan_is_one_click_away(page: Page) -> None:
    go(page, "#job=quickstart&device=h100-sxm&devices=2")
    page.keyboard.press("b")
    page.wait_for_selector("#search em")
    settled(page)
    assert "beside=" in page.url and page.locator("#search tbody tr").count() > 1
    page.wait_for_selector("#search pre", state="attached")
    assert "Recommended" in page.locator("#search pre").text_content()
    assert page.is_hidden("#search button >> text=Search with my fields kept")  # none was set


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone_and_all_can_read_it(page: Page, scheme: str) -> None:
    page.set_viewport_size({"width": 390, "height": 800})
    page.emulate_media(color_scheme=scheme)
    go(page, JOB)
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 390
    sizes = page.evaluate("() => [...document.querySelectorAll('button, select')].map((one) => one.offsetHeight)")
    assert all(size == 0 or size >= 36 for size in sizes)
    checked = pytest.importorskip("axe_playwright_python.sync_playwright").Axe().run(page)
    assert not [(fault["id"], fault["nodes"][0]["html"]) for fault in checked.response["violations"]]
