"""Shards of clips."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import soundfile

from ops.train.clips import Clip, Phone, Word, read_audio, read_shard, recorded_clips, write_shard


def test_a_shard_gives_back_its_clips(tmp_path: Path) -> None:
    clips = [
        Clip(
            name=f"c{number}", source="order", speaker="s", text="a latte", words=(Word("a",
            0, 10),), phones=(Phone(1, 0, 10), Phone(2, 10, 20)), score=-3.5,
            pcm=np.arange(number * 100, number * 100 + 50 + number, dtype=np.int16),
        )
        for number in range(3)
    ]  # fmt: skip
    write_shard(tmp_path / "shard.npz", clips)
    for before, after in zip(clips, read_shard(tmp_path / "shard.npz"), strict=True):
        np.testing.assert_array_equal(before.pcm, after.pcm)
        assert (before.name, before.text, before.words, before.phones, before.score) == (
            after.name,
            after.text,
            after.words,
            after.phones,
            after.score,
        )
    assert [path.name for path in tmp_path.iterdir()] == ["shard.npz"]


def test_audio_is_read_as_it_was_written(tmp_path: Path) -> None:
    pcm = np.random.default_rng(1).integers(-30_000, 30_000, 1_600).astype(np.int16)
    soundfile.write(tmp_path / "wide.flac", pcm, 16_000)
    np.testing.assert_array_equal(read_audio(tmp_path / "wide.flac"), pcm)
    soundfile.write(tmp_path / "narrow.wav", pcm, 8_000)
    assert abs(len(read_audio(tmp_path / "narrow.wav")) - 3_200) <= 1


def test_what_may_be_trained_on_leaves_out_the_held_out(tmp_path: Path) -> None:
    orders = "file\tspeaker\tsplit\ttranscript\ntrain/a.wav\ts1\ttrain\ta latte\ndev/b.wav\ts2\tdev\ta mocha\n"
    manifest = "path\ttranscript\ntelephone/asterisk/hold.wav\tPlease hold.\ntelephone/asterisk/digits_4.wav\tfour\nzh/c.wav\t一\n"
    for name, text in (("orders/transcripts.tsv", orders), ("MANIFEST.tsv", manifest)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    quiet = np.zeros(4_000, np.int16)
    sounds = ("orders/train/a.wav", "telephone/asterisk/hold.wav", "telephone/asterisk/digits_4.wav")
    for name in (*sounds, "fsdd/recordings/7_jack_0.wav", "fsdd/recordings/7_luke_0.wav"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(tmp_path / name, quiet, 8_000)
    count, found = recorded_clips(tmp_path, ["luke"])
    clips = [(clip.source, clip.speaker, clip.text) for clip in found]
    prompts = [("prompt", "prompts", "please hold"), ("digit", "prompts", "four")]
    assert clips == [("order", "s1", "a latte"), ("digit", "jack", "seven"), *prompts]
    assert count == len(clips)
