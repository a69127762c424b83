"""The parts of stage `micro`: what single operations of a step take, beside what torch takes or the memory allows."""
