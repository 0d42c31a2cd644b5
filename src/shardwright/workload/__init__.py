"""What is computed: shapes, FLOPs, bytes, and what is kept for the backward. Needs no torch."""
