"""Tensors that are not kept from the forward to the backward: recomputed, or sent to the host meanwhile."""
