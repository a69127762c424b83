"""The command `baton`. Modules are imported when their command runs, so that `baton --help` starts fast."""
