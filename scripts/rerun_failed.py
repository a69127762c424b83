"""Runs each test that failed in the last run once more, by itself, and lists the flaky ones.

A test that passes now failed because of other tests or processes: it is listed as flaky, and must be fixed before
anything else. A test that fails again is a failure. Exits with 0 if all tests passed, else with 1.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

LAST_FAILED = Path(".pytest_cache/v/cache/lastfailed")
MAX_RERUN = 10
"""More failed tests than this are not flaky; they are not run again."""


def main() -> int:
    try:
        failed = list(json.loads(LAST_FAILED.read_text()))
    except (OSError, ValueError) as error:
        print(f"rerun_failed: pytest left no list of failed tests in {LAST_FAILED}: {error}", file=sys.stderr)
        return 1
    if not 0 < len(failed) <= MAX_RERUN:
        print(f"rerun_failed: {len(failed)} tests failed; between 1 and {MAX_RERUN} are run again", file=sys.stderr)
        return 1
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
    again = {test: subprocess.run([*command, test], check=False).returncode for test in failed}
    for test, status in again.items():
        print(f"flaky: {test} (it failed, and passed when run by itself)" if status == 0 else f"failed twice: {test}")
    return int(any(again.values()))


if __name__ == "__main__":
    sys.exit(main())
