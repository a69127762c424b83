"""The two halves of a node's hand-offs, which every node has: it offers its blocks to readers, and reads blocks of
others."""
