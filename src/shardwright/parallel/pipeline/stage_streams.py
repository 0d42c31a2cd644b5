"""Streams of a device for the stages of a rank, on which the two passes of a pair run side by side.

Torch's autograd engine runs an operator of a backward on the stream of its forward. So a stream belongs to a stage, and
not to a pass: schedules with pairs put a forward of one stage of a rank beside a backward of its other stage.

Between actions of a program all that was issued is in order, as on one stream: a stage's stream begins after it, and
what follows begins after the stage's stream. So memory of one stream that another uses is safe from one action to the
next. Within a pair it is not: there a tensor that one stage made and the other frees needs `handed_on`.
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from torch import Tensor

from shardwright.parallel.device_streams import DeviceStreams


class StageStreams(Protocol):
    """Where the stages of a rank compute."""

    def fork(self, stages: Sequence[int]) -> None:
        """Order all work issued for these stages from now on behind all that was issued before."""

    def computing(self, stage: int) -> AbstractContextManager[None]:
        """While it lasts, this thread issues for a stage."""

    def join(self, stages: Iterable[int]) -> None:
        """Order all work issued from now on behind the work of these stages."""

    def handed_on(self, x: Tensor, stage: int) -> None:
        """Let this stage use, and be the last to use, what another stage made."""


class InOrder:
    """A device that computes what it is told at once, such as a CPU, or all of it on one stream."""

    def fork(self, stages: Sequence[int]) -> None: ...

    def computing(self, stage: int) -> AbstractContextManager[None]:
        return nullcontext()

    def join(self, stages: Iterable[int]) -> None: ...

    def handed_on(self, x: Tensor, stage: int) -> None: ...


class StreamPerStage:
    """A stream for each stage of this rank, beside the one that is current where this is made."""

    def __init__(self, streams: DeviceStreams, stages: Iterable[int]) -> None:
        self._of_device, self._main = streams, streams.current()
        self._streams = {stage: streams.made() for stage in stages}

    def fork(self, stages: Sequence[int]) -> None:
        assert len(set(stages)) == len(stages), f"two passes of one stage, of {stages}, would share its stream"
        for stage in stages:
            self._streams[stage].wait_stream(self._main)

    def computing(self, stage: int) -> AbstractContextManager[None]:
        return self._of_device.using(self._streams[stage])

    def join(self, stages: Iterable[int]) -> None:
        for stage in stages:
            self._main.wait_stream(self._streams[stage])

    def handed_on(self, x: Tensor, stage: int) -> None:
        self._of_device.lend(x, self._streams[stage])
