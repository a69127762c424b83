"""What ranks are, which part of a model each computes, and how they exchange what they have computed."""
