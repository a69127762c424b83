"""The decode node's half of a hand-off: transfers, which say what is read and when it may be used, and join probes.

Take `TransferBook` and `JoinProbes` from here, and from the two modules of values what they are given and answer. All
of it is pure.
"""
