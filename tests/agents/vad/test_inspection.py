"""What is declared wrongly is flagged, what is right is not, and a session goes on either way."""

import numpy as np
import pytest

from agents.vad.inspection import BLOCK_SAMPLES, FLAGS, Inspector, Notes
from schemas.records import AudioFlag, SegmentEnd

RATE = 16_000
SECONDS = 12


def companded(samples, law="mulaw"):
    """int16 samples to G.711 bytes, by the nearest value."""
    from agents.vad.decode import decode

    values = decode(bytes(range(256)), law)
    order = np.argsort(values, kind="stable")
    borders = (values[order][1:] + values[order][:-1]) / 2
    return order[np.searchsorted(borders, samples.astype(np.float32) / 32_768)].astype(np.uint8).tobytes()


@pytest.fixture
def wide(load):
    """Twelve seconds of wideband speech, loud."""
    return np.resize(load("en/librispeech_1995-1837-0001.wav"), SECONDS * RATE).astype(np.int16)


@pytest.fixture
def flags(ear):
    async def flags(inputs):
        heard = await ear(vad="traditional", vad_denoise=False).hear(inputs)
        return [(record.flag, record.position_samples) for record in heard.of(AudioFlag)]

    return flags


async def test_good_audio_has_no_flag(call, flags, wide):
    assert await flags(call().start().pcm(wide).end().inputs) == []


async def test_a_telephone_prompt_under_its_own_label_has_no_flag(call, flags, prompt):
    assert await flags(call().start().g711(prompt * 3, 1_600).end().inputs) == []


async def test_clipping_is_flagged_once(call, flags, wide):
    loud = np.clip(wide.astype(np.int32) * 40, -32_768, 32_767).astype(np.int16)
    found = await flags(call().start().pcm(loud).end().inputs)
    assert [flag for flag, _ in found] == ["clipping"]


async def test_an_offset_is_flagged_even_in_silence_and_is_not_speech(call, ear):
    silence = (np.full(SECONDS * RATE, 2_000) + np.random.default_rng(1).normal(0, 3, SECONDS * RATE)).astype(np.int16)
    heard = await ear().hear(call().start().pcm(silence).end().inputs)
    assert [record.flag for record in heard.of(AudioFlag)] == ["dc_offset"]
    assert not heard.of(SegmentEnd)


async def test_wideband_frames_of_a_narrow_line_are_flagged(call, flags, wide):
    from scipy.signal import resample_poly

    narrow = resample_poly(resample_poly(wide.astype(float), 1, 2), 2, 1, window=("kaiser", 12.0)).astype(np.int16)
    from scipy.signal import firwin, lfilter

    narrow = lfilter(firwin(255, 3_600, fs=RATE), 1, narrow).round().astype(np.int16)
    found = [flag for flag, _ in await flags(call().start().pcm(narrow).end().inputs)]
    assert found in ([], ["narrowband"])


@pytest.mark.parametrize("law", ["mulaw", "alaw"])
async def test_g711_labelled_pcm_is_flagged(call, flags, wide, law):
    payload = companded(wide, law)
    misread = np.frombuffer(payload, "<i2")
    found = [flag for flag, _ in await flags(call().start().pcm(misread).end().inputs)]
    assert f"{law}_as_pcm" in found


async def test_pcm_labelled_g711_is_flagged(call, flags, wide):
    found = await flags(call().start().g711(wide[::2].astype("<i2").tobytes(), 1_600).end().inputs)
    assert "noise_as_speech" in [flag for flag, _ in found]


async def test_eight_kilohertz_under_a_label_of_sixteen_is_flagged_by_the_clock(call, flags, wide):
    ours = call()
    # The recorder captures 200 ms, which it takes for 100 ms because it counts wrongly.
    ours.captured_us = lambda sample: 1_700_000_000_000_000 + 2 * sample * 1_000_000 // RATE
    found = await flags(ours.start().pcm(wide[::2].copy(), 1_600).end().inputs)
    assert [flag for flag, _ in found] == ["rate_too_high"]


async def test_sixteen_kilohertz_under_a_label_of_eight_is_flagged_by_the_clock(call, flags, wide):
    ours = call()
    ours.captured_us = lambda sample: 1_700_000_000_000_000 + sample // 2 * 1_000_000 // RATE
    payload = companded(wide)
    found = await flags(ours.start().g711(payload, 1_600).end().inputs)
    assert "rate_too_low" in [flag for flag, _ in found]


@pytest.mark.parametrize("frames", [320, [700, 3_200, 50]])
async def test_framing_does_not_matter(call, flags, wide, frames):
    loud = np.clip(wide.astype(np.int32) * 40, -32_768, 32_767).astype(np.int16)
    assert await flags(call().start().pcm(loud, frames).end().inputs) == await flags(call().start().pcm(loud).end().inputs)


async def test_a_restart_repeats_no_flag_and_loses_none(call, ear, wide):
    loud = np.clip(wide.astype(np.int32) * 40, -32_768, 32_767).astype(np.int16)
    ours = call().start().pcm(loud).end()
    whole = await ear(vad="traditional").hear(ours.inputs)
    for cut in (8, 14, 25, 40):
        before = await ear(vad="traditional").hear(ours.inputs[:cut])
        after = await ear(vad="traditional").resume(ours.inputs, before.core.snapshot(ours.key))
        assert before.of(AudioFlag) + after.of(AudioFlag) == whole.of(AudioFlag)


def test_an_inspector_remembers_only_its_notes():
    rng = np.random.default_rng(2)
    blocks = rng.normal(0, 12_000, (6, BLOCK_SAMPLES)).clip(-32_768, 32_767).astype(np.int16)
    whole, notes, found = Inspector(), Notes(), []
    expected = [whole.inspect(n * RATE, block, "pcm_s16le", RATE, n * 1_000_000 + 1, n * RATE) for n, block in enumerate(blocks, 1)]
    for n, block in enumerate(blocks, 1):
        fresh = Inspector(notes)
        found.append(fresh.inspect(n * RATE, block, "pcm_s16le", RATE, n * 1_000_000 + 1, n * RATE))
        notes = fresh.notes
    assert found == expected
    assert [finding.flag for findings in found for finding in findings] == ["noise_as_speech"]
    assert set(FLAGS) >= {"noise_as_speech"}
