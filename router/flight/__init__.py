"""A request from its acceptance to its end: its attempts, the merged output, the text for its client, its record.

`flight` decides, by the table in `flight_table`; `active_request` is what the router keeps beside it. A flight's
tokens go through `flight_sequence` and `answer` into the client's `event_queue`. `flight_record` lets another router
continue it, and `timeline` says where its time went. Nothing here knows a connection or waits for nodes.
"""
