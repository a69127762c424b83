"""The decode role of a node: it meets prefill nodes as they join the cluster, and reads prompts' blocks from them.

Take `app.make_role` from here. `senders` are the prefill nodes in the registry.
"""
