"""gRPC and Protocol Buffers, which otherwise only `kv_transfer.link` and `kv_transfer.mover.remote_messages` know.

`services` and `clients` are the two sides of each service, `codec` the messages in bytes, `server` the ports of a
process, `http2` our own transport. Beside them is what several use: credentials, statuses of errors, the budget of a
loop's turn, and the connections between the hosts of one node (`stage_hosts`).
"""
