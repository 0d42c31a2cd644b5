"""The facts of policies of recomputation, one file each; model/recomputed_block.py recomputes what they name."""
