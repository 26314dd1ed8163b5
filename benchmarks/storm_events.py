"""The events of the storm, and what must hold after each of them."""

from __future__ import annotations

import os
import random
import shutil
import signal
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import storm_damage
import storm_plans
from corrnoise.noise import Key
from corrnoise.records import read_entries
from storm_faults import FULL, INTERRUPTS, KILLS, STOPPED, Fault
from storm_process import KEYS, Outcome, Process, Tell
from storm_runs import RUNS, STEPS, EngineRun, undisturbed

RESUMED, REFUSED, WRONG = "resumed", "refused", "wrong"


@dataclass(frozen=True)
class Result:
    """How an event ended.

    Attributes:
        subject: the file that it was about, or what happened, in words.
        end: resumed bit-equal, refused in one line, or wrong.
        why: the line, or what is wrong.
    """

    subject: str
    end: str
    why: str = ""


def judged(run: Any, folder: Path, outcomes: list[Outcome], key: int | None = None) -> Result:
    """What the processes of a run, one after the other, and its files come to.

    Args:
        run: which one.
        folder: its files.
        outcomes: of its processes.
        key: the number of its key; read from its file by default.
    """

    def wrong(why: str) -> Result:
        return Result("", WRONG, why)

    for outcome in outcomes:
        if outcome.end == "broken":
            return wrong(outcome.line)
    last, path = outcomes[-1], folder / run.secret
    number = key
    if number is None and path.exists():
        number = KEYS.index(Key.load(path))
    released = [release for outcome in outcomes for release in outcome.released]
    if number is None:
        return wrong("the key is gone") if released else Result("", REFUSED, last.line)
    expected = undisturbed(run, number)
    different = [step for step, value in released if dict(expected.released)[step] != value]
    if different:
        return wrong(f"steps {different} were released with other values")
    seen = 0
    for outcome in outcomes:
        if outcome.known is not None and outcome.known < seen and run.publishes == "steps":
            return wrong(f"the ledger knows {outcome.known} steps of {seen}")
        seen = max([seen, *(step + 1 for step, _ in outcome.released)])
    secret = KEYS[number].reveal()
    for place in folder.rglob("*"):
        if place.is_file() and place != path:
            data = place.read_bytes()
            if secret in data or secret.hex().encode() in data:
                return wrong(f"the key is in {place.name}")
    if last.end == REFUSED:
        return Result("", REFUSED, last.line)
    if last.end != "done":
        return wrong(f"the last process was {last.end}")
    if last.final != expected.final:
        return wrong("the run ended with other values")
    steps = {entry["step"] for entry in read_entries(folder / run.ledger)[1:] if "step" in entry}
    if steps != set(range(STEPS)):
        return wrong(f"the ledger has the steps {sorted(steps)}")
    return Result("", RESUMED)


class Events:
    """The kinds of events; each of them is a method that makes one.

    Args:
        seed: of all choices.
        folder: for files; on a file system that can lock.
        small: a folder on a small file system of its own; ``None`` where there is none.
    """

    def __init__(self, seed: int, folder: Path, small: Path | None = None) -> None:
        self._dice = random.Random(seed)
        self._folder, self._small = folder, small
        self._turn = 0
        self._count: Counter[Any] = Counter()
        self._bases: dict[Any, Path] = {}
        self.kinds: dict[str, Callable[[], Result]] = {
            "kill": self.kill,
            "begin": self.begin,
            "full": self.full,
            "limit": self.limit,
            "interrupt": self.interrupt,
            "damage": self.damage,
            "plan": self.plan,
            "two": self.two,
            "fork": self.fork,
        }
        if small is not None:
            self.kinds["small"] = self.small

    def make(self, kind: str) -> Result:
        """An event of a kind; a defect of the storm itself counts as wrong, too."""
        try:
            return self.kinds[kind]()
        except Exception:
            return Result("", WRONG, traceback.format_exc())

    # Processes that die, and disks that are full.

    def kill(self) -> Result:
        """A process is killed, perhaps the next one too, and the last one must go on."""
        run, fault, writer = self._fault(KILLS)
        faults = [fault]
        if self._dice.random() < 0.3:
            faults.append(Fault(self._dice.randrange(30), self._dice.choice(KILLS)))
        return self._survived(writer, run, self._new(run), *faults)

    def begin(self) -> Result:
        """A process is killed while key and ledger come into being, and so is the next one."""
        run = self._dice.choice(RUNS[:-1])
        first = Fault(self._dice.randrange(16), self._dice.choice(KILLS))
        second = Fault(self._dice.randrange(6), self._dice.choice(KILLS))
        return self._survived("key and ledger", run, self._new(run), first, second)

    def full(self) -> Result:
        """The disk is full at a point and stays so; then there is space again."""
        run, fault, writer = self._fault((FULL,))
        patient = self._dice.random() < 0.5
        return self._survived(writer, run, self._new(run), fault, patient=patient)

    def interrupt(self) -> Result:
        """Ctrl-C inside a write; the user goes on in the same process, then starts another."""
        run, fault, writer = self._fault(INTERRUPTS)
        return self._survived(writer, run, self._new(run), fault, patient=True)

    def limit(self) -> Result:
        """The kernel lets no file grow beyond a limit, in the middle of a write."""
        run = self._run()
        size = self._dice.randrange(4_500)  # a checkpoint has more
        return self._survived("any file", run, self._new(run), None, limit=size)

    def small(self) -> Result:
        """A small file system has a few pages left; then it has space again."""
        assert self._small is not None
        run, folder = self._run(), Path(tempfile.mkdtemp(dir=self._small))
        filler = folder / "filler"
        run.prepare(folder)
        system = os.statvfs(folder)
        # A run needs two pages for each of three checkpoints, and one for key and ledger each.
        pages = max(0, system.f_bavail - self._dice.randrange(1, 8))
        filler.write_bytes(bytes(pages * system.f_frsize))
        return self._survived("any file", run, folder, None, after=filler.unlink)

    def _survived(
        self,
        subject: str,
        run: Any,
        folder: Path,
        *faults: Fault | None,
        after: Callable[[], None] = lambda: None,
        **options: Any,
    ) -> Result:
        """A process for each fault, and one without: it must go on to the end."""
        outcomes = [self._attempt(run, folder, fault=fault, **options) for fault in faults]
        after()
        outcomes.append(self._attempt(run, folder))
        found = judged(run, folder, outcomes)
        shutil.rmtree(folder)
        if outcomes[0].end == "done" and not options.get("patient"):
            return Result(subject, WRONG, "the storm has a defect: nothing happened")
        if found.end == REFUSED:
            return Result(subject, WRONG, f"cannot go on: {found.why}")
        return Result(subject, found.end, found.why)

    # Files that are damaged, and plans that claim too much.

    def damage(self) -> Result:
        """One file of a run that was killed half-way, or that is complete, is damaged."""
        every = []
        for run in (self._dice.choice(RUNS[:-1]), RUNS[-1]):
            base = self._base(run, whole=run is RUNS[-1] or self._dice.random() < 0.3)
            files = [p.relative_to(base) for p in base.rglob("*") if p.is_file()]
            every += [(run, base, f) for f in files if f.name != "data.npz" and f.name[0] != "."]
        run, base, name = self._next("damage", every, label=lambda each: each[2])
        how = self._next(("damage", name), list(storm_damage.DAMAGES), in_order=True)
        folder = self._new(run, base)
        other = self._base(run, whole=True, key=1) / name
        storm_damage.DAMAGES[how](folder / name, self._dice, other)
        # A record of another run is a true one, of that run.
        original = other if how == "of another run" else base / name
        found = self._read_again(run, folder, name, original)
        shutil.rmtree(folder)
        return Result(f"{name.name}, {how}", found.end, found.why)

    def _read_again(self, run: Any, folder: Path, name: Path, original: Path) -> Result:
        """Read a file of a run that may be damaged, and go on with the run."""
        path = folder / name
        if path.exists() and name.name in storm_damage.READERS:
            found = Process(lambda tell: storm_damage.read(path, original, tell)).wait()
            if found.end != "done":
                return Result("", REFUSED if found.end == REFUSED else WRONG, found.line)
        before = _contents(folder)
        outcome = self._attempt(run, folder)
        found = judged(run, folder, [outcome], key=0)
        after = _contents(folder)
        if outcome.known is not None:  # a ledger that was accepted: a torn entry of it is dropped
            before[run.ledger] = after[run.ledger]
        if found.end == REFUSED and not outcome.released and after != before:
            return Result("", WRONG, f"a refusal changed the files: {found.why}")
        return found

    def plan(self) -> Result:
        """A changed plan is given to the engine or to the command line."""
        folder = self._new(RUNS[-1])
        found = storm_plans.hostile(folder, self._dice)
        shutil.rmtree(folder)
        return Result(*found)

    # More than one process.

    def two(self) -> Result:
        """Two processes at once, or a second one while the first has stopped anywhere."""
        run, fault = self._run(), None
        if self._dice.random() < 0.7:
            points = undisturbed(run, 0).points
            fault = Fault(self._dice.randrange(len(points)), STOPPED)
        folder = self._new(run)
        first = self._begin(run, folder, fault=fault)
        if fault is not None and not first.stopped():
            return Result("", WRONG, "the first process ended before the second one came")
        second = self._attempt(run, folder)
        if fault is not None:
            os.kill(first.pid, signal.SIGCONT)
        outcomes = [first.wait(), second]
        third = self._attempt(run, folder)
        # Either may have been the first to release: the third must know what both released.
        results = [judged(run, folder, [outcome, third]) for outcome in outcomes]
        shutil.rmtree(folder)
        subject = "at once" if fault is None else "one has stopped"
        for found in results:
            if found.end != RESUMED:
                return Result(subject, WRONG, found.why)
        lines = [outcome.line for outcome in outcomes if outcome.end == REFUSED]
        return Result(subject, REFUSED, lines[0]) if lines else Result(subject, RESUMED)

    def fork(self) -> Result:
        """A fork takes a step, or begins the run anew, or outlives the process that was killed."""
        run = self._dice.choice([each for each in RUNS if isinstance(each, EngineRun)])
        how = self._next("fork", ["takes a step", "begins anew", "outlives its process"])
        folder, after = self._new(run), self._dice.randrange(STEPS)
        first = Process(lambda tell: _forking(run, folder, how, after, tell), key=self._turn)
        child = first.told("fork") if how == "outlives its process" else None
        outcomes = [first.wait(), self._attempt(run, folder)]
        if child is not None:
            os.kill(child, signal.SIGKILL)
        found = judged(run, folder, outcomes)
        shutil.rmtree(folder)
        if found.end != RESUMED:
            return Result(how, WRONG, found.why)
        line = outcomes[0].heard.get("refused", "")
        if how == "outlives its process":
            return Result(how, RESUMED)
        if len(line.splitlines()) != 1:
            return Result(how, WRONG, f"the fork was not refused in one line: {line}")
        return Result(how, REFUSED, line)

    # What the events above share.

    def _run(self) -> Any:
        # The command line is slower, and has the same engine.
        return self._dice.choice(RUNS if self._dice.random() < 0.5 else RUNS[:-1])

    def _fault(self, ways: tuple[str, ...]) -> tuple[Any, Fault, str]:
        """A point and what happens there: of the writers, and of their points, the rarest yet."""
        runs: dict[str, list[Any]] = {}
        for run in RUNS:
            for writer in sorted({writer for writer, _ in undisturbed(run, 0).points}):
                runs.setdefault(writer, []).append(run)
        writer = self._next(ways, list(runs))
        run = self._run() if len(runs[writer]) > 1 else runs[writer][0]
        points = undisturbed(run, 0).points
        mine = [
            (number, what, how)
            for number, (each, what) in enumerate(points)
            for how in ways
            if each == writer
        ]
        # Of two operations the rarer first, too: a file has many writes and one rename.
        what = self._next((run, writer, ways), list({what for _, what, _ in mine}))
        number, _, how = self._next((run, ways, what), [each for each in mine if each[1] == what])
        return run, Fault(number, how), writer

    def _next(
        self,
        name: Any,
        every: list[Any],
        *,
        label: Callable[[Any], Any] = lambda each: each,
        in_order: bool = False,
    ) -> Any:
        """One of those that came least often so far under this name."""
        least = min(self._count[name, label(each)] for each in every)
        rarest = [each for each in every if self._count[name, label(each)] == least]
        found = rarest[0] if in_order else self._dice.choice(sorted(rarest, key=repr))
        self._count[name, label(found)] += 1
        return found

    def _begin(self, run: Any, folder: Path, *, patient: bool = False, **options: Any) -> Process:
        self._turn += 1
        return Process(
            lambda tell: run.attempt(folder, tell, patient=patient), key=self._turn, **options
        )

    def _attempt(self, run: Any, folder: Path, **options: Any) -> Outcome:
        return self._begin(run, folder, **options).wait()

    def _new(self, run: Any, base: Path | None = None) -> Path:
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        if base is None:
            run.prepare(folder)
        else:
            shutil.copytree(base, folder, dirs_exist_ok=True)
        return folder

    def _base(self, run: Any, *, whole: bool, key: int = 0) -> Path:
        """The files of a run that was killed half-way, or that is complete."""
        if (run, whole, key) not in self._bases:
            folder = self._new(run)
            half = len(undisturbed(run, 0).points) * 2 // 3
            fault = None if whole else Fault(half, KILLS[0])
            Process(lambda tell: run.attempt(folder, tell), key=key, fault=fault).wait()
            self._bases[run, whole, key] = folder
        return self._bases[run, whole, key]


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def _forking(run: EngineRun, folder: Path, how: str, after: int, tell: Tell) -> None:
    """Train, and fork after some steps."""
    engine, *made = run.begin(folder)
    path = folder / run.checkpoint
    run.steps(engine, *made, path, after)
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # whatever happens to the storm
        if how == "outlives its process":
            os.closerange(3, 1024)  # the pipe, so that the storm sees the end of the other
            signal.pause()
        try:
            if how == "begins anew":
                run.attempt(folder, tell)
            else:
                run.steps(engine, *made, path)
            tell(refused="")
        except (ValueError, OSError) as refused:
            tell(refused=str(refused))
        os._exit(0)
    if how == "outlives its process":
        tell(fork=child)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    run.steps(engine, *made, path)
