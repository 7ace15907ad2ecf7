"""One run of chaos: the same audio first undisturbed, then while things are killed, and a verdict on what came out."""

from __future__ import annotations

import json
import math
import random
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from connectors.recorder.session import partition_of
from ops.chaos.checker import (
    CHECKED_TOPICS,
    Call,
    Decoder,
    RawRecord,
    SentSession,
    Verdict,
    delivered_samples,
    judge,
    read_journal,
    read_raw,
)
from ops.chaos.fleet import Fleet, Member
from ops.chaos.health import Growth, Health, Lag, Sample, growths
from ops.chaos.plan import Layout, Role, Strike
from ops.chaos.player import CallFile, Planned, Task
from ops.chaos.takeover import Answers, Mark, Times, measure
from ops.chaos.tap import Tap
from ops.demo.calls import assemble
from schemas.records import SAMPLE_RATE_HZ
from streams.errors import UserError
from streams.settings import Settings

__all__ = ["Chaos", "Options", "Outcome"]

_PLAYER: Final = ("-m", "ops.chaos.player")
#: Distinct calls; the channels play them in turn, so that the undisturbed run need not last as long as the disturbed one.
_CALLS_MOST: Final = 12
#: Every third call is a dialogue, of which one party is played: half of it is silence.
_DIALOGUE_EVERY: Final = 3
#: Before the first strike all channels have been heard.
_LEAD_S: Final = 5.0
#: After the last one, so long calls go on.
_TRAIL_S: Final = 5.0
_POLL_S: Final = 0.05
#: Sessions whose recorder was killed are closed by a timeout; on top of that, as long as an outage.
_CLOSE_S: Final = 60.0
_PLAYED_S: Final = 120.0
_SEGMENT_WAIT_S: Final = 15.0
#: So far from a segment's ends is the middle of it.
_INSIDE_US: Final = 300_000
_MOMENT_WAIT_S: Final = 90.0
_JOINED_S: Final = 3.0
#: A backlog of 10 s is to be taken within 5.
_CATCH_UP_S: Final = 20.0
_US_PER_S: Final = 1_000_000
_FOREVER_US: Final = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What kind of run.

    Attributes:
        channels: calls at the same time.
        plan: what is done, in order.
        seed: which calls.
        workers: of each stage, or in all.
        layout: a worker for each stage, or for all of them.
        nodes: brokers.
        recorders: processes that play the calls.
        call_s: length of a call.
        strike_for_s: after so long no strike begins any more.
        gateway: run one.
    """

    channels: int
    plan: Sequence[Strike]
    seed: int
    workers: int = 2
    layout: Layout = "stages"
    nodes: int = 1
    recorders: int = 2
    call_s: float = 25.0
    strike_for_s: float = math.inf
    gateway: bool = True


@dataclass(slots=True)
class Outcome:
    """Everything that is known after a run.

    Attributes:
        verdict: of the checker.
        times: what each mark cost.
        kills: processes killed or stopped.
        deaths: processes that died though nobody killed them, with the cause of each.
        broken_off: why no more was struck; empty if everything was.
        answers: by channel, of the disturbed run.
        begun_us: when the disturbed run began.
        ended_us: when it ended.
        lags: of the consumer groups.
        lag_at_end: when everything was over.
        growths: of processes that lived long.
        samples: of all processes.
        folder: logs and journals.
    """

    verdict: Verdict
    times: list[Times]
    kills: int
    deaths: list[str]
    answers: dict[str, Answers]
    begun_us: int
    ended_us: int
    lags: list[Lag]
    lag_at_end: list[Lag]
    growths: list[Growth]
    samples: list[Sample] = field(repr=False)
    folder: Path = Path()
    broken_off: str = ""


class Chaos:
    """One run.

    Args:
        settings: the configuration.
        overrides: settings that differ from the environment, for every process.
        folder: for audio, logs, journals and the brokers' data.
        options: what kind of run.
        on_progress: told what goes on.
        on_kill: told of each kill, with how many it counts.
        on_strike: told of each strike that begins.
        worker_command: arguments to Python that run a worker; by default the product's.
    """

    def __init__(
        self,
        settings: Settings,
        overrides: Mapping[str, Any],
        folder: Path,
        options: Options,
        *,
        on_progress: Callable[[str], None] = lambda _message: None,
        on_kill: Callable[[int], None] = lambda _count: None,
        on_strike: Callable[[str], None] = lambda _what: None,
        worker_command: Sequence[str] | None = None,
    ) -> None:
        self._folder = folder.absolute()
        self._options = options
        self._on_progress = on_progress
        self._on_kill = on_kill
        self._on_strike = on_strike
        self._rng = random.Random(options.seed)  # noqa: S311 reproducible, not secret
        command = {"worker_command": worker_command} if worker_command is not None else {}
        self._fleet = Fleet(
            settings,
            self._folder,
            overrides,
            workers=options.workers,
            layout=options.layout,
            nodes=options.nodes,
            on_progress=on_progress,
            **command,
        )
        self._decoder = Decoder(Path(__file__).parents[2] / "schemas")
        self._calls: dict[str, Call] = {}
        self._files: tuple[CallFile, ...] = ()
        self._marks: list[Mark] = []
        self._kills = 0
        self._deaths: list[str] = []
        self._broken_off = ""
        self._killed_players: set[str] = set()
        self._brokers_disturbed = False
        self._read_to: dict[Path, int] = {}
        self._newest: dict[str, dict[str, Any]] = {}
        #: By call, where its segments are in the undisturbed run, in µs from its start.
        self._segments: dict[str, list[tuple[int, int]]] = {}

    # ------------------------------------------------------------------ the whole

    def run(self) -> Outcome:
        """Do it all, and leave nothing running.

        Raises:
            UserError: the system does not start, or does not come back after a strike.
        """
        self._make_calls()
        with ExitStack() as stack:
            fleet = stack.enter_context(self._fleet)
            if self._options.gateway:
                fleet.start(fleet.gateway())
            servers, namespace = fleet.settings.bootstrap_servers, fleet.settings.namespace
            tap = stack.enter_context(Tap(servers, namespace, self._decoder))
            self._on_progress("The undisturbed run")
            self._play_all("undisturbed", {str(1 + number): (Planned(file.name),) for number, file in enumerate(self._files)})
            self._wait_closed(tap)
            self._learn_segments()
            health = stack.enter_context(Health(fleet.cluster, [fleet.group(role) for role in fleet.roles], self._processes))
            begun_us, ended_us = self._disturbed_run()
            self._wait_closed(tap)
            self._on_progress("The cut calls once more, undisturbed")
            self._play_cut(tap)
            lag_at_end = health.lag_now()
            self._on_progress("Reading everything from offset 0")
            sessions = self._sessions()
            answers: dict[str, dict[tuple[str, int], int]] = defaultdict(dict)

            def answered(record: RawRecord) -> None:
                read_us = tap.read_us.get((record.partition, record.offset), _FOREVER_US)
                known = answers[record.fields["channel_id"]]
                frame = record.fields["session_id"], record.fields["position_samples"]
                known[frame] = min(read_us, known.get(frame, _FOREVER_US))

            verdict = judge(
                sessions,
                self._calls,
                self._read(CHECKED_TOPICS),
                killed_players=frozenset(self._killed_players),
                brokers_disturbed=self._brokers_disturbed,
                on_answer=answered,
            )
            channels = _answers(sessions, answers, self._killed_players)
            return Outcome(
                verdict=verdict,
                times=measure(self._marks, channels, ended_us),
                kills=self._kills,
                deaths=self._deaths,
                answers=channels,
                begun_us=begun_us,
                ended_us=ended_us,
                lags=health.lags,
                lag_at_end=lag_at_end,
                growths=growths(health.samples),
                samples=health.samples,
                folder=self._folder,
                broken_off=self._broken_off,
            )

    def _processes(self) -> dict[str, int]:
        return {member.life: pid for member in list(self._fleet.members.values()) if (pid := member.pid) is not None}

    # ------------------------------------------------------------------ audio

    def _make_calls(self) -> None:
        """Put the calls together, and write them down as they go on the wire."""
        folder = self._folder / "calls"
        folder.mkdir(parents=True, exist_ok=True)
        (self._folder / "journals").mkdir(exist_ok=True)
        files = []
        for number in range(min(self._options.channels, _CALLS_MOST)):
            parties = 2 if number % _DIALOGUE_EVERY == _DIALOGUE_EVERY - 1 else 1
            rng = np.random.default_rng((self._options.seed, number))
            party = assemble(parties, self._options.call_s, telephone=number % 2 == 1, rng=rng).parties[-1]
            name, payload = f"call-{number:02d}", party.payload()
            file = folder / f"{name}.raw"
            file.write_bytes(payload)
            files.append(CallFile(name, str(file), party.encoding, party.sample_rate_hz))
            self._calls[name] = Call(name, party.encoding, party.sample_rate_hz, payload)
        self._files = tuple(files)

    def _start_player(self, member: Member, run: str, channels: Mapping[str, tuple[Planned, ...]], *, again: bool) -> None:
        life = f"{member.name}.{member.lives + 1}"
        journal = self._folder / "journals" / f"{life}.jsonl"
        task = Task(player=life, run=run, calls=self._files, channels=dict(channels), again=again, journal=str(journal))
        file = self._folder / f"{life}.json"
        file.write_bytes(msgspec.json.encode(task))
        self._fleet.start(member, str(file))

    def _play_all(self, run: str, channels: Mapping[str, tuple[Planned, ...]]) -> None:
        """Play calls once, and wait until all is sent."""
        member = self._fleet.add(f"player-{run}", _PLAYER)
        self._start_player(member, run, channels, again=False)
        self._fleet.wait_gone(member, self._options.call_s + _PLAYED_S)
        member.due = False

    def _sessions(self) -> dict[str, SentSession]:
        return read_journal(sorted((self._folder / "journals").iterdir()))

    def _begun(self) -> list[dict[str, Any]]:
        """Return the newest session of each channel, from what the recorders have journaled since the last look."""
        for file in (self._folder / "journals").glob("recorder-*"):
            with file.open("rb") as journal:
                journal.seek(self._read_to.get(file, 0))
                for line in journal:
                    if not line.endswith(b"\n"):
                        break
                    self._read_to[file] = self._read_to.get(file, 0) + len(line)
                    if b'"what": "begin"' in line:
                        entry = json.loads(line)
                        self._newest[entry["channel_id"]] = entry
        return list(self._newest.values())

    def _read(self, topics: Sequence[str]) -> Iterator[RawRecord]:
        return read_raw(self._fleet.settings.bootstrap_servers, self._fleet.settings.namespace, topics, self._decoder)

    def _wait_closed(self, tap: Tap) -> None:
        """Wait until the end of every session is written; who is not closed by then is the checker's to find."""
        deadline_s = time.monotonic() + self._fleet.settings.session_lost_ms / 1_000 + _CLOSE_S
        while time.monotonic() < deadline_s and (open_ones := self._sessions().keys() - tap.closed):
            self._on_progress(f"Waiting for the end of {len(open_ones)} sessions")
            self._note_deaths()
            time.sleep(1.0)

    def _learn_segments(self) -> None:
        calls = {session_id: session.call for session_id, session in self._sessions().items()}
        for record in self._read(["transcripts"]):
            fields = record.fields
            if fields["session_id"] in calls and fields["kind"] == "final":
                span = fields["position_samples"], fields["end_sample"]
                start_us, end_us = (sample * _US_PER_S // SAMPLE_RATE_HZ for sample in span)
                self._segments.setdefault(calls[fields["session_id"]], []).append((start_us, end_us))

    def _play_cut(self, tap: Tap) -> None:
        """Play again, undisturbed, as much of the calls that a killed recorder broke off as had reached the brokers."""
        cut = {
            session_id: session
            for session_id, session in self._sessions().items()
            if session.player in self._killed_players and not session.ended
        }
        if not cut:
            return
        lengths = delivered_samples(cut, self._read(["audio"]))
        wanted = dict.fromkeys(Planned(cut[session_id].call, samples) for session_id, samples in lengths.items() if samples)
        self._play_all("cut", {str(1 + number): (planned,) for number, planned in enumerate(wanted)})
        self._wait_closed(tap)

    # ------------------------------------------------------------------ strikes

    def _disturbed_run(self) -> tuple[int, int]:
        options, fleet = self._options, self._fleet
        for number in range(options.recorders):
            self._start_player(fleet.add(f"recorder-{number}", _PLAYER), "disturbed", self._share(number), again=True)
        self._wait_for(lambda: len(self._begun()) == options.channels)
        begun_us = time.time_ns() // 1_000
        time.sleep(_LEAD_S)
        for number, strike in enumerate(options.plan):
            if time.time_ns() // 1_000 - begun_us > options.strike_for_s * _US_PER_S:
                break
            what = f"{number + 1} of {len(options.plan)}: {strike.kind} {' '.join(strike.roles) or strike.broker}"
            self._on_progress(what)
            self._on_strike(what)
            time.sleep(strike.pause_s)
            try:
                getattr(self, f"_{strike.kind}")(strike)
                fleet.wait_whole(self._note_deaths)
            except UserError as failure:
                # What was done so far is judged all the same.
                self._broken_off = f"in {what}: {failure}"
                break
        time.sleep(_TRAIL_S)
        ended_us = time.time_ns() // 1_000
        self._on_progress("The last calls come to their ends")
        recorders = [fleet.members[f"recorder-{number}"] for number in range(options.recorders)]
        for member in recorders:
            fleet.terminate(member)
        for member in recorders:
            try:
                fleet.wait_gone(member, options.call_s + _PLAYED_S)
            except UserError as failure:
                self._broken_off = self._broken_off or f"at the end: {failure}"
            member.due = False
        return begun_us, ended_us

    def _share(self, recorder: int) -> dict[str, tuple[Planned, ...]]:
        """Return the channels of a recorder, each with all calls, beginning with another one."""
        names = [file.name for file in self._files]
        return {
            str(1 + number): tuple(Planned(name) for name in (*names[number % len(names) :], *names[: number % len(names)]))
            for number in range(recorder, self._options.channels, self._options.recorders)
        }

    def _kill(self, strike: Strike) -> None:
        (role,) = strike.roles
        victim = self._victims(strike)[0]
        self._strike_workers(strike, {victim: self._owned(role, victim)})
        self._restart(strike, [victim])

    def _pair(self, strike: Strike) -> None:
        victims = {victim: self._owned(role, victim) for role, victim in zip(strike.roles, self._victims(strike), strict=True)}
        self._strike_workers(strike, victims)
        self._restart(strike, list(victims))

    def _freeze(self, strike: Strike) -> None:
        (role,) = strike.roles
        (victim,) = self._victims(strike)
        owned = self._owned(role, victim)
        note = self._wait_moment(strike, owned)
        self._mark(self._fleet.freeze(victim), "stop", strike, victim.name, partitions=owned, note=note)
        self._count(1)
        time.sleep(strike.freeze_s)
        self._mark(self._fleet.thaw(victim), "continue", strike, victim.name)

    def _rebalance(self, strike: Strike) -> None:
        """Kill one; and the other one in the moment when the first one's successor joins."""
        (role,) = strike.roles
        (first,) = self._victims(strike)
        self._strike_workers(strike, {first: self._owned(role, first)})
        self._fleet.wait_gone(first)
        survivor = self._rng.choice([member for member in self._fleet.workers(role) if member is not first])
        remaining = {member.life for member in self._fleet.workers(role) if member is not first}
        owned: Mapping[str, tuple[int, ...]] = {}

        def alone() -> bool:
            nonlocal owned
            owned = self._fleet.owned(role)
            return owned.keys() == remaining

        self._wait_for(alone)
        self._fleet.start(first)
        # The group is not stable for the moment in which it lets the successor in; between two looks that may be over already.
        self._wait_for(lambda: self._fleet.joins(role) or first.life in self._fleet.owned(role))
        self._strike_workers(strike, {survivor: owned.get(survivor.life, ())}, note="while a successor joins")
        self._restart(strike, [survivor])

    def _broker(self, strike: Strike) -> None:
        if not self._fleet.nodes:
            raise UserError(
                "The brokers are another's, and are not killed here", "Leave broker out of --targets, or unset ASR_BOOTSTRAP_SERVERS."
            )
        partition = 1 + self._rng.randrange(self._options.channels)
        node = self._fleet.node_that(strike.broker, partition % self._fleet.settings.partitions)
        sole = len(self._fleet.nodes) == 1
        self._brokers_disturbed = True
        at_us = time.time_ns() // 1_000
        node.kill()
        self._mark(at_us, "kill", strike, f"broker-{node.node_id}", everybody=True, sole=sole, note=strike.broker)
        self._count(1)
        time.sleep(0.0 if sole else strike.restart_s)
        self._fleet.restart_node(node)

    def _recorder(self, strike: Strike) -> None:
        victim = self._fleet.members[f"recorder-{strike.number}"]
        self._killed_players.add(victim.life)
        mine = tuple(sorted({partition_of(channel, self._fleet.settings.partitions) for channel in self._share(strike.number)}))
        self._mark(self._fleet.kill(victim), "kill", strike, victim.name, partitions=mine)
        self._count(1)
        self._fleet.wait_gone(victim)
        time.sleep(strike.restart_s)
        self._start_player(victim, "disturbed", self._share(strike.number), again=True)

    def _gateway(self, strike: Strike) -> None:
        victim = self._fleet.gateway()
        self._mark(self._fleet.kill(victim), "kill", strike, victim.name)
        self._count(1)
        self._restart(strike, [victim])

    def _stall(self, strike: Strike) -> None:
        """Stop all engines for a while; then see how the backlog is taken."""
        (role,) = strike.roles
        engines = self._fleet.engines(role)
        self._mark(self._fleet.signal_all(engines, signal.SIGSTOP), "stop", strike, "engines", everybody=True, sole=True)
        self._count(1)
        time.sleep(strike.freeze_s)
        self._mark(self._fleet.signal_all(engines, signal.SIGCONT), "continue", strike, "engines", everybody=True)
        time.sleep(_CATCH_UP_S)

    def _rolling(self, strike: Strike) -> None:
        (role,) = strike.roles
        for member in self._fleet.workers(role):
            owned = self._owned(role, member)
            self._mark(self._fleet.terminate(member), "leave", strike, member.name, partitions=owned)
            self._fleet.wait_gone(member)
            self._fleet.start(member)
            self._fleet.wait_whole(self._note_deaths)
            time.sleep(_JOINED_S)

    def _join(self, strike: Strike) -> None:
        (role,) = strike.roles
        third = self._fleet.worker(role, self._options.workers)
        self._mark(time.time_ns() // 1_000, "join", strike, third.name)
        self._fleet.start(third)
        self._fleet.wait_whole(self._note_deaths)
        time.sleep(_JOINED_S)
        owned = self._owned(role, third)
        third.due = False
        self._mark(self._fleet.terminate(third), "leave", strike, third.name, partitions=owned)
        self._fleet.wait_gone(third)

    # ------------------------------------------------------------------ what strikes have in common

    def _victims(self, strike: Strike) -> list[Member]:
        """Return a worker of each role that is struck; no one twice."""
        of_roles = map(self._fleet.workers, strike.roles)
        return [workers[(strike.number + each) % len(workers)] for each, workers in enumerate(of_roles)]

    def _owned(self, role: Role, member: Member) -> tuple[int, ...]:
        return self._fleet.owned_lately(role).get(member.life, ())

    def _strike_workers(self, strike: Strike, victims: Mapping[Member, tuple[int, ...]], note: str = "") -> None:
        partitions = tuple({number for owned in victims.values() for number in owned})
        note = note or self._wait_moment(strike, partitions)
        alive = [member for role in self._fleet.roles for member in self._fleet.workers(role) if member.pid is not None]
        left = {member.role for member in alive if member not in victims}
        times = {victim: self._fleet.kill(victim) for victim in victims}
        for victim, at_us in times.items():
            self._mark(at_us, "kill", strike, victim.name, partitions=victims[victim], sole=victim.role not in left, note=note)
        self._count(len(times))

    def _restart(self, strike: Strike, members: Sequence[Member]) -> None:
        for member in members:
            self._fleet.wait_gone(member)
        time.sleep(strike.restart_s)
        for member in members:
            self._fleet.start(member)

    def _wait_moment(self, strike: Strike, partitions: Sequence[int]) -> str:
        """Wait for the moment that the strike wants; return what it was."""
        if strike.moment == "any":
            return ""
        deadline_s = time.monotonic() + _SEGMENT_WAIT_S
        while time.monotonic() < deadline_s:
            now_us = time.time_ns() // 1_000
            for session in self._begun():
                position_us = now_us - session["started_us"]
                spans = self._segments.get(session["call"], ()) if session["partition"] in partitions else ()
                if any(start_us + _INSIDE_US < position_us < end_us - _INSIDE_US for start_us, end_us in spans):
                    return f"channel {session['channel_id']} in the middle of a segment"
            time.sleep(_POLL_S)
        return ""

    @staticmethod
    def _wait_for(condition: Callable[[], bool]) -> None:
        """Wait for a moment, but not for ever: a strike that misses it strikes all the same."""
        deadline_s = time.monotonic() + _MOMENT_WAIT_S
        while not condition() and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)

    def _mark(
        self,
        at_us: int,
        what: str,
        strike: Strike,
        target: str,
        *,
        partitions: tuple[int, ...] = (),
        everybody: bool = False,
        sole: bool = False,
        note: str = "",
    ) -> None:
        mark = Mark(
            at_us=at_us, what=what, kind=strike.kind, target=target, partitions=partitions, everybody=everybody, sole=sole, note=note
        )
        self._marks.append(mark)
        with (self._folder / "marks.jsonl").open("a", encoding="utf-8") as journal:
            journal.write(json.dumps(asdict(mark)) + "\n")

    def _count(self, kills: int) -> None:
        self._kills += kills
        self._on_kill(kills)

    def _note_deaths(self) -> None:
        """Note what died by itself, and start it again, as a supervisor would."""
        dead = [member for member in self._fleet.members.values() if member.due and member.child is not None and member.pid is None]
        self._deaths += self._fleet.deaths()
        for member in dead:
            if member.role or member.name == "gateway":
                self._fleet.start(member)


def _answers(
    sessions: Mapping[str, SentSession], answers: Mapping[str, Mapping[tuple[str, int], int]], killed_players: Collection[str]
) -> dict[str, Answers]:
    """Return the frames of the disturbed run by channel, in the order of capture, with when each was answered."""
    frames: dict[str, list[tuple[int, int]]] = defaultdict(list)
    partitions: dict[str, int] = {}
    for session in sessions.values():
        if session.run != "disturbed":
            continue
        partitions[session.channel_id] = session.partition
        known = answers.get(session.channel_id, {})
        # What a killed recorder still held, nobody could answer.
        may_be_held = session.player in killed_players and not session.ended
        for start, _, captured_us in session.frames:
            answered_us = known.get((session.session_id, start), _FOREVER_US)
            if answered_us != _FOREVER_US or not may_be_held:
                frames[session.channel_id].append((captured_us, answered_us))
    found = {}
    for channel_id, mine in frames.items():
        table = np.array(sorted(mine), dtype=np.int64)
        found[channel_id] = Answers(partitions[channel_id], table[:, 0], table[:, 1])
    return dict(sorted(found.items(), key=lambda each: (len(each[0]), each[0])))
