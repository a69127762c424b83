"""What makes a node an encode node: it makes rows of inputs (images, speech, texts) for other nodes."""
