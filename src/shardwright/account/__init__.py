"""The exact account of a rank: its state, activations, buffers and traffic. Needs no torch."""
