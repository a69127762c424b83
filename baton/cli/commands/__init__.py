"""One module a command, imported when it runs. What several commands share lives beside this folder."""
