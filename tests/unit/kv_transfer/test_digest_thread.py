"""The executor for work that may hang."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from kv_transfer.mover.digest_thread import DaemonWorker

WITHIN_S = 20.0


def test_work_is_done_in_order_by_one_thread_and_answered() -> None:
    worker, done = DaemonWorker("work"), list[int]()

    def note(n: int) -> int:
        done.append(n)
        return threading.get_ident()

    answers = [worker.submit(note, n) for n in range(50)]
    failed = worker.submit(lambda: 1 // 0)
    worker.shutdown()
    assert done == list(range(50))
    assert len({answer.result(0) for answer in answers}) == 1
    with pytest.raises(ZeroDivisionError):
        failed.result(0)
    with pytest.raises(RuntimeError, match="shut down"):
        worker.submit(print)


def test_a_cancelled_future_is_not_called() -> None:
    worker, release, called = DaemonWorker("work"), threading.Event(), list[int]()
    worker.submit(release.wait, WITHIN_S)
    second = worker.submit(called.append, 2)
    worker.submit(called.append, 3)
    assert second.cancel()
    worker.shutdown(wait=False)
    assert not worker.join(0.0)
    release.set()
    assert worker.join(WITHIN_S)
    assert called == [3]


def test_a_worker_without_work_has_no_thread() -> None:
    worker = DaemonWorker("work")
    worker.shutdown()
    assert worker.join(0.0)


def test_the_end_of_the_process_does_not_wait_for_work_that_hangs() -> None:
    program = """
import threading
from kv_transfer.mover.digest_thread import DaemonWorker
begun = threading.Event()
DaemonWorker("hangs").submit(lambda: (begun.set(), threading.Event().wait()))
begun.wait()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=WITHIN_S)
