"""Compressed reduction of gradients over replicas: in 16 bits, in 8 bits, at low rank, or only the largest elements."""
