"""``corrnoise audit``: what canaries show about the ε of a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from corrnoise.apps.cli import options


def audit(
    plan: Annotated[
        Path,
        typer.Argument(help="File of `corrnoise plan --save`, a run.json, or the folder of a run."),
    ],
    canaries: Annotated[int, typer.Option(help="Number of canaries.")] = 50_000,
    delta: Annotated[
        list[float] | None,
        typer.Option(
            metavar="<float>",
            help="δ at which ε is bounded; the plan's by default; repeatable.",
        ),
    ] = None,
    confidence: Annotated[float, typer.Option(help="Probability that each bound holds.")] = 0.999,
    seed: Annotated[int, typer.Option(help="Seed of coins, noise and batches.")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    report: Annotated[
        Path | None, typer.Option(help="Write a report with claims and bounds to this file.")
    ] = None,
    as_json: options.AsJson = False,
) -> int:
    """Bound ε from below, by canaries through the engine.

    Each canary is an example whose gradient has a direction of its own, in or out by a fair coin. The engine draws its batches, clips it and adds the noise, as in a run of the plan; the likelihood ratio of what it releases is the guess. The exit code is 1 where the bound is above the claim.

    \b
    Examples:
      corrnoise audit plan.json --delta 0.01 --json
      corrnoise audit run/run.json --canaries 20000 --delta 0.1 --delta 0.01 --report audit.html
    """
    from corrnoise import _checks as checks
    from corrnoise import planning
    from corrnoise._progress import Bar
    from corrnoise.apps.cli import terminal
    from corrnoise.torch import PrivacyEngine
    from corrnoise.torch.audit import audits

    if plan.is_dir():
        plan = _run_file(plan)
    data = checks.parsed("plan", plan.read_text(encoding="utf-8"))
    if not isinstance(data, dict):
        raise ValueError(f"plan must be a plan or a run in JSON, got another file: {plan}")
    made = planning.Plan.from_dict(data.get("plan", data))
    terminal.check_file(report)
    with Bar("auditing") as progress:
        found = audits(
            made,
            delta or [made.delta],
            make_engine=lambda key: PrivacyEngine(key=key),
            num_canaries=canaries,
            confidence=confidence,
            seed=seed,
            device=device,
            progress=progress,
        )
    if report is not None:
        from corrnoise import report as pages

        pages.write(report, made, audits=found)
    if as_json:
        terminal.print_json({"audits": [each.to_dict() for each in found]})
    else:
        print("\n".join(each.to_text() for each in found), end="")
    return 1 if any(each.violated for each in found) else 0


def _run_file(folder: Path) -> Path:
    """The run file of a folder that has exactly one."""
    from corrnoise.evidence.verification import run_files_of

    found = run_files_of(folder)
    if len(found) == 1:
        return found[0]
    if not found:
        raise ValueError(
            f"plan must be a file, or a folder with run.json, got the folder {folder} without "
            "one; give the file that `corrnoise plan --save` wrote"
        )
    names = ", ".join(str(path) for path in found)
    raise ValueError(
        f"plan must be one run, got the folder {folder} with {len(found)}; give one of {names}"
    )
