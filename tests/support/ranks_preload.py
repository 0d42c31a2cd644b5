"""Modules that the fork server of the tests loads once: what a run's server does, and what test modules import."""

# ruff: noqa: E402 - first what an interruption of the rest would be told with
import signal

signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches this process too, and the tests end it

import gc

gc.disable()  # nothing of what is loaded here is garbage, and ranks share it for as long as no look writes to it

import hypothesis  # noqa: F401
import pytest  # noqa: F401
import torch._dynamo  # noqa: F401 - a dispatch mode loads it at its first call, in each rank if not here
from click.testing import CliRunner  # noqa: F401

from fuzz import preloaded  # noqa: F401 - commands are forked from here, too
from support import (
    cases,  # noqa: F401
    going_on,  # noqa: F401
)

gc.freeze()
gc.enable()
