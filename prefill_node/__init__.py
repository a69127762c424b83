"""The prefill role of a node: it offers the blocks that its engine computes to decode nodes."""
