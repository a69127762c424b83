"""Reports: a result file of the benchmark as one page for people, or as JSON or CSV for programs."""
