"""What clients, routers and nodes say to each other, as plain values; `baton.wire` turns them into bytes."""
