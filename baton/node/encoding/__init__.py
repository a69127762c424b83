"""Where a node gets the rows of inputs from: its own encoder, or a node that has made them."""
