"""What was measured: outcomes of requests, summaries, SLOs and goodput, and the result file."""
