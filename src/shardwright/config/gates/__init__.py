"""The facts of gates, one file each; their arithmetic is in files of the same names in model/gates."""
