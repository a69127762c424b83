"""The process of a stage before a node's last one: it computes, and its blocks are moved.

Take `host.run_stage_host` from here; a node starts `python -m baton.stage.process` for the stages on its own host.
"""
