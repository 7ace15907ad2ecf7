"""Configuration: one frozen, validated object, read once at start from ``ASR_*`` variables and ``.env``.

Every entry says what it is in its description; ``asr config`` prints them all. Times are in ms, sizes in bytes, rates in Hz.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from platformdirs import user_cache_path, user_data_path
from pydantic import Field, SecretStr, ValidationError, model_validator
from pydantic_settings import (
    BaseSettings,
    DotEnvSettingsSource,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from schemas.records import SAMPLE_RATE_HZ, StageName
from streams.errors import UserError

__all__ = ["STAGES", "Settings", "SettingsError", "load_settings", "setting_sources"]

#: What ``vad_channels`` may set for a channel.
CHANNEL_SETTINGS: Final = (
    "vad_denoise",
    "vad_confidence",
    "vad_threshold",
    "vad_onset",
    "vad_margin_db",
    "vad_closing_ms",
    "vad_min_speech_ms",
    "vad_preroll_ms",
    "vad_tail_ms",
    "vad_max_segment_ms",
)

STAGES: Final[tuple[StageName, ...]] = ("vad", "features", "inference")

_Ms = Annotated[int, Field(ge=0)]
_Port = Annotated[int, Field(ge=0, le=65_535)]


class SettingsError(UserError, ValueError):
    """The configuration is wrong; the message names each variable and what it must be."""


class Settings(BaseSettings):
    """Everything that can be configured. Field ``x_y`` is the variable ``ASR_X_Y``."""

    model_config = SettingsConfigDict(env_prefix="ASR_", env_file=".env", env_file_encoding="utf-8", frozen=True, extra="ignore")

    # Kafka
    namespace: str = Field(
        "asr",
        pattern=r"^[a-zA-Z0-9._-]{1,100}$",
        description="What the names of all topics and consumer groups begin with, so that several systems can share a cluster.",
    )
    bootstrap_servers: str = Field("127.0.0.1:9092", description="Kafka brokers, host:port, comma-separated.")
    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = Field(
        "PLAINTEXT", description="How to talk to the brokers."
    )
    sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = Field(
        "PLAIN", description="SASL mechanism, with a SASL_ protocol."
    )
    sasl_username: str = Field("", description="SASL user.")
    sasl_password: SecretStr = Field(SecretStr(""), description="SASL password.")
    ssl_ca_file: Path | None = Field(
        None, description="CA certificate (PEM) that signs the brokers' certificates; the system's when unset."
    )
    ssl_cert_file: Path | None = Field(None, description="Client certificate (PEM), where brokers ask for one.")
    ssl_key_file: Path | None = Field(None, description="Key of the client certificate (PEM).")
    schema_registry_url: str = Field(
        "", description="Confluent-compatible schema registry; unset: Avro single-object encoding, no registry."
    )
    partitions: int = Field(
        64, ge=1, description="Partitions of every topic that is keyed by channel or session; by default one channel, one partition."
    )
    replication_factor: int = Field(1, ge=1, description="Copies of each partition; 3 on three brokers.")
    audio_retention_ms: int = Field(
        24 * 3_600_000, ge=1, description="How long asr.audio is kept: 24 h of 50 channels of 16 kHz PCM take 138 GB."
    )
    results_retention_ms: int = Field(
        30 * 24 * 3_600_000,
        ge=0,
        description="How long finished calls stay on asr.transcripts and asr.sessions (asr.log: at most 7 days): 30 days; 0: for ever.",
    )
    session_timeout_ms: int = Field(
        500, ge=100, description="A worker not heard of for this long is dead; the brokers' group.min.session.timeout.ms must allow it."
    )

    # The worker
    stage: Literal["", "vad", "features", "inference"] = Field(
        "", description="The one stage to run, in the group <namespace>.<stage>; unset: all, in the group <namespace>."
    )
    worker_id: str = Field("", description="Name of this worker; unset: host and process.")
    metrics_port: _Port = Field(0, description="Port for Prometheus metrics; 0: none.")
    data_dir: Path = Field(
        default_factory=lambda: user_data_path("asr-streams"), description="Where the embedded broker and workers keep files."
    )
    cache_dir: Path = Field(
        default_factory=lambda: user_cache_path("asr-streams"), description="Where downloaded programs and models are kept."
    )
    snapshot_interval_ms: _Ms = Field(1_000, description="A stage's state is committed with its offsets about this often.")
    snapshot_max_bytes: int = Field(4_096, ge=256, le=32_767, description="The brokers' offset.metadata.max.bytes.")

    # Voice activity detection
    vad: Literal["fusion", "traditional", "tiny", "silero", "off"] = Field(
        "fusion",
        description="Detectors: TinyVAD and the traditional one, or one alone; off: all audio is one segment up to the cap, which "
        "the engine conformer cuts into utterances by endpoint rules.",
    )
    vad_backend: Literal["onnx", "openvino", "torch"] = Field("onnx", description="What runs TinyVAD.")
    vad_denoise: bool = Field(True, description="Denoise (FFmpeg afftdn) what the detectors hear; the recogniser hears the original.")
    vad_confidence: float = Field(
        0.85, ge=0.5, le=1.0, description="The neural detector decides where its confidence, either way, is above this."
    )
    vad_threshold: float = Field(0.5, gt=0.0, lt=1.0, description="The neural detector calls speech what is more probable than this.")
    vad_onset: float = Field(
        0.935, ge=0.0, lt=1.0, description="Speech begins only where TinyVAD finds it more probable than this; it may go on with less."
    )
    vad_margin_db: float = Field(
        0.0, ge=-20.0, le=20.0, description="Speech must stand out from noise by so much more than usual for the traditional detector."
    )
    vad_closing_ms: _Ms = Field(300, description="Pauses shorter than this do not split a segment.")
    vad_min_speech_ms: _Ms = Field(300, description="Segments with less speech are cancelled.")
    vad_preroll_ms: _Ms = Field(300, description="Audio before the detected onset that is forwarded with it.")
    vad_tail_ms: _Ms = Field(200, description="Audio after the detected end that is forwarded with it; at most the closing.")
    vad_max_segment_ms: int = Field(20_000, ge=1_000, description="Longer segments are cut.")
    vad_channels: dict[str, dict[str, Any]] = Field(
        default_factory=dict,
        description='Other ASR_VAD_* values for some channels, as JSON: {"<channel>": {"vad_confidence": 0.9, "vad_closing_ms": 400}}.',
    )
    session_idle_ms: int = Field(30_000, ge=1_000, description="A session without audio for this long is idle, though its recorder lives.")
    # At least the 5 s between two heartbeats, and the 3 s in which an outage of the brokers is noticed.
    session_lost_ms: int = Field(
        90_000,
        ge=8_000,
        description="A session without audio or heartbeats for this long is closed, an outage of the brokers not counted: longer than any "
        "outage of a recorder's own connection that is to be bridged.",
    )

    # The recorder
    spool_dir: Path | None = Field(None, description="Where recorders keep audio that no broker takes; unset: spool in ASR_DATA_DIR.")
    spool_after_ms: _Ms = Field(
        2_000, description="Audio that no broker has taken for this long goes to disk; it is what a recorder that is killed may lose."
    )
    spool_max_bytes: int = Field(
        2 * 2**30, ge=0, description="The most that one recorder keeps on disk: 2 GiB are 22 min of 50 channels of 16 kHz PCM; 0: nothing."
    )

    # Features and inference
    engine: Literal["conformer", "whisper", "instant"] = Field(
        "conformer",
        description="What recognises speech: conformer streams WeNet's models in one batch, whisper knows every word and answers later; "
        "instant answers at once with nothing, for measuring the rest.",
    )
    feature_kind: Literal["auto", "fbank", "mfcc", "none"] = Field("auto", description="Features to compute; auto: what the engine needs.")
    model: str = Field(
        "tiny.en", description="Model of the engine: a path, or a name found in the cache, in an installed package or on the hub."
    )
    model_dir: Path | None = Field(None, description="A WeNet model directory for the engine conformer; it wins over ASR_MODEL.")
    final_engine: Literal["", "whisper"] = Field(
        "",
        description="A second pass over finished segments: its text stands beside the final as refined, and changes nothing; unset: none.",
    )
    final_model: str = Field("tiny.en", description="Model of the second pass, as ASR_MODEL.")
    language: str = Field("", description="Language where a session names none; unset: the model's own, or detected.")
    threads: int = Field(1, ge=1, description="CPU threads for each engine worker.")
    engine_workers: int | None = Field(
        None, ge=1, description="Finals that are decoded at the same time; for whisper, 2 by default, partials too. [half the cores]"
    )
    engine_timeout_ms: int = Field(30_000, ge=100, description="An engine that does not answer for this long is killed and restarted.")
    partial_interval_ms: _Ms = Field(
        1_000, description="Shortest time between two partials of one segment, for engines that decode anew; grows with load."
    )

    # The engine conformer
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="Where to compute; auto: on a GPU where there is one.")
    precision: Literal["auto", "fp32", "bf16", "fp16", "int8"] = Field(
        "auto", description="What partials are computed in. auto: bf16 where the processor or GPU has it; int8 needs a CPU, fp16 a GPU."
    )
    final_precision: Literal["fp32", "bf16", "fp16", "int8"] = Field(
        "fp32", description="What finals are computed in; another one is faster, and no final depends on load in any."
    )
    engine_slots: int = Field(128, ge=1, description="Segments that can have partials at the same time; the others have finals alone.")
    chunk_frames: int = Field(5, ge=1, le=50, description="Encoder frames of 40 ms that are taken at once; 5 are a block of 200 ms.")
    left_chunks: int = Field(16, ge=0, le=100, description="Chunks of the past that the encoder looks back on.")
    final_chunk_frames: int = Field(
        100, ge=0, le=500, description="The same for finals, which wait for nothing: 100 frames are 4 s; 0: finals hear as partials do."
    )
    final_left_chunks: int = Field(4, ge=0, le=100, description="Chunks of the past that finals look back on.")
    beam: int = Field(10, ge=2, le=64, description="Hypotheses that the search follows, and that are rescored.")
    lm: Path | None = Field(
        None, description="A word n-gram in ARPA format that the search listens to; unset: lm.arpa in the model's folder, if there is one."
    )
    lm_weight: float = Field(0.5, ge=0.0, description="What the n-gram's log-probabilities count.")
    lm_word_bonus: float = Field(0.5, description="What each word gets beside them, so that few words are not preferred.")
    rescoring: bool = Field(True, description="Let the attention decoder choose among the hypotheses of a final.")
    ctc_weight: float = Field(0.8, ge=0.0, description="What the search's score counts beside the attention decoder's.")
    reverse_weight: float | None = Field(
        None, ge=0.0, le=1.0, description="What the right-to-left decoder counts; unset: as the model's train.yaml says."
    )
    itn: bool = Field(True, description="Write numbers, dates and amounts in finals as digits (Chinese and English).")
    punctuation: bool = Field(True, description="Set commas, stops and question marks in finals, where the speaker paused.")
    sentence_case: bool = Field(True, description="Begin sentences in finals with a capital.")

    # Gateway
    gateway_host: str = Field("127.0.0.1", description="Address that the gateway listens on.")
    gateway_port: _Port = Field(8_080, description="Port that the gateway listens on.")
    gateway_history_ms: _Ms = Field(3_600_000, description="How far back the gateway knows finals; an hour of 50 channels takes 75 MB.")
    gateway_origins: str = Field(
        "", description="Web origins besides its own whose pages may connect, comma-separated, such as https://desk.example.com."
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.security_protocol.startswith("SASL") and not self.sasl_username:
            raise ValueError("ASR_SASL_USERNAME is needed with ASR_SECURITY_PROTOCOL=" + self.security_protocol)
        if (self.ssl_cert_file is None) != (self.ssl_key_file is None):
            raise ValueError("ASR_SSL_CERT_FILE and ASR_SSL_KEY_FILE belong together")
        for name in ("ssl_ca_file", "ssl_cert_file", "ssl_key_file"):
            path = getattr(self, name)
            if path is not None and not path.is_file():
                raise ValueError(f"ASR_{name.upper()}: there is no file {path}")
        if self.lm is not None and not self.lm.is_file():
            raise ValueError(f"ASR_LM: there is no file {self.lm}")
        if self.engine == "conformer" and self.feature_kind not in ("auto", "fbank"):
            raise ValueError("ASR_FEATURE_KIND must be fbank or auto with ASR_ENGINE=conformer")
        if self.final_engine and self.engine == self.final_engine:
            raise ValueError(
                f"ASR_FINAL_ENGINE={self.final_engine} is a second pass by the same engine: unset it, or set ASR_ENGINE to another"
            )
        if self.vad_tail_ms > self.vad_closing_ms:
            raise ValueError("ASR_VAD_TAIL_MS must be at most ASR_VAD_CLOSING_MS: what comes later is not known to be silence yet")
        for channel, values in self.vad_channels.items():
            for name in values.keys() - set(CHANNEL_SETTINGS):
                raise ValueError(f"ASR_VAD_CHANNELS: {name!r} of channel {channel!r} is none of {', '.join(CHANNEL_SETTINGS)}")
            try:
                self.for_channel(channel)
            except ValidationError as wrong:
                raise ValueError(f"ASR_VAD_CHANNELS: channel {channel!r}: {_told(wrong)}") from wrong
        return self

    @property
    def stages(self) -> tuple[StageName, ...]:
        """The stages that this worker runs."""
        return (self.stage,) if self.stage else STAGES

    @property
    def group(self) -> str:
        """The consumer group of this worker: state belongs to it, so it is fixed per set of stages."""
        return f"{self.namespace}.{self.stage}" if self.stage else self.namespace

    @property
    def worker_name(self) -> str:
        """The worker's id as configured, else host and process."""
        return self.worker_id or f"{socket.gethostname()}-{self.stage or 'all'}-{os.getpid()}"

    @property
    def wants_pcm(self) -> bool:
        """Whether the engine or the second pass listens to audio itself."""
        return "whisper" in (self.engine, self.final_engine)

    @property
    def features(self) -> Literal["fbank", "mfcc", "none"]:
        """The features to compute."""
        if self.feature_kind != "auto":
            return self.feature_kind
        return "none" if self.engine == "whisper" else "fbank"

    def for_channel(self, channel_id: str) -> Settings:
        """Return the settings that are in force for a channel."""
        values = self.vad_channels.get(channel_id)
        return _Given(**{**self.model_dump(), "vad_channels": {}, **values}) if values else self

    @staticmethod
    def samples(ms: int) -> int:
        """Return a time in ms as 16 kHz samples."""
        return ms * SAMPLE_RATE_HZ // 1_000


class _Given(Settings):
    """Settings from values alone: what the environment says is in them already."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Leave out all other sources."""
        return (init_settings,)


def load_settings(**overrides: Any) -> Settings:
    """Read the settings from ``ASR_*``, ``.env`` and the overrides, which win.

    Raises:
        SettingsError: a value is wrong; the message names its variable.
    """
    try:
        return Settings(**overrides)
    except ValidationError as wrong:
        raise SettingsError(_told(wrong)) from wrong


def _told(wrong: ValidationError) -> str:
    """Return what is wrong, a line for each variable."""
    lines = []
    for error in wrong.errors():
        name = "_".join(str(part) for part in error["loc"]).upper()
        lines.append(f"ASR_{name}: {error['msg']}, not {error['input']!r}" if name else error["msg"].removeprefix("Value error, "))
    return "\n".join(lines)


def setting_sources() -> dict[str, str]:
    """Return where each setting that is not at its default comes from: ``environment`` or ``.env``."""
    environment = dict.fromkeys(EnvSettingsSource(Settings)(), "environment")
    return dict.fromkeys(DotEnvSettingsSource(Settings)(), ".env") | environment
