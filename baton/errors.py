"""One tree of errors. Each says whether trying again can help and which status it maps to.

Foreign errors are translated into these once, at the boundary where they appear; `baton.wire` alone turns them into
gRPC statuses, `baton.cli` alone into exit codes.
"""

from __future__ import annotations

import enum
from typing import Self


class Status(enum.Enum):
    """Names of gRPC's canonical status codes, so that no layer below the wire needs grpc to speak of them."""

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
    """Exit codes of the command and of the processes."""

    OK = 0
    FAILED = 1
    USAGE = 2
    NOT_FOUND = 3
    UNAUTHORISED = 4
    UNREACHABLE = 5
    TIMEOUT = 6
    BAD_USAGE = 64
    IO_ERROR = 74
    BAD_CONFIG = 78
    INTERRUPTED = 130


class BatonError(Exception):
    """Root of every error that Baton raises on purpose. `str()` is one line for a person."""

    status: Status = Status.INTERNAL
    retryable: bool = False
    exit_code: ExitCode = ExitCode.FAILED
    tokens_sent: int | None = None
    """Of a stream that it ended: how many tokens the client was sent before, if any."""

    def not_raised(self) -> Self:
        """The same error without a traceback, for whoever keeps one to raise it: an error that was raised keeps the
        frames that it went through, and all that they have.
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


class UnknownModel(InvalidRequest):
    """The request names a model that this cluster does not serve."""


class DuplicateRequest(BatonError):
    """A live request already has this id."""

    status = Status.ALREADY_EXISTS


class RequestNotFound(BatonError):
    """No live request has this id."""

    status = Status.NOT_FOUND
    exit_code = ExitCode.NOT_FOUND


class NodeNotFound(BatonError):
    """The cluster has no node of this name."""

    status = Status.NOT_FOUND
    exit_code = ExitCode.NOT_FOUND


class CacheInUse(BatonError):
    """A prefix cache can't be forgotten: blocks of it are in use; the message says by whom."""

    status = Status.FAILED_PRECONDITION


class Overloaded(BatonError):
    """No capacity now; the same request may succeed later: try again after `retry_after_s`."""

    status = Status.UNAVAILABLE
    retryable = True

    def __init__(self, story: str, retry_after_s: float = 1.0) -> None:
        super().__init__(story)
        self.retry_after_s = retry_after_s


class NoCapacity(Overloaded):
    """No node that could serve the request is up."""


class QueueFull(Overloaded):
    """As many requests wait as may, none of them less urgent than this one."""


class WouldBeLate(Overloaded):
    """The deadline or the time to first token that the request asks for can't be met now: refused at once."""


class QuotaExceeded(Overloaded):
    """As many requests of the tenant run as may; others are served."""

    status = Status.RESOURCE_EXHAUSTED


class Draining(Overloaded):
    """The process takes no new work."""


class DeadlineExceeded(BatonError):
    """The client's deadline passed."""

    status = Status.DEADLINE_EXCEEDED
    exit_code = ExitCode.TIMEOUT


class Cancelled(BatonError):
    """The client went away or asked to stop."""

    status = Status.CANCELLED
    exit_code = ExitCode.INTERRUPTED


class ContinuedElsewhere(BatonError):
    """The request goes on at another router, or is left for one: resume it there."""

    status = Status.UNAVAILABLE
    retryable = True


class NodeLost(BatonError):
    """A node died or stopped answering while it served the request."""

    status = Status.UNAVAILABLE
    retryable = True


class AttemptsExhausted(BatonError):
    """Every try failed and the budget of attempts is spent; the message has the last cause."""

    status = Status.ABORTED
    retryable = True


class StreamDiverged(BatonError):
    """A later attempt gave other tokens than those already sent: the stream ends rather than contradict itself."""

    status = Status.ABORTED
    retryable = True


class SlowReader(BatonError):
    """The client did not take its tokens in time."""

    status = Status.RESOURCE_EXHAUSTED


class EngineFault(BatonError):
    """A request failed inside the engine (non-finite logits, a runner error); other requests are untouched."""

    status = Status.INTERNAL


class RepetitiveOutput(EngineFault):
    """The output repeats itself in the way that the request wants to end with an error; tokens sent so far stand."""


class BackgroundFault(BatonError):
    """Work that a process can't go on without has failed: the process ends. `__cause__` is what was raised."""


class TransferCause(enum.Enum):
    """Why a prompt's KV did not come."""

    PEER_GONE = "peer_gone"
    """The prefill node ended, or can't be reached."""
    LEASE_LOST = "lease_lost"
    """The prefill node could not keep, or not compute, what it had promised."""
    DIGEST_MISMATCH = "digest_mismatch"
    """What arrived is not what had been computed."""
    LAYOUT_MISMATCH = "layout_mismatch"
    """The two nodes don't store KV alike."""
    DEADLINE = "deadline"
    """The other side waited for it too long."""
    REFUSED = "refused"
    """One side does not want to, or what it was asked for makes no sense."""
    CANCELLED = "cancelled"
    """Nobody wanted it any more."""
    STALLED = "stalled"
    """Both sides live, and its bytes don't come."""


class TransferFailed(BatonError):
    """A hand-off did not bring its KV, and nothing more is tried; `cause` says why, the last time."""

    status = Status.ABORTED
    retryable = True

    def __init__(self, cause: TransferCause, story: str = "") -> None:
        super().__init__(f"KV transfer failed: {cause.value}" + (f" ({story})" if story else ""))
        self.cause = cause
        self.story = story


class ConfigError(BatonError):
    """Something here or in the configuration keeps a process from starting; the message says how to fix it."""

    status = Status.FAILED_PRECONDITION
    exit_code = ExitCode.BAD_CONFIG


class Unauthenticated(BatonError):
    """Nobody knows who the caller is: no key, or one that is not known."""

    status = Status.UNAUTHENTICATED
    exit_code = ExitCode.UNAUTHORISED


class PermissionDenied(BatonError):
    """The caller is known, and may not do this."""

    status = Status.PERMISSION_DENIED
    exit_code = ExitCode.UNAUTHORISED


class UsageError(BatonError):
    """A command line that makes no sense."""

    status = Status.INVALID_ARGUMENT
    exit_code = ExitCode.BAD_USAGE


class Unreachable(BatonError):
    """A server that a client command needs does not answer."""

    status = Status.UNAVAILABLE
    retryable = True
    exit_code = ExitCode.UNREACHABLE


class NobodyListens(Unreachable):
    """The host of an address answers that no process listens there: whoever did has ended."""
