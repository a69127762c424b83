"""What was measured: outcomes of requests, summaries, SLOs and goodput, and the result file.

Free of anything that measures: live and simulated runs, experiments and reports all take from here.
"""
