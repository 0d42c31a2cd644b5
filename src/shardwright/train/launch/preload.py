"""Modules that the server of ranks loads once, so that each rank is up in milliseconds."""

import tempfile

import torch
import torch.fx.experimental.symbolic_shapes  # the first backward imports it, and it takes half a second

import shardwright.train.checkpoint.box_reader
import shardwright.train.checkpoint.box_writer  # what ranks import themselves, for those who start them need none of it
import shardwright.train.trainer  # noqa: F401

# An OpenMP pool does not survive a fork.
torch.set_num_threads(1)

# Python finds out once where temporary files go, by writing one: a rank that was killed at that would leave it behind.
tempfile.gettempdir()
