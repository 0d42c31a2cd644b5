"""Stashed weights: several versions of a stage's weights at once, for pipelines that update without draining.

Before a microbatch's backward, the weights of its forward may have been updated. Harlap et al. 2018 (PipeDream, arXiv
1806.03377, section 3.3): keep the version of its forward for its backward. Narayanan et al. 2021 (PipeDream-2BW, arXiv
2006.09503, section 3.1): two versions are enough if gradients are accumulated over a batch.

A version is the flat memory of all weights; before each pass the parameters become views of it. An update writes into
memory that no microbatch needs any more, so autograd never sees a weight change between a forward and its backward.
"""

from collections import Counter

from torch import Tensor

from shardwright.parallel.zero.sharded_stage import ShardedStage


class WeightStash:
    """The versions of one stage's weights that some microbatch may still need."""

    def __init__(self, stage: ShardedStage) -> None:
        self._units = stage.units
        self._versions: dict[int, list[Tensor]] = {0: [unit.values() for unit in self._units]}
        self._num_uses_left: Counter[int] = Counter()
        self.newest = 0
        self.most_alive = 1

    @property
    def most_older_bytes(self) -> int:
        """The largest memory that versions besides the newest have taken so far, in bytes."""
        newest = self._versions[self.newest]
        return (self.most_alive - 1) * sum(values.untyped_storage().nbytes() for values in newest)

    def memory(self) -> list[Tensor]:
        """The values of all present versions."""
        return [values for version in self._versions.values() for values in version]

    def expect(self, versions: list[int]) -> None:
        """Set the version that each microbatch of the coming run sees. The newest version at its begin has number 0."""
        self._versions = {0: self._versions[self.newest]}
        self.newest = 0
        self._num_uses_left = Counter(versions)

    def load(self, version: int) -> None:
        """Make the parameters views of a version."""
        for unit, values in zip(self._units, self._versions[version], strict=True):
            unit.show(values)

    def release(self, version: int) -> None:
        """Note that a microbatch that saw this version has ended its backward, and drop versions not needed any
        more."""
        self._num_uses_left[version] -= 1
        self._drop_unneeded()

    def before_update(self) -> None:
        """Let the coming update write into the memory of the next version."""
        newest = self._versions[self.newest]
        if self._num_uses_left[self.newest] > 0:  # some microbatch still needs it
            newest = [values.clone() for values in newest]
        self.newest += 1
        self._versions[self.newest] = newest
        for unit, values in zip(self._units, newest, strict=True):
            unit.write_to(values)
        self._drop_unneeded()
        self.most_alive = max(self.most_alive, len(self._versions))

    def _drop_unneeded(self) -> None:
        for version in [v for v in self._versions if v < self.newest and self._num_uses_left[v] <= 0]:
            del self._versions[version]
