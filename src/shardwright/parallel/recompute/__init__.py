"""Tensors that do not stay on the device from the forward to the backward: recomputed, or offloaded to the host."""
