"""The decoder, one idea a file. Each part is written for its share of a mesh, and one rank is a mesh of one."""
