"""Text as a person would write it."""

from __future__ import annotations

import pytest

from agents.inference.postprocess import readable


@pytest.mark.parametrize(
    ("raw", "language", "text"),
    [
        (" Go forward  10 meters.", "en", "Go forward 10 meters."),
        ("", "", ""),
        ("廣州市", "zh", "广州市"),
        ("廣州市", "zh-CN", "广州市"),
        ("廣州市", "zh-Hant-TW", "廣州市"),
        ("廣州市", "zh_HK", "廣州市"),
        ("広島", "ja", "広島"),
    ],
)
def test_readable(raw: str, language: str, text: str) -> None:
    assert readable(raw, language) == text
