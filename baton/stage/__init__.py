"""The process of a stage behind a node's first one, on another GPU or host: it computes, and its blocks are moved.

Take `run_stage_host` from here; a node starts `python -m baton.stage` for the stages on its own host.
"""
