"""Traces of the operators of some steps, recorded by torch.profiler, in files that Perfetto and chrome://tracing open.

Every rank records a trace, because ranks of a pipeline do different work. A file is for one rank and one step, or for
the steps that run without draining the pipeline.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from shardwright.config.job import JobSpec
from shardwright.config.phrase import say
from shardwright.config.run_file_names import PROFILE
from shardwright.train.launch.full_disk import telling_of_full_disk
from shardwright.train.run_files import make_room


class ProfiledSteps:
    """Records the steps that run.profile_first_step and run.profile_steps select."""

    def __init__(self, job: JobSpec, rank: int, device: torch.device, folder: Path) -> None:
        self._rank, self._device, self._folder = rank, device, folder / PROFILE
        first = job.run.profile_first_step
        self._steps = range(first, first + job.run.profile_steps)

    def file(self, step: int) -> Path:
        """The path of the trace of a step, counted from 1."""
        return self._folder / f"rank{self._rank:05d}-step{step:05d}.json.gz"

    @contextmanager
    def recording(self, first: int, num_steps: int) -> Iterator[None]:
        """A context for `num_steps` steps from `first` on, counted from 1. Records them if one of them is selected.
        RunError if the disk is full."""
        selected = [step for step in range(first, first + num_steps) if step in self._steps]
        if not selected:
            yield
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        name = (
            f"step {first}"
            if num_steps == 1
            else say("steps {first} to {last}", first=first, last=first + num_steps - 1)
        )
        with torch.profiler.profile(activities=activities) as profile, torch.profiler.record_function(name):
            yield
        path = self.file(selected[0])
        with telling_of_full_disk(path):
            make_room(path)
            profile.export_chrome_trace(str(path))
