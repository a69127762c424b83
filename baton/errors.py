"""The errors that Baton raises. Each has a gRPC status, an exit code, and a flag that tells whether a retry can help.

Exceptions of libraries are translated into these once, at the boundary where they appear. Only `baton.wire` turns them
into gRPC statuses, and only `baton.cli` into exit codes.
"""

from __future__ import annotations

import enum
from typing import Self


class Status(enum.Enum):
    """The names of gRPC's canonical status codes, so that no layer below the wire needs to import grpc for them."""

    CANCELLED = "CANCELLED"
    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    NOT_FOUND = "NOT_FOUND"
    ALREADY_EXISTS = "ALREADY_EXISTS"
    RESOURCE_EXHAUSTED = "RESOURCE_EXHAUSTED"
    FAILED_PRECONDITION = "FAILED_PRECONDITION"
    ABORTED = "ABORTED"
    UNIMPLEMENTED = "UNIMPLEMENTED"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    INTERNAL = "INTERNAL"
    UNAVAILABLE = "UNAVAILABLE"


class ExitCode(enum.IntEnum):
    """Exit codes of the command `baton` and of its processes."""

    OK = 0
    FAILED = 1
    USAGE = 2
    NOT_FOUND = 3
    UNAUTHORISED = 4
    UNREACHABLE = 5
    TIMEOUT = 6
    BAD_CONFIG = 78
    INTERRUPTED = 130


class BatonError(Exception):
    """The base class of every error that Baton raises on purpose. Its `str()` is one line for people."""

    status: Status = Status.INTERNAL
    """The gRPC status with which a call ends that raises the error."""
    retryable: bool = False
    """Whether the same request may succeed later."""
    exit_code: ExitCode = ExitCode.FAILED
    """The exit code of a command that ends with the error."""
    tokens_sent: int | None = None
    """The number of tokens that had been sent when this error ended the client's stream; None: it ended no stream."""

    def not_raised(self) -> Self:
        """A copy of the error without its traceback, to be stored and raised later.

        The traceback of a raised error keeps the frames that it passed through alive, with all their variables.
        """
        same = type(self).__new__(type(self), *self.args)
        same.__dict__.update(self.__dict__)
        same.__cause__ = self.__cause__
        return same


class InvalidRequest(BatonError):
    """A request that can't be served as written; `field` names the offending field."""

    status = Status.INVALID_ARGUMENT
    exit_code = ExitCode.USAGE

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason

    def renamed(self, field: str) -> Self:
        """The same refusal of what this client calls by another name."""
        same = self.not_raised()
        same.args, same.field = (f"{field}: {self.reason}",), field
        return same


class ContextLengthExceeded(InvalidRequest):
    """The prompt, or the prompt with the output that is wanted, is longer than the model takes."""

    def __init__(
        self,
        field: str,
        reason: str,
        num_tokens: int = 0,
        longest: int = 0,
        context: int = 0,
        *,
        num_output_tokens: int = 0,
    ) -> None:
        """`num_tokens` are asked for, `longest` possible. `context`: the tokens that the model takes in all.

        `num_output_tokens`: how many of those asked for are output; 0: the prompt alone is too long.

        OpenAI's sentence is added to the reason: by its words agents see that they have to shorten a conversation.
        Without `longest` the reason is whole, as another process has sent it.
        """
        if longest:
            reason = f"{reason}. This model's maximum context length is {context or longest} tokens."
        super().__init__(field, reason)
        self.num_tokens = num_tokens
        self.longest = longest
        self.num_output_tokens = num_output_tokens


class UnknownModel(InvalidRequest):
    """The request names a model that this cluster does not serve."""


class UnsupportedRequest(InvalidRequest):
    """The request needs something that no node of its model can do; the message names it."""


class DuplicateRequest(BatonError):
    """The id of the request is in use by another request that has not ended."""

    status = Status.ALREADY_EXISTS


class RequestNotFound(BatonError):
    """There is no request with this id, or it has ended."""

    status = Status.NOT_FOUND
    exit_code = ExitCode.NOT_FOUND


class NodeNotFound(BatonError):
    """The cluster has no node of this name."""

    status = Status.NOT_FOUND
    exit_code = ExitCode.NOT_FOUND


class CacheInUse(BatonError):
    """A prefix cache can't be cleared because some of its blocks are in use; the message says by what."""

    status = Status.FAILED_PRECONDITION


class Overloaded(BatonError):
    """There is no capacity now. The same request may succeed later; retry after `retry_after_s` seconds."""

    status = Status.UNAVAILABLE
    retryable = True

    def __init__(self, detail: str, retry_after_s: float = 1.0) -> None:
        super().__init__(detail)
        self.retry_after_s = retry_after_s


class NoCapacity(Overloaded):
    """No node that could serve the request is available."""


class QueueFull(Overloaded):
    """The queue is full, and no waiting request is less urgent than this one."""


class LogprobsFull(Overloaded):
    """The log-probabilities of live requests may come to as many bytes as the router keeps."""


class WouldBeLate(Overloaded):
    """The request is refused at once because its deadline or its time to first token can't be met now."""


class QuotaExceeded(Overloaded):
    """The request is beyond a quota of its tenant or of its API key; the message names the quota."""

    status = Status.RESOURCE_EXHAUSTED


class QuotaTooSmall(QuotaExceeded):
    """The prompt alone is larger than a quota of tokens, so the request can never be served."""

    retryable = False


class QuotaUnknown(Overloaded):
    """The request has quotas, and the registry that knows what is used of them does not answer."""


class Draining(Overloaded):
    """The process accepts no new work any more."""


class DeadlineExceeded(BatonError):
    """The client's deadline passed."""

    status = Status.DEADLINE_EXCEEDED
    exit_code = ExitCode.TIMEOUT


class Cancelled(BatonError):
    """The client cancelled the request, or disconnected."""

    status = Status.CANCELLED
    exit_code = ExitCode.INTERRUPTED


class ContinuedElsewhere(BatonError):
    """The request is continued by another router, or can be: the client should resume it there."""

    status = Status.UNAVAILABLE
    retryable = True


class NodeLost(BatonError):
    """A node died or stopped answering while it served the request."""

    status = Status.UNAVAILABLE
    retryable = True


class AttemptsExhausted(BatonError):
    """Every attempt failed and no further one is allowed; the message has the last cause."""

    status = Status.ABORTED
    retryable = True


class StreamDiverged(BatonError):
    """A later attempt generated other tokens than those already sent, so the stream can't be continued."""

    status = Status.ABORTED
    retryable = True


class VersionGone(BatonError):
    """The stream had begun, and no node is left that gives the same tokens: its weights, dtype or kernels have gone."""

    status = Status.ABORTED
    retryable = True


class SlowReader(BatonError):
    """The client did not read its stream fast enough."""

    status = Status.RESOURCE_EXHAUSTED


class EngineFault(BatonError):
    """A request failed inside the engine (non-finite logits, a runner error); other requests are not affected."""

    status = Status.INTERNAL


class TemplateFault(BatonError):
    """The model's own chat template exceeds its limits of time or memory. The request is not at fault."""

    status = Status.INTERNAL


class RepetitiveOutput(EngineFault):
    """The output repeats itself, and the request wants an error in that case. Tokens sent before remain valid."""


class BackgroundFault(BatonError):
    """Background work that a process can't do without has failed, so the process ends. `__cause__`: the exception."""


class TransferCause(enum.Enum):
    """The cause for which a prompt's KV did not arrive."""

    PEER_GONE = "peer_gone"
    """The prefill node ended, or can't be reached."""
    LEASE_LOST = "lease_lost"
    """The prefill node could not compute the blocks, or could not keep them until they were read."""
    DIGEST_MISMATCH = "digest_mismatch"
    """The bytes that arrived are not those that the prefill node computed."""
    LAYOUT_MISMATCH = "layout_mismatch"
    """The two nodes store KV in different layouts."""
    DEADLINE = "deadline"
    """A deadline of the transfer passed."""
    REFUSED = "refused"
    """One side refused the transfer, or received an invalid message about it."""
    CANCELLED = "cancelled"
    """The request had ended or was aborted."""
    STALLED = "stalled"
    """Both nodes are alive, but no bytes arrive."""
    PROBE_FAILED = "probe_failed"
    """The decode node could not read a block of known bytes from the prefill node, so it reads no prompt there."""


class TransferFailed(BatonError):
    """A prompt's KV did not arrive, and there is no further attempt; `cause` is that of the last failure."""

    status = Status.ABORTED
    retryable = True

    def __init__(self, cause: TransferCause, detail: str = "") -> None:
        super().__init__(f"KV transfer failed: {cause.value}" + (f" ({detail})" if detail else ""))
        self.cause = cause
        self.detail = detail


class ConfigError(BatonError):
    """The configuration or something on this machine keeps a process from starting; the message says how to fix it."""

    status = Status.FAILED_PRECONDITION
    exit_code = ExitCode.BAD_CONFIG


class AdapterRefused(BatonError):
    """An adapter can't be loaded: its files are unsound or don't fit the model; the message says how to fix it."""

    status = Status.INVALID_ARGUMENT


class Unauthenticated(BatonError):
    """The caller is not authenticated: it sent no key, or an unknown one."""

    status = Status.UNAUTHENTICATED
    exit_code = ExitCode.UNAUTHORISED


class PermissionDenied(BatonError):
    """The caller is authenticated, but is not allowed to do this."""

    status = Status.PERMISSION_DENIED
    exit_code = ExitCode.UNAUTHORISED


class UsageError(BatonError):
    """A command line has invalid or contradictory arguments."""

    status = Status.INVALID_ARGUMENT
    exit_code = ExitCode.USAGE


class Unreachable(BatonError):
    """A server does not answer, or can't be reached."""

    status = Status.UNAVAILABLE
    retryable = True
    exit_code = ExitCode.UNREACHABLE


class NotLeader(BatonError):
    """A router wanted something as the one that plans moves, and is that no more. Nothing was changed."""


class NobodyListens(Unreachable):
    """The host of the address refuses the connection, so that no process listens there any more."""
