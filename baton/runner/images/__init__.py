"""Models that take images beside text: their text part, which decodes, and their encoder of images."""
