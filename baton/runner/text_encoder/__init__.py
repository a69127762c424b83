"""Encoders (BERT and its kin): models whose tokens attend to their whole text, which is computed in one step.

`load_encoder` in `encoder_runner.py` is what others take.
"""
