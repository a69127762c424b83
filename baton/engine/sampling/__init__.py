"""What may be drawn and what must not go on: grammars, and outputs that repeat themselves."""
