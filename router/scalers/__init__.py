"""Scalers: how many nodes each pool has, asked of and told to whoever runs the nodes (Kubernetes, Slurm, systemd, ...).

A pool is a set of nodes that one supervisor keeps at a number. A node stays in its pool when its role changes. The
rules that every scaler keeps are those of `scaler.Scaler`; `choice.scaler_of` makes one from the text of a setting.
"""
