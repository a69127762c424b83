"""Access control: on which addresses a process may listen, and who may call what.

Without configuration a process serves this machine alone; other addresses need certificates and API keys.
"""
