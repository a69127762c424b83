"""The messages between clients, routers and nodes, as plain values; `baton.wire` turns them into bytes."""
