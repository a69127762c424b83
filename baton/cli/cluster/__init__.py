"""A cluster on this machine: its run directory and state, its logs, its supervisor; and files for other supervisors."""
