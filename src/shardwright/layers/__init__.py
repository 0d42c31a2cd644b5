"""The layers of a model: operators, FLOPs, sizes of tensors, and what the backward needs. Needs no torch."""
