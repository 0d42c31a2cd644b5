"""The work of a step: shapes, FLOPs, bytes, and tensors that are kept for the backward. Needs no torch."""
