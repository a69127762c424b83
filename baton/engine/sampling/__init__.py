"""What the engine decides about tokens that were drawn: stops, repetitions, and what a grammar lets be drawn."""
