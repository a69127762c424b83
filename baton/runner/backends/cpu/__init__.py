"""The CPU: our C kernels, and the file that they are compiled to (which costs no import of torch)."""
