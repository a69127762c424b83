"""A cluster on this machine: its run directory, its supervisor, its logs; and files for other supervisors."""
