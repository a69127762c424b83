"""Runs one model on several ranks of a host: the processes beside the node's own, and the steps announced to them.

Take `rank.FirstRank` from here, which starts and leads the others, and the interfaces in `rank_leader`, which the
stages of `remote_stages` have, too.
"""
