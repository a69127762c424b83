"""What was measured: outcomes, summaries, objectives and goodput, and the file that a run leaves."""
