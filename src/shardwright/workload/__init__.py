"""What is computed: FLOPs of the pieces of a model. Needs no torch."""
