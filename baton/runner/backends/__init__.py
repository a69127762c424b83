"""Where products, norms, attention and copies are computed: C kernels on a CPU, CUDA, plain torch, a reference."""
