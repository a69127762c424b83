"""Models with an encoder and a decoder (T5, BART, Whisper): their encoder's inputs, and their decoder's steps.

`load_encoder_decoder` in `loading.py` is what others take; the model's runner is that of decoders.
"""
