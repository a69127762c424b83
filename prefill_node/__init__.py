"""The prefill role of a node: it offers the blocks that its engine computes to decode nodes.

Take `app.make_role` from here: it puts `HandOff`, on the event loop, and `OfferConnector`, on the engine's thread,
together.
"""
