"""Claims that are commonly told of large training and contradict arithmetic, checked where a job touches them."""
