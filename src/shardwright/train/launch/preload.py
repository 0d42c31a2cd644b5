"""Modules that the server of ranks imports once, so that each rank starts in milliseconds."""

import tempfile

import torch
import torch.fx.experimental.symbolic_shapes  # the first backward imports it, and it takes half a second

import shardwright.train.trainer  # noqa: F401

# An OpenMP pool does not survive a fork.
torch.set_num_threads(1)

# Python finds the folder for temporary files once, by writing one, which a rank that is killed meanwhile would leave.
tempfile.gettempdir()
