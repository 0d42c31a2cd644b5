"""The cost model: seconds of kernels and collectives, bytes of memory. Needs no torch."""
