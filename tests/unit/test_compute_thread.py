"""The engine's one thread (replicas.engine.compute_thread)."""

from __future__ import annotations

import threading

import pytest

from replicas.engine.compute_thread import ComputeThread


def test_everything_runs_on_one_thread_in_the_order_it_was_given() -> None:
    thread = ComputeThread()
    idents = [thread.submit(threading.get_ident).result(10) for _ in range(3)]
    assert len(set(idents)) == 1
    assert idents[0] != threading.get_ident()
    assert thread.submit(lambda: thread.is_current).result(10)
    assert not thread.is_current
    thread.close()


def test_an_error_goes_to_who_asked_and_the_thread_lives_on() -> None:
    thread = ComputeThread()
    with pytest.raises(ZeroDivisionError):
        thread.submit(lambda: 1 // 0).result(10)
    assert thread.submit(lambda: 7).result(10) == 7
    thread.close()


def test_a_closed_thread_ends_after_its_work_and_may_be_closed_again() -> None:
    thread = ComputeThread()
    seen = thread.submit(threading.current_thread)
    thread.close()
    thread.close()
    seen.result(10).join(10)
    assert not seen.result().is_alive()
