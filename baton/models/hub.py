"""Fetches models of the Hugging Face Hub with its own library: its cache, variables (HF_*) and credentials apply.

Only weights in safetensors, JSON files and tokenizers' texts are fetched: no pickles, and no code.
"""

from __future__ import annotations

import errno
import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from baton.errors import ConfigError
from baton.models.progress import say

_NAME = re.compile(r"([A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?:@([A-Za-z0-9][\w./-]{0,199}))?\Z", re.ASCII)
_WANTED = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
_UNWANTED = ["*/*"]
"""Folders hold other forms of a model, such as ONNX."""
_DISK_ERRORS = frozenset(
    {errno.EACCES, errno.EDQUOT, errno.EFBIG, errno.ENOSPC, errno.ENOTDIR, errno.EPERM, errno.EROFS}
)


@dataclass(frozen=True, slots=True)
class HubName:
    """The name of a model on the hub: ORG/NAME, or ORG/NAME@REVISION."""

    repository: str
    revision: str | None

    @classmethod
    def parse(cls, text: str) -> HubName | None:
        """The name; None for a text that is not one."""
        match = _NAME.match(text)
        return None if match is None or ".." in text else cls(match[1], match[2])

    def __str__(self) -> str:
        return self.repository + (f"@{self.revision}" if self.revision else "")


def fetched_directory(name: HubName) -> Path:
    """The directory of a model in the hub's cache, after what is missing or newer on the hub was fetched.

    Without a network, or with HF_HUB_OFFLINE=1, it is what the cache has. Raises ConfigError: one line that says what
    to do.
    """
    # Importing it is slow, and only models of the hub need it.
    from huggingface_hub import constants, errors, snapshot_download

    say(f"Fetching {name} from {constants.ENDPOINT}, unless it is in the cache …")
    try:
        with _quiet_library():
            fetched = snapshot_download(
                name.repository, revision=name.revision, allow_patterns=_WANTED, ignore_patterns=_UNWANTED
            )
        return Path(fetched)
    except errors.GatedRepoError:
        reason = "its owner gives access on request: accept the terms on its page, and set HF_TOKEN to your token"
    except errors.RepositoryNotFoundError:
        reason = (
            "there is no such directory here and no such model there, or it is private: check the name, or set "
            "HF_TOKEN to a token that may read it"
        )
    except errors.RevisionNotFoundError:
        reason = f"it has no revision {name.revision}"
    except errors.LocalEntryNotFoundError:
        revision = f" --revision {name.revision}" if name.revision else ""
        reason = (
            f"there is no network, or HF_HUB_OFFLINE is set, and the cache lacks it: run `hf download "
            f"{name.repository}{revision}` where there is one, with the same HF_HOME, or name a directory"
        )
    except Exception as error:  # The library lets the exceptions of its HTTP client through.
        reason = _reason_of(error)
    raise ConfigError(f"model {name} can't be fetched from {constants.ENDPOINT}: {reason}")


def _reason_of(error: Exception) -> str:
    """What to tell about an error of the library that is not about this model: one of network or disk, or another."""
    if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
        path = "" if error.filename is None else f": {error.filename}"
        return f"its cache can't be written ({error.strerror}{path}); set HF_HOME to a directory with enough room"
    lines = str(error).split("\n") if str(error) else [type(error).__name__]
    return f"{lines[0][:300]}; what has arrived is kept, so try again"


@contextmanager
def _quiet_library() -> Iterator[None]:
    """Within this context the library logs nothing, not even its retries, and shows progress on a terminal only."""
    from huggingface_hub.utils import (  # type: ignore[attr-defined]
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    logger = logging.getLogger("huggingface_hub")
    level, had_bars = logger.level, not are_progress_bars_disabled()
    logger.setLevel(logging.CRITICAL)
    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        yield
    finally:
        logger.setLevel(level)
        if had_bars:
            enable_progress_bars()
