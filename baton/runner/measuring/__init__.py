"""What this machine could do at best, and where the time of a step goes."""
