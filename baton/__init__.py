"""The code that routers, prefill nodes and decode nodes share: engine, wire, registry, text, command line and more."""

__version__ = "0.1.0"
