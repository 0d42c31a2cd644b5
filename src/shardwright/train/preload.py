"""What the server that ranks are forked from loads once, so that each of them is up in milliseconds."""

# ruff: noqa: E402 - first what an interruption of the rest would be told with
import signal

# Ctrl-C reaches all processes of a terminal. The command answers it, and this one ends with the command.
signal.signal(signal.SIGINT, signal.SIG_IGN)

import torch
import torch.fx.experimental.symbolic_shapes  # the first backward imports it, and it takes half a second

import shardwright.train.trainer  # noqa: F401

# An OpenMP pool does not survive a fork.
torch.set_num_threads(1)
