"""Streams of a device for the stages of a rank, on which the two passes of a pair run side by side.

Torch's autograd engine runs an operator of a backward on the stream of its forward. So a stream belongs to a stage, and
not to a pass: schedules with pairs overlap a forward of one stage of a rank with a backward of its other stage.

Actions of a program are ordered as on one stream: an action's stage stream begins after all earlier work, and later
work begins after that stream. So from one action to the next, one stream may safely use memory of another. Within a
pair it may not: there a tensor that one stage made and the other one frees needs `handed_on`.
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from shardwright.parallel.device_streams import DeviceStreams


class StageStreams:
    """The streams on which the stages of a rank compute: here one for all, or a device that executes work at once, such
    as a CPU."""

    def fork(self, stages: Sequence[int]) -> None:
        """Order all further work of these stages after all work issued before."""

    def computing(self, stage: int) -> AbstractContextManager[None]:
        """A block in which this thread issues work of a stage."""
        return nullcontext()

    def join(self, stages: Iterable[int]) -> None:
        """Order all further work after the work of these stages."""

    def handed_on(self, x: Tensor, stage: int) -> None:
        """Allow a stage to be the last user of a tensor that another stage made."""


class StreamPerStage(StageStreams):
    """A stream for each stage of this rank, besides the stream that is current when this object is made."""

    def __init__(self, streams: DeviceStreams, stages: Iterable[int]) -> None:
        self._device_streams, self._main = streams, streams.current()
        self._streams = {stage: streams.made() for stage in stages}

    def fork(self, stages: Sequence[int]) -> None:
        assert len(set(stages)) == len(stages), f"two passes of one stage, of {stages}, would share its stream"
        for stage in stages:
            self._streams[stage].wait_stream(self._main)

    def computing(self, stage: int) -> AbstractContextManager[None]:
        return self._device_streams.using(self._streams[stage])

    def join(self, stages: Iterable[int]) -> None:
        for stage in stages:
            self._main.wait_stream(self._streams[stage])

    def handed_on(self, x: Tensor, stage: int) -> None:
        self._device_streams.lend(x, self._streams[stage])
