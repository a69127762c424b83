"""The decode role of a node: it reads the blocks of prompts from prefill nodes.

Take `app.make_role` from here: it puts `Intake`, on the event loop, and `IntakeConnector`, on the engine's thread,
together. `senders` are the prefill nodes and the links to them, `pair_prober` carries out the probes of those.
"""
