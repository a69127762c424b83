"""The decode role of a node: it reads the blocks of prompts that prefill nodes computed."""
