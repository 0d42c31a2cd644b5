"""The facts of recipes of fp8 training, one file each; the casts of each granularity are in precision/float8.py."""
