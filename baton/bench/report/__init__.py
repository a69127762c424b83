"""Reports: renders a result file as one HTML page, or as JSON or CSV for programs."""
