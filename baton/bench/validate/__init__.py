"""`baton bench validate`: compares the simulator with real processes that get the same requests at the same times."""
