from __future__ import annotations

import io

import av
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ops.demo.calls import (
    MANIFEST_COLUMNS,
    Party,
    assemble,
    call_seconds,
    calls_folder,
    clips,
    hold_music,
    line_sizes,
    mulaw,
    noises,
    read_clip,
    read_manifest,
)
from schemas.records import SAMPLE_RATE_HZ

#: Licences that ask for no more than a notice; and one under which recordings made of the recordings must stay, too.
FREE = {"Apache-2.0", "MIT", "BSD-2-Clause", "CC BY 4.0", "CC BY-SA 4.0", "Public domain", "Public domain dedication"}


class TestBundledClips:
    def test_the_manifest_lists_each_file_and_a_free_licence(self) -> None:
        rows = read_manifest()
        assert {row["file"] for row in rows} == {path.name for path in calls_folder().glob("*.flac")}
        assert {row["licence"] for row in rows} <= FREE
        assert all(row.keys() == set(MANIFEST_COLUMNS) and row["source"] for row in rows)

    def test_they_stay_small(self) -> None:
        assert sum(path.stat().st_size for path in calls_folder().iterdir()) < 5_000_000

    def test_words_end_in_order_inside_the_audio(self) -> None:
        assert len(clips()) > 40
        for clip in clips():
            ends = [word.end_sample for word in clip.words]
            assert ends == sorted(set(ends)), clip.file
            assert ends[0] > 0, clip.file
            assert ends[-1] <= len(read_clip(clip.file)), clip.file

    def test_words_end_where_sound_is(self) -> None:
        """Half a second around the last word's end is louder before it than after it."""
        for clip in clips():
            pcm, end = read_clip(clip.file).astype(float), clip.words[-1].end_sample
            before, after = pcm[end - 4_000 : end], pcm[end + 800 :]
            assert np.mean(before**2) > np.mean(after**2), clip.file

    def test_noise_is_there(self) -> None:
        assert len(noises()) >= 3


class TestAssemble:
    def test_the_same_seed_is_the_same_call(self) -> None:
        one, two = (assemble(2, 20, telephone=False, rng=np.random.default_rng(5)) for _ in range(2))
        assert all(a.payload() == b.payload() and a.words == b.words for a, b in zip(one.parties, two.parties, strict=True))

    def test_other_seeds_are_other_calls(self) -> None:
        texts = {assemble(1, 20, telephone=False, rng=np.random.default_rng(seed)).parties[0].transcript for seed in range(5)}
        assert len(texts) == 5

    def test_a_dialogue_has_two_voices_that_both_speak(self) -> None:
        agent, customer = assemble(2, 30, telephone=False, rng=np.random.default_rng(1)).parties
        assert (agent.name, customer.name) == ("agent", "customer")
        assert agent.voice != customer.voice
        assert agent.words
        assert customer.words
        assert len(agent.pcm) == len(customer.pcm) == 30 * SAMPLE_RATE_HZ

    @given(seed=st.integers(0, 2**32), parties=st.integers(1, 2), seconds=st.floats(0.2, 40))
    def test_whole_words_that_end_before_the_call_does(self, seed: int, parties: int, seconds: float) -> None:
        call = assemble(parties, seconds, telephone=False, rng=np.random.default_rng(seed))
        for party in call.parties:
            ends = [word.end_sample for word in party.words]
            assert ends == sorted(ends)
            assert not ends or ends[-1] < len(party.pcm)
            assert len(party.pcm) == round(seconds * SAMPLE_RATE_HZ)
            assert np.abs(party.pcm.astype(int)).max() > 0, "there is always some background"

    def test_speech_is_well_above_its_background(self) -> None:
        party = assemble(1, 30, telephone=False, rng=np.random.default_rng(2)).parties[0]
        level = np.array([np.mean(party.pcm[end - 3_200 : end].astype(float) ** 2) for _, end in party.words])
        quiet = np.mean(party.pcm[-8_000:].astype(float) ** 2)
        assert np.median(level) > 100 * quiet

    def test_pcm_goes_as_it_is(self) -> None:
        party = assemble(1, 5, telephone=False, rng=np.random.default_rng(3)).parties[0]
        assert (party.encoding, party.sample_rate_hz) == ("pcm_s16le", 16_000)
        assert np.array_equal(np.frombuffer(party.payload(), "<i2"), party.pcm)

    def test_telephone_calls_are_g711(self) -> None:
        party = assemble(1, 5, telephone=True, rng=np.random.default_rng(3)).parties[0]
        assert (party.encoding, party.sample_rate_hz) == ("mulaw", 8_000)
        assert len(party.payload()) == len(party.pcm) // 2
        heard = decode_mulaw(party.payload()).astype(float)
        assert np.corrcoef(heard, party.pcm[::2].astype(float))[0, 1] > 0.95

    def test_nothing_said_in_no_time(self) -> None:
        party = assemble(1, 1.0, telephone=False, rng=np.random.default_rng(3)).parties[0]
        assert (party.words, party.transcript) == ((), "")


def decode_mulaw(payload: bytes) -> np.ndarray:
    """FFmpeg's decoder, to check against."""
    with av.open(io.BytesIO(payload), format="mulaw", options={"sample_rate": "8000"}) as container:
        return np.concatenate([frame.to_ndarray().reshape(-1) for frame in container.decode(audio=0)])


class TestMulaw:
    def test_ffmpeg_hears_every_level(self) -> None:
        pcm = np.arange(-32_768, 32_768, dtype=np.int32).astype(np.int16)
        heard = decode_mulaw(mulaw(pcm).tobytes()).astype(int)
        step = np.maximum(np.abs(pcm.astype(int)) / 16, 8)  # a segment has 16 steps, the finest of 8
        clipped = np.clip(pcm.astype(int), -32_635, 32_635)
        assert np.all(np.abs(heard - clipped) <= step)

    def test_silence(self) -> None:
        assert mulaw(np.zeros(1, np.int16)).tolist() == [0xFF]


def test_hold_music_has_no_click_and_no_clipping() -> None:
    music = hold_music()
    assert np.abs(music).max() < 32_000
    assert 5 < len(music) / SAMPLE_RATE_HZ < 9


class TestLines:
    @pytest.mark.parametrize(("channels", "sizes"), [(1, [1]), (2, [2]), (3, [2, 1]), (4, [2, 1, 1]), (8, [2, 1, 2, 1, 2])])
    def test_dialogues_and_single_callers(self, channels: int, sizes: list[int]) -> None:
        assert line_sizes(channels) == sizes

    @given(st.integers(0, 100))
    def test_take_all_channels(self, channels: int) -> None:
        assert sum(line_sizes(channels)) == channels

    @given(st.floats(0.2, 500), st.integers(0, 100))
    def test_calls_fill_the_time(self, seconds: float, seed: int) -> None:
        lengths = list(call_seconds(seconds, np.random.default_rng(seed)))
        assert sum(lengths) == pytest.approx(seconds)
        assert max(lengths) <= 65

    def test_without_a_time_they_go_on(self) -> None:
        endless = call_seconds(None, np.random.default_rng(0))
        assert all(20 < next(endless) < 45 for _ in range(100))


def test_a_party_is_a_value() -> None:
    party = Party("agent", "v", np.zeros(3_200, np.int16), (), "pcm_s16le", 16_000)
    assert party.payload() == bytes(6_400)
