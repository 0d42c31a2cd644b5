"""Bytes of a rank: its state, activations, buffers and traffic, exact for this runtime. Needs no torch."""
