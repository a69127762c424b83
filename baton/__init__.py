"""What Baton's roles share: engine, wire, registry, text, command line. It knows no role."""

__version__ = "0.1.0"
