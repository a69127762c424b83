"""The code that Baton's roles share: engine, wire, registry, text, command line. It imports none of the roles."""

__version__ = "0.1.0"
