"""Files from strangers: job files, checkpoints, data, tokenizer and model files, and launch scripts and
configurations of other systems, made wrong at random.

    python tests/fuzz/strangers.py --kind checkpoint --count 2000 --seed 1
    python tests/fuzz/inputs.py --case FILE        # sees a failing case again

Each case runs and is judged as in inputs.py, with what `train` does on one rank for a folder of checkpoints: none may
crash, hang, take more than 1 GiB or load in silence what was not saved. Half of the folders are `damaged`, half are
`signed`: changed by one who made all digests and sums right, which can be another checkpoint and no harm. `growth` are
small files that would become large ones (growth.py), and have limits of their own.
"""

import argparse
import os
import sys
from pathlib import Path

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).parents[1])

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is there: threads do not survive a fork

from fuzz.inputs import load_everything, run_cases

KINDS = {
    "job": ["job"], "checkpoint": ["checkpoint"], "data": ["data", "format", "tokenizer", "entry"],
    "model": ["config", "weights"], "foreign": ["foreign"], "table": ["table"],
    "growth": ["growth"],
}  # fmt: skip


def _load_torch() -> None:
    """Load the modules for going on from a checkpoint or beginning with released weights, for all children. Nothing is
    computed: that may start threads."""
    import torch.utils.tensorboard

    import shardwright.train.trainer

    assert torch.utils.tensorboard and shardwright.train.trainer


def main() -> int:
    """Run cases, and write down those that fail. 1 if there is one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=list(KINDS), required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case of the seed")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--folder", type=Path, default=Path("fuzz-failures"), help="where failing cases are written")
    parser.add_argument("--show", action="store_true", help="print what each case says")
    options = parser.parse_args()
    load_everything()
    if options.kind in ("checkpoint", "model", "growth"):
        _load_torch()
    numbers = range(options.first, options.first + options.count)
    return run_cases(options.seed, numbers, KINDS[options.kind], options.folder, options.show)


if __name__ == "__main__":
    sys.exit(main())
