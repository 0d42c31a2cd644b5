"""Environment variables that torch and NCCL read when CUDA begins, if nobody has set them."""

import os
from collections.abc import MutableMapping

# The second is the older name of the first.
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_COMPILER_THREADS = 4  # of each rank; each would take one a core, 32 at most


def set_device_environment(local_world: int, variables: MutableMapping[str, str] = os.environ) -> None:
    """Set the variables of a rank, one of so many on its node. Call it before anything of CUDA begins.

    Segments that grow are used for tensors of all sizes: experts' rows differ in each step, and memory between segments
    of fixed size is lost. NCCL says why it fails. Ranks of a node don't start a compiler's threads for each core each.
    """
    if not any(name in variables for name in _ALLOCATOR):
        variables[_ALLOCATOR[0]] = "expandable_segments:True"
    variables.setdefault("NCCL_DEBUG", "WARN")
    if local_world > 1:
        variables.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(_COMPILER_THREADS))
