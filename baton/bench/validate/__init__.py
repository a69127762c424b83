"""`baton bench validate`: the simulator against real processes under the same requests, at the same times."""
