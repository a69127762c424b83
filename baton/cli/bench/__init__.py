"""`baton bench`: the command lines of the benchmarks in `baton.bench`.

`bench` is the group, each other module a command or, as `micro`, a few; `flags` makes options of the fields of
configurations, and `options` has what several commands share.
"""
