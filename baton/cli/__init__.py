"""The command `baton`: `main` finds the module of a command, and imports no other, so that `baton --help` starts fast.

`commands` and `bench` have the commands, `views` what several of them show, `cluster` a cluster on this machine. Beside
them is what commands share: flags from settings (`options`), the cluster that they call (`target`, `ask`), output, and
waiting; and what is longer than its command: the stream of a chat, and what `baton demo` does. Nothing outside
the folder imports it.
"""
