"""Operations of one rank: those of the C kernels, on its own columns and attention heads."""
