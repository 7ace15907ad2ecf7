"""What a run achieved: every frame accounted for, how late frames and words came, and how many words were wrong.

Pure bookkeeping over raw records: it shares no code with the pipeline and none of its rules of repair, so that what the pipeline loses,
repeats or delays shows up here. Two clocks, always apart:

* *frame latency*: capture of a frame's last sample until its Coverage record could be read;
* *word latency*: the end of a spoken word in the audio until the first partial or final that holds it could be read.
"""

from __future__ import annotations

import os
import platform
import re
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from schemas.records import SAMPLE_RATE_HZ, Coverage, Partial, Session, SessionRecord, Transcript

__all__ = [
    "Latency",
    "LostSpan",
    "Measurement",
    "Report",
    "SpokenWord",
    "comparable",
    "cores",
    "latency_of",
    "processor",
    "word_errors",
]

#: The promise for 95 % of frames.
PROMISED_FRAME_LATENCY_MS: Final = 300
#: A recogniser may write a word before its last sound is over, and reference times are good to about this.
_AHEAD_SAMPLES: Final = 300 * SAMPLE_RATE_HZ // 1_000

_DIGIT: Final = re.compile(r"\d")
_ONE: Final = re.compile(r"\bone\b")
_US_PER_MS: Final = 1_000
_US_PER_S: Final = 1_000_000
_STAGES: Final = {"vad": 0, "features": 1, "inference": 2}
#: Stamps in the order in which audio passes them, and the hop that ends with each.
_HOPS: Final = (
    ("recorder", "enqueued_us"),
    ("vad", "vad_us"),
    ("features", "features_us"),
    ("inference", "inference_us"),
)


class SpokenWord(NamedTuple):
    """A word that is known to be spoken, and where in the session it ends, in 16 kHz samples."""

    text: str
    end_sample: int


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """A distribution of latencies in ms; all None where nothing was measured."""

    p50: float | None = None
    p95: float | None = None
    p99: float | None = None
    max: float | None = None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured. These names are the keys of the JSON that commands write, and stay as they are.

    Attributes:
        channels: channels that were played.
        sessions: calls' channels that were played, one after another on each channel.
        seconds: audio sent, over all channels.
        frames_sent: frames that recorders sent.
        frames_answered: frames sent that a Coverage record answered.
        frames_lost: frames sent that none answered.
        frames_duplicated: answers beyond a frame's first, by the same owner or by another stage.
        frames_replayed: answers beyond a frame's first by a later owner of the partition, as takeovers make them.
        frames_unknown: answers to frames that nobody sent.
        answers_fenced: answers that a newer owner's had overtaken, which readers drop.
        frame_latency_ms: from a frame's capture until its answer could be read.
        frames_within_300_ms: the share of frames answered within the promised 300 ms.
        hop_latency_ms: the same time in parts: until the recorder had sent it, until each stage had passed it on, until it was read.
        word_latency_ms: from a word's end in the audio until a text that holds it could be read.
        words_spoken: words in the audio that was sent, normalised one by one ("I'd" counts as two).
        words_timed: words of these that appeared in a text, which ``word_latency_ms`` is of.
        words_written: words in the finals.
        wer: word error rate after Whisper's normalisation of English, over all sessions; None where nothing was said.
        finals: finals read.
        finals_conflicting: finals that differ from an earlier one of the same segment.
        sessions_closed: sessions whose end was written.
        engine: what recognised.
        model_digest: with which model.
        processor: on what.
        cores: how many of them this process may use.
    """

    channels: int
    sessions: int
    seconds: float
    frames_sent: int
    frames_answered: int
    frames_lost: int
    frames_duplicated: int
    frames_replayed: int
    frames_unknown: int
    answers_fenced: int
    frame_latency_ms: Latency
    frames_within_300_ms: float | None
    hop_latency_ms: dict[str, Latency]
    word_latency_ms: Latency
    words_spoken: int
    words_timed: int
    words_written: int
    wer: float | None
    finals: int
    finals_conflicting: int
    sessions_closed: int
    engine: str
    model_digest: str
    processor: str
    cores: int

    def to_json(self) -> bytes:
        """Return it as JSON, indented."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"


class LostSpan(NamedTuple):
    """Audio that nobody answered for, in 16 kHz samples from the session's start."""

    channel_id: str
    session_id: str
    start_sample: int
    end_sample: int


class WordErrors(NamedTuple):
    """The words of a reference, those of a hypothesis, and their errors: substitutions, deletions and insertions."""

    reference_words: int
    hypothesis_words: int
    errors: int

    @property
    def rate(self) -> float | None:
        """Errors per reference word; None without any."""
        return self.errors / self.reference_words if self.reference_words else None


def word_errors(references: Sequence[str], hypotheses: Sequence[str], *, digits_apart: bool = False) -> WordErrors:
    """Compare texts pairwise by jiwer, after Whisper's normalisation of English (numbers, spelling, punctuation, case).

    Args:
        references: what was said.
        hypotheses: what was written.
        digits_apart: count each digit as a word. Spelt numbers become one word by the normalisation, so that "four two" and "4 2" would
            differ in all, and a wrong digit of a telephone number would be the whole number.
    """
    import jiwer

    said, written = ([comparable(text, digits_apart=digits_apart) for text in texts] for texts in (references, hypotheses))
    if not said:
        return WordErrors(0, 0, 0)
    found = jiwer.process_words(said, written)
    reference_words = found.hits + found.substitutions + found.deletions
    errors = found.substitutions + found.deletions + found.insertions
    return WordErrors(reference_words, found.hits + found.substitutions + found.insertions, errors)


def comparable(text: str, *, digits_apart: bool = False) -> str:
    """Return a text as texts are compared, see `word_errors`."""
    normal: str = _normaliser()(text)
    # The normalisation leaves some a "one", as in "one of them".
    return " ".join(_DIGIT.sub(r" \g<0> ", _ONE.sub("1", normal)).split()) if digits_apart else normal


def latency_of(values_ms: NDArray[np.float64] | Sequence[float]) -> Latency:
    """Return the distribution of latencies, to a tenth of a ms."""
    if len(values_ms) == 0:
        return Latency()
    p50, p95, p99, most = (round(float(value), 1) for value in np.percentile(values_ms, (50, 95, 99, 100)))
    return Latency(p50=p50, p95=p95, p99=p99, max=most)


def processor() -> str:
    """Return the processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def cores() -> int:
    """Return how many processor cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Measurement:
    """Takes what was sent and every record that came back, in the order of reading, and says what became of it."""

    def __init__(self) -> None:
        self._sessions: dict[str, _Session] = {}

    def expect(self, session_id: str, channel_id: str, words: Iterable[SpokenWord] = ()) -> None:
        """Announce a session, with what is said in it. Only announced sessions are measured."""
        self._sessions[session_id] = _Session(channel_id, tuple(words))

    def forget(self, session_id: str) -> None:
        """Take back that a session was announced: it never began."""
        self._sessions.pop(session_id, None)

    def sent(self, session_id: str, start_sample: int, end_sample: int) -> None:
        """Note a frame that its recorder has sent."""
        session = self._sessions[session_id]
        session.sent_starts.append(start_sample)
        session.sent_ends.append(end_sample)

    def take(self, record: SessionRecord, read_us: int) -> None:
        """Take a record from a result topic, read at a Unix time in microseconds."""
        session = self._sessions.get(record.session_id)
        if session is None:
            return
        match record:
            case Coverage():
                session.take_coverage(record, read_us)
            case Partial():
                session.hear(record.position_samples, record.end_sample, record.text, read_us)
            case Transcript(kind="final"):
                session.take_final(record, read_us)
            case Session():
                session.closed |= record.state == "closed"
            case _:
                pass

    def unsettled(self) -> list[str]:
        """Return the sessions whose end has not been written yet, or some of whose frames have not been answered."""
        return [session_id for session_id, session in self._sessions.items() if not session.closed or session.account().lost]

    def lost(self) -> list[LostSpan]:
        """Return the audio that nobody answered for, neighbouring frames joined."""
        return [
            LostSpan(session.channel_id, session_id, start, end)
            for session_id, session in self._sessions.items()
            for start, end in _joined(session.account().lost_frames)
        ]

    def report(self) -> Report:
        """Return what was measured so far."""
        sessions = list(self._sessions.values())
        accounts = [session.account() for session in sessions]
        frame_ms = np.concatenate([account.latency_ms for account in accounts]) if accounts else np.empty(0)
        hop_ms = np.concatenate([account.hop_ms for account in accounts]) if accounts else np.empty((0, len(_HOPS) + 1))
        word_ms = [latency for session in sessions for latency in session.word_latencies_ms()]
        spoken = [session.words_sent() for session in sessions]
        errors = word_errors([" ".join(word.text for word in words) for words in spoken], [session.text() for session in sessions])
        finals = [final for session in sessions for final in session.finals.values()]
        return Report(
            channels=len({session.channel_id for session in sessions}),
            sessions=len(sessions),
            seconds=round(sum(session.length_samples for session in sessions) / SAMPLE_RATE_HZ, 3),
            frames_sent=sum(account.sent for account in accounts),
            frames_answered=sum(account.answered for account in accounts),
            frames_lost=sum(account.lost for account in accounts),
            frames_duplicated=sum(account.duplicated for account in accounts),
            frames_replayed=sum(account.replayed for account in accounts),
            frames_unknown=sum(account.unknown for account in accounts),
            answers_fenced=sum(account.fenced for account in accounts),
            frame_latency_ms=latency_of(frame_ms),
            frames_within_300_ms=round(float(np.mean(frame_ms <= PROMISED_FRAME_LATENCY_MS)), 4) if len(frame_ms) else None,
            hop_latency_ms={
                name: latency_of(column[~np.isnan(column)]) for name, column in zip((*dict(_HOPS), "reader"), hop_ms.T, strict=True)
            },
            word_latency_ms=latency_of(word_ms),
            words_spoken=sum(token.end_sample <= session.length_samples for session in sessions for token in session.tokens),
            words_timed=len(word_ms),
            words_written=errors.hypothesis_words,
            wer=None if errors.rate is None else round(errors.rate, 4),
            finals=len(finals),
            finals_conflicting=sum(session.conflicts for session in sessions),
            sessions_closed=sum(session.closed for session in sessions),
            engine=next((final.engine for final in finals if final.engine), ""),
            model_digest=next((final.model_digest for final in finals if final.model_digest), ""),
            processor=processor(),
            cores=cores(),
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Account:
    """A session's frames, settled. ``latency_ms`` and ``hop_ms`` are of the frames answered, in their order."""

    sent: int
    answered: int
    lost_frames: NDArray[np.int64]
    duplicated: int
    replayed: int
    unknown: int
    fenced: int
    latency_ms: NDArray[np.float64]
    hop_ms: NDArray[np.float64]

    @property
    def lost(self) -> int:
        """How many frames nobody answered for."""
        return len(self.lost_frames)


def _positions() -> array[int]:
    return array("q")


@dataclass(slots=True, eq=False)
class _Session:
    """Everything known of one session; arrays, for a frame is 5 to 50 records a second and channel."""

    channel_id: str
    words: tuple[SpokenWord, ...]
    closed: bool = False
    conflicts: int = 0
    finals: dict[int, Transcript] = field(default_factory=dict)
    sent_starts: array[int] = field(default_factory=_positions)
    sent_ends: array[int] = field(default_factory=_positions)
    #: One row for each answer: start, end, stage, epoch, read_us, captured_us, then the stamps of ``_HOPS``.
    answers: array[int] = field(default_factory=_positions)
    #: The words after normalisation: a word may become two, or none.
    tokens: list[SpokenWord] = field(init=False)
    #: When each token could first be read, Unix time in microseconds; 0: not yet.
    heard_us: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = [SpokenWord(token, word.end_sample) for word in self.words for token in _tokens(word.text)]
        self.heard_us = [0] * len(self.tokens)

    @property
    def length_samples(self) -> int:
        """How much audio was sent."""
        return max(self.sent_ends, default=0)

    def take_coverage(self, record: Coverage, read_us: int) -> None:
        stamps = record.stamps
        self.answers.extend((record.position_samples, record.end_sample, _STAGES[record.stage], record.epoch, read_us, stamps.captured_us))
        self.answers.extend(getattr(stamps, stamp) for _, stamp in _HOPS)

    def take_final(self, record: Transcript, read_us: int) -> None:
        first = self.finals.setdefault(record.segment, record)
        if (first.text, first.position_samples, first.end_sample) != (record.text, record.position_samples, record.end_sample):
            self.conflicts += 1
        self.hear(record.position_samples, record.end_sample, record.text, read_us)

    def hear(self, start_sample: int, end_sample: int, text: str, read_us: int) -> None:
        """Note which of the words spoken in a stretch of audio a text holds."""
        import jiwer

        at = [n for n, token in enumerate(self.tokens) if start_sample < token.end_sample <= end_sample + _AHEAD_SAMPLES]
        written = [token for word in text.split() for token in _tokens(word)]
        if not written or all(self.heard_us[n] for n in at):
            return
        aligned = jiwer.process_words(" ".join(self.tokens[n].text for n in at), " ".join(written)).alignments[0]
        for chunk in aligned:
            if chunk.type == "equal":
                for n in at[chunk.ref_start_idx : chunk.ref_end_idx]:
                    self.heard_us[n] = self.heard_us[n] or read_us

    def text(self) -> str:
        """Return the finals, in the order of their audio."""
        return " ".join(final.text for final in sorted(self.finals.values(), key=lambda final: final.position_samples))

    def words_sent(self) -> list[SpokenWord]:
        """Return the words that were spoken before the recorder stopped."""
        return [word for word in self.words if word.end_sample <= self.length_samples]

    def word_latencies_ms(self) -> list[float]:
        """Return how long after its end in the audio each word could be read."""
        rows = self._rows()
        if not len(rows):
            return []
        # The recorder's clock as a function of the position: captured_us is when a frame's last sample was.
        ends, first = np.unique(rows[:, 1], return_index=True)
        captured_us = rows[first, 5]
        latencies = []
        for token, heard_us in zip(self.tokens, self.heard_us, strict=True):
            if heard_us:
                frame = min(int(np.searchsorted(ends, token.end_sample)), len(ends) - 1)
                spoken_us = captured_us[frame] - (ends[frame] - token.end_sample) * _US_PER_S / SAMPLE_RATE_HZ
                latencies.append(float(heard_us - spoken_us) / _US_PER_MS)
        return latencies

    def account(self) -> _Account:
        """Settle which frames were answered, by whom, and how late."""
        rows = self._rows()
        stages, epochs = rows[:, 2], rows[:, 3]
        # Readers keep the highest epoch of each writing stage and drop what comes from lower ones after it.
        current = np.ones(len(rows), bool)
        for stage in _STAGES.values():
            of_stage = stages == stage
            current[of_stage] = epochs[of_stage] == np.maximum.accumulate(epochs[of_stage])
        kept = rows[current]

        frames, first = np.unique(kept[:, :2], axis=0, return_index=True)
        by_stage, by_owner = (len(np.unique(kept[:, :columns], axis=0)) for columns in (3, 4))
        sent = np.array([self.sent_starts, self.sent_ends], np.int64).T.reshape(-1, 2)
        was_sent = np.isin(_keys(frames), _keys(sent))
        answered = kept[first[was_sent]]
        stamps = np.concatenate([answered[:, 5:], answered[:, 4:5]], axis=1).astype(np.float64)
        stamps[stamps == 0] = np.nan
        known_before = _last_known(stamps)
        return _Account(
            sent=len(sent),
            answered=len(answered),
            lost_frames=sent[~np.isin(_keys(sent), _keys(frames))],
            duplicated=len(kept) - by_owner + by_stage - len(frames),
            replayed=by_owner - by_stage,
            unknown=int(np.sum(~was_sent)),
            fenced=int(np.sum(~current)),
            latency_ms=(answered[:, 4] - answered[:, 5]) / _US_PER_MS,
            hop_ms=(stamps[:, 1:] - known_before[:, :-1]) / _US_PER_MS,
        )

    def _rows(self) -> NDArray[np.int64]:
        return np.array(self.answers, np.int64).reshape(-1, 6 + len(_HOPS))


def _joined(frames: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Return spans without the borders that neighbours share.

    >>> _joined(np.array([[0, 5], [5, 9], [12, 20]]))
    [(0, 9), (12, 20)]
    """
    if not len(frames):
        return []
    begins = np.concatenate([[True], frames[1:, 0] != frames[:-1, 1]])
    starts = np.flatnonzero(begins)
    ends = np.concatenate([starts[1:] - 1, [len(frames) - 1]])
    return [(int(frames[first, 0]), int(frames[last, 1])) for first, last in zip(starts, ends, strict=True)]


def _keys(frames: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return one number for each (start, end); frames are shorter than 2**20 samples (65 s)."""
    return (frames[:, 0] << 20) + (frames[:, 1] - frames[:, 0])


def _last_known(stamps: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return for each column the newest stamp up to it, for stages that audio went past (silence never meets the decoder).

    >>> _last_known(np.array([[1.0, np.nan, 3.0]]))
    array([[1., 1., 3.]])
    """
    columns = np.where(np.isnan(stamps), 0, np.arange(stamps.shape[1]))
    return np.take_along_axis(stamps, np.maximum.accumulate(columns, axis=1), axis=1)


@cache
def _normaliser() -> Any:
    from whisper_normalizer.english import EnglishTextNormalizer

    return EnglishTextNormalizer()


@lru_cache(maxsize=65_536)
def _tokens(word: str) -> tuple[str, ...]:
    """Return a word as the normaliser writes it alone, so that where it stands is not lost."""
    return tuple(_normaliser()(word).split())
