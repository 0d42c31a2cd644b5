"""The cost model: seconds of kernels and collectives, and money. Needs no torch."""
