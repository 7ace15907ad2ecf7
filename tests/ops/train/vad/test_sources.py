"""Training, the choice of thresholds, and the evaluation share no recording, no speaker, no noise and no piece of music."""

import csv
from fnmatch import fnmatch
from importlib import resources
from itertools import combinations, product
from pathlib import PurePath

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


PAIRS = list(combinations(SPLITS, 2))


def of(split):
    return [row for row in rows() if row["split"] == split]


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_no_path_is_in_two_splits(one, other):
    assert of(one)
    for mine, theirs in product(of(one), of(other)):
        assert not fnmatch(mine["path"], theirs["path"])
        assert not fnmatch(theirs["path"], mine["path"])
        assert mine["path"].replace("*", "x") != theirs["path"].replace("*", "x")


@pytest.mark.parametrize(("one", "other"), PAIRS)
@pytest.mark.parametrize("what", ["speaker", "source"])
def test_no_speaker_and_no_source_is_in_two_splits(one, other, what):
    """Of collections, whose one source holds many speakers or noises, files and speakers are compared."""
    several = {"Picovoice/speech-to-intent-benchmark", "Jakobovski/free-spoken-digit-dataset"}
    bare = [{row[what].partition(" (")[0] for row in of(split) if "*" not in row[what]} - {""} - several for split in (one, other)]
    packages = {source for source in bare[0] & bare[1] if source.startswith("Debian ") and ":" not in source}
    assert not (bare[0] & bare[1]) - packages


@pytest.mark.parametrize("kind", ["noise", "music", "keyboard", "tone"])
@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_no_noise_and_no_piece_of_music_is_in_two_splits(one, other, kind):
    pieces = [{PurePath(row["path"]).stem for row in of(split) if row["kind"] == kind} for split in (one, other)]
    assert not pieces[0] & pieces[1]


def test_every_split_has_music_noise_and_speech_of_its_own():
    assert all({"speech", "digits", "noise", "music"} <= {row["kind"] for row in of(split)} for split in SPLITS)


def test_speakers_named_by_files_are_apart_too(tmp_path):
    """Orders name their speaker in the file's name, and their folder is their split: whoever is in two is noticed here."""
    for row in rows():
        path = tmp_path / row["path"].replace("*", "s01_x")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (tmp_path / "orders/train/s02_a.flac").touch()
    (tmp_path / "orders/dev/s03_a.flac").touch()
    (tmp_path / "orders/test/s04_b.flac").touch()
    heard = [{each.speaker for each in recordings(tmp_path, split)} for split in SPLITS]
    orders = [{speaker for speaker in speakers if speaker.startswith("order-")} - {"order-s01"} for speakers in heard]
    assert orders == [{"order-s02"}, {"order-s03"}, {"order-s04"}]


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(UserError, match="lacks orders/train"):
        recordings(tmp_path, "train")
