"""One module for each command, imported when the command runs. Shared parts are beside this folder."""
