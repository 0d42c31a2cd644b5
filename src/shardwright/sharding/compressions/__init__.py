"""Facts of the methods of gradient compression, a file each."""
