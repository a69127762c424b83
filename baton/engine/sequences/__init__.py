"""Several sequences of one request: samples side by side, and beams."""
