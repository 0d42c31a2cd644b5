"""The bar of a search: on a terminal alone, after a second, and nothing of it stays."""

import io
import sys

import pytest

import shardwright as sw
from shardwright.cli import progress_bar
from shardwright.config.load import make_job
from shardwright.config.progress_records import LOGGER, tell_part, tell_share
from shardwright.planner.search.search_progress import Phase, tell, tell_best, tell_bound


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_search_tells_how_far_it_is(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", LOGGER.name):
        _ = sw.load("tiny-llama", devices=2, device="h100-sxm").plan(keep=["plan.tp=2", "plan.recompute=none"]).text
    answer = [record for record in caplog.records if hasattr(record, "share")]
    shares = [record.share for record in answer]
    assert shares == sorted(shares) and 0 < shares[0] < 0.2 and 0.9 < shares[-1] < 1
    assert {record.message for record in answer} == {phase.value[0] for phase in Phase}


@pytest.mark.long
def test_a_search_tells_its_best_plan_before_it_simulates_any(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", LOGGER.name):
        result = sw.load("tiny-llama", devices=8, device="h100-sxm").plan(keep=["plan.recompute=none"])
    kinds = ["best" if hasattr(record, "best") else record.message for record in caplog.records]
    assert kinds.index("best") < kinds.index(Phase.SIMULATING.value[0])
    seconds = [record.step_s for record in caplog.records if hasattr(record, "best")]
    assert seconds[-1] == pytest.approx(result.dicts()[0]["step_s"])


def test_a_terminal_sees_a_bar_with_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_bar, "_PATIENCE_S", 0.0)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with progress_bar.progress_shown():
        monkeypatch.setattr(progress_bar.time, "monotonic", lambda: 1e9)
        tell(Phase.SIMULATING, 0.5)
    written = terminal.getvalue()
    assert Phase.SIMULATING.value[0] in written and " left" in written
    assert not LOGGER.handlers


def test_parts_of_work_share_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_bar, "_PATIENCE_S", 0.0)
    monkeypatch.setattr(sys, "stderr", Terminal())
    with progress_bar.progress_shown():
        (bar,) = LOGGER.handlers
        shares = []
        for number in range(2):
            tell_part("8 devices", number, 2)
            for share in (0.5, 0.2, 0.8):  # a search that begins anew
                tell_share("pricing plans", share)
                shares.append(bar.share)  # type: ignore[attr-defined]
    assert shares == pytest.approx([0.25, 0.25, 0.4, 0.75, 0.75, 0.9])


def test_the_best_plan_so_far_is_one_line_of_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_job({})
    monkeypatch.setattr(sys, "stderr", written := io.StringIO())
    seconds = iter([0.0, 0.9, 1.1, 2.0])
    monkeypatch.setattr(progress_bar.time, "monotonic", lambda: next(seconds))
    with progress_bar.search_shown():
        tell_best(lambda: job, 2.0 / job.tokens_per_step)
        assert written.getvalue() == ""
        tell_best(lambda: job, 1.5 / job.tokens_per_step)
        tell_best(lambda: job, 1.0 / job.tokens_per_step)
    assert written.getvalue() == "So far: 1.500 s a step with tp 1, pp 1, dp 1, mb 1, zero 0; looking for better ones\n"


def test_a_plan_that_is_not_simulated_yet_takes_at_least_what_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_job({})
    monkeypatch.setattr(sys, "stderr", written := io.StringIO())
    monkeypatch.setattr(progress_bar, "_PATIENCE_S", 0.0)
    with progress_bar.search_shown():
        tell_bound(lambda: job, 2.0 / job.tokens_per_step)
    lines = (
        "So far: at least 2.000 s a step with tp 1, pp 1, dp 1, mb 1, zero 0, if it fits; looking for better\n  ones\n"
    )
    assert written.getvalue() == lines  # as wide as a page


def test_a_plan_whose_memory_is_not_accounted_yet_may_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_job({})
    monkeypatch.setattr(sys, "stderr", written := io.StringIO())
    monkeypatch.setattr(progress_bar, "_PATIENCE_S", 0.0)
    with progress_bar.search_shown():
        tell_best(lambda: job, 2.0 / job.tokens_per_step, may_not_fit=True)
    line = "So far: 2.000 s a step with tp 1, pp 1, dp 1, mb 1, zero 0, if it fits; looking for better ones\n"
    assert written.getvalue() == line


@pytest.mark.long
def test_a_search_tells_which_plans_may_not_fit(caplog: pytest.LogCaptureFixture) -> None:
    """A plan that is refuted later was told with that, and the last one, which is shown, is known to fit or nearly
    sure to."""
    with caplog.at_level("INFO", LOGGER.name):
        sw.load("llama2-7b", devices=8, device="a100-sxm-40g").plan(keep=["plan.tp=1", "plan.schedule=1f1b"])
    told = [record for record in caplog.records if hasattr(record, "best")]
    assert any(record.may_not_fit for record in told) and not told[-1].may_not_fit


def test_each_part_of_long_work_has_a_line_in_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_job({})
    monkeypatch.setattr(sys, "stderr", written := io.StringIO())
    monkeypatch.setattr(progress_bar, "_PATIENCE_S", 0.0)
    with progress_bar.search_shown():
        for number in range(2):
            tell_part(f"{number + 8} devices", number, 2)
            for seconds in (2.0, 1.5):
                tell_best(lambda: job, seconds / job.tokens_per_step)
    lines = [line for line in written.getvalue().splitlines() if not line.startswith("  ")]  # others go on with these
    assert [line.partition(" a step")[0] for line in lines] == [
        "8 devices (1 of 2). So far: 2.000 s",
        "9 devices (2 of 2). So far: 2.000 s",
    ]


def test_a_terminal_sees_the_best_plan_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_bar, "_PATIENCE_S", 0.0)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    job = make_job({})
    with progress_bar.search_shown():
        tell_best(lambda: job, 2.0 / job.tokens_per_step)
        tell_best(lambda: job, 1.5 / job.tokens_per_step)
    assert "So far: 1.500 s a step with tp 1, pp 1" in terminal.getvalue()


@pytest.mark.parametrize(("stream", "patience_s"), [(io.StringIO, 0.0), (Terminal, 1e9)])
def test_a_pipe_and_quick_work_see_nothing(
    stream: type[io.StringIO], patience_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_bar, "_PATIENCE_S", patience_s)
    monkeypatch.setattr(sys, "stderr", written := stream())
    with progress_bar.progress_shown():
        tell(Phase.SIMULATING, 0.5)
    assert written.getvalue() == ""
