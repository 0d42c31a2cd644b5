"""The facts of methods of context parallelism, one file each; their arithmetic is in parallel/context."""
