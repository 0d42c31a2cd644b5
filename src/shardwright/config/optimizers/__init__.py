"""The facts of optimizers, a file each; their arithmetic is in parallel/optimizers."""
