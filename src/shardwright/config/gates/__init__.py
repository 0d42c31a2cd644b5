"""The facts of gates, a file each; their arithmetic is in files of the same names in model/gates."""
