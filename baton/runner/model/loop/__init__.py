"""What Baton's loop over the layers consists of: the steps that transformers' loop was seen to take, and the angles.

`trace.py` watches one call of transformers' loop, `steps.py` computes or records the same steps, `angles.py` keeps
cosines and sines by position. Taken by `decoder.py` alone.
"""
