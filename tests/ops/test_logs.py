"""Loggers that say less for a while."""

from __future__ import annotations

import logging

import pytest

from ops.logs import quietened


def test_they_say_less_and_then_as_much_as_before(caplog: pytest.LogCaptureFixture) -> None:
    loud, quiet = logging.getLogger("test.loud"), logging.getLogger("test.quiet")
    with quietened(logging.ERROR, "test.quiet"):
        for log in (loud, quiet):
            log.warning("a warning of %s", log.name)
            log.error("an error of %s", log.name)
    quiet.warning("a late warning")
    assert caplog.messages == ["a warning of test.loud", "an error of test.loud", "an error of test.quiet", "a late warning"]


def test_they_are_left_as_they_were_by_a_failure() -> None:
    log = logging.getLogger("test.failing")
    log.setLevel(logging.INFO)
    with pytest.raises(RuntimeError), quietened(logging.CRITICAL, "test.failing", ""):
        raise RuntimeError
    assert (log.level, logging.root.level) == (logging.INFO, logging.WARNING)
