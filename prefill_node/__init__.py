"""The prefill role of a node: decode nodes wait for what it computes. Take `app.make_role` from here."""
