import asyncio

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agents.features.fbank import Fbank
from agents.vad.session import LONGEST_FILLED_GAP_SAMPLES
from agents.vad.snapshot import SnapshotError
from ops.demo.calls import mulaw
from schemas.records import (
    AudioFrame,
    Coverage,
    FrameMark,
    Gap,
    Heartbeat,
    SegmentCancelled,
    SegmentEnd,
    SegmentStart,
    SessionEnd,
    SessionStart,
    SpeechChunk,
    Stamps,
    Timeout,
    VersionChange,
)
from streams.core import Input, SessionKey, SessionState

CHUNK, LOOKAHEAD = 3_200, 240


def spans_of(ear):
    return [(record.start_sample, record.position_samples) for record in ear.of(SegmentEnd)]


def frames_of(call):
    return [record for record in call.records if isinstance(record, AudioFrame)]


# What is said of real audio


async def test_no_first_and_no_last_word_is_lost(call, ear, load):
    # The words by ear and eye: "go" begins at 0.47 s, "meters" ends at 2.2 s; the Chinese sentence lies at 0.45 to 3.6 s.
    for name, first_s, last_s in (("en/goforward.wav", 0.47, 2.2), ("zh/aishell1_BAC009S0724W0121.wav", 0.45, 3.6)):
        heard = await ear().hear(call().start().pcm(load(name)).end().inputs)
        spans = spans_of(heard)
        assert spans[0][0] / 16_000 < first_s - 0.1
        assert spans[-1][1] / 16_000 > last_s + 0.1
        assert sum(end - start for start, end in spans) / 16_000 < last_s - first_s + 1


def weak_sound(kind, rng):
    """A weak consonant, 120 ms: 25 to 30 dB under the vowel that follows."""
    length = 1_920
    if kind == "m":  # a murmur, as at the start of "没有"
        seconds = np.arange(length) / 16_000
        sound = sum(np.sin(2 * np.pi * 125 * order * seconds) / order**2 for order in range(1, 5))
    else:  # hiss: of an "s" above 4 kHz, of an "f" everywhere
        spectrum = np.fft.rfft(rng.standard_normal(length))
        spectrum[: round(4_000 * length / 16_000) if kind == "s" else round(1_000 * length / 16_000)] = 0
        sound = np.fft.irfft(spectrum, length)
    return sound / np.abs(sound).max()


@pytest.mark.parametrize("kind", ["s", "f", "m"])
@pytest.mark.parametrize("name", ["en/librispeech_1995-1837-0001.wav", "zh/aishell1_BAC009S0724W0121.wav"])
@pytest.mark.parametrize("line", ["wide", "telephone"])
async def test_preroll_keeps_a_weak_first_sound(call, ear, load, kind, name, line):
    rng = np.random.default_rng(13)
    words = load(name).astype(np.float64)
    loud = np.flatnonzero(np.abs(words) > 0.2 * np.abs(words).max())[0]
    words = words[loud - 160 :]
    weak = weak_sound(kind, rng) * np.abs(words).max() * 10 ** (-25 / 20)
    quiet = 16_000
    audio = np.concatenate([np.zeros(quiet), weak, words, np.zeros(quiet)]) + rng.normal(0, 5, 2 * quiet + len(weak) + len(words))
    pcm = audio.clip(-32_768, 32_767).astype("<i2")
    ours = call().start()
    if line == "telephone":
        ours.g711(mulaw(pcm[::2]).tobytes(), 1_600)
    else:
        ours.pcm(pcm)
    heard = await ear().hear(ours.end().inputs)
    start, _ = spans_of(heard)[0]
    assert quiet - 8_000 < start <= quiet
    first = heard.of(SpeechChunk)[0]
    assert first.position_samples == start


async def test_a_call_that_begins_with_speech_is_heard_from_its_first_word(call, ear, load):
    heard = await ear().hear(call().start().pcm(load("en/librispeech_1995-1837-0001.wav")).end().inputs)
    assert spans_of(heard)[0][0] < 0.14 * 16_000  # where the label says that it begins


async def test_a_word_that_the_call_ends_in_is_kept_to_its_end(call, ear, load):
    cut = load("en/goforward.wav")[:26_001]
    heard = await ear().hear(call().start().pcm(cut).end().inputs)
    assert spans_of(heard)[-1][1] == len(cut)
    assert heard.of(SegmentEnd)[-1].reason == "session_end"
    last = heard.of(SpeechChunk)[-1]
    assert np.array_equal(np.frombuffer(last.pcm, "<i2"), cut[last.position_samples :])


async def test_a_telephone_prompt_is_heard_from_its_first_word_to_its_last(call, ear, prompt):
    heard = await ear().hear(call().start().g711(prompt, 1_600).end().inputs)
    assert spans_of(heard)[0][0] < 0.2 * 16_000
    assert spans_of(heard)[-1][1] > 4.9 * 16_000


@pytest.mark.parametrize("vad", ["fusion", "silero"])
async def test_noise_is_mostly_not_speech(call, ear, load, vad):
    rng = np.random.default_rng(11)
    clicks = np.zeros(80_000)
    clicks[rng.integers(0, 80_000, 40)] = rng.normal(0, 12_000, 40)
    keyboard = np.convolve(clicks, np.exp(-np.arange(160) / 30) * rng.normal(0, 1, 160), "same").clip(-32_000, 32_000)
    for noise in (load("noise/doing_the_dishes_4s.wav"), keyboard, rng.normal(0, 1_000, 80_000), np.zeros(48_000)):
        heard = await ear(vad=vad).hear(call().start().pcm(noise.astype("<i2")).end().inputs)
        assert sum(end - start for start, end in spans_of(heard)) < 0.1 * len(noise)


async def test_a_steady_tone_is_silence_in_any_framing(call, ear):
    tone = (8_000 * np.sin(2 * np.pi * 1_000 * np.arange(20 * 16_000) / 16_000)).astype("<i2")
    for frames in (3_200, (320, 480, 1_111)):
        heard = await ear().hear(call().start().pcm(tone, frames).end().inputs, step=10)
        assert not heard.of(SegmentEnd)
        assert not heard.of(SegmentCancelled)


# The contract of chunks


@pytest.mark.parametrize("vad", ["fusion", "off"])
async def test_chunks_hold_the_original_audio_of_their_segment(call, ear, speech, vad):
    heard = await ear(vad=vad, vad_max_segment_ms=6_000).hear(call().start().pcm(speech).end().inputs)
    ends = heard.of(SegmentEnd)
    assert len(ends) > 3
    for end in ends:
        chunks = [chunk for chunk in heard.of(SpeechChunk) if chunk.segment == end.segment]
        assert [chunk.chunk for chunk in chunks] == list(range(len(chunks)))
        for chunk in chunks:
            start = end.start_sample + chunk.chunk * CHUNK
            pcm = speech[start : min(start + CHUNK + LOOKAHEAD, end.position_samples)]
            assert chunk.position_samples == start
            assert chunk.pcm == pcm.tobytes()
            assert chunk.hops == min(20, -(-(end.position_samples - start) // 160))
        assert sum(chunk.hops for chunk in chunks) == -(-(end.position_samples - end.start_sample) // 160)


async def test_without_detectors_all_audio_is_segments_up_to_the_cap(call, ear, speech):
    heard = await ear(vad="off").hear(call().start().pcm(speech, 3_001).end().inputs, step=3)
    assert spans_of(heard) == [(begin, min(begin + 320_000, len(speech))) for begin in range(0, len(speech), 320_000)]


async def test_without_detectors_no_audio_is_too_short(call, ear, speech):
    heard = await ear(vad="off").hear(call().start().pcm(speech[:2_000]).end().inputs)
    assert spans_of(heard) == [(0, 2_000)]


async def test_records_come_in_the_order_of_a_session(call, ear, speech):
    heard = await ear().hear(call().start().pcm(speech).end().inputs)
    flow = [record for record in heard.records if not isinstance(record, (Coverage, FrameMark))]
    assert isinstance(flow[0], SessionStart)
    assert isinstance(flow[-1], SessionEnd)
    open_segment = None
    for record in flow[1:-1]:
        if isinstance(record, SegmentStart):
            assert open_segment is None
            open_segment = record.segment
        else:
            assert record.segment == open_segment
            if isinstance(record, (SegmentEnd, SegmentCancelled)):
                open_segment = None


async def test_speech_flows_while_it_is_spoken(call, ear, load):
    # Each frame well inside speech brings a chunk at once, whatever the detectors still owe: their delay is no longer than the tail.
    heard = await ear().hear(call().start().pcm(load("en/librispeech_1995-1837-0001.wav")).end().inputs)
    by_cause = {}
    for cause, record in heard.causes:
        if isinstance(record, SpeechChunk):
            by_cause.setdefault(cause.record.position_samples, []).append(record)
    assert all(by_cause[position] for position in range(9_600, 32_000, 3_200))
    newest = max(record.position_samples + len(record.pcm) // 2 for record in by_cause[28_800])
    assert 32_000 - newest < CHUNK


# Answers


@pytest.mark.parametrize("frames", [640, 3_200, 8_000, (1, 159, 3_333)])
async def test_every_frame_is_answered_once_at_once_and_never_ahead_of_the_decoder(call, ear, answers, speech, frames):
    ours = call().start().pcm(speech, frames).end()
    heard = ear()
    inputs = ours.inputs
    for item in inputs:
        before = len(heard.records)
        await heard.core.step([item])
        said = heard.records[before:]
        if isinstance(item.record, AudioFrame):
            ((start, end, stage),) = answers(said)
            assert (start, end) == (item.record.position_samples, item.record.position_samples + len(item.record.payload) // 2)
            carries = [record for record in said if isinstance(record, (SpeechChunk, SegmentEnd, SegmentCancelled))]
            if carries:
                assert carries[-1].frames
                assert stage == "inference"
        else:
            assert not answers(said)
    assert heard.finished == inputs
    assert heard.of(Coverage)
    # A frame called silence lies in no segment that was open when it ended.
    opened_us = {record.segment: cause.offset for cause, record in heard.causes if isinstance(record, SegmentStart)}
    closed_us = {record.segment: cause.offset for cause, record in heard.causes if isinstance(record, (SegmentEnd, SegmentCancelled))}
    for cause, record in heard.causes:
        if isinstance(record, Coverage):
            assert not any(opened_us[segment] <= cause.offset <= closed_us[segment] for segment in opened_us)
            assert (record.stage, record.decoded_to_sample) == ("vad", record.end_sample)


async def test_strange_frames_are_answered_and_do_no_harm(call, ear, answers, essence, load):
    audio = load("en/goforward.wav")
    plain = await ear().hear(call().start().pcm(audio).end().inputs)
    ours = call().start().pcm(audio[:16_000])
    ours.frame(b"", 0)
    ours.frame(b"\x01", 0)
    ours.records.append(ours.records[3])  # a repeat
    ours.records.append(msgspec.structs.replace(ours.records[-1], sample_rate_hz=44_100, position_samples=16_000))
    ours.records.append(msgspec.structs.replace(ours.records[-1], sample_rate_hz=0))
    ours.records.append(Gap(**ours.ids, position_samples=16_000, missing_samples=5))
    # The next frame repeats half of the last.
    ours.position -= 1_600
    ours.pcm(audio[16_000 - 1_600 :]).end()
    heard = await ear().hear(ours.inputs)
    assert essence(heard.records) == essence(plain.records)
    assert len(answers(heard.records)) == len(frames_of(ours))


async def test_audio_outside_a_session_is_answered(call, ear, answers, load):
    ours = call().start().pcm(load("en/goforward.wav")[:6_400]).end().pcm(np.zeros(3_200, "<i2"))
    heard = await ear().hear(ours.inputs)
    assert len(answers(heard.records)) == 3
    assert heard.core.snapshot(ours.key) is None
    stray = call("never started").pcm(np.zeros(3_200, "<i2"))
    heard = await ear().hear(stray.inputs)
    assert [type(record) for record in heard.records] == [Coverage]
    assert heard.core.snapshot(stray.key) is None


# Nothing depends on framing, company or steps

FRAMINGS = [480, 8_000, (3_200, 320, 7, 1_111)]


@pytest.mark.parametrize("vad", ["fusion", "off"])
async def test_framing_changes_nothing_but_answers(call, ear, essence, speech, vad):
    plain = await ear(vad=vad).hear(call().start().pcm(speech).end().inputs)
    assert len(plain.of(SegmentEnd)) >= 1
    for frames in FRAMINGS:
        heard = await ear(vad=vad).hear(call().start().pcm(speech, frames).end().inputs, step=7)
        assert essence(heard.records) == essence(plain.records)


async def test_framing_of_telephone_audio_changes_nothing_but_answers(call, ear, essence, prompt):
    plain = await ear().hear(call().start().g711(prompt, 1_600).end().inputs)
    for frame_bytes in (160, 240, 801, 4_000):
        heard = await ear().hear(call().start().g711(prompt, frame_bytes).end().inputs, step=5)
        assert essence(heard.records) == essence(plain.records)


@given(st.lists(st.integers(300, 9_000), min_size=1, max_size=8))
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_any_framing_changes_nothing_but_answers(call, ear, essence, load, sizes):
    audio = load("en/goforward.wav")
    plain = await ear().hear(call().start().pcm(audio).end().inputs, step=50)
    heard = await ear().hear(call().start().pcm(audio, sizes).end().inputs, step=4)
    assert essence(heard.records) == essence(plain.records)


async def test_steps_and_company_change_nothing_at_all(call, ear, speech, prompt):
    calls = [
        call("a").start().pcm(speech).end(),
        call("b", 1).start().pcm(speech[30_000:], (320, 3_200)).end(),
        call("c", 2).start().g711(prompt, 1_600).end(),
        call("d", 2).start().pcm(speech[::-1].copy(), 8_000).end(),
        call("e", 3).start().pcm(np.zeros(50_000, "<i2")).end(),
    ]
    alone = {ours.session_id: (await ear().hear(ours.inputs)).records for ours in calls}
    rng = np.random.default_rng(9)
    together, left = ear(), {ours.session_id: ours.inputs for ours in calls}
    while any(left.values()):
        step = []
        for session_id in rng.permutation(list(left)):
            take = int(rng.integers(0, 12))
            step += left[session_id][:take]
            left[session_id] = left[session_id][take:]
        await together.core.step(step)
    for session_id, records in alone.items():
        assert [record for record in together.records if record.session_id == session_id] == records


# Restarts


def restless(call, speech):
    """A call with all that may happen: heartbeats, short gaps, a long one, a change of rate, repeats, an idle time."""
    ours = call().start().pcm(speech[:60_000])
    ours.records.append(Heartbeat(**ours.ids, position_samples=ours.position, stamps=Stamps(captured_us=ours.captured_us(ours.position))))
    ours.position += 5_001
    ours.records.append(VersionChange(**ours.ids, position_samples=ours.position, kind="hotwords", name="h", version="h1"))
    ours.pcm(speech[65_001:100_000], (1_600, 333))
    ours.position += LONGEST_FILLED_GAP_SAMPLES + 4_321
    ours.pcm(speech[100_000:150_000])
    ours.records.append(ours.records[-2])
    late = Stamps(captured_us=ours.captured_us(ours.position) + 40_000_000)
    ours.records.append(Heartbeat(**ours.ids, position_samples=ours.position, stamps=late))
    ours.pcm(speech[150_000:200_000])
    return ours


@pytest.mark.parametrize("vad", ["fusion", "off"])
async def test_a_restart_anywhere_changes_nothing_at_all(call, ear, speech, prompt, vad):
    ours = restless(call, speech).g711(prompt, 1_600).pcm(speech[200_000:], 800).end()
    inputs = ours.inputs
    plain, states, counts = ear(vad=vad), [], []
    for item in inputs:
        await plain.core.step([item])
        states.append(plain.core.snapshot(ours.key))
        counts.append(len(plain.records))
    kinds = {type(record) for record in plain.records}
    assert {Gap, SegmentEnd, Heartbeat, SpeechChunk} <= kinds
    assert states[-1] is None
    # Each cut is followed far enough to see a difference; all that a state holds is compared to the bit.
    onward = 12
    for cut in range(1, len(inputs) - 1, 4):
        heard = await ear(vad=vad).resume(inputs, states[cut - 1], onward)
        last = min(cut + onward, len(inputs)) - 1
        assert heard.records == plain.records[counts[cut - 1] : counts[last]], cut
        assert heard.core.snapshot(ours.key) == states[last], cut


async def test_a_restart_in_any_step_size_goes_on_to_the_same_end(call, ear, speech):
    ours = call().start().pcm(speech[:200_000], 1_600).end()
    inputs = ours.inputs
    plain = await ear().hear(inputs)
    for cut in (20, 100):
        first = await ear().hear(inputs[:cut], step=5)
        second = await ear().resume(inputs, first.core.snapshot(ours.key))
        assert first.records + second.records == plain.records


async def test_a_state_is_small_and_reads_back_far_enough_for_the_filters(call, ear, speech):
    ours = call().start().pcm(speech[:100_000], 320).end()
    heard, frames = ear(), frames_of(ours)
    for item in ours.inputs[:-1]:
        await heard.core.step([item])
        state = heard.core.snapshot(ours.key)
        assert len(state.state) <= 1_536
        assert state.from_offset == item.offset + 1
        if isinstance(item.record, AudioFrame):
            read_from = frames[state.read_from_offset // 10 - 1].position_samples
            assert 16_000 < item.record.position_samples - read_from < 16_000 * 2.5 or read_from == 0


async def test_before_its_first_frame_is_taken_a_loaded_session_is_as_it_was(call, ear, speech):
    inputs = call().start().pcm(speech[:48_000]).inputs
    state = (await ear().hear(inputs)).core.snapshot(inputs[0].key)
    loaded = ear()
    loaded.core.load(inputs[0].key, state)
    assert loaded.core.snapshot(inputs[0].key) == state
    warm = [
        Input(item.key, item.offset, item.appended_ms, item.record, warm=True) for item in inputs if item.offset >= state.read_from_offset
    ]
    await loaded.core.step(warm)
    assert loaded.core.snapshot(inputs[0].key) == state
    assert not loaded.records
    assert not loaded.finished


async def test_when_the_log_has_lost_the_audio_before_it_goes_on_with_silence(call, ear, answers, speech):
    ours = call().start().pcm(speech).end()
    inputs = ours.inputs
    state = (await ear().hear(inputs[:40])).core.snapshot(ours.key)
    heard = ear()
    heard.core.load(ours.key, state)
    await heard.hear(inputs[40:])
    assert len(answers(heard.records)) == len(inputs) - 41
    assert isinstance(heard.records[-1], SessionEnd)
    assert heard.of(SegmentEnd)


async def test_after_a_change_of_detectors_it_goes_on(call, ear, speech):
    ours = call().start().pcm(speech).end()
    state = (await ear(vad="traditional").hear(ours.inputs[:40])).core.snapshot(ours.key)
    heard = await ear(vad="fusion").resume(ours.inputs, state)
    assert heard.of(SegmentEnd)


async def test_a_state_that_cannot_be_read_is_refused(call, ear, speech):
    ours = call().start().pcm(speech[:20_000])
    state = (await ear().hear(ours.inputs)).core.snapshot(ours.key)
    with pytest.raises(SnapshotError):
        ear().core.load(ours.key, SessionState(0, 0, state.state[:-1]))


def test_a_dropped_session_is_gone(ear):
    heard = ear()
    heard.core.drop(SessionKey(0, "unknown"))
    assert heard.core.snapshot(SessionKey(0, "unknown")) is None


async def test_nothing_is_said_of_a_session_dropped_during_its_step(call, ear, speech):
    ours = call().start().pcm(speech)
    heard = ear()
    step = asyncio.create_task(heard.core.step(ours.inputs))
    await asyncio.sleep(0)  # the work is on its way
    heard.core.drop(ours.key)
    await step
    assert not heard.records
    assert not heard.finished


# Gaps, ends, quiet


async def test_a_short_gap_is_marked_and_filled_with_silence(call, ear, load):
    audio = load("en/librispeech_1995-1837-0001.wav")
    ours = call().start().pcm(audio[:32_000])
    ours.position += 3_000
    ours.pcm(audio[35_000:]).end()
    heard = await ear().hear(ours.inputs)
    (gap,) = heard.of(Gap)
    assert (gap.position_samples, gap.missing_samples) == (32_000, 3_000)
    holed = audio.copy()
    holed[32_000:35_000] = 0
    for chunk in heard.of(SpeechChunk):
        start = chunk.position_samples
        assert chunk.pcm == holed[start : start + len(chunk.pcm) // 2].tobytes()


async def test_a_long_gap_ends_the_segment_and_all_begins_anew(call, ear, load):
    audio = load("en/librispeech_1995-1837-0001.wav")
    ours = call().start().pcm(audio[:32_000])
    resumed = ours.position = ours.position + LONGEST_FILLED_GAP_SAMPLES + 1_001
    ours.pcm(audio).end()
    heard = await ear().hear(ours.inputs)
    (gap,) = heard.of(Gap)
    assert (gap.position_samples, gap.missing_samples) == (32_000, resumed - 32_000)
    before, *after = heard.of(SegmentEnd)
    assert (before.position_samples, before.reason) == (32_000, "gap")
    assert heard.records.index(before) < heard.records.index(gap)
    assert after[0].start_sample >= resumed
    assert [record.segment for record in heard.of(SegmentStart)] == list(range(len(after) + 1))


async def test_frames_missing_at_the_end_are_a_gap(call, ear, speech):
    ours = call().start().pcm(speech[:6_400])
    ours.position += 777
    heard = await ear().hear(ours.end().inputs)
    assert [(gap.position_samples, gap.missing_samples) for gap in heard.of(Gap)] == [(6_400, 777)]


async def test_a_timeout_acts_only_when_the_log_agrees(call, ear, load):
    ours = call().start().pcm(load("en/librispeech_1995-1837-0001.wav")[:32_000])
    heard = await ear(session_lost_ms=30_000).hear(ours.inputs)
    assert heard.of(SegmentStart)
    last = ours.inputs[-1]
    timeout = Timeout(**ours.ids, position_samples=32_000, silent_ms=30_000)
    await heard.hear([Input(ours.key, last.offset + 1, last.appended_ms + 29_999, timeout)])
    assert not heard.of(SegmentEnd, SessionEnd)
    await heard.hear([Input(ours.key, last.offset + 2, last.appended_ms + 30_000, timeout)])
    segment, end = heard.of(SegmentEnd, SessionEnd)
    assert (segment.reason, segment.position_samples) == ("timeout", 32_000)
    assert (end.reason, end.position_samples) == ("timeout", 32_000)
    # All that was said is out, to the last sample that came.
    last = heard.of(SpeechChunk)[-1]
    assert last.position_samples + len(last.pcm) // 2 == 32_000
    assert heard.core.snapshot(ours.key) is None


async def test_a_channel_without_audio_is_idle_by_the_recorders_clock(call, ear, load):
    audio = load("en/librispeech_1995-1837-0001.wav")
    ours = call().start().pcm(audio[:32_000])
    for seconds in (5, 29, 31, 36):
        stamps = Stamps(captured_us=ours.captured_us(32_000) + seconds * 1_000_000)
        ours.records.append(Heartbeat(**ours.ids, position_samples=32_000, stamps=stamps))
    heard = await ear().hear(ours.pcm(audio[32_000:]).end().inputs)
    idle, *later = heard.of(SegmentEnd)
    assert (idle.reason, idle.position_samples) == ("timeout", 32_000)
    beats = heard.of(Heartbeat)
    assert len(beats) == 4
    assert heard.records.index(beats[1]) < heard.records.index(idle) < heard.records.index(beats[2])
    assert later[0].start_sample >= 32_000


def changing(call, speech):
    """A call in which versions change now and then."""
    ours = call().start()
    for number, start in enumerate(range(0, len(speech), 24_000)):
        ours.records.append(VersionChange(**ours.ids, position_samples=ours.position, kind="hotwords", name="h", version=f"h{number}"))
        ours.pcm(speech[start : start + 12_000])
        ours.records.append(VersionChange(**ours.ids, position_samples=ours.position, kind="model", name="m", version=f"m{number}"))
        ours.pcm(speech[start + 12_000 : start + 24_000])
    return ours.end()


@pytest.mark.parametrize("step", [1, 7, 10_000])
async def test_segments_name_the_versions_that_were_in_force_where_they_begin_and_end(call, ear, speech, step):
    heard = await ear().hear(changing(call, speech).inputs, step)
    assert len(heard.of(SegmentEnd)) > 2
    in_force = {"hotwords": "", "model": ""}
    named = set()
    for record in heard.of(VersionChange, SegmentStart, SegmentEnd):
        if isinstance(record, VersionChange):
            in_force[record.kind] = record.version
        elif isinstance(record, SegmentStart):
            assert record.model_digest == in_force["model"]
        else:
            assert record.hotword_version == in_force["hotwords"]
            named.add(record.hotword_version)
    assert len(named) > 2
    plain = await ear().hear(changing(call, speech).inputs)
    assert heard.records == plain.records


async def test_other_events_are_passed_on(call, ear):
    ours = call().start()
    ours.records.append(VersionChange(**ours.ids, position_samples=0, kind="model", name="m", version="2"))
    heard = await ear().hear(ours.inputs)
    assert [type(record) for record in heard.records] == [SessionStart, VersionChange]


async def test_the_core_starts_and_stops(ear):
    heard = ear()
    await heard.core.start()
    await heard.core.stop()
    with pytest.raises(RuntimeError):
        await heard.core.start()


async def test_a_channel_follows_its_own_settings_also_after_a_restart(call, ear, speech):
    """Without a minimum, and with closing that joins all, for one of two channels that hear the same."""
    values = {"vad_closing_ms": 3_000, "vad_tail_ms": 0, "vad_preroll_ms": 0}
    settings = {"vad": "traditional", "vad_channels": {"ch-s1": values}}
    own, other = call("s1").start().pcm(speech).end(), call("s2").start().pcm(speech).end()
    heard = await ear(**settings).hear([item for pair in zip(own.inputs, other.inputs, strict=True) for item in pair], step=2)
    mine = essence_of(heard, "s1")
    assert mine == essence_of(await ear(vad="traditional", **values).hear(own.inputs), "s1")
    assert essence_of(heard, "s2") == essence_of(await ear(vad="traditional").hear(other.inputs), "s2")
    before = await ear(**settings).hear(own.inputs[:50])
    after = await ear(**settings).resume(own.inputs, before.core.snapshot(own.key))
    assert essence_of(before, "s1") + essence_of(after, "s1") == mine


def essence_of(heard, session):
    return [
        (type(record).__name__, record.position_samples, getattr(record, "segment", None))
        for record in heard.of(SegmentStart, SegmentEnd, SegmentCancelled, SpeechChunk)
        if record.session_id == session
    ]


async def test_five_minutes_of_a_sine_give_the_same_decision_throughout(call, ear):
    """The field's test for faults of timing: nothing drifts, in frames of 200 ms and of 37."""
    seconds = np.arange(300 * 16_000) / 16_000
    sine = (8_000 * np.sin(2 * np.pi * 1_000 * seconds)).astype("<i2")
    for frames in (3_200, 592):
        heard = await ear().hear(call().start().pcm(sine, frames).end().inputs, step=50)
        assert not heard.of(SegmentEnd)
        assert all(record.position_samples < 16_000 for record in heard.of(SegmentStart))


async def test_five_minutes_of_a_sine_give_constant_features_and_no_drifting_phase(call, ear):
    """What the recogniser hears of a sine of 1 kHz, 10 ms of which are ten whole periods: the same for each hop, also from 8 kHz."""
    seconds, amplitude = 300, 8_000
    extract = Fbank()
    for rate_hz, frames in ((16_000, 592), (8_000, 1_600)):
        sine = (amplitude * np.sin(2 * np.pi * 1_000 * np.arange(seconds * rate_hz) / rate_hz)).astype("<i2")
        ours = call().start()
        for begin in range(0, len(sine), frames):
            piece = sine[begin : begin + frames]
            ours.frame(piece.tobytes(), len(piece) * 16_000 // rate_hz, rate_hz=rate_hz)
        heard = await ear(vad="off").hear(ours.end().inputs, step=50)
        chunks = [chunk for chunk in heard.of(SpeechChunk) if len(chunk.pcm) == 2 * (CHUNK + LOOKAHEAD)][1:-1]
        assert len(chunks) > 0.95 * seconds * 5
        features = np.concatenate(extract([chunk.pcm for chunk in chunks]))
        # The bands that hold the tone; in the others there is nothing but rounding.
        tonal = features[:, features.mean(axis=0) > features.mean(axis=0).max() - 10]
        assert np.ptp(tonal, axis=0).max() < 0.01
        wave = np.exp(-2j * np.pi * 1_000 * np.arange(CHUNK) / 16_000)
        phases = np.array([np.angle(np.frombuffer(chunk.pcm, "<i2")[:CHUNK] @ wave) for chunk in chunks])
        starts = np.array([chunk.position_samples for chunk in chunks])
        assert (starts % 16 == 0).all()
        assert np.abs(phases + np.pi / 2).max() < 0.001
