"""`baton up --emit`: a cluster as files for systemd, Docker Compose, Helm or Slurm."""
