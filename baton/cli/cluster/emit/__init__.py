"""`baton up --emit`: the cluster of a command line, written down for whoever starts processes elsewhere."""
