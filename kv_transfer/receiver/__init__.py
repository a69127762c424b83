"""The decode node's half of a hand-off: transfers, which say what is read, what is proven and what is quarantined."""
