"""The settings: read once, checked, named in every complaint."""

from __future__ import annotations

from pathlib import Path

import pytest

from streams.errors import UserError
from streams.settings import STAGES, Settings, SettingsError, load_settings, setting_sources


def test_every_setting_says_what_it_is() -> None:
    undescribed = [name for name, field in Settings.model_fields.items() if not field.description]
    assert undescribed == []


def test_variables_and_file_are_read_and_variables_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(Settings.model_config, "env_file", ".env")
    (tmp_path / ".env").write_text("ASR_PARTITIONS=8\nASR_MODEL=base\n")
    monkeypatch.setenv("ASR_PARTITIONS", "12")
    settings = load_settings()
    assert (settings.partitions, settings.model) == (12, "base")
    assert setting_sources() == {"partitions": "environment", "model": ".env"}
    assert load_settings(partitions=3).partitions == 3


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("ASR_PARTITIONS", "0"),
        ("ASR_PARTITIONS", "many"),
        ("ASR_STAGE", "decoder"),
        ("ASR_NAMESPACE", "has space"),
        ("ASR_NAMESPACE", ""),
        ("ASR_SECURITY_PROTOCOL", "TLS"),
        ("ASR_SASL_MECHANISM", "GSSAPI"),
        ("ASR_GATEWAY_PORT", "70000"),
        ("ASR_VAD_CONFIDENCE", "0.2"),
        ("ASR_SNAPSHOT_MAX_BYTES", "40000"),
    ],
)
def test_wrong_value_is_named_with_its_variable(variable: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(SettingsError) as wrong:
        load_settings()
    assert str(wrong.value).startswith(f"{variable}: ")
    assert repr(value) in str(wrong.value)


def test_all_wrong_values_are_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASR_PARTITIONS", "none")
    monkeypatch.setenv("ASR_REPLICATION_FACTOR", "some")
    with pytest.raises(SettingsError) as wrong:
        load_settings()
    assert [line.partition(":")[0] for line in str(wrong.value).splitlines()] == ["ASR_PARTITIONS", "ASR_REPLICATION_FACTOR"]


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        ({"security_protocol": "SASL_SSL"}, "ASR_SASL_USERNAME"),
        ({"ssl_ca_file": "/no/such/ca.pem"}, "ASR_SSL_CA_FILE: there is no file /no/such/ca.pem"),
        ({"ssl_cert_file": __file__}, "ASR_SSL_CERT_FILE and ASR_SSL_KEY_FILE"),
        ({"vad_tail_ms": 400, "vad_closing_ms": 300}, "ASR_VAD_TAIL_MS"),
    ],
)
def test_values_that_contradict_each_other_are_refused(overrides: dict[str, object], complaint: str) -> None:
    with pytest.raises(SettingsError, match=complaint):
        load_settings(**overrides)


def test_mistake_in_a_setting_is_the_users() -> None:
    assert issubclass(SettingsError, UserError)


def test_settings_do_not_change() -> None:
    settings = load_settings()
    with pytest.raises(ValueError, match="frozen"):
        settings.partitions = 3  # type: ignore[misc]


def test_password_is_in_no_text_of_the_settings() -> None:
    settings = load_settings(sasl_username="asr", sasl_password="do-not-show-this")  # noqa: S106
    assert "do-not-show-this" not in f"{settings} {settings!r} {settings.model_dump_json()}"
    assert settings.sasl_password.get_secret_value() == "do-not-show-this"


@pytest.mark.parametrize(("stage", "group", "stages"), [("", "asr", STAGES), ("vad", "asr.vad", ("vad",))])
def test_group_is_fixed_for_each_set_of_stages(stage: str, group: str, stages: tuple[str, ...]) -> None:
    settings = load_settings(stage=stage)
    assert (settings.group, settings.stages) == (group, stages)
    assert load_settings(stage=stage, namespace="other").group == group.replace("asr", "other")


def test_worker_has_the_name_it_is_given_else_one_of_its_own() -> None:
    assert load_settings(worker_id="blue").worker_name == "blue"
    assert load_settings(stage="vad").worker_name != load_settings().worker_name


def test_features_are_what_the_engine_needs_unless_set() -> None:
    assert load_settings(engine="whisper").features == "none"
    assert load_settings(engine="whisper", feature_kind="mfcc").features == "mfcc"


def test_milliseconds_are_samples_of_16_khz() -> None:
    assert (Settings.samples(200), Settings.samples(1)) == (3_200, 16)


def test_a_channel_can_have_other_thresholds():
    settings = load_settings(vad_confidence=0.8, vad_channels={"7": {"vad_confidence": 0.95, "vad_closing_ms": 400}})
    assert settings.for_channel("8") is settings
    other = settings.for_channel("7")
    assert (other.vad_confidence, other.vad_closing_ms, other.vad_tail_ms) == (0.95, 400, settings.vad_tail_ms)
    assert other.for_channel("7") is other


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"vad_confidence": 2}, "ASR_VAD_CHANNELS: channel '7': ASR_VAD_CONFIDENCE: .*less than or equal to 1"),
        ({"vad_tail_ms": 400}, "ASR_VAD_CHANNELS: channel '7': ASR_VAD_TAIL_MS must be at most"),
        ({"engine": "instant"}, "ASR_VAD_CHANNELS: 'engine' of channel '7' is none of vad_denoise"),
    ],
)
def test_what_a_channel_cannot_have_is_named(values, said):
    with pytest.raises(SettingsError, match=said):
        load_settings(vad_channels={"7": values})


def test_channels_come_from_the_environment_as_json(monkeypatch):
    monkeypatch.setenv("ASR_VAD_CHANNELS", '{"7": {"vad_min_speech_ms": 100}}')
    assert load_settings().for_channel("7").vad_min_speech_ms == 100
