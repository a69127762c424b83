"""What is read and not generated: pages for browsers, the description of the API, models, health and metrics."""
