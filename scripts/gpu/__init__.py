"""What `scripts/gpu_pack` and `scripts/gpu_check` run: the packing, the driver of the stages, and a stage's context."""
