"""Text of strangers on a terminal: what a model writes, names of files, and messages."""

import io
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.cli import generating
from shardwright.config.base import printable
from shardwright.train.data.progress import tell_aside
from shardwright.train.launch import launch
from shardwright.train.launch.rank_environment import RankEnvironment
from shardwright.train.metrics import MetricsLog
from support.cases import small_job

TITLE = "a\x1b]0;owned\x07\x1b[2J\x13b\x9b31m\u202ec\n\tß \u200c"


class Terminal(io.StringIO):
    """A standard output that is, or is not, a terminal."""

    def __init__(self, is_one: bool) -> None:
        super().__init__()
        self.is_one = is_one

    def isatty(self) -> bool:
        return self.is_one


@given(st.text())
def test_nothing_drives_a_terminal(text: str) -> None:
    shown = printable(text)
    assert all(c.isprintable() or c in "\n\t\u200c\u200d" for c in shown)
    assert not text.isprintable() or shown == text


@pytest.mark.parametrize("is_terminal", [True, False])
def test_what_a_model_writes(is_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a file it is as it was written."""
    monkeypatch.setattr(generating.sys, "stdout", Terminal(is_terminal))
    shown = generating.shown(TITLE)
    assert shown == ("a\\x1b]0;owned\\x07\\x1b[2J\\x13b\\x9b31m\\u202ec\n\tß \u200c" if is_terminal else TITLE)


def test_what_a_run_says(capsys: pytest.CaptureFixture[str]) -> None:
    log: Any = SimpleNamespace(_out=(out := io.StringIO()))
    MetricsLog.tell(log, f"a sample: {TITLE}")
    tell_aside(f"tokens of {TITLE}")
    assert "\x1b" not in out.getvalue() + capsys.readouterr().err
    assert "a\\x1b]0;owned" in out.getvalue()


def test_sockets_of_one_machine_are_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of both libraries, unless somebody says otherwise."""
    monkeypatch.setattr(launch, "run_rank", lambda *given: None)
    monkeypatch.setattr(os, "environ", {"GLOO_SOCKET_IFNAME": "eth7"})
    connection: Any = SimpleNamespace(send=lambda result: None)
    work: Any = None
    launch._live(RankEnvironment(0, 0, 1, 1), work, small_job(), Path("unused"), 1, connection)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"
    assert os.environ["NCCL_SOCKET_IFNAME"].startswith("lo")
