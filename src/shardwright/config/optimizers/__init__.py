"""The facts of optimizers, one file each; their arithmetic is in parallel/optimizers."""
