"""What will happen: programs in time, without torch and without ranks."""
