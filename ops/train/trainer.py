"""Trains the bundled streaming model: CTC, attention decoder and, to be quick to find its feet, the phones of a forced alignment.

The run is a row of epochs of equal length. After each, the averaged weights are judged on the development sets, a line is added to
``log.jsonl``, the plot is drawn again. ``checkpoint.pt`` is replaced every two minutes: a run that is stopped anywhere goes on from there.
"""

# ruff: noqa: S311 - seeded draws, no secrets
from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
import yaml
from torch import Tensor, nn

from agents.inference.conformer.loader import CMVN_FILE, CONFIG_FILE, UNITS_FILE, WEIGHTS_FILE, load_model
from agents.inference.conformer.model import DecoderConfig, EncoderConfig, ModelConfig, StreamingModel
from ops.train.augment import IGNORED_PHONE
from ops.train.batches import Batch, batch_stream, make_mixer
from ops.train.clips import PHONES, read_shard
from ops.train.evaluate import development_sets, word_errors
from ops.train.features import MEL_BINS
from ops.train.tokens import BLANK, SOS_EOS, Tokens, train_tokens

__all__ = ["Recipe", "Trainer", "save_wenet", "second_recipe"]

BPE_FILE: Final = "bpe.model"
#: A run that is stopped loses at most this much.
_SAVE_EVERY_S: Final = 120


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """Every number of the recipe."""

    pieces: int = 160
    encoder: EncoderConfig = EncoderConfig(
        output_size=128,
        attention_heads=4,
        linear_units=512,
        num_blocks=8,
        cnn_module_kernel=15,
        cnn_module_norm="layer_norm",
        dropout_rate=0.1,
        positional_dropout_rate=0.1,
        attention_dropout_rate=0.0,
    )
    decoder: DecoderConfig = DecoderConfig(
        num_blocks=3, linear_units=512, dropout_rate=0.15, self_attention_dropout_rate=0.1, src_attention_dropout_rate=0.1
    )
    #: The layer whose output must tell the phones.
    phone_layer: int = 4
    ctc_weight: float = 0.5
    attention_weight: float = 0.35
    phone_weight: float = 0.6
    label_smoothing: float = 0.1
    learning_rate: float = 1e-3
    weight_decay: float = 0.02
    warmup_updates: int = 800
    gradient_clip: float = 2.0
    average_decay: float = 0.998
    #: About two hours of a free core.
    updates: int = 10_000
    #: The learning rate falls over this last share of the updates.
    cooling_share: float = 0.3
    #: How often the sound of examples is changed at first, of how often it is changed from so many updates on.
    first_strength: float = 0.25
    strengthening_updates: int = 5_000
    updates_per_epoch: int = 250
    synthetic_share: float = 0.35
    #: Of the recorded examples, how many are numbers.
    number_share: float = 0.48
    cmvn_examples: int = 600
    seed: int = 1


def second_recipe(**changes: Any) -> Recipe:
    """Return the recipe of a run that goes on with weights which have learnt: mostly numbers, nothing easy first, the rate soon falling."""
    return msgspec.structs.replace(
        Recipe(learning_rate=6e-4, warmup_updates=200, updates=3_000, cooling_share=0.8, first_strength=1.0, number_share=0.66), **changes
    )


class ByteDropout(nn.Module):
    """Dropout that draws eight numbers at once: on a CPU the drawing of `nn.Dropout` takes a seventh of a training step."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.dropped = round(rate * 256)

    def forward(self, inputs: Tensor) -> Tensor:
        """Drop elements, and scale the others up."""
        if not self.training or not self.dropped:
            return inputs
        drawn = torch.empty(-(-inputs.numel() // 8), dtype=torch.int64).random_(-(2**63), None).view(torch.uint8)
        kept = drawn[: inputs.numel()].view(inputs.shape) >= self.dropped
        return inputs * kept.to(inputs.dtype).mul_(256 / (256 - self.dropped))


def use_byte_dropout(module: nn.Module) -> None:
    """Exchange every `nn.Dropout` below a module."""
    for name, child in module.named_children():
        if isinstance(child, nn.Dropout):
            setattr(module, name, ByteDropout(child.p))
        else:
            use_byte_dropout(child)


def _targets_for_decoder(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return sos + tokens (padded with eos) and tokens + eos (padded with -1), (B, L + 1) int64."""
    rows = len(batch.tokens)
    inputs = torch.cat((torch.full((rows, 1), SOS_EOS), batch.tokens), 1)
    inputs = inputs.masked_fill(inputs < 0, SOS_EOS)
    outputs = torch.cat((batch.tokens, torch.full((rows, 1), -1)), 1)
    outputs[torch.arange(rows), batch.token_counts] = SOS_EOS
    return inputs, outputs


def draw_blocks(choose: random.Random) -> tuple[int, int]:
    """Draw block size and left context for one update: mostly those the product streams with, sometimes others, sometimes all."""
    kind = choose.random()
    if kind < 0.6:
        return 5, choose.randint(8, 24)
    if kind < 0.85:
        return choose.randint(2, 24), choose.choice((-1, 8, 16))
    return 0, -1


class Trainer:
    """A run in a folder."""

    def __init__(
        self,
        recipe: Recipe,
        run_dir: Path,
        data_dir: Path,
        audio_dir: Path,
        digit_speaker: str,
        workers: int,
        begin: Path | None = None,
    ) -> None:
        self.recipe, self.run_dir, self.data_dir, self.audio_dir = recipe, run_dir, data_dir, audio_dir
        self._workers = workers
        run_dir.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(recipe.seed)
        bpe_model = run_dir / BPE_FILE
        if begin is not None and not bpe_model.exists():
            bpe_model.write_bytes((begin / BPE_FILE).read_bytes())
        if not bpe_model.exists():
            recorded = [clip.text for clip in read_shard(data_dir / "recorded.npz")]
            train_tokens(bpe_model, recorded, recipe.pieces, recipe.seed)
        self.tokens = Tokens(bpe_model)
        encoder = msgspec.structs.replace(recipe.encoder, input_dim=MEL_BINS)
        self.config = ModelConfig(
            vocabulary=len(self.tokens.units), blank=BLANK, sos=SOS_EOS, eos=SOS_EOS, encoder=encoder, decoder=recipe.decoder
        )
        self.model = StreamingModel(self.config)
        use_byte_dropout(self.model)
        self.averaged = StreamingModel(self.config).requires_grad_(False).eval()
        self.phone_head = nn.Linear(encoder.output_size, len(PHONES))
        self._phone_layer_output: Tensor | None = None
        self.model.encoder.encoders[recipe.phone_layer - 1].register_forward_hook(self._keep_phone_layer)
        self.optimizer = self._make_optimizer()
        self.sets = development_sets(data_dir.parent, audio_dir, digit_speaker)
        self.epoch, self.update, self.cpu_s, self.best = 0, 0, 0.0, math.inf
        if (run_dir / "checkpoint.pt").exists():
            self._resume()
        elif begin is not None:
            self.model.load_state_dict(load_model(begin).model.state_dict())
            self.averaged.load_state_dict(self.model.state_dict())
        else:
            self._measure_cmvn()
            self.averaged.load_state_dict(self.model.state_dict())

    def _keep_phone_layer(self, _module: nn.Module, _inputs: Any, output: Tensor) -> None:
        self._phone_layer_output = output

    def _make_optimizer(self) -> torch.optim.AdamW:
        parameters = [*self.model.parameters(), *self.phone_head.parameters()]
        matrices = [parameter for parameter in parameters if parameter.dim() > 1]
        others = [parameter for parameter in parameters if parameter.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": self.recipe.weight_decay}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=self.recipe.learning_rate, betas=(0.9, 0.98), foreach=True)

    def _measure_cmvn(self) -> None:
        """Measure the features' mean and variance over augmented examples."""
        mixer = make_mixer(self.data_dir, self.audio_dir, self.recipe.synthetic_share, self.recipe.number_share)
        choose = random.Random(self.recipe.seed)
        features = np.concatenate([mixer.example(choose).features for _ in range(self.recipe.cmvn_examples)])
        cmvn = self.model.encoder.global_cmvn
        cmvn.mean.copy_(torch.from_numpy(features.mean(0)))
        cmvn.istd.copy_(torch.from_numpy(1 / features.std(0)))

    def _learning_rate(self) -> float:
        """Warm up, stay, and fall to nothing over the last part: so a run can be made longer up to there."""
        recipe = self.recipe
        left = (recipe.updates - self.update) / (recipe.updates * recipe.cooling_share)
        return recipe.learning_rate * max(0.0, min(1.0, self.update / recipe.warmup_updates, left))

    def _strength(self) -> float:
        """Start with few words at a time, in sound that is changed seldom: they show sooner what words are made of."""
        recipe = self.recipe
        return min(1.0, recipe.first_strength + (1 - recipe.first_strength) * self.update / recipe.strengthening_updates)

    @property
    def finished(self) -> bool:
        """Whether the run has made all its updates."""
        return self.update >= self.recipe.updates

    def losses(self, batch: Batch, block_frames: int, left_blocks: int) -> dict[str, Tensor]:
        """Return the three losses of a batch: CTC by token, attention by token, phones by frame."""
        with torch.autocast("cpu", torch.bfloat16):
            hidden, frames = self.model.encoder(batch.features, batch.feature_frames, block_frames, left_blocks)
            scores = self.model.ctc(hidden)
            inputs, outputs = _targets_for_decoder(batch)
            logits = self.model.left_to_right(hidden, frames, inputs)
            assert self._phone_layer_output is not None  # noqa: S101 - the hook ran in the line above
            phones = self.phone_head(self._phone_layer_output)
        targets = torch.cat([row[:count] for row, count in zip(batch.tokens, batch.token_counts.tolist(), strict=True)])
        ctc = F.ctc_loss(scores.transpose(0, 1), targets, frames, batch.token_counts, BLANK, reduction="sum", zero_infinity=True)
        count = phones.size(1)
        losses = {
            "ctc": ctc / max(1, len(targets)),
            "attention": F.cross_entropy(
                logits.float().flatten(0, 1), outputs.flatten(), ignore_index=-1, label_smoothing=self.recipe.label_smoothing
            ),
        }
        if (batch.phones != IGNORED_PHONE).any():
            losses["phones"] = F.cross_entropy(phones.float().flatten(0, 1), batch.phones[:, :count].flatten(), ignore_index=IGNORED_PHONE)
        return losses

    def _learn(self, batch: Batch, choose: random.Random) -> dict[str, float]:
        recipe = self.recipe
        self.update += 1
        for group in self.optimizer.param_groups:
            group["lr"] = self._learning_rate()
        losses = self.losses(batch, *draw_blocks(choose))
        weights = {"ctc": recipe.ctc_weight, "attention": recipe.attention_weight, "phones": recipe.phone_weight}
        total = torch.stack([weights[name] * loss for name, loss in losses.items()]).sum()
        self.optimizer.zero_grad(set_to_none=True)
        total.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), recipe.gradient_clip)
        if torch.isfinite(norm):
            self.optimizer.step()
            self._average()
        return {name: float(loss.detach()) for name, loss in losses.items()}

    @torch.no_grad()
    def _average(self) -> None:
        decay = min(self.recipe.average_decay, (1 + self.update) / (20 + self.update))
        torch._foreach_lerp_(list(self.averaged.parameters()), list(self.model.parameters()), 1 - decay)

    def run_epoch(self) -> dict[str, Any]:
        """Train for one epoch, judge, and save; returns the line of the log."""
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        recipe = self.recipe
        # A run that was stopped inside an epoch draws other examples for the rest of it.
        left = min((self.epoch + 1) * recipe.updates_per_epoch, recipe.updates) - self.update
        seed = recipe.seed * 1_000_000 + self.update
        choose = random.Random(seed)
        stream = batch_stream(
            self.data_dir, self.audio_dir, self.run_dir / BPE_FILE, self.model.encoder.global_cmvn.mean.numpy(),
            synthetic_share=recipe.synthetic_share, number_share=recipe.number_share, strength=self._strength(), seed=seed, batches=left,
            workers=self._workers,
        )  # fmt: skip
        self.model.train()
        sums: dict[str, list[float]] = {}
        audio_s = 0.0
        columns = (
            TextColumn("epoch {task.fields[epoch]} of {task.fields[epochs]}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[losses]}"),
            TimeRemainingColumn(),
        )
        with Progress(*columns) as progress:
            epochs = -(-recipe.updates // recipe.updates_per_epoch)
            task = progress.add_task("train", total=left, epoch=self.epoch + 1, epochs=epochs, losses="")
            # The time that the run was given, not the time it was left waiting: it may be stopped, or have the machine's leftovers.
            began, saved = time.process_time(), time.monotonic()
            for batch in stream:
                for name, loss in self._learn(batch, choose).items():
                    sums.setdefault(name, []).append(loss)
                audio_s += float(batch.feature_frames.sum()) / 100
                means = " ".join(f"{name} {np.mean(values[-50:]):.3f}" for name, values in sums.items())
                progress.update(task, advance=1, losses=means)
                worked = time.process_time()
                self.cpu_s += worked - began
                began, now = worked, time.monotonic()
                if now - saved > _SAVE_EVERY_S:
                    self.save_checkpoint()
                    (self.run_dir / "progress.txt").write_text(
                        f"update {self.update}, {self.cpu_s / 3600:.3f} CPU hours: {means}\n", encoding="utf-8"
                    )
                    saved = now
        self.epoch += 1
        row: dict[str, Any] = {
            "epoch": self.epoch,
            "update": self.update,
            "cpu_hours": round(self.cpu_s / 3600, 3),
            "audio_hours": round(audio_s / 3600, 2),
            "learning_rate": round(self._learning_rate(), 6),
            **{f"loss_{name}": round(float(np.mean(values)), 4) for name, values in sums.items()},
        }
        hypotheses = {}
        for name, utterances in self.sets.items():
            rate, rows = word_errors(self.averaged, self.tokens, utterances)
            row[f"wer_{name}"] = round(rate, 2)
            hypotheses[name] = rows
        self._save(row, hypotheses)
        return row

    def _save(self, row: Mapping[str, Any], hypotheses: Mapping[str, list[tuple[str, str, str]]]) -> None:
        with (self.run_dir / "log.jsonl").open("a", encoding="utf-8") as log:
            log.write(json.dumps(row) + "\n")
        with (self.run_dir / "hypotheses.tsv").open("w", encoding="utf-8") as lines:
            for name, rows in hypotheses.items():
                lines.writelines(
                    f"{name}\t{utterance}\t{text}\t{hypothesis}\n" for utterance, text, hypothesis in rows if text != hypothesis
                )
        self.save_checkpoint()
        score = row["wer_orders"] + row["wer_orders_mulaw"] + row["wer_digits"]
        if score <= self.best:
            self.best = score
            save_wenet(self.run_dir / "best", self)
        plot(self.run_dir)

    def save_checkpoint(self) -> None:
        """Replace the checkpoint.

        Weights are kept as they are, averages in half precision, second moments in bfloat16; first moments are soon found again.
        """
        moments = [
            self.optimizer.state[parameter].get("exp_avg_sq") for group in self.optimizer.param_groups for parameter in group["params"]
        ]
        unfinished = self.run_dir / "checkpoint.unfinished"
        torch.save(
            {
                "recipe": msgspec.json.encode(self.recipe).decode(),
                "model": _without_tables(self.model),
                "averaged": {name: tensor.half() for name, tensor in self.averaged.named_parameters()},
                "phone_head": self.phone_head.state_dict(),
                "moments": [moment if moment is None else moment.bfloat16() for moment in moments],
                "epoch": self.epoch,
                "update": self.update,
                "cpu_s": self.cpu_s,
                "best": self.best,
            },
            unfinished,
        )
        unfinished.rename(self.run_dir / "checkpoint.pt")

    def _resume(self) -> None:
        saved = torch.load(self.run_dir / "checkpoint.pt", weights_only=True)
        self.model.load_state_dict(saved["model"], strict=False)
        self.averaged.load_state_dict(saved["model"] | {name: tensor.float() for name, tensor in saved["averaged"].items()}, strict=False)
        self.phone_head.load_state_dict(saved["phone_head"])
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        for parameter, moment in zip(parameters, saved["moments"], strict=True):
            if moment is not None:
                self.optimizer.state[parameter] = {
                    "step": torch.tensor(float(saved["update"])),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": moment.float(),
                }
        self.epoch, self.update, self.cpu_s, self.best = (saved[key] for key in ("epoch", "update", "cpu_s", "best"))


def _without_tables(model: StreamingModel) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in model.state_dict().items() if not name.endswith(".pe")}


def save_wenet(directory: Path, trainer: Trainer) -> None:
    """Write the averaged model as a WeNet model directory, weights in half precision, position tables left out."""
    directory.mkdir(parents=True, exist_ok=True)
    recipe, config = trainer.recipe, trainer.config
    state = _without_tables(trainer.averaged)
    # Half precision bends the statistics of the features by more than the weights.
    torch.save(
        {name: tensor.clone() if "global_cmvn" in name else tensor.half() for name, tensor in state.items()}, directory / WEIGHTS_FILE
    )
    (directory / UNITS_FILE).write_text("".join(f"{unit} {number}\n" for number, unit in enumerate(trainer.tokens.units)), encoding="utf-8")
    (directory / BPE_FILE).write_bytes((trainer.run_dir / BPE_FILE).read_bytes())
    cmvn = trainer.averaged.encoder.global_cmvn
    mean, variance = cmvn.mean.double(), cmvn.istd.double() ** -2
    statistics = {"mean_stat": mean.tolist(), "var_stat": (variance + mean**2).tolist(), "frame_num": 1}
    (directory / CMVN_FILE).write_text(json.dumps(statistics), encoding="utf-8")
    encoder = {key: value for key, value in msgspec.to_builtins(config.encoder).items() if key != "input_dim"}
    settings = {
        "model": "asr_model",
        "encoder": "conformer",
        "encoder_conf": encoder
        | {
            "input_layer": "conv2d", "pos_enc_layer_type": "rel_pos", "selfattention_layer_type": "rel_selfattn", "normalize_before": True,
            "use_cnn_module": True, "causal": True, "use_dynamic_chunk": True, "use_dynamic_left_chunk": True,
        },
        "decoder": "transformer",
        "decoder_conf": {key: value for key, value in msgspec.to_builtins(config.decoder).items() if key != "r_num_blocks"},
        "ctc": "ctc",
        "ctc_conf": {"ctc_blank_id": BLANK},
        "cmvn": "global_cmvn",
        "cmvn_conf": {"cmvn_file": CMVN_FILE, "is_json_cmvn": True},
        "tokenizer": "bpe",
        "tokenizer_conf": {
            "bpe_path": BPE_FILE, "symbol_table_path": UNITS_FILE, "split_with_space": False, "is_multilingual": False, "num_languages": 1,
            "non_lang_syms_path": None, "special_tokens": {"<blank>": 0, "<unk>": 1, "<sos>": SOS_EOS, "<eos>": SOS_EOS},
        },
        "input_dim": MEL_BINS,
        "output_dim": config.vocabulary,
        "vocab_size": config.vocabulary,
        "model_conf": {
            "ctc_weight": recipe.ctc_weight, "lsm_weight": recipe.label_smoothing, "length_normalized_loss": True, "reverse_weight": 0.0,
        },
        "dataset": "asr",
        "dataset_conf": {
            "resample_conf": {"resample_rate": 16000},
            "fbank_conf": {"num_mel_bins": MEL_BINS, "frame_length": 25, "frame_shift": 10, "dither": 0.0},
        },
        "dtype": "fp32",
    }  # fmt: skip
    (directory / CONFIG_FILE).write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")


def plot(run_dir: Path) -> None:
    """Draw losses and word errors over the updates."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    rows = [json.loads(row) for row in (run_dir / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    updates = [row["update"] for row in rows]
    for axes, prefix, label in ((left, "loss_", "loss"), (right, "wer_", "word errors, %")):
        for key in sorted({key for row in rows for key in row if key.startswith(prefix)}):
            axes.plot(updates, [row.get(key, math.nan) for row in rows], label=key.removeprefix(prefix).replace("_", ", "))
        axes.set(xlabel="updates", ylabel=label)
        axes.grid(alpha=0.3)
        axes.legend()
    right.set_yscale("log")
    figure.savefig(run_dir / "curves.png", dpi=90)
    pyplot.close(figure)
