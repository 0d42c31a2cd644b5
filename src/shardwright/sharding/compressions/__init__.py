"""Facts of the methods of gradient compression, one file each."""
