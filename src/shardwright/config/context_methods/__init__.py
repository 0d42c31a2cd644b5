"""The facts of methods of context parallelism, a file each; their arithmetic is in parallel/context."""
