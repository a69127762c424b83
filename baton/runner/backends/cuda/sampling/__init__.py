"""The kernels of the sampler on a GPU: survey.py, draw.py with edits.py, and report.py; numbers.py is for all."""
