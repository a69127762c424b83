"""From a model directory to a module whose every layer is one of ours: weights, recognition, layers, attention."""
