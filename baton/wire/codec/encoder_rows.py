"""The codec of a request for rows that another node's encoder has made."""

from __future__ import annotations

from baton.messages.spans import RowsRequest
from baton.v1 import encoder_rows_pb2 as pb
from baton.wire.codec.derived import Codec

READ_ROWS = Codec(RowsRequest, pb.ReadRowsRequest)
