"""Computes a stage of a model, or all of it, on several ranks of a host: processes, and the steps announced to them.

Take `rank.FirstRank` from here, which starts and leads the others, and the interfaces in `rank_leader`, which the
stages of `stages` have, too.
"""
