"""Sets environment variables that torch and NCCL read when CUDA starts, unless they are set already."""

import os
from collections.abc import MutableMapping

# The second is the older name of the same variable.
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_COMPILER_THREADS = 4  # for each rank; torch's default is one for each core, at most 32


def set_device_environment(local_world: int, variables: MutableMapping[str, str] = os.environ) -> None:
    """Set the variables of one of `local_world` ranks on a node. Call it before CUDA starts.

    Expandable segments serve tensors of all sizes: experts get different numbers of rows in each step, and segments of
    fixed size waste memory. NCCL prints why it fails. Several ranks on a node share the cores for compiler threads.
    """
    if not any(name in variables for name in _ALLOCATOR):
        variables[_ALLOCATOR[0]] = "expandable_segments:True"
    variables.setdefault("NCCL_DEBUG", "WARN")
    if local_world > 1:
        variables.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(_COMPILER_THREADS))
