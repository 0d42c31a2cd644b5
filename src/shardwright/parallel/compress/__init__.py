"""Gradients over the replicas in fewer bytes: in 16 bits, in 8 bits, at low rank, or only the largest elements."""
