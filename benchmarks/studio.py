"""Time from a change of the planning page to the screen, in Chromium without a window.

    python benchmarks/studio.py                          # GPT-3 on 1,024 devices, and three other jobs
    python benchmarks/studio.py gpt3-175b-1024 --rounds 5

Each change is made with a control of the page, as a user makes it. The page marks the time at which it asks, and for each
part of the answer the time at which it is on the screen: after the frame in which it was painted. The server runs in a
process of its own, as `shardwright studio` starts it. It takes shardwright[studio], playwright and chromium.
"""

import argparse
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Page, sync_playwright

JOBS = ("gpt3-175b-1024", "llama3-405b-16k", "gpt-100b-32xa100", "deepseek-v3")
PARTS = {"step": "time and money", "memory": "memory by rank", "links": "traffic", "timeline": "timeline", "shown": "all"}
# (the id of a control, its value); some make a plan that does not fit, which is shown all the same.
CHANGES = (
    ("plan-zero", "1"),
    ("plan-recompute", "none"),
    ("plan-schedule", "zb-h1"),
    ("plan-order", "tp-cp-ep-pp-dp"),
    ("plan-schedule", "1f1b"),
    ("plan-zero", "0"),
    ("plan-microbatch_size", "2"),
    ("plan-microbatch_size", "1"),
    ("model-sequence", "4096"),
    ("cluster-inter_node-bandwidth_gb_per_s", "20"),
    ("cluster-usd_per_device_hour", "2"),
    ("memory_gib", "60"),
    ("plan-recompute", "full"),
    ("precision-compute", "bf16"),
    ("cluster-software", "megatron-core"),
    ("plan-offload_optimizer", "0.5"),
)
_READ = "() => performance.getEntriesByType('mark').map((mark) => [mark.name, mark.startTime])"
_SHOWN = "() => performance.getEntriesByName('shown').length || document.body.classList.contains('faulty')"


@contextmanager
def served() -> Iterator[str]:
    """The address of a studio."""
    words = [sys.executable, "-m", "shardwright", "studio", "--no-open"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().split()[4].partition("#")[0]
        process.terminate()


def changed(page: Page, control: str, value: str) -> dict[str, float] | None:
    """Milliseconds from a change until each part was on the screen; None if the plan has faults."""
    field = page.locator(f"#{control}")
    page.evaluate("() => performance.clearMarks()")
    if field.evaluate("(node) => node.tagName") == "SELECT":
        field.select_option(value)
    else:
        field.fill(value)
        field.press("Enter")
    page.wait_for_function(_SHOWN)
    marks = dict(page.evaluate(_READ))
    return {part: marks[part] - marks["asked"] for part in PARTS if part in marks} if "shown" in marks else None


def measured(page: Page, address: str, job: str, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of all changes of a job by part, without the first round, in which nothing is loaded yet."""
    times: dict[str, list[float]] = {part: [] for part in PARTS}
    for number in range(rounds + 1):
        page.goto("about:blank")  # each round begins with the job as it is
        page.goto(f"{address}#job={job}&optimizer.warmup_steps={10 + number}")  # which no answer that is kept has
        page.wait_for_function(_SHOWN)
        for control, value in CHANGES:
            taken = changed(page, control, value)
            for part, milliseconds in (taken or {}).items() if number else ():
                times[part].append(milliseconds)
    return times


def main() -> None:
    """Print median and worst time of each part, for each job."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="*", default=JOBS)
    parser.add_argument("--rounds", type=int, default=2)
    asked = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    print("milliseconds from a change to the screen, median / worst")
    print(f"{'job':18s} {'changes':>8s} " + " ".join(f"{name:>16s}" for name in PARTS.values()))
    with served() as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1400, "height": 900})
        for job in asked.jobs:
            times = measured(page, address, job, asked.rounds)
            cells = [f"{statistics.median(some):.0f} / {max(some):.0f}" if some else "-" for some in times.values()]
            print(f"{job:18s} {len(times['shown']):>8d} " + " ".join(f"{cell:>16s}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
