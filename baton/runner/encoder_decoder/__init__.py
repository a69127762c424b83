"""Models with an encoder and a decoder (T5, BART, Whisper): their encoder's inputs, and their decoder's steps."""
