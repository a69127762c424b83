"""Processes that Baton starts, and how they end.

`ends` and, where the kernel can't help, `death_pipe` end them with whoever started them; `held_processes` ends those
that others have started; `bounded_process` bounds those for untrusted work; `fork_server` forks nodes from a process
that has imported torch; `interpreter` has settings of Python; `process_stat` is what the kernel says of a process.
"""
