"""The bar of a search: on a terminal alone, after a second, and nothing of it stays."""

import io
import sys

import pytest

import shardwright as sw
from shardwright.cli import progress_bar
from shardwright.planner.search.search_progress import LOGGER, Phase, tell


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_search_tells_how_far_it_is(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", LOGGER.name):
        _ = sw.load("tiny-llama", devices=2, device="h100-sxm").plan(keep=["plan.tp=2", "plan.recompute=none"]).text
    shares = [record.share for record in caplog.records if record.name == LOGGER.name]
    assert shares == sorted(shares) and 0 < shares[0] < 0.2 and 0.9 < shares[-1] < 1
    assert {record.message for record in caplog.records} == {phase.value[0] for phase in Phase}


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


@pytest.mark.parametrize(("stream", "patience_s"), [(io.StringIO, 0.0), (Terminal, 1e9)])
def test_a_pipe_and_quick_work_see_nothing(
    stream: type[io.StringIO], patience_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_bar, "_PATIENCE_S", patience_s)
    monkeypatch.setattr(sys, "stderr", written := stream())
    with progress_bar.progress_shown():
        tell(Phase.SIMULATING, 0.5)
    assert written.getvalue() == ""
