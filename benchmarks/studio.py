"""Time from a change of the planning page to the screen, in Chromium without a window.

    python benchmarks/studio.py                          # GPT-3 on 1,024 devices, and three other jobs
    python benchmarks/studio.py gpt3-175b-1024 --rounds 5

Each change is made with a control of the page, as a user makes it. The page marks the time at which it asks, and for
each part of the answer the time at which it is on the screen: after the frame in which it was painted. The server runs
in a process of its own, as `shardwright studio` starts it. The last two columns are processor milliseconds of a change,
of the server and of the page's main thread: where others use the machine too, times say little, and these say what a
change takes. It takes shardwright[studio], playwright and chromium.
"""

import argparse
import os
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import CDPSession, Page, sync_playwright

JOBS = ("gpt3-175b-1024", "llama3-405b-16k", "gpt-100b-32xa100", "deepseek-v3")
PARTS = {
    "step": "time and money",
    "memory": "memory by rank",
    "links": "traffic",
    "timeline": "timeline",
    "shown": "all",
}
PROCESSORS = ("server", "page")
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
_POLLING_MS = 100  # to look at each frame, as playwright else does, takes the page as long as a change
# The whole answer to the newest question; a plan with faults is answered by these.
_SHOWN = """() => {
  const newest = (name) => performance.getEntriesByName(name).at(-1)?.startTime ?? -1;
  return newest("asked") >= 0 && newest("shown") > newest("asked");
}"""


@contextmanager
def served() -> Iterator[tuple[str, int]]:
    """The address of a studio, and its process."""
    words = [sys.executable, "-m", "shardwright", "studio", "--no-open"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().split()[4].partition("#")[0], process.pid
        finally:  # the block waits for the process
            process.send_signal(signal.SIGINT)


def server_ms(process: int) -> float:
    """The processor milliseconds that a process has taken."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return 1e3 * (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def page_ms(tools: CDPSession) -> float:
    """The processor milliseconds that the main thread of a page has taken."""
    metrics = tools.send("Performance.getMetrics")["metrics"]
    return 1e3 * next(metric["value"] for metric in metrics if metric["name"] == "TaskDuration")


def changed(page: Page, control: str, value: str) -> dict[str, float] | None:
    """Milliseconds from a change until each part was on the screen; None if it is no change, or is taken back since the
    plan has faults."""
    field = page.locator(f"#{control}")
    if field.input_value() == value:
        return None
    page.evaluate("() => performance.clearMarks()")
    if field.evaluate("(node) => node.tagName") == "SELECT":
        field.select_option(value)
    else:
        field.fill(value)
        field.press("Enter")
    page.wait_for_function(_SHOWN, polling=_POLLING_MS)
    marks = dict(page.evaluate(_READ))
    if "faults" not in marks:
        return {part: marks[part] - marks["asked"] for part in PARTS if part in marks}
    page.wait_for_timeout(50)  # until the address has the change
    page.evaluate("() => performance.clearMarks()")
    page.go_back()  # else each further change would have this fault
    page.wait_for_function(_SHOWN, polling=_POLLING_MS)
    return None


def measured(page: Page, address: tuple[str, int], job: str, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of all changes of a job by part, and those of the processors, without the first round, in which
    nothing is loaded yet."""
    origin, process = address
    tools = page.context.new_cdp_session(page)
    tools.send("Performance.enable", {"timeDomain": "threadTicks"})
    times: dict[str, list[float]] = {part: [] for part in (*PARTS, *PROCESSORS)}
    for number in range(rounds + 1):
        page.goto("about:blank")  # each round begins with the job as it is
        page.goto(f"{origin}#job={job}&optimizer.warmup_steps={10 + number}")  # which no answer that is kept has
        page.wait_for_function(_SHOWN, polling=_POLLING_MS)
        for control, value in CHANGES:
            before = server_ms(process), page_ms(tools)
            taken = changed(page, control, value)
            if not taken or not number:
                continue
            page.wait_for_timeout(50)  # what is painted afterwards
            after = server_ms(process), page_ms(tools)
            taken |= {name: end - start for name, start, end in zip(PROCESSORS, before, after, strict=True)}
            for part, milliseconds in taken.items():
                times[part].append(milliseconds)
    return times


def main() -> None:
    """Print median and worst time of each part, for each job."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="*", default=JOBS)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--height", type=int, default=900, help="of the window; with 2400 all of the page is seen")
    asked = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    print("milliseconds from a change to the screen, median / worst")
    print(f"{'job':18s} {'changes':>8s} " + " ".join(f"{name:>16s}" for name in (*PARTS.values(), *PROCESSORS)))
    with served() as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1400, "height": asked.height})
        for job in asked.jobs:
            times = measured(page, address, job, asked.rounds)
            cells = [f"{statistics.median(some):.0f} / {max(some):.0f}" if some else "-" for some in times.values()]
            print(f"{job:18s} {len(times['shown']):>8d} " + " ".join(f"{cell:>16s}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
