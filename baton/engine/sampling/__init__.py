"""Constraints on outputs: grammars, and the detection of outputs that repeat themselves."""
