"""The decode node's half of a hand-off: transfers, which say what is read, what was proven, what is quarantined."""
