"""The hand-off's failpoints: before and after (`-done`) each step of its protocol."""

from __future__ import annotations

SENDER = ("offer", "closing-offer", "Subscribe", "ReadProgress", "ConfirmRead")
RECEIVER = ("plan", "Connected", "Offer", "read-posted", "ReadDone", "ReadConfirmed")
MESSAGES = ("Subscribe", "ReadProgress", "ConfirmRead", "Offer", "ReadConfirmed")
HANDOFF_FAILPOINTS = [*SENDER, *RECEIVER, *(f"{name}-done" for name in MESSAGES)]
REPEATED_FAILPOINTS = ["offer", "ReadProgress", "ReadProgress-done", "Offer", "Offer-done", "read-posted", "ReadDone"]
"""The failpoints that one hand-off passes more than once."""
