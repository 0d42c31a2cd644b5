"""The registry of attention kernels that generations of software use, with their facts."""

from dataclasses import dataclass
from typing import Annotated, Literal

from shardwright.config.registry import NameOf, Registry


@dataclass(frozen=True, kw_only=True)
class AttentionKernel:
    """The facts of a kernel.

    - `place` orders lists of kernels; `other_names` are its names in tables of measured runs.
    - `constant` names the share of the device's peak that it reaches, and `backward_constant` the rate of its backward
      over that of its forward (cost/calibration.py). `otherwise` is the constant for devices of which nobody knows
      that share; empty if it is known of all.
    - `number` is the number type of its products, if it is not that of everything but products with weights. Results
      are in 16 bits. `cast` is bytes moved to make its operands: by element of query, key and value in the forward, and
      of the gradient of its result in the backward. `kept_input_bytes` are kept by element of query, key and value.
    - `block`: it computes all scores of so many queries and keys that a window's edge passes through; 0 is not known.
      `skips_backward`: its backward leaves out scores beyond a window, as its forward does.
    - `kept_score_bytes` are kept by score from forward to backward, with no dropout; 0 if a fused kernel keeps none.
      The next two are 0, too, then: `score_gradient_bytes` of the gradient of a score, and `softmax` moved by score,
      (forward, backward).
    - `reads_mask`: which scores count is a tensor that it reads, and so it computes all.
    """

    name: str
    place: int
    constant: str
    backward_constant: str = "attention_backward"
    otherwise: str = ""
    other_names: tuple[str, ...] = ()
    number: str = ""
    cast: tuple[float, float] = (0.0, 0.0)
    kept_input_bytes: Literal[1, 2] = 2
    block: int = 0
    skips_backward: bool = True
    kept_score_bytes: int = 0
    score_gradient_bytes: int = 0
    softmax: tuple[float, float] = (0.0, 0.0)
    reads_mask: bool = False

    @property
    def computes_masked(self) -> bool:
        """True if scores that causality masks are computed, too: with a mask to read, nothing is known to be masked."""
        return self.keeps_scores or self.reads_mask

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
    # torch's scaled_dot_product_attention with a mask, which FlashAttention does not take: xFormers' kernel,
    # which torch names memory-efficient, about as fast as FlashAttention 1 (figure 4 of arXiv 2307.08691).
    AttentionKernel(name="efficient", place=25, constant="attention_flash1", reads_mask=True),
    # FlashAttention's kBlockM and kBlockN with heads of 64 and 128 (flash_fwd_launch_template.h; hopper/tile_size.h).
    AttentionKernel(name="flash1", place=30, constant="attention_flash1", block=128),
    AttentionKernel(name="flash2", place=40, constant="attention_flash2", block=128),
    # torch's scaled_dot_product_attention as torchtitan calls it since May 2025 (its pull request 1196): cuDNN first on
    # Blackwell, FlashAttention 2 elsewhere.
    AttentionKernel(name="sdpa", place=45, constant="attention_sdpa", otherwise="attention_flash2", block=128),
    AttentionKernel(
        name="cudnn",
        place=50,
        constant="attention_cudnn",
        otherwise="attention_flash2",
        other_names=("flash3",),
        block=128,
    ),
    # Transformer Engine's fp8_dot_product_attention (at d0067d0, dot_product_attention): cuDNN's alone trains in fp8
    # (get_attention_backend). Numbers of 2 bytes are read and written once by rows and once by columns
    # (mxfp8_quantize_fast_path), and only these copies of query, key and value are saved (FusedAttnFunc). The backward
    # takes as long with a window of 128 as without (cudnn-frontend at 3929da2, sdpa_benchmark_training, gpt_oss).
    AttentionKernel(
        name="cudnn-float8",
        place=60,
        constant="attention_float8",
        backward_constant="attention_float8_backward",
        other_names=("cudnn-fp8",),
        number="fp8",
        cast=(4.0, 4.0),
        kept_input_bytes=1,
        block=128,
        skips_backward=False,
    ),
    # Pallas on TPUs: sa_block_q and sa_block_kv of MaxText's base.yml.
    AttentionKernel(
        name="splash",
        place=70,
        constant="attention_cudnn",
        otherwise="attention_flash2",
        other_names=("xla",),
        block=512,
    ),
)

ATTENTION_KERNELS: Registry[AttentionKernel] = Registry("an attention kernel", __name__, AttentionKernel)
KernelName = Annotated[str, NameOf(ATTENTION_KERNELS)]


def kernel_names() -> dict[str, str]:
    """The name of each kernel by all of its names."""
    return {name: kernel.name for kernel in ATTENTION_KERNELS.values() for name in (kernel.name, *kernel.other_names)}
