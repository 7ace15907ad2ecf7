"""All three stages in this process, without Kafka: what the benchmark of finals feeds, as fast as it goes.

The cores are the product's own, fed as ``streams/stage.py`` feeds them; only what carries records between them is left out. A restart takes
the state that would have been committed, and reads what would be read again.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from agents.inference.engine import Block, Engine, FinalText, Finish, Hypothesis, Opening, SegmentKey
from schemas.records import FeatureBlock, FlowRecord, SegmentEnd, SessionRecord, Transcript
from streams.core import Core, Input, SessionKey, SessionState
from streams.settings import Settings

if TYPE_CHECKING:
    from agents.inference.core import InferenceCore

__all__ = ["Pipeline"]

#: Finals that may wait: more would only make the engine give up partials, and those are to be there.
_FINALS_WAITING: Final = 16
_POLL_S: Final = 0.001
#: Blocks of cancelled segments are never stepped; whoever waits for one waits no longer than this.
_STEP_PATIENCE_S: Final = 0.25


class _Borrowed:
    """An engine that outlives the core that uses it, and is asked for partials or not."""

    def __init__(self, engine: Engine, *, partials: bool) -> None:
        self._engine = engine
        self._partials = partials
        self._open: set[SegmentKey] = set()
        self.name, self.model_digest = engine.name, engine.model_digest
        self.finals_lanes, self.finals_batch, self.blocks_at_once = engine.finals_lanes, engine.finals_batch, engine.blocks_at_once
        self.stepped = 0
        #: Steps by how many segments they held.
        self.sizes: defaultdict[int, int] = defaultdict(int)

    def open(self, segments: Sequence[Opening]) -> None:
        self._open.update(opening.key for opening in segments)
        self._engine.open(segments)

    def step(self, blocks: Sequence[Block]) -> Sequence[Hypothesis]:
        if not self._partials:
            blocks = [msgspec.structs.replace(block, quiet=True) for block in blocks]
        found = self._engine.step(blocks)
        self.stepped += len(blocks)
        if blocks:
            self.sizes[len({block.key for block in blocks})] += 1
        return found

    def finish(self, requests: Sequence[Finish]) -> Sequence[FinalText]:
        return self._engine.finish(requests)

    def hotwords(self, version: str, folder: str, **how: Any) -> None:
        self._engine.hotwords(version, folder, **how)

    def close(self, keys: Sequence[SegmentKey]) -> None:
        self._open.difference_update(keys)
        self._engine.close(keys)

    def stop(self) -> None:
        """Leave it running: its owner stops it."""

    def let_go(self) -> None:
        """Close what a core that is gone left open."""
        self.close(list(self._open))


class _Outlet:
    """Takes what follows from a stage's inputs."""

    def __init__(self, take: Callable[[SessionKey, SessionRecord], None]) -> None:
        self._take = take
        self.open_inputs = 0

    def emit(self, cause: Input, records: Sequence[SessionRecord]) -> None:
        for record in records:
            self._take(cause.key, record)

    def done(self, cause: Input) -> None:
        self.open_inputs -= 1


class Pipeline:
    """See the module.

    Args:
        settings: of the stages.
        engine: used, not stopped.
        partials: whether it is to find partials: those take most of the time, and finals do not depend on them.
    """

    def __init__(self, settings: Settings, engine: Engine, *, partials: bool = True) -> None:
        self._settings = settings
        self._engine = engine
        self._partials = partials
        #: Finals by session and segment.
        self.finals: dict[tuple[str, int], Transcript] = {}
        #: Finals that came again and were not the same.
        self.conflicts: list[tuple[Transcript, Transcript]] = []
        #: Steps of the engine by how many segments they held.
        self.sizes: defaultdict[int, int] = defaultdict(int)
        self._logs: tuple[dict[SessionKey, list[FlowRecord]], ...] = tuple(defaultdict(list) for _ in range(3))
        self._cores: list[Core] = []

    async def start(self) -> None:
        """Start the stages."""
        from agents.features.core import FeaturesCore
        from agents.inference.core import InferenceCore
        from agents.vad.core import VadCore

        self._borrowed = _Borrowed(self._engine, partials=self._partials)
        self._outlets = (_Outlet(self._to_features), _Outlet(self._to_inference), _Outlet(self._to_readers))
        self._said: tuple[list[Input], list[Input]] = ([], [])
        self._blocks = self._awaited = self._ends = self._settled = 0
        self._inference: InferenceCore = InferenceCore(self._settings, self._outlets[2], self._borrowed)
        self._cores = [VadCore(self._settings, self._outlets[0]), FeaturesCore(self._settings, self._outlets[1]), self._inference]
        for core in self._cores:
            await core.start()

    async def stop(self) -> None:
        """Stop the stages."""
        for core in self._cores:
            await core.stop()
        self._borrowed.let_go()
        for size, count in self._borrowed.sizes.items():
            self.sizes[size] += count

    async def feed(self, records: Mapping[SessionKey, Sequence[FlowRecord]], *, paced: bool = True) -> None:
        """Feed the next records of some sessions, through all stages.

        Args:
            records: in order.
            paced: wait until the engine has stepped what it was fed before, as it would have in real time.
        """
        inputs = []
        for key, some in records.items():
            log = self._logs[0][key]
            inputs += [Input(key, len(log) + number, 0, record) for number, record in enumerate(some)]
            log.extend(some)
        await self._through(inputs, paced=paced)

    async def settle(self) -> None:
        """Wait until everything that was fed is done."""
        while self._outlets[2].open_inputs:  # noqa: ASYNC110 the runtime would go on reading meanwhile
            await asyncio.sleep(_POLL_S)

    async def restart(self) -> None:
        """Stop in the middle, and go on from the state that was left: what follows is what a successor says."""
        states: list[dict[SessionKey, SessionState]] = []
        for core, log in zip(self._cores, self._logs, strict=True):
            snapshots = {key: core.snapshot(key) for key in log}
            states.append({key: state for key, state in snapshots.items() if state is not None})
        await self.stop()
        await self.start()
        for core, of_stage in zip(self._cores, states, strict=True):
            for key, state in of_stage.items():
                core.load(key, state)
        warm = [each for key, state in states[0].items() for each in self._again(0, key, state)]
        for each in warm:
            self._outlets[0].open_inputs += not each.warm
        await self._cores[0].step(warm)
        again = [each for key, state in states[2].items() for each in self._again(2, key, state)]
        await self._infer(again)

    def _again(self, stage: int, key: SessionKey, state: SessionState) -> list[Input]:
        """Return what a stage reads again of a session."""
        log = self._logs[stage][key]
        return [Input(key, offset, 0, log[offset], warm=offset < state.from_offset) for offset in range(state.read_from_offset, len(log))]

    async def _through(self, inputs: Sequence[Input], *, paced: bool) -> None:
        features, inference = self._said
        self._outlets[0].open_inputs += len(inputs)
        await self._cores[0].step(inputs)
        heard, features[:] = list(features), []
        self._outlets[1].open_inputs += len(heard)
        await self._cores[1].step(heard)
        if paced:
            await self._wait_for_engine()
        ready, inference[:] = list(inference), []
        await self._infer(ready)

    async def _infer(self, inputs: Sequence[Input]) -> None:
        self._outlets[2].open_inputs += sum(not each.warm for each in inputs)
        for each in inputs:
            self._blocks += isinstance(each.record, FeatureBlock)
            self._ends += isinstance(each.record, SegmentEnd)
        await self._cores[2].step(inputs)

    async def _wait_for_engine(self) -> None:
        """Wait until the engine has stepped all but what it was fed last: the stages before it work meanwhile."""
        waited_s = 0.0
        while self._borrowed.stepped < self._awaited and waited_s < _STEP_PATIENCE_S:
            await asyncio.sleep(_POLL_S)
            waited_s += _POLL_S
        # What is still missing was cancelled.
        missing = max(0, self._awaited - self._borrowed.stepped)
        self._blocks -= missing
        self._awaited = self._blocks
        while self._ends - self._settled > _FINALS_WAITING:  # noqa: ASYNC110 as above
            await asyncio.sleep(_POLL_S)

    def _to_features(self, key: SessionKey, record: SessionRecord) -> None:
        self._pass_on(1, self._said[0], key, record)

    def _to_inference(self, key: SessionKey, record: SessionRecord) -> None:
        self._pass_on(2, self._said[1], key, record)

    def _pass_on(self, stage: int, said: list[Input], key: SessionKey, record: SessionRecord) -> None:
        if isinstance(record, FlowRecord):
            log = self._logs[stage][key]
            said.append(Input(key, len(log), 0, record))
            log.append(record)

    def _to_readers(self, key: SessionKey, record: SessionRecord) -> None:
        if isinstance(record, Transcript) and record.kind == "final":
            self._settled += 1
            first = self.finals.setdefault((record.session_id, record.segment), record)
            if first is not record:
                self.conflicts.append((first, record))
