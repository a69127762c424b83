"""Who may listen where and call what: loopback alone without configuration, certificates and keys beyond it."""
