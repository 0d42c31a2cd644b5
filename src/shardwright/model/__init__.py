"""The decoder, one idea in each file. Each part computes its share on a mesh; one rank is a mesh of one."""
