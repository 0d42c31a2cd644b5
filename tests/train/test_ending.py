"""A signal ends a command with one sentence, wherever it finds it."""

import signal
import subprocess
import sys
import time

import pytest

from support.ranks import PATIENCE_S

# The work of the command when the signal comes.
PLACES = {
    "in a loop": "while True: time.sleep(0.01)",
    "in a callback, which can raise nothing": """
class Thing: pass
def dropped(_):
    os.kill(os.getpid(), NUMBER)
    time.sleep(0.1)
while True:
    thing = Thing()
    finalizer = weakref.ref(thing, dropped)
    del thing
    while True: time.sleep(0.01)
""",
    "where every exception is dropped": """
while True:
    try: time.sleep(0.01)
    except BaseException: pass
""",
    "where Python raises another error of it": """
class Part:
    def __set_name__(self, owner, name):
        while True: time.sleep(0.01)
class Whole:
    part = Part()
""",
    "where a library makes another error of it, and keeps no link": """
try:
    while True: time.sleep(0.01)
except BaseException as error:
    text = str(error)
raise ValueError(text)
""",
    "in what an error is turned into": """
try:
    while True: time.sleep(0.01)
except BaseException:
    raise ValueError("something else")
""",
    "on its way out already": """
try:
    while True: time.sleep(0.01)
finally:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.2)
""",
}
PROGRAM = """
import os, signal, sys, time, weakref
from shardwright.train.launch import ending
ending.LATEST_S = 1.0
NUMBER = signal.{name}
def command():
    print("ready", flush=True)
    exec(sys.argv[1], globals())
ending.telling_of_signals(command)
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_one_sentence(name: str, place: str) -> None:
    command = [sys.executable, "-c", PROGRAM.format(name=name), place]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        time.sleep(0.05)
        process.send_signal(signal.Signals[name])
        _, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, err) == (1, f"failed: {name} ended this command and all that it had started\n")


def test_what_was_ignored_stays_so() -> None:
    """As `nohup` asks for."""
    program = "import signal\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\n" + PROGRAM.format(name="SIGTERM")
    body = "os.kill(os.getpid(), signal.SIGHUP)\nprint('goes on')"
    done = subprocess.run([sys.executable, "-c", program, body], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ready\ngoes on\n", "")


@pytest.mark.parametrize("turn", range(5))
def test_a_signal_that_comes_again_at_once(turn: int) -> None:
    """An error of a callback is dropped: the second attempt may come before Python has left the first."""
    body = f"ending.AGAIN_S = 0.0\n{PLACES['in a callback, which can raise nothing']}"
    command = [sys.executable, "-c", PROGRAM.format(name="SIGTERM"), body]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, err) == (1, "failed: SIGTERM ended this command and all that it had started\n")


ENDS = {
    "done": ("pass", 0),
    "a status": ("sys.exit(3)", 3),
    "a reason": ("sys.exit('why')", 1),
    "an error": ("raise ValueError('why')", 1),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("loads", ["", "import torch\n"], ids=["small", "with torch"])
@pytest.mark.parametrize(("end", "status"), ENDS.values(), ids=ENDS)
def test_a_command_ends_with_all_that_was_left_to_do(loads: str, end: str, status: int) -> None:
    """Threads, what is registered for the exit, and what is not written yet; also where torch was loaded."""
    program = f"""
import atexit, sys, threading, time
from shardwright.train.launch.ending import ending_at_once
def command():
    threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
    atexit.register(print, "exit")
    {end}
{loads}ending_at_once(command)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stdout) == (status, "thread\nexit\n")
    assert ("why" in done.stderr) == ("why" in end)
