"""No recording, no speaker and no noise of the evaluation is ever heard in training."""

import csv
from fnmatch import fnmatch
from importlib import resources

import pytest

from ops.train.vad.sources import SPLITS, recordings
from streams.errors import UserError


def rows():
    with resources.files("ops.train.vad").joinpath("sources.tsv").open(encoding="utf-8") as table:
        return list(csv.DictReader(table, delimiter="\t"))


def test_every_source_names_where_it_is_from_and_its_licence():
    assert rows()
    for row in rows():
        assert row["split"] in SPLITS
        assert all(row[name] for name in ("path", "kind", "licence", "source"))
        assert "://" not in row["source"]


def test_no_path_is_in_both_splits():
    train, held_out = ([row["path"] for row in rows() if row["split"] == split] for split in SPLITS)
    assert train
    assert held_out
    for one in train:
        for other in held_out:
            assert not fnmatch(one, other)
            assert not fnmatch(other, one)
            assert one.replace("*", "x") != other.replace("*", "x")


def test_no_speaker_is_in_both_splits():
    speakers = {split: {row["speaker"] for row in rows() if row["split"] == split and "*" not in row["speaker"]} - {""} for split in SPLITS}
    assert not speakers["train"] & speakers["held_out"]


def test_no_noise_is_in_both_splits():
    noises = {split: {row["path"] for row in rows() if row["split"] == split and not row["speaker"]} for split in SPLITS}
    assert not noises["train"] & noises["held_out"]


def test_speakers_named_by_files_are_apart_too(tmp_path):
    """Orders name their speaker in the file's name, and their folder is their split: whoever is in both is noticed here."""
    for row in rows():
        path = tmp_path / row["path"].replace("*", "s01")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (tmp_path / "orders/train/s02_a.flac").touch()
    (tmp_path / "orders/test/s03_b.flac").touch()
    train, held_out = ({each.speaker for each in recordings(tmp_path, split)} for split in SPLITS)
    assert {"order-s02"} <= train
    assert {"order-s03"} <= held_out
    assert "order-s02" not in held_out


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(UserError, match="lacks orders/train"):
        recordings(tmp_path, "train")
