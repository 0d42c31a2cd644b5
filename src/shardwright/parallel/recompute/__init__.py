"""What is not kept from the forward to the backward: made again, or sent to the host meanwhile."""
