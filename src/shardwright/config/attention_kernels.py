"""The registry of attention kernels that generations of software use, with their facts."""

from dataclasses import dataclass
from typing import Annotated

from shardwright.config.registry import NameOf, Registry


@dataclass(frozen=True, kw_only=True)
class AttentionKernel:
    """The facts of a kernel.

    - `place` orders lists of kernels; `other_names` are its names in tables of measured runs.
    - `constant` names the share of the device's peak that it reaches (cost/calibration.py).
    - `kept_score_bytes` are kept by score from forward to backward, with no dropout; 0 if a fused kernel keeps none.
      The next two are 0, too, then: `score_gradient_bytes` of the gradient of a score, and `softmax` moved by score,
      (forward, backward).
    """

    name: str
    place: int
    constant: str
    other_names: tuple[str, ...] = ()
    kept_score_bytes: int = 0
    score_gradient_bytes: int = 0
    softmax: tuple[float, float] = (0.0, 0.0)

    @property
    def keeps_scores(self) -> bool:
        """True if attention is two products with a softmax between them, which keeps the scores."""
        return self.kept_score_bytes > 0


FACTS = (
    # torch's operators: the result of a softmax in float32, and its copy in 16 bits.
    AttentionKernel(
        name="torch",
        place=10,
        constant="attention_flash2",
        kept_score_bytes=6,
        score_gradient_bytes=4,
        softmax=(22.0, 22.0),
    ),
    AttentionKernel(
        name="softmax",
        place=20,
        constant="attention_flash2",
        other_names=("fused-softmax",),
        kept_score_bytes=2,
        score_gradient_bytes=2,
        softmax=(4.0, 6.0),
    ),
    AttentionKernel(name="flash1", place=30, constant="attention_flash1"),
    AttentionKernel(name="flash2", place=40, constant="attention_flash2"),
    AttentionKernel(name="cudnn", place=50, constant="attention_cudnn", other_names=("flash3", "xla")),
)

ATTENTION_KERNELS: Registry[AttentionKernel] = Registry("an attention kernel", __name__, AttentionKernel)
KernelName = Annotated[str, NameOf(ATTENTION_KERNELS)]


def kernel_names() -> dict[str, str]:
    """The name of each kernel by all of its names."""
    return {name: kernel.name for kernel in ATTENTION_KERNELS.values() for name in (kernel.name, *kernel.other_names)}
