"""From what an engine says to what a person would write.

An engine that writes by itself (Whisper) is only tidied: :func:`readable`. One that says words and no more gets them written by a
:class:`Writer`: numbers as digits, punctuation where it paused, capitals where a sentence begins. Nothing here changes which words were
said.
"""

from __future__ import annotations

import contextlib
import logging
import re
import shutil
import tempfile
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

__all__ = ["Writer", "WritingOptions", "Written", "joined", "readable", "run_on"]

log = logging.getLogger(__name__)

#: Where Chinese is written in traditional characters. Models write either, whoever speaks.
_TRADITIONAL: Final = frozenset({"hant", "tw", "hk", "mo"})


def readable(raw_text: str, language: str) -> str:
    """Return a final's text as a person would write it.

    Args:
        raw_text: as the engine gave it.
        language: its language, BCP 47: Chinese is written in simplified characters unless the tag says otherwise; empty when unknown.
    """
    text = " ".join(raw_text.split())
    first, *rest = language.lower().replace("_", "-").split("-")
    if first == "zh" and not _TRADITIONAL.intersection(rest):
        return str(_to_simplified().convert(text))
    return text


@cache
def _to_simplified() -> Any:
    from opencc import OpenCC

    return OpenCC("t2s")


# ---------------------------------------------------------------------- units to text

_SPECIAL: Final = re.compile(r"</?(?:blank|unk|context|sos|eos|sos/eos|noise|space)>", re.IGNORECASE)
_CJK: Final = r"\u3400-\u4dbf\u4e00-\u9fff"
_CHINESE: Final = re.compile(f"[{_CJK}]")
#: Blanks between words of which one is Chinese: words are told apart there without.
_NEEDLESS: Final = re.compile(rf"(?<=[{_CJK}]) +| +(?=[{_CJK}])")


def joined(units: str) -> str:
    """Return units as text: ``▁`` begins a word, what is not speech is left out, Chinese is written without blanks.

    Args:
        units: a model's units one behind the other, or words with blanks between them.

    >>> joined("超哥▁is▁the▁most▁HANDSOME")
    '超哥 is the most handsome'
    >>> joined(" 吴迪 也 好帅")
    '吴迪也好帅'
    """
    text = _NEEDLESS.sub("", _SPECIAL.sub("", units).strip()).replace("▁", " ")
    return " ".join(text.split()).lower()


#: What is written without blanks around it: Chinese characters, and the wide stops and commas that come with them.
_WIDE: Final = re.compile(rf"[{_CJK}\u3001-\u303f\uff01-\uff60]")


def run_on(texts: Iterable[str]) -> str:
    """Return texts one behind the other: a blank between two words, none beside Chinese.

    >>> run_on(["Good morning.", "Two lattes?"])
    'Good morning. Two lattes?'
    >>> run_on(["你好。", "两杯拿铁。", "OK"])
    '你好。两杯拿铁。OK'
    """
    whole = ""
    for text in filter(None, texts):
        beside_chinese = not whole or _WIDE.match(whole[-1]) or _WIDE.match(text[0])
        whole += text if beside_chinese else f" {text}"
    return whole


# ---------------------------------------------------------------------- writing

#: A pause between two words that a reader should see, and one that ends a sentence. CTC puts a word's time at its peak, so a pause looks
#: longer than it was by about a word.
_COMMA_MS: Final = 500
_STOP_MS: Final = 1_100
_AUXILIARY: Final = r"is|are|am|was|were|do|does|did|can|could|will|would|shall|should|has|have|had|may"
_SUBJECT: Final = r"it|he|she|this|that|these|those|there|the|a|an|my|your|his|her|our|their|any(?:one|body|thing)|some(?:one|body|thing)"
#: A question in English begins with a word that asks and a verb, or with a verb and its subject; commands ("do it") do neither.
_ASKING: Final = re.compile(
    r"(?:who|whom|whose|what|which|when|where|why|how)"
    rf"(?:'(?:s|re|d|ll) | +(?:{_AUXILIARY}|much|many|long|old|far|about|kind|time|else)\b)"
    rf"|(?:{_AUXILIARY}) +(?:i|you|we|they)\b"
    rf"|(?:is|are|was|were|does|did|can|could|will|would|shall|should|has) +(?:{_SUBJECT})\b"
)
#: In Chinese it ends with one.
_ASKING_CHINESE: Final = re.compile(
    r"(?:吗|呢|么|什么|多少|几[个点号天年月块岁]|哪[里儿个些]?|谁|为什么|怎么样?|如何|是不是|有没有|能不能|可不可以)(?:啊|呀)?$"
)
#: Words that no sentence ends with: whoever pauses behind one looks for the next.
_UNFINISHED: Final = frozenset({"a", "an", "the", "my", "your", "our", "their", "every", "and", "or"})
#: Words that no clause ends with. "In", "on" and their like are not among them ("come in, please").
_LEADING_ON: Final = _UNFINISHED | {"of", "with", "without", "for", "from", "to", "at", "into", "than"}
_I: Final = re.compile(r"\bi(?=$|[ ,.?!]|'(?:m|ve|ll|d)\b)")


@dataclass(frozen=True, slots=True)
class WritingOptions:
    """What to do beyond joining words.

    Attributes:
        numbers: write numbers, dates, amounts as digits (inverse text normalisation).
        punctuation: set commas, stops and question marks.
        capitals: begin sentences with a capital, write "I".
    """

    numbers: bool = True
    punctuation: bool = True
    capitals: bool = True


@dataclass(frozen=True, slots=True)
class Written:
    """A word to be written.

    Attributes:
        text: the word, in lower case, or a Chinese character.
        start_ms: when it starts.
        end_ms: when it ends.
    """

    text: str
    start_ms: int
    end_ms: int


class Writer:
    """Writes what was said. A pure function of its input and the options; several threads may use it.

    Args:
        options: what to do.
        cache_dir: where the compiled English grammar is kept (1.2 MB, compiled in 2 s); unset: nowhere.
    """

    def __init__(self, options: WritingOptions | None = None, cache_dir: Path | None = None) -> None:
        self._options = options or WritingOptions()
        self._cache_dir = cache_dir
        self._grammars: dict[str, Any] = {}
        self._lock = threading.Lock()

    def write(self, words: Sequence[Written], language: str = "", *, complete: bool = True) -> str:
        """Return what was said as text.

        Args:
            words: in order.
            language: BCP 47; empty: told by the script.
            complete: the speaker came to an end; else the text may break off anywhere and gets no final stop.
        """
        if not words:
            return ""
        code = language.lower().replace("_", "-").split("-")[0]
        if code not in ("zh", "en"):
            chinese = sum(_CHINESE.match(word.text) is not None for word in words)
            code = "zh" if 2 * chinese >= len(words) else code or "en"
        text = ""
        begins = True
        clauses = self._clauses(words, english=code == "en")
        for clause, pause in clauses:
            plain = joined(" ".join(clause))
            written = self._numbers(plain, code)
            if self._options.capitals and code != "zh":
                written = _I.sub("I", written)
                if begins:
                    written = written[:1].upper() + written[1:]
            last = pause is None
            broken_off = code == "en" and clause[-1] in _UNFINISHED
            ends = complete and not broken_off if last else pause == _STOP_MS
            mark = self._mark(plain, code, ends=ends, last=last)
            text += written + mark + ("" if last or (code == "zh" and mark) else " ")
            begins = ends
        return text

    def warm_up(self, language: str) -> None:
        """Load a language's grammar, so that the first final does not wait for it."""
        if self._options.numbers:
            self._grammar(language)

    def _clauses(self, words: Sequence[Written], *, english: bool) -> list[tuple[list[str], int | None]]:
        """Return the words between pauses that a reader should see, each group with the pause behind it; None: the end."""
        if not self._options.punctuation:
            return [([word.text for word in words], None)]
        clauses: list[tuple[list[str], int | None]] = []
        clause: list[str] = []
        for word, following in zip(words, [*words[1:], None], strict=True):
            clause.append(word.text)
            gap_ms = 0 if following is None else following.start_ms - word.end_ms
            pause = _STOP_MS if gap_ms >= _STOP_MS else _COMMA_MS if gap_ms >= _COMMA_MS else 0
            if english and word.text in (_UNFINISHED if pause == _STOP_MS else _LEADING_ON):
                pause = 0
            if following is None or pause:
                clauses.append((clause, None if following is None else pause))
                clause = []
        return clauses

    def _mark(self, clause: str, language: str, *, ends: bool, last: bool) -> str:
        """Return the punctuation behind a clause."""
        if not self._options.punctuation or (last and not ends):
            return ""
        chinese = language == "zh"
        if not ends:
            return "，" if chinese else ","  # noqa: RUF001 Chinese punctuation is meant
        if (_ASKING_CHINESE.search(clause) if chinese else _ASKING.match(clause)) is not None:
            return "？" if chinese else "?"  # noqa: RUF001
        return "。" if chinese else "."

    def _numbers(self, text: str, language: str) -> str:
        grammar = self._grammar(language) if self._options.numbers else None
        if grammar is None:
            return text
        try:
            with self._lock:
                return str(grammar.normalize(text)) or text
        except Exception:  # the grammar's own kinds; the words as they were said are right as well
            log.warning("%r cannot be written with digits; it stays as it was said", text, exc_info=log.isEnabledFor(logging.DEBUG))
            return text

    def _grammar(self, language: str) -> Any:
        with self._lock:
            if language not in self._grammars:
                self._grammars[language] = self._load(language)
            return self._grammars[language]

    def _load(self, language: str) -> Any:
        """Return the rules of a language, or None where there are none."""
        # The package logs what it loads, to a handler of its own.
        logging.getLogger("wetext").addHandler(logging.NullHandler())
        logging.getLogger("wetext").setLevel(logging.WARNING)
        if language == "zh":
            from itn.chinese.inverse_normalizer import InverseNormalizer as Chinese

            return Chinese()
        if language == "en":
            return self._english()
        return None

    def _english(self) -> Any:
        """Return the English rules. They come uncompiled; the result is kept, whole or not at all, as several processes may want it."""
        from itn.english.inverse_normalizer import InverseNormalizer as English

        kept = None if self._cache_dir is None else self._cache_dir / "itn" / f"en-{version('WeTextProcessing')}"
        if kept is not None and kept.is_dir():
            return English(cache_dir=str(kept))
        with tempfile.TemporaryDirectory() as work:
            grammar = English(cache_dir=work)
            if kept is not None:
                with contextlib.suppress(OSError):  # a cache that cannot be written, or is by now, costs nothing but time
                    _keep(Path(work), kept)
        return grammar


def _keep(work: Path, kept: Path) -> None:
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kept.parent) as beside:
        copy = shutil.copytree(work, Path(beside) / kept.name)
        copy.rename(kept)
