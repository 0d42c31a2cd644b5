"""What a rank holds and moves, exactly: state, activations, buffers, traffic. Needs no torch."""
